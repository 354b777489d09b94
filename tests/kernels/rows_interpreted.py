"""Run by ``test_triton_kernels.py`` under ``TRITON_INTERPRET=1``: the kernels against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from llmpq.dist.kv.cache import CodeKVStorage, PlainKVStorage, TokenIndex
from llmpq.kernels.base import ProductParts
from llmpq.kernels.cpu.step import ACTIVATIONS, RowNorm, UnsupportedStepError
from llmpq.kernels.gpu.rows import (
    NewTokens,
    Rotation,
    add_norm,
    check_norm,
    gate,
    rotate_store,
)
from llmpq.models import KVShape

torch.set_num_threads(1)

# Largest relative error, by dtype: a sum, a norm and a product are rounded, and the interpreter
# cuts bf16 numbers off where a GPU rounds them.
ERROR = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}
DTYPES = list(ERROR)
FORMS = {
    "none": None,
    "rms": (True, False, False, True),
    "rounded late": (True, False, False, False),
    "layer": (True, True, True, False),
    "alone": (False, False, True, False),
}
"""Whether a norm has a weight and a bias, centers, and rounds before the weight."""


def _norm(form, columns, rng):
    if FORMS[form] is None:
        return None
    has_weight, has_bias, centers, rounds = FORMS[form]
    weight = torch.randn(columns, generator=rng) if has_weight else None
    bias = torch.randn(columns, generator=rng) if has_bias else None
    return RowNorm(weight=weight, bias=bias, epsilon=1e-3, centers=centers, rounds=rounds)


def _normed(x, norm):
    if norm is None:
        return x
    if norm.centers:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.epsilon).sqrt()
    x = x if norm.weight is None else x * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


def _parts(shape, dtype, rng, *, parts=1, has_bias=False, extra=0):
    """Parts of a product with ``extra`` more columns, and the numbers that they stand for."""
    *rows, columns = shape
    own = dtype if parts == 1 else torch.float32
    values = torch.randn(parts, *rows, columns + extra, generator=rng).to(own)[..., extra:]
    bias = torch.randn(columns + extra, generator=rng).to(dtype)[extra:] if has_bias else None
    total = values.double().sum(0)
    return ProductParts(values=values, bias=bias), total if bias is None else total + bias.double()


def _check(found, expected, dtype):
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm()
    assert error < ERROR[dtype], float(error)


@pytest.mark.parametrize(
    ("dtype", "inner", "norm"),
    [(DTYPES[place % 3], *forms) for place, forms in enumerate(itertools.product(FORMS, FORMS))],
)
def test_sums_and_norms(dtype, inner, norm):
    rng = torch.Generator().manual_seed(3)
    for rows, columns, parts, has_bias, factor in ((3, 96, 1, False, 1.0), (2, 100, 5, True, 0.3)):
        hidden = torch.randn(rows, columns, generator=rng).to(dtype)
        made, exact = _parts((rows, columns), dtype, rng, parts=parts, has_bias=has_bias, extra=8)
        first, second = _norm(inner, columns, rng), _norm(norm, columns, rng)
        total, out = add_norm(hidden, made, inner=first, factor=factor, norm=second)
        expected = hidden.double() + factor * _normed(exact, first)
        _check(total, expected, dtype)
        _check(out, _normed(expected, second), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_alone_leaves_the_hidden_states(form, dtype):
    rng = torch.Generator().manual_seed(4)
    hidden, norm = torch.randn(4, 40, generator=rng).to(dtype), _norm(form, 40, rng)
    before = hidden.clone()
    total, out = add_norm(hidden, None, norm=norm)
    assert torch.equal(total, before)
    _check(out, _normed(before.double(), norm), dtype)


def test_a_number_that_overflows_stays_one_that_is_not_finite():
    hidden = torch.randn(2, 16)
    made = torch.randn(2, 16)
    made[1, 3] = torch.inf
    norm = RowNorm(weight=torch.ones(16), bias=None, epsilon=1e-5, centers=False, rounds=True)
    with pytest.warns(RuntimeWarning, match="invalid value"):
        total, out = add_norm(hidden, ProductParts(values=made[None]), norm=norm)
    assert total[0].isfinite().all()
    assert not total[1].isfinite().all()
    assert not out[1].isfinite().all()


_EXACT = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_up", [True, False])
def test_activations(activation, has_up, dtype):
    rng = torch.Generator().manual_seed(5)
    shape = (3, 1030)
    for parts, has_bias in ((1, False), (3, True)):
        first, x = _parts(shape, dtype, rng, parts=parts, has_bias=has_bias, extra=6)
        second, y = _parts(shape, dtype, rng, parts=parts + 1, has_bias=has_bias)
        found = gate(first, second if has_up else None, activation, dtype)
        expected = _EXACT[activation](x.to(dtype).double())
        _check(found, expected * y if has_up else expected, dtype)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_large_numbers_are_finite(activation):
    x = torch.tensor([[-100.0, -30.0, 30.0, 100.0]])
    found = gate(ProductParts(values=x[None]), None, activation, torch.float32)
    torch.testing.assert_close(found, _EXACT[activation](x))


BLOCK, CPU = 16, torch.device("cpu")


def _rotated(x, cos, sin, turned):
    """Rotate features ``[..., d]`` with those half of ``turned`` away."""
    own, rest = x[..., :turned], x[..., turned:]
    first, second = own.chunk(2, dim=-1)
    other = torch.cat((-second, first), dim=-1)
    return torch.cat((own * cos[:, None] + other * sin[:, None], rest), dim=-1)


def _storage(kv_bits, shape, dtype):
    if kv_bits == 8:
        return CodeKVStorage(shape, (6, BLOCK), CPU, 8)
    return PlainKVStorage(shape, (6, BLOCK), dtype, CPU)


HEADS, KV_HEADS, TOKENS = 4, 2, 3
OPTIONS = [
    {},
    {"kv_bits": 8},
    {"parts": 3, "has_bias": True},
    {"is_normed": True},
    {"is_normed": True, "is_late": True, "parts": 2},
    {"turned": 16},
    {"turned": 16, "is_short": True, "is_normed": True},
    {"turned": 0},
    {"dim": 80, "turned": 80, "kv_bits": 8, "parts": 2},
    {"by_heads": True},
    {"value_dim": 24},
    {"is_stored": False},
]


def _projections(options, dims, dtype, rng):
    """Parts of queries, keys and values, and the numbers that they stand for."""
    sums = {"parts": options.get("parts", 1), "has_bias": options.get("has_bias", False)}
    if "by_heads" in options:  # one product makes them head by head
        shape = (KV_HEADS, 3, dims[0])
        both, exact = _parts((TOKENS, KV_HEADS * 3 * dims[0]), dtype, rng, **sums)
        whole = both.viewed(lambda x: x.unflatten(-1, shape))
        parts = [whole.viewed(lambda x, n=n: x[..., n, :]) for n in range(3)]
        return parts, exact.unflatten(-1, shape).unbind(-2)
    parts, exacts = [], []
    for heads, dim in zip((HEADS, KV_HEADS, KV_HEADS), dims, strict=True):
        part, exact = _parts((TOKENS, heads * dim), dtype, rng, extra=16, **sums)
        parts.append(part.viewed(lambda x, d=dim: x.unflatten(-1, (-1, d))))
        exacts.append(exact.unflatten(-1, (heads, dim)))
    return parts, exacts


def _check_stored(storage, index, expected, error, kv_bits):
    """Compare what is in the blocks; places of other tokens are as they were."""
    for read, right in zip(storage.read(torch.arange(6)[None], torch.float64), expected,
                           strict=True):  # fmt: skip
        blocks = read[0].unflatten(1, (6, BLOCK)).clone()
        stored = blocks[:, index.block, index.offset].transpose(0, 1)
        step = 0 if kv_bits is None else right.abs().amax(-1, keepdim=True) / 127
        assert ((stored - right).abs() <= step + error * right.abs().amax()).all()
        blocks[:, index.block, index.offset] = 0
        assert not blocks.any()


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        *((one, DTYPES[place % 3]) for place, one in enumerate(OPTIONS)),
        *((one, dtype) for one in OPTIONS[:2] for dtype in DTYPES[::-1]),
    ],
    ids=str,
)
def test_heads_are_rotated_and_stored(options, dtype):
    rng = torch.Generator().manual_seed(6)
    dim, kv_bits = options.get("dim", 32), options.get("kv_bits")
    dims, turned = (dim, dim, options.get("value_dim", dim)), options.get("turned", 32)
    parts, exacts = _projections(options, dims, dtype, rng)
    tables = torch.randn(2, TOKENS, turned // 2, generator=rng).to(dtype)
    whole = torch.cat((tables, tables), dim=-1)
    cos, sin = (tables if options.get("is_short") else whole) if turned else (None, None)
    norms = [_norm("rounded late" if options.get("is_normed") else "none", dim, rng)] * 2
    is_late = options.get("is_late", False)
    rotation = Rotation(
        query_norm=norms[0], key_norm=norms[1], is_late=is_late, cos=cos, sin=sin, turned=turned
    )
    storage = _storage(kv_bits, KVShape(heads=KV_HEADS, head_dim=dim, value_dim=dims[2]), dtype)
    index = TokenIndex.of([[4, 0], [2]], [15, 3], [2, 1], BLOCK, CPU)
    tokens = NewTokens(heads=storage.paged_heads, block=index.block, offset=index.offset)
    is_stored = options.get("is_stored", True)
    results = rotate_store(tuple(parts), rotation, tokens if is_stored else None, dtype)
    expected = []
    for exact, norm in zip(exacts, (*norms, None), strict=True):
        made = exact if is_late else _normed(exact, norm)
        if len(expected) < 2 and turned:
            made = _rotated(made, *whole.double(), turned)
        expected.append(_normed(made, norm) if is_late else made)
    for result, right in zip(results, expected, strict=True):
        _check(result[0].transpose(0, 1), right, dtype)
    if is_stored:
        _check_stored(storage, index, expected[1:], ERROR[dtype], kv_bits)
    else:
        assert not any(part.any() for part in storage.read(torch.arange(6)[None], dtype))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("overflow", [torch.inf, torch.nan])
def test_codes_are_those_of_the_cache_and_an_overflow_does_not_get_lost(overflow):
    rng = torch.Generator().manual_seed(7)
    new = torch.randn(3, 4, 2, 16, generator=rng)  # query, key, value: [N, h, d]
    new[1, 2, 1, 5] = overflow
    shape = KVShape(heads=2, head_dim=16)
    storages = [_storage(8, shape, torch.float32) for _ in range(2)]
    index = TokenIndex.of([[3]], [0], [4], BLOCK, CPU)
    tokens = NewTokens(heads=storages[0].paged_heads, block=index.block, offset=index.offset)
    rotation = Rotation(query_norm=None, key_norm=None, is_late=False, cos=None, sin=None, turned=0)
    rotate_store(
        tuple(ProductParts(values=part[None]) for part in new), rotation, tokens, torch.float32
    )
    key, value = (part.transpose(0, 1)[None] for part in new[1:])
    storages[1].write(index, key, value)
    found, right = (storage.read(torch.tensor([[3]]), torch.float64) for storage in storages)
    for mine, theirs in zip(found, right, strict=True):
        # The interpreter cuts the scale off where torch rounds it.
        torch.testing.assert_close(mine, theirs, rtol=2.0**-6, atol=0.03, equal_nan=True)
    assert not found[0][0, 1, 2].isfinite().any()


def test_norms_that_the_kernels_do_not_have_are_refused():
    rng = torch.Generator().manual_seed(8)
    check_norm(_norm("layer", 64, rng), 64, of_heads=False)
    check_norm(_norm("rms", 64, rng), 64, of_heads=True)
    for norm, columns, of_heads in (
        (_norm("layer", 64, rng), 64, True),
        (_norm("rms", 64, rng), 32, False),
        (_norm("rms", 1 << 15, rng), 1 << 15, False),
        (_norm("rms", 1024, rng), 1024, True),
    ):
        with pytest.raises(UnsupportedStepError, match=f"a norm of {columns} numbers"):
            check_norm(norm, columns, of_heads=of_heads)
