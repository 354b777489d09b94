from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.spec import catalog
from llmpq.spec.precision import BITS, Phase

OPT_30B = catalog.model("facebook/opt-30b")
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE

# Milliseconds of one OPT-30b layer in the LLM-PQ cluster study: prefill of 8 sequences of 512
# tokens, decode of 16 sequences at 562 tokens, at 16, 8, 4 and 3 bits; and the figures behind them.
STUDY_FIGURES = {
    "T4-16G": {"compute_efficiency": 0.38, "memory_efficiency": 0.75, "saturation_tokens": 250},
    "V100-32G": {"compute_efficiency": 0.5, "memory_efficiency": 0.75, "saturation_tokens": 250},
}
STUDY_MS = {
    "T4-16G": ((224.046, 233.487, 269.701, 295.761), (7.2726, 6.6436, 4.0443, 3.9569)),
    "V100-32G": ((98.865, 143.005, 120.219, 132.680), (2.5100, 2.5277, 1.5583, 1.6531)),
}


def roofline(model=OPT_30B, device="V100-32G", dtype="float16", kv_bits=16, threads=1):
    return RooflineLatencyModel(
        model=model, device=catalog.device(device), dtype=dtype, kv_bits=kv_bits, threads=threads
    )


@pytest.mark.parametrize("device", STUDY_MS)
def test_the_study_is_met_within_five_percent(device):
    spec = replace(catalog.device(device), **STUDY_FIGURES[device])
    model = replace(roofline(device=device), device=spec)
    prefill, decode = STUDY_MS[device]
    for index, bits in enumerate(BITS):
        seconds = model.layer_s(PREFILL, bits, 8, 512, 0)
        assert seconds * 1e3 == pytest.approx(prefill[index], rel=0.05)
        seconds = model.layer_s(DECODE, bits, 16, 562, 0)
        assert seconds * 1e3 == pytest.approx(decode[index], rel=0.05)


models = st.sampled_from(
    ["facebook/opt-125m", "meta-llama/Llama-3.1-405B", "Qwen/Qwen3-30B-A3B", "google/gemma-2-9b"]
).map(catalog.model)


@given(
    model=models, device=st.sampled_from(catalog.device_types()), phase=st.sampled_from(Phase),
    bits=st.sampled_from(BITS), batch=st.integers(1, 512), tokens=st.integers(1, 8192),
    more=st.integers(1, 300), dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)  # fmt: skip
def test_seconds_are_positive_and_grow_with_batch_and_tokens(
    model, device, phase, bits, batch, tokens, more, dtype
):
    latency = roofline(model, device, dtype)
    kind = len(model.layer_types) - 1
    here = latency.layer_s(phase, bits, batch, tokens, kind)
    assert here > 0
    assert latency.layer_s(phase, bits, batch + more, tokens, kind) > here
    assert latency.layer_s(phase, bits, batch, tokens + more, kind) > here
    master = latency.master_s(phase, batch, tokens)
    assert master > 0
    assert latency.master_s(phase, batch + more, tokens) > master
    assert latency.master_s(phase, batch, tokens + more) >= master


def test_fewer_bits_are_faster_in_decode_and_slower_in_prefill_on_a_gpu():
    latency = roofline()
    assert latency.layer_s(DECODE, 4, 1, 512, 0) < latency.layer_s(DECODE, 16, 1, 512, 0)
    assert latency.layer_s(PREFILL, 4, 8, 512, 0) > latency.layer_s(PREFILL, 16, 8, 512, 0)


def test_float32_moves_twice_the_bytes():
    half, full = (roofline(device="A100-40G", dtype=name) for name in ("bfloat16", "float32"))
    ratio = full.layer_s(DECODE, 16, 1, 1, 0) / half.layer_s(DECODE, 16, 1, 1, 0)
    assert ratio == pytest.approx(2, rel=0.1)


def test_smaller_kv_values_are_read_faster():
    wide, narrow = (roofline(kv_bits=bits) for bits in (16, 8))
    assert narrow.layer_s(DECODE, 16, 32, 4000, 0) < wide.layer_s(DECODE, 16, 32, 4000, 0)


def test_threads_speed_up_a_cpu_and_nothing_else():
    def seconds(device, threads):
        return roofline(device=device, threads=threads).layer_s(PREFILL, 16, 1, 512, 0)

    # Two measured threads gained 1.0 to 1.9 times: four are no more than four.
    assert 0.25 < seconds("cpu", 4) / seconds("cpu", 1) < 0.5
    assert seconds("V100-32G", 4) == seconds("V100-32G", 1)


def test_bandwidth_stops_growing_with_threads():
    eight, many = (
        roofline(device="cpu", dtype="bfloat16", threads=n).layer_s(DECODE, 16, 1, 1, 0)
        for n in (8, 64)
    )
    assert 0.7 * eight < many <= eight


def test_a_mixture_decodes_one_sequence_by_its_active_experts():
    mixtral = catalog.model("mistralai/Mixtral-8x7B-v0.1")
    latency = roofline(mixtral, "A100-80G", "bfloat16")
    one, many = (latency.layer_s(DECODE, 16, batch, 512, 0) for batch in (1, 64))
    assert one < many / 3
