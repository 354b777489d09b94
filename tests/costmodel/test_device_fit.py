"""A measured device: the roofline returns what was measured."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.costmodel.device_fit import fit_device
from llmpq.costmodel.roofline import DECODE_ARITHMETIC, OVERLAP_LOSS
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.devices.timings import DeviceTimings, ProductTiming
from llmpq.spec.precision import default_precision, linear_bytes

FEATURES, ROWS = 2048, (1, 16, 64, 512)


def product_s(rows, stored, rate, stream, decode_share):
    flops = 2.0 * rows * FEATURES * FEATURES
    read_s = stored / stream
    compute_s = flops / (rate * (decode_share if rows < 64 else 1.0))
    return max(read_s, compute_s) + OVERLAP_LOSS * min(read_s, compute_s)


def timings_of(rates, stream, slower=lambda _: 1.0, **fields):
    products = []
    for dtype, rate in rates.items():
        for bits in (16, 8, 4, 3) if dtype == "bfloat16" else (16,):
            size = 4 if dtype == "float32" else 2
            stored = linear_bytes(FEATURES, FEATURES, default_precision(bits), size)
            products += [
                ProductTiming(
                    dtype=dtype, bits=bits, rows=rows, out_features=FEATURES, in_features=FEATURES,
                    stored_bytes=stored,
                    seconds=product_s(
                        rows, stored, rate / slower(bits), stream, DECODE_ARITHMETIC
                    ),
                )
                for rows in ROWS
            ]  # fmt: skip
    values = {
        "kind": "cuda", "memory_bytes": 10**10, "threads": 1, "copy_bytes_per_s": 1.25 * stream,
        "products": tuple(products), "layer_overhead_s": 1e-4,
    }  # fmt: skip
    return DeviceTimings(**values | fields)


@settings(max_examples=50, deadline=None)
@given(rate=st.floats(1e11, 1e15), intensity=st.floats(60, 600), factor=st.floats(0.6, 3.0))
def test_figures_of_a_device_that_is_a_roofline_are_found(rate, intensity, factor):
    stream = rate / intensity
    rates = {"bfloat16": rate, "float32": rate / 8}
    timings = timings_of(rates, stream, lambda bits: factor if bits != 16 else 1.0)
    entry = fit_device(timings, "own", "test")
    # One row reads its weight and multiplies a little; the bandwidth contains that.
    slack = 0.01 + 2 * OVERLAP_LOSS / intensity / DECODE_ARITHMETIC * max(1.0, factor)
    found = dict(entry.flops)
    for name, expected in rates.items():
        assert found[name] == pytest.approx(expected, rel=slack)
    assert entry.memory_bytes_per_s * entry.memory_efficiency == pytest.approx(stream, rel=slack)
    for cost in entry.precision_costs:
        compute = 1.0 if cost.bits == 16 else factor
        assert cost.compute == pytest.approx(compute, rel=4 * slack)
        assert cost.stream == pytest.approx(1.0, rel=8 * slack)


def test_an_entry_can_be_planned_with_and_names_its_origin():
    timings = timings_of(
        {"bfloat16": 1e14, "float32": 1e13}, 5e11, host_bytes_per_s=1e10, host_latency_s=1e-5,
        compute_capability=(8, 6),
    )  # fmt: skip
    entry = fit_device(timings, "own", "a test")
    spec = catalog.device("own", replace(cluster_of_types({"own": 1}), device_types=(entry,)))
    assert spec.link_bytes_per_s == 1e10
    assert spec.formats == ("bfloat16", "float32")
    assert spec.compute_capability == (8, 6)
    assert set(dict(entry.source)) >= {"flops", "link_latency_s"}
    assert all("a test" in text for _, text in entry.source)


def test_threads_of_a_processor_are_its_cores():
    for threads, cores in ((1, None), (4, 4)):
        timings = timings_of({"bfloat16": 1e12}, 1e11, kind="cpu", threads=threads)
        assert fit_device(timings, "own", "test").cores == cores


def test_nothing_measured_is_an_error():
    timings = replace(timings_of({"bfloat16": 1e12}, 1e11), products=())
    with pytest.raises(SpecError, match="found no product"):
        fit_device(timings, "own", "test")
