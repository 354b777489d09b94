"""A weight whose columns are stored in another order is the same weight."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from llmpq.errors import SpecError
from llmpq.kernels import choose_backend
from llmpq.quant import QuantLinear, quantize
from llmpq.spec.precision import default_precision, linear_bytes

torch.set_num_threads(1)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def ordered(bits):
    """A weight, and its packed form with shuffled columns."""
    weight = gaussian(64, 256)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    packed = quantize(weight[:, order].contiguous(), default_precision(bits), torch.float32)
    return weight, replace(packed, order=order.to(torch.int32))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_dequantize_undoes_the_order(bits):
    weight, packed = ordered(bits)
    stored = packed.in_stored_order().dequantize(torch.float32)
    assert torch.equal(packed.dequantize(torch.float32)[:, packed.order.long()], stored)
    step = packed.scales.max()
    assert (packed.dequantize(torch.float32) - weight).abs().max() <= step / 2 + 1e-6


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_linear_reads_its_inputs_in_the_order(bits):
    _, packed = ordered(bits)
    backend = choose_backend("cpu", packed.precision, torch.float32, 64, 256)
    module = QuantLinear(packed, None, backend)
    x = gaussian(2, 3, 256, seed=1)
    expected = F.linear(x, packed.dequantize(torch.float32))
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)


def test_an_order_takes_four_bytes_an_input():
    _, packed = ordered(4)
    assert packed.nbytes == linear_bytes(64, 256, packed.precision, 4) + 4 * 256
    assert packed.in_stored_order().nbytes == linear_bytes(64, 256, packed.precision, 4)


@pytest.mark.parametrize(
    "order",
    [
        torch.arange(255, dtype=torch.int32),
        torch.arange(256),
        torch.zeros(256, dtype=torch.int32),
        torch.arange(1, 257, dtype=torch.int32),
    ],
)
def test_an_order_that_is_none_is_refused(order):
    _, packed = ordered(4)
    with pytest.raises(SpecError, match="found an order of"):
        replace(packed, order=order)
