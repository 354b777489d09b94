"""A measured device: the roofline returns what was measured, and predicts other layers."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.costmodel.device_fit import OVERLAP_LOSS, fit_device
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.devices.figures import DeviceEntry, PrecisionCost
from llmpq.spec.devices.timings import (
    HEAD_DIM,
    DeviceTimings,
    LayerTiming,
    kv_heads_of,
    narrow_features,
)
from llmpq.spec.huggingface.families import model_from_config
from llmpq.spec.precision import BITS, Phase

FEATURES = 2048
LAYERS = [
    *((Phase.DECODE, batch, 1) for batch in (1, 4, 16)),
    *((Phase.PREFILL, count // 32, 32) for count in (64, 512)),
]
LONG = [(Phase.PREFILL, 1, 512), (Phase.DECODE, 16, 512)]
OTHERS = [(Phase.PREFILL, 1, 100), (Phase.PREFILL, 4, 128), (Phase.DECODE, 8, 700)]


@cache
def llama(hidden, wide, kv_heads):
    fields = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": wide,
        "num_attention_heads": hidden // 64, "num_key_value_heads": kv_heads,
        "num_hidden_layers": 2, "vocab_size": 8, "max_position_embeddings": 1024,
    }  # fmt: skip
    return model_from_config(fields, "llama", "config")


def device_of(entry):
    cluster = cluster_of_types({entry.type: 1})
    return catalog.device(entry.type, replace(cluster, device_types=(entry,)))


def roofline(entry, model, dtype="bfloat16"):
    return RooflineLatencyModel(model=model, device=device_of(entry), dtype=dtype, kv_bits=16)


def entry_of(rate=1e12, stream=1e11, factor=1.0, **fields):
    """A device that is a roofline, whose kernels of few bits are slower by a factor."""
    figures = {
        "kind": "cuda", "memory_bytes": 10**10, "memory_bytes_per_s": 1.25 * stream,
        "flops": (("bfloat16", 2 * rate), ("float32", rate / 4)), "compute_efficiency": 0.5,
        "memory_efficiency": 0.8, "saturation_tokens": 100.0, "layer_overhead_s": 0.0,
        "precision_costs": tuple(
            PrecisionCost(bits=bits, compute=1.0 if bits == 16 else factor, stream=1.0, thin=1.5)
            for bits in BITS
        ),
    }  # fmt: skip
    return DeviceEntry(type="true", **figures | fields)


def timings_of(entry, **fields):
    """What the roofline of a device says of the layers that are measured."""
    model, half = (llama(size, 2 * size, size // 256) for size in (FEATURES, FEATURES // 2))
    square = []
    main, other = (dtype for dtype, _ in entry.flops)
    for dtype in (main, other):
        seconds = roofline(entry, model, dtype).layer_s
        for bits in BITS if dtype == main else (16,):
            shapes = (LAYERS + LONG if bits == 16 else LAYERS) if dtype == main else LAYERS[-1:]
            square += [
                LayerTiming(
                    dtype=dtype, bits=bits, phase=phase, batch=batch, tokens=tokens,
                    seconds=seconds(phase, bits, batch, tokens, 0) - entry.layer_overhead_s,
                )
                for phase, batch, tokens in shapes
            ]  # fmt: skip
    phase, batch, tokens = LAYERS[-1]
    narrow = tuple(
        LayerTiming(
            dtype=main, bits=bits, phase=phase, batch=batch, tokens=tokens,
            seconds=roofline(entry, half, main).layer_s(phase, bits, batch, tokens, 0)
            - entry.layer_overhead_s,
        )
        for bits in BITS
    )  # fmt: skip
    values = {
        "kind": entry.kind, "memory_bytes": 10**10, "threads": 1,
        "copy_bytes_per_s": entry.memory_bytes_per_s, "features": FEATURES,
        "layers": tuple(square), "narrow": narrow, "layer_overhead_s": entry.layer_overhead_s,
        "step_overhead_s": entry.step_overhead_s or 0.0,
    }  # fmt: skip
    return DeviceTimings(**values | fields)


@settings(max_examples=50, deadline=None)
@given(
    rate=st.floats(1e11, 1e15), intensity=st.floats(5, 600), factor=st.floats(0.6, 3.0),
    loss=st.floats(0.1, 1.0), arithmetic=st.floats(0.2, 2.0), memory=st.floats(0.4, 1.5),
)  # fmt: skip
def test_other_layers_of_a_device_that_is_a_roofline_are_predicted(
    rate, intensity, factor, loss, arithmetic, memory
):
    # Where all steps read longer than they multiply, none says how much both overlap.
    loss = loss if intensity < 100 else OVERLAP_LOSS
    true = entry_of(
        rate, rate / intensity, factor, overlap_loss=loss, attention_efficiency=arithmetic,
        attention_memory_efficiency=memory,
    )  # fmt: skip
    found = fit_device(timings_of(true), "own", "test")
    for model in (llama(1024, 2816, 8), llama(4096, 11008, 64)):
        expected, predicted = (roofline(entry, model).layer_s for entry in (true, found))
        for phase, batch, tokens in OTHERS:
            for bits in BITS:
                shape = phase, bits, batch, tokens, 0
                assert predicted(*shape) == pytest.approx(expected(*shape), rel=0.1), shape
    full = dict(found.flops)["float32"]
    assert full == pytest.approx(dict(true.flops)["float32"] * true.compute_efficiency, rel=0.1)


@pytest.mark.parametrize("value_flops", [0.0, 300.0, 1000.0])
def test_layers_of_other_widths_have_other_shares_of_output_values(value_flops):
    costs = tuple(
        PrecisionCost(bits=bits, compute=0.8, stream=0.5, value_flops=value_flops) for bits in BITS
    )
    true = entry_of(1e11, 1e10, overlap_loss=0.15, precision_costs=costs)
    found = fit_device(timings_of(true), "own", "test")
    assert device_of(found).precision_cost(8).value_flops == pytest.approx(
        value_flops, rel=0.05, abs=5
    )
    for model in (llama(512, 2048, 2), llama(4096, 11008, 64)):
        expected, predicted = (roofline(entry, model).layer_s for entry in (true, found))
        for phase, batch, tokens in OTHERS:
            shape = phase, 8, batch, tokens, 0
            assert predicted(*shape) == pytest.approx(expected(*shape), rel=0.05), shape


@pytest.mark.parametrize("loss", [0.15, 1.0])
def test_how_much_of_the_smaller_time_counts_is_found(loss):
    entry = fit_device(timings_of(entry_of(1e11, 1e10, overlap_loss=loss)), "own", "test")
    assert entry.overlap_loss == pytest.approx(loss, abs=0.1)


def test_every_bitwidth_has_an_overlap_and_a_saturation_of_its_own():
    costs = (
        PrecisionCost(bits=16, compute=1.0, stream=1.0, thin=0.6),
        # Few rows multiply faster than prompts, as in a kernel that rounds activations.
        PrecisionCost(bits=8, compute=0.5, stream=1.0, thin=0.35, saturation_tokens=0.0,
                      overlap_loss=0.9),
        PrecisionCost(bits=4, compute=0.8, stream=0.5, thin=0.8, saturation_tokens=300.0),
    )  # fmt: skip
    true = entry_of(1e11, 2e10, overlap_loss=0.2, precision_costs=costs)
    timings = timings_of(true)
    timings = replace(timings, layers=tuple(one for one in timings.layers if one.bits != 3))
    found = fit_device(timings, "own", "test")
    model = llama(1024, 2816, 8)
    expected, predicted = (roofline(entry, model).layer_s for entry in (true, found))
    for phase, batch, tokens in OTHERS:
        for bits in (4, 8, 16):
            shape = phase, bits, batch, tokens, 0
            assert predicted(*shape) == pytest.approx(expected(*shape), rel=0.1), shape
    eight = device_of(found).precision_cost(8)
    assert eight.overlap_loss == pytest.approx(0.9, abs=0.1)
    assert eight.saturation_tokens == pytest.approx(0.0, abs=2.0)


def test_an_entry_can_be_planned_with_and_names_its_origin():
    true = entry_of(1e14, 5e11)
    timings = timings_of(
        true, host_bytes_per_s=1e10, host_latency_s=1e-5, compute_capability=(8, 6)
    )
    entry = fit_device(timings, "own", "a test")
    spec = device_of(entry)
    assert spec.link_bytes_per_s == 1e10
    assert spec.formats == ("bfloat16", "float32")
    assert spec.compute_capability == (8, 6)
    assert set(dict(entry.source)) >= {"flops", "link_latency_s"}
    assert all("a test" in text for _, text in entry.source)


def test_a_step_costs_what_it_takes_outside_layers():
    # Else a small model is forecast several times too fast: its steps are little else.
    timings = timings_of(entry_of(layer_overhead_s=1e-5, step_overhead_s=3e-3))
    found, model = fit_device(timings, "own", "test"), llama(128, 128, 2)
    free = replace(found, step_overhead_s=0.0)
    whole_s, rest_s = (roofline(e, model).master_s(Phase.DECODE, 1, 1) for e in (found, free))
    assert whole_s - rest_s == pytest.approx(3e-3)


def test_a_step_of_a_device_that_states_no_overhead_has_that_of_a_layer():
    entry, model = entry_of(layer_overhead_s=2e-4), llama(128, 128, 2)
    free = replace(entry, step_overhead_s=0.0)
    whole_s, rest_s = (roofline(e, model).master_s(Phase.DECODE, 1, 1) for e in (entry, free))
    assert whole_s - rest_s == pytest.approx(2e-4)


def test_threads_of_a_processor_are_its_cores():
    for threads, cores in ((1, None), (4, 4)):
        timings = timings_of(entry_of(), kind="cpu", threads=threads)
        assert fit_device(timings, "own", "test").cores == cores


def test_nothing_measured_is_an_error():
    with pytest.raises(SpecError, match="found no layer"):
        fit_device(timings_of(entry_of(), layers=()), "own", "test")


@given(heads=st.integers(1, 200))
def test_measured_layers_have_whole_heads(heads):
    features = heads * HEAD_DIM
    assert heads % kv_heads_of(features) == 0
    assert narrow_features(features) % HEAD_DIM == 0
    assert narrow_features(features) in (features // 2, (features - HEAD_DIM) // 2)
    assert kv_heads_of(2048) == 8
