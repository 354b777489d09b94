"""Round-to-nearest: nearest on the stored grid, never undefined, better with more bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmpq.errors import SpecError
from llmpq.kernels.base import PACKED_BITS
from llmpq.quant import quantize
from llmpq.spec.precision import Precision, default_precision, linear_bytes

torch.set_num_threads(1)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

weights = hnp.arrays(
    dtype="float32",
    shape=st.tuples(st.integers(1, 4), st.sampled_from([1, 5, 16, 32, 48])),
    # Within float16, whose scales must hold it; one subnormal of it is below any error here.
    elements=st.floats(-1000.0, 1000.0, width=32).map(lambda v: v if abs(v) > 1e-20 else 0.0),
).map(torch.from_numpy)

precisions = st.builds(
    Precision,
    bits=st.sampled_from(PACKED_BITS),
    group_size=st.sampled_from([None, 4, 16]),
    symmetric=st.booleans(),
)


def gaussian(rows=64, columns=512, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def mean_square_error(weight, precision, dtype=torch.float32):
    restored = quantize(weight, precision, dtype).dequantize(torch.float32)
    return (restored - weight).square().mean().item()


@settings(deadline=None)  # the first call of a kernel loads it
@given(weight=weights, precision=precisions, dtype=st.sampled_from(DTYPES))
def test_error_is_at_most_half_a_step(weight, precision, dtype):
    packed = quantize(weight, precision, dtype)
    error = (packed.dequantize(torch.float64) - weight.double()).abs()
    steps = packed.scales.double().repeat_interleave(packed.group_size, dim=1)
    rounding = 1e-5 * weight.abs().max().item()  # float32 arithmetic on the way, nothing else
    assert (error <= 0.5 * steps + rounding).all()


@settings(deadline=None)  # the first call of a kernel loads it
@given(weight=weights, precision=precisions, dtype=st.sampled_from(DTYPES))
def test_the_result_is_finite_and_takes_the_bytes_that_plans_count(weight, precision, dtype):
    packed = quantize(weight, precision, dtype)
    assert torch.isfinite(packed.scales).all()
    assert (packed.scales > 0).all()
    assert packed.zeros is None or torch.isfinite(packed.zeros).all()
    assert packed.nbytes == linear_bytes(*weight.shape, precision, dtype.itemsize)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_weights_stay_zero(bits, symmetric, dtype):
    precision = Precision(bits=bits, symmetric=symmetric)
    packed = quantize(torch.zeros(3, 256), precision, dtype)
    assert torch.equal(packed.dequantize(torch.float32), torch.zeros(3, 256))


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.5, -3.0])
def test_constant_groups_are_exact_with_a_zero_point(bits, dtype, value):
    weight = torch.full((2, 128), value)
    packed = quantize(weight, Precision(bits=bits, symmetric=False), dtype)
    assert torch.equal(packed.dequantize(torch.float32), weight)


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_a_weight_on_its_own_grid_is_kept(bits):
    precision = Precision(bits=bits, symmetric=False)
    once = quantize(gaussian(), precision, torch.float32)
    twice = quantize(once.dequantize(torch.float32), precision, torch.float32)
    assert torch.equal(twice.codes, once.codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fewer_bits_never_have_a_smaller_error(symmetric, group, dtype):
    errors = [
        mean_square_error(
            gaussian(), Precision(bits=b, group_size=group, symmetric=symmetric), dtype
        )
        for b in (8, 4, 3)
    ]
    assert errors == sorted(errors)
    assert errors[0] > 0


@pytest.mark.parametrize("bits", [3, 4])
def test_smaller_groups_never_have_a_larger_error(bits):
    errors = [
        mean_square_error(gaussian(), Precision(bits=bits, group_size=group))
        for group in (32, 128, None)
    ]
    assert (
        errors[0] < errors[1] < mean_square_error(gaussian(), Precision(bits=bits, group_size=None))
    )


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("factor", [0.25, 8.0])
def test_scaling_the_weight_scales_the_grid(bits, symmetric, factor):
    precision = Precision(bits=bits, symmetric=symmetric)
    one = quantize(gaussian(), precision, torch.bfloat16)
    scaled = quantize(gaussian() * factor, precision, torch.bfloat16)
    assert torch.equal(scaled.codes, one.codes)
    assert torch.equal(scaled.scales, one.scales * factor)


def test_error_of_a_uniform_weight_is_that_of_its_step():
    # A uniform weight on a grid of step s has error s^2 / 12; s is the range over 2^b - 1.
    weight = torch.rand(64, 1024, generator=torch.Generator().manual_seed(0))
    for bits in PACKED_BITS:
        step = 1.0 / (2**bits - 1)
        got = mean_square_error(weight, Precision(bits=bits, group_size=None))
        assert got == pytest.approx(step**2 / 12, rel=0.03)


def test_bfloat16_weights_are_quantized_like_their_float32_values():
    weight = gaussian().to(torch.bfloat16)
    packed = quantize(weight, default_precision(4), torch.bfloat16)
    again = quantize(weight.float(), default_precision(4), torch.bfloat16)
    assert torch.equal(packed.codes, again.codes)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_that_are_not_finite_are_refused(poison, symmetric):
    weight = gaussian()
    weight[3, 5] = poison
    with pytest.raises(SpecError, match="expected finite"):
        quantize(weight, Precision(bits=4, symmetric=symmetric), torch.float32)


def test_scales_that_overflow_their_dtype_are_refused():
    with pytest.raises(SpecError, match="float16"):
        quantize(torch.full((1, 128), 1e8), Precision(bits=3), torch.float16)


@pytest.mark.parametrize("precision", [default_precision(16), Precision(bits=4, method="gptq")])
def test_methods_that_need_more_than_the_weight_are_refused(precision):
    with pytest.raises(SpecError, match="rtn"):
        quantize(gaussian(), precision, torch.float32)
