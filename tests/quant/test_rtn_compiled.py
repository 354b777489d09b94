"""Compiled rounding gives the bits and the errors of the torch version."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.instruction_sets import RUNNABLE
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmpq.errors import SpecError
from llmpq.kernels.base import PACKED_BITS
from llmpq.kernels.cpu import native
from llmpq.quant.quantizers import rtn
from llmpq.spec.precision import Precision

torch.set_num_threads(1)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")


def by_torch(weight, precision, scale_dtype):
    packed = rtn.round_to_nearest(weight, precision, scale_dtype)
    zeros = None if packed.zeros is None else torch.full_like(packed.zeros, -7.0)
    scales = torch.full_like(packed.scales, -7.0)
    empty = replace(packed, codes=torch.zeros_like(packed.codes), scales=scales, zeros=zeros)
    rtn._rounded_by_torch(weight, empty)
    return packed, empty


def assert_same(weight, precision, scale_dtype):
    found, expected = by_torch(weight, precision, scale_dtype)
    assert torch.equal(found.scales, expected.scales)
    assert found.zeros is None or torch.equal(found.zeros, expected.zeros)
    assert torch.equal(found.codes, expected.codes)


@pytest.mark.parametrize(("dtype", "scale_dtype"), list(product(DTYPES, DTYPES)))
@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [16, 128, None])
def test_codes_scales_and_zeros_equal_torchs(dtype, scale_dtype, bits, symmetric, group):
    drawn = torch.Generator().manual_seed(bits)
    weight = (torch.randn(37, 384, generator=drawn) * 0.02 + 0.003).to(dtype)
    weight[3] = 0.25  # equal numbers, an outlier, numbers below float16's
    weight[4, 7] = 40.0
    weight[5] *= 1e-5
    weight[6] = 0.0
    precision = Precision(bits=bits, group_size=group, symmetric=symmetric)
    assert rtn._can_compile(weight, precision.effective_group(384))
    assert_same(weight, precision, scale_dtype)


@settings(deadline=None, max_examples=200)
@given(
    weight=hnp.arrays(
        dtype="float32",
        shape=st.tuples(st.integers(1, 3), st.sampled_from([16, 32, 48])),
        elements=st.floats(-1000.0, 1000.0, width=32),
    ).map(torch.from_numpy),
    bits=st.sampled_from(PACKED_BITS),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from(DTYPES),
)
def test_any_weight_gives_the_same_bits_as_torch(weight, bits, symmetric, scale_dtype):
    precision = Precision(bits=bits, group_size=16, symmetric=symmetric)
    assert_same(weight, precision, scale_dtype)


@pytest.mark.parametrize(
    ("scale_dtype", "exponent"),
    [
        *product((torch.float32, torch.bfloat16), (-110, -62, -58, -20, 0, 58, 62, 100)),
        *product((torch.float16,), (-12, 0, 8)),
    ],
)
def test_weights_next_to_half_steps_are_rounded_as_by_division(scale_dtype, exponent):
    # Multiplying by a reciprocal alone takes some of these to the wrong side.
    drawn = torch.Generator().manual_seed(exponent)
    step = torch.rand(64, 1, generator=drawn) + 1  # [N, 1]
    halves = torch.randint(-7, 8, (64, 64), generator=drawn) + 0.5  # [N, K]
    units = torch.randint(-3, 4, (64, 64), generator=drawn, dtype=torch.int32)
    near_half = (step.to(torch.bfloat16).to(torch.float32) * halves).view(torch.int32) + units
    weight = near_half.view(torch.float32) * 2.0**exponent
    for bits, group, symmetric in product(PACKED_BITS, (16, 64), (True, False)):
        precision = Precision(bits=bits, group_size=group, symmetric=symmetric)
        assert_same(weight, precision, scale_dtype)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3.0e38])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_that_cannot_be_rounded_raise_the_error_of_torch(wrong, symmetric):
    weight = torch.zeros(20, 64)
    weight[17, 40] = wrong
    with pytest.raises(SpecError, match=r"expected finite ones whose scales fit torch\.float16"):
        rtn.round_to_nearest(weight, Precision(bits=4, symmetric=symmetric), torch.float16)


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_instruction_set_rounds_the_same(monkeypatch, name):
    loaded = native.load(name)
    monkeypatch.setattr(rtn, "library", lambda: loaded)
    weight = torch.randn(33, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for bits in PACKED_BITS:
        assert_same(weight, Precision(bits=bits, group_size=64), torch.bfloat16)
