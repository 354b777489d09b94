"""Run by ``test_triton_kernels.py`` under ``TRITON_INTERPRET=1``: kernels against the oracle."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from llmpq.errors import SpecError
from llmpq.kernels.base import PackedWeight, PreparedWeight, pack_codes
from llmpq.kernels.gpu import triton_int
from llmpq.kernels.gpu.cuda import CudaInt4Backend, read_int4pack_into
from llmpq.kernels.gpu.triton_int import TritonIntBackend, dequantize, launch_failure, multiply
from llmpq.quant.modules.layer import QuantLinear
from llmpq.spec.precision import Precision, linear_bytes

torch.set_num_threads(1)

BACKEND = TritonIntBackend("cpu")
# Relative error of the product against float64, of the norm of the answer: rounding alone. The
# interpreter cuts bf16 numbers off where a GPU rounds them, hence twice the usual figure.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)
CASES = [
    (shape, dtype, symmetric)
    for shape, symmetric in [
        ((64, 512, 128), False),  # whole tiles, a group a tile
        ((37, 96, 32), False),  # odd outputs, tiles half empty, groups across tiles
        ((20, 264, None), True),  # a group a row, tiles half empty
        ((20, 48, 12), True),  # several groups a tile
    ]
    for dtype in DTYPES
]


def random_packed(precision, dtype, rows, columns):
    rng = torch.Generator().manual_seed(precision.bits)
    groups = columns // precision.effective_group(columns)
    codes = torch.randint(0, 1 << precision.bits, (rows, columns), generator=rng)
    zeros = torch.randn(rows, groups, generator=rng).mul(0.01).to(dtype)
    return PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=precision,
        codes=pack_codes(codes.to(torch.uint8), precision.bits),
        scales=torch.rand(rows, groups, generator=rng).add(1).mul(0.01).to(dtype),
        zeros=None if precision.symmetric else zeros,
    )


def test_the_interpreter_runs_kernels():
    for dtype in DTYPES:
        assert launch_failure(torch.device("cpu"), dtype) is None


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_and_bytes(bits, case):
    (rows, columns, group), dtype, symmetric = case
    precision = Precision(bits=bits, group_size=group, symmetric=symmetric)
    packed = random_packed(precision, dtype, rows, columns)
    weight = BACKEND.prepare(packed)
    assert weight.nbytes == linear_bytes(rows, columns, precision, dtype.itemsize)
    assert weight.nbytes == BACKEND.stored_bytes(precision, dtype, rows, columns)
    ulp = 2**-7 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(
        dequantize(weight, dtype), packed.dequantize(dtype), atol=0, rtol=ulp
    )
    exact = packed.dequantize(torch.float64)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(dtype)
    for tokens, added in ((1, None), (1, bias), (3, None), (19, bias)):
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
        got = BACKEND.linear(x, weight, added)
        expected = F.linear(x.double(), exact, None if added is None else added.double())
        assert got.dtype == dtype
        error = (got.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], (tokens, added is not None)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("tokens", [40, 70])
def test_the_large_tiles_agree_with_the_small(bits, tokens):
    packed = random_packed(Precision(bits=bits, group_size=128), torch.float16, 136, 256)
    weight = BACKEND.prepare(packed)
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(3)).to(torch.float16)
    many = multiply(x, weight, None)
    few = torch.cat([multiply(part.contiguous(), weight, None) for part in x.split(16)])
    torch.testing.assert_close(many, few, atol=2e-2, rtol=2e-3)


def test_many_rows_and_leading_dimensions(monkeypatch):
    monkeypatch.setattr(triton_int, "MANY_ROWS", 6)
    packed = random_packed(Precision(bits=3, group_size=32), torch.float32, 24, 64)
    weight = BACKEND.prepare(packed)
    x = torch.randn(2, 3, 64)
    bias = torch.randn(24)
    got = BACKEND.linear(x, weight, bias)
    torch.testing.assert_close(got, F.linear(x, packed.dequantize(torch.float32), bias))
    assert BACKEND.linear(x[:1], weight, bias).shape == (1, 3, 24)
    assert BACKEND.linear(x[:0], weight, bias).shape == (0, 3, 24)


def test_rows_of_a_strided_tensor():
    packed = random_packed(Precision(bits=4, group_size=32), torch.float32, 24, 64)
    weight = BACKEND.prepare(packed)
    x = torch.randn(64, 5).t()
    torch.testing.assert_close(
        BACKEND.linear(x, weight, None), F.linear(x, packed.dequantize(torch.float32))
    )


def test_equal_calls_give_equal_bits():
    weight = BACKEND.prepare(
        random_packed(Precision(bits=3, group_size=128), torch.float16, 16, 1024)
    )
    x = torch.randn(1, 1024).to(torch.float16)
    assert torch.equal(multiply(x, weight, None), multiply(x, weight, None))


def test_uneven_inputs_are_refused():
    packed = random_packed(Precision(bits=3, group_size=None), torch.float32, 4, 12)
    with pytest.raises(SpecError, match="kernel 'triton_int'"):
        BACKEND.prepare(packed)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("tokens", "has_bias"), [(1, True), (3, False), (70, True)])
def test_joined_weights_and_their_parts(bits, tokens, has_bias):
    """Parts that are yet to be summed, and lack the bias, are those of the product."""
    precision = Precision(bits=bits, group_size=32, symmetric=bits == 8)
    packed = [random_packed(precision, torch.float16, rows, 1024) for rows in (40, 8, 24)]
    linears = [
        QuantLinear(one, torch.randn(one.out_features) if has_bias else None, BACKEND)
        for one in packed
    ]
    whole = QuantLinear.joined(linears)
    assert whole.weight_bytes == sum(one.weight_bytes for one in linears)
    x = torch.randn(tokens, 1024, generator=torch.Generator().manual_seed(1)).to(torch.float16)
    exact = [F.linear(x.double(), one.dequantize(torch.float64)) for one in packed]
    if has_bias:
        exact = [y + one.bias.double() for y, one in zip(exact, linears, strict=True)]
    expected = torch.cat(exact, dim=1)
    made = whole.parts(x)
    total = made.values.double().sum(0)
    total = total if made.bias is None else total + made.bias.double()
    for found in (total, whole(x).double()):
        assert (found - expected).norm() / expected.norm() < TOLERANCE[torch.float16]
    if tokens < 17:
        assert len(made.values) > 1


def test_weights_that_cannot_be_joined_stay_apart():
    def linear(bits=4, columns=64, group=32, bias=None, order=None):
        packed = random_packed(Precision(bits=bits, group_size=group), torch.float16, 8, columns)
        return QuantLinear(replace(packed, order=order), bias, BACKEND)

    one = linear()
    for other in (
        linear(bits=3), linear(columns=128), linear(group=64), linear(bias=torch.ones(8)),
        linear(order=torch.arange(64, dtype=torch.int32)),
    ):  # fmt: skip
        assert QuantLinear.joined([one, other]) is None
    assert QuantLinear.joined([one, linear()]) is not None


def pack_as_torch_does_on_cuda(codes, inner_tiles):
    """torch's int4pack layout on CUDA, lane by lane as its own packing kernel writes it."""
    rows, columns = codes.shape
    shape = (rows // 8, columns // (16 * inner_tiles), 32, inner_tiles // 2)
    words = torch.zeros(shape, dtype=torch.int64)
    for n8, outer, lane, pair in torch.cartesian_prod(*(torch.arange(size) for size in shape)):
        first = (outer * inner_tiles + 2 * pair) * 16 + lane % 4 * 2
        held = [first + 16 * tile + 8 * half + odd for tile, half, odd in product((0, 1), repeat=3)]
        values = codes[n8 * 8 + lane // 4, torch.stack(held)].tolist()
        # From the highest half byte to the lowest.
        for place, index in enumerate((7, 5, 3, 1, 6, 4, 2, 0)):
            words[n8, outer, lane, pair] |= values[index] << (28 - 4 * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize("inner_tiles", [2, 4, 8])
def test_int4pack_of_cuda_is_read_back(inner_tiles):
    packed = random_packed(Precision(bits=4, group_size=32), torch.float32, 16, 128)
    codes = packed.signed_rows(slice(None)).to(torch.int64) + 8
    affine = torch.stack((packed.scales.t(), packed.zeros.t()), dim=-1).contiguous()
    words = pack_as_torch_does_on_cuda(codes, inner_tiles)
    out = torch.empty(16, 128)
    read_int4pack_into(words, affine, 32, out)
    expected = packed.dequantize(torch.float32)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-7)
    weight = PreparedWeight(
        backend="cuda_int4", out_features=16, in_features=128, precision=packed.precision,
        tensors=(words, affine),
    )  # fmt: skip
    joined = CudaInt4Backend().joined([weight, weight])
    twice = torch.empty(joined.out_features, 128)
    read_int4pack_into(*joined.tensors, 32, twice)
    torch.testing.assert_close(twice, torch.cat((expected, expected)), rtol=0, atol=1e-7)
