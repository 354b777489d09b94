"""Run by ``test_triton_kernels.py`` under ``TRITON_INTERPRET=1``: the kernels against float64."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.dist.kv.cache import CodeKVStorage, PlainKVStorage, TokenIndex
from llmpq.kernels.gpu import paged_decode
from llmpq.kernels.gpu.paged_decode import DecodeRows, attend, can_attend
from llmpq.models import KVShape
from llmpq.spec import runtime_constants

torch.set_num_threads(1)

BLOCK = 16
UNIT = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Distance of neighbouring numbers; the interpreter cuts bf16 numbers off where a GPU rounds."""


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """The interpreter takes a millisecond for each."""
    monkeypatch.setattr(runtime_constants, "DECODE_PROGRAMS", 24)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows with random blocks, keys and values."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    kv_bits: int | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_slopes: bool = False
    seed: int = 0


def _storage(case, blocks):
    shape = KVShape(heads=case.kv_heads, head_dim=case.dim, value_dim=case.value_dim)
    device = torch.device("cpu")
    if case.kv_bits == 8:
        return CodeKVStorage(shape, (blocks, BLOCK), device, 8)
    return PlainKVStorage(shape, (blocks, BLOCK), case.dtype, device)


def _expected(query, key, value, case, sinks, slopes):
    """Softmax attention of one query ``[H, d]`` to keys ``[h, S, d]``, all in float64."""
    length = key.shape[1]
    groups = case.heads // case.kv_heads
    key, value = (part.double().repeat_interleave(groups, 0) for part in (key, value))
    scores = torch.einsum("hd,hsd->hs", query.double(), key) * case.dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if slopes is not None:
        bias = slopes[:, None] * torch.arange(length)
        scores = scores + bias.to(case.dtype).double()
    first = 0 if case.window is None else max(0, length - case.window)
    if case.chunk is not None:
        first = max(first, (length - 1) // case.chunk * case.chunk)
    scores[:, :first] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], 1)
    weights = scores.softmax(-1)[:, :length]
    return torch.einsum("hs,hsd->hd", weights, value)


def check(case):
    """Some rows of a step of more tokens, in scattered blocks, whose other places hold NaN."""
    rng = torch.Generator().manual_seed(case.seed)
    rows, value_dim = len(case.lengths), case.value_dim or case.dim
    widths = [-(-length // BLOCK) for length in case.lengths]
    blocks = sum(widths) + 3
    order = torch.randperm(blocks, generator=rng).tolist()
    storage = _storage(case, blocks)
    for tensor in storage._tensors:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    tables = torch.full((rows, max(widths) + 2), 10**9, dtype=torch.int32)
    everything = torch.randn(case.heads, rows + 2, case.dim, generator=rng).to(case.dtype)
    tokens = torch.randperm(rows + 2, generator=rng)[:rows]
    sinks = torch.randn(case.heads, generator=rng).to(case.dtype) if case.has_sinks else None
    slopes = torch.rand(case.heads, generator=rng) / 8 if case.has_slopes else None
    expected = []
    for row, length in enumerate(case.lengths):
        own = [order.pop() for _ in range(widths[row])]
        tables[row, : len(own)] = torch.tensor(own)
        key, value = (
            torch.randn(1, case.kv_heads, length, dim, generator=rng).to(case.dtype)
            for dim in (case.dim, value_dim)
        )
        storage.write(TokenIndex.of([own], [0], [length], BLOCK, torch.device("cpu")), key, value)
        if case.kv_bits == 8:
            key, value = storage.read(torch.tensor([own]), torch.float64)
            key, value = key[:, :, :length], value[:, :, :length]
        query = everything[:, tokens[row]]
        expected.append(_expected(query, key[0], value[0], case, sinks, slopes))
    out = torch.full((1, rows + 2, case.heads, value_dim), 7.0, dtype=case.dtype)
    where = DecodeRows(
        tables=tables, positions=torch.tensor(case.lengths) - 1, tokens=tokens
    )  # fmt: skip
    attend(
        everything[None], storage.paged_heads, where, out, scaling=case.dim**-0.5,
        window=case.window, chunk=case.chunk, softcap=case.softcap, sinks=sinks, slopes=slopes,
        rounds_bias=case.has_slopes,
    )  # fmt: skip
    found, right = out[0, tokens].double(), torch.stack(expected)
    # Sums of d and S rounded numbers; the weights are rounded to the dtype before their product.
    bound = UNIT[case.dtype] * (4 + 2 * case.dim**0.5)
    if case.softcap is not None:  # a hyperbolic tangent is a difference of numbers up to 1
        bound += UNIT[torch.float32] * case.softcap
    assert ((found - right).norm() / right.norm()).item() < bound
    others = [token for token in range(rows + 2) if token not in tokens.tolist()]
    assert (out[0, others] == 7.0).all()


def test_the_interpreter_runs_kernels():
    assert can_attend(torch.device("cpu"), torch.float32, 128, 128)
    assert not can_attend(torch.device("cpu"), torch.float32, 576, 512)


@pytest.mark.parametrize(
    ("dtype", "kv_bits"),
    # Options are independent of dtypes; test_any_rows draws the other pairs.
    [(torch.float32, None), (torch.float16, None), (torch.bfloat16, 8)],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_heads": 4},  # MHA
        {"kv_heads": 1, "heads": 71, "dim": 64},  # more query heads than a program takes
        {"window": 37},
        {"window": 1},
        {"chunk": 48},
        {"softcap": 2.0},
        {"has_sinks": True, "window": 20},
        {"has_slopes": True, "kv_heads": 4},
        {"dim": 80},
        {"dim": 24, "heads": 6},
        {"dim": 256},
    ],
    ids=str,
)
def test_ragged_rows(dtype, kv_bits, options):
    lengths = (1, 70, 16, 130, 17) if "heads" not in options else (40, 3)
    check(Case(lengths=lengths, dtype=dtype, kv_bits=kv_bits, **options))


def test_values_of_another_size():
    check(Case(lengths=(5, 40), dim=48, value_dim=32))


@pytest.mark.parametrize("splits", [1, 2, 16, 64])
def test_any_number_of_splits(monkeypatch, splits):
    monkeypatch.setattr(paged_decode, "decode_splits", lambda *_: splits)
    check(Case(lengths=(300, 3), kv_heads=1, heads=2, has_sinks=True))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_rows(data):
    def maybe(values):
        return data.draw(st.one_of(st.none(), values))

    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    kv_heads = data.draw(st.integers(1, 3))
    check(
        Case(
            lengths=tuple(lengths),
            kv_heads=kv_heads,
            heads=kv_heads * data.draw(st.integers(1, 5)),
            dim=data.draw(st.sampled_from([8, 16, 40, 64, 96])),
            dtype=data.draw(st.sampled_from(list(UNIT))),
            kv_bits=maybe(st.just(8)),
            window=maybe(st.integers(1, 200)),
            chunk=maybe(st.integers(1, 100)),
            softcap=maybe(st.floats(0.5, 50)),
            has_sinks=data.draw(st.booleans()),
            has_slopes=data.draw(st.booleans()),
            seed=data.draw(st.integers(0, 9)),
        )
    )


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("overflow", [torch.inf, torch.nan])
def test_an_overflow_does_not_get_lost(overflow, kv_bits):
    case = Case(lengths=(40,), kv_bits=kv_bits)
    storage = _storage(case, 3)
    key = torch.randn(1, 2, 40, 32)
    key[0, 0, 7, 3] = overflow
    index = TokenIndex.of([[0, 1, 2]], [0], [40], BLOCK, torch.device("cpu"))
    storage.write(index, key, torch.randn(1, 2, 40, 32))
    out = torch.zeros(1, 1, 4, 32)
    rows = DecodeRows(
        tables=torch.tensor([[0, 1, 2]], dtype=torch.int32), positions=torch.tensor([39])
    )
    attend(torch.ones(1, 4, 1, 32), storage.paged_heads, rows, out, scaling=1.0)
    assert out[0, 0, :2].isnan().all()
    assert out[0, 0, 2:].isfinite().all()
