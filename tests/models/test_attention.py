"""Packed batches, masks, and attention over blocks compared with attention on dense tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching.blocks import blocks_of
from llmpq.dist.kv.cache import KVCache
from llmpq.errors import SpecError
from llmpq.models import KVShape, PackedBatch
from llmpq.models.attention import (
    Alibi,
    ScoreOptions,
    StepAttention,
    alibi_bias,
    alibi_slopes,
    keys_before,
    use_packed_attention,
)

torch.set_num_threads(1)

WINDOWS = st.none() | st.integers(1, 40)


def test_positions_follow_each_row():
    batch = PackedBatch(block_tables=[(4,), (2,), (0, 7)], starts=[3, 0, 17], counts=[1, 3, 2])
    assert batch.positions.tolist() == [[3, 0, 1, 2, 17, 18]]
    assert batch.lengths == [4, 3, 19]
    assert batch.offsets == [0, 1, 4]
    assert batch.last_tokens.tolist() == [0, 3, 5]
    assert (batch.rows, batch.tokens, batch.longest, batch.is_decode) == (3, 6, 19, False)
    decode = PackedBatch(block_tables=[(4,), (2,)], starts=[3, 9], counts=[1, 1])
    assert decode.is_decode
    assert decode.positions.tolist() == [[3, 9]]


def test_rows_of_a_sequence_that_follow_each_other_are_joined():
    tables = [()] * 4
    batch = PackedBatch(
        block_tables=tables, starts=[0, 7, 8, 3], counts=[3, 1, 1, 2], slots=[1, 4, 4, 0]
    )
    # First token, tokens, slot, whether it begins, tokens before drafts, slot after them.
    expected = [[0, 3, 1, 1, 3, 1], [3, 2, 4, 0, 2, 4], [5, 2, 0, 0, 2, 0]]
    assert batch.sequence_rows.tolist() == expected
    apart = PackedBatch(
        block_tables=tables, starts=[0, 7, 3, 8], counts=[3, 1, 2, 1], slots=[1, 4, 0, 4]
    )
    assert apart.sequence_rows is None


def test_rows_of_drafts_are_joined_to_those_before():
    batch = PackedBatch(
        block_tables=[()] * 5,
        starts=[7, 9, 10, 4, 5],
        counts=[2, 1, 1, 1, 1],
        slots=[1, 5, 5, 0, 6],
        parent_slots=[-1, 1, -1, -1, 0],
    )
    assert batch.sequence_rows.tolist() == [[0, 4, 1, 0, 2, 5], [4, 2, 0, 0, 1, 6]]
    taken = replace(batch, slots=[1, 5, 5, 0, 5])
    assert taken.sequence_rows is None


@pytest.mark.parametrize(
    ("tables", "starts", "counts"),
    [([], [], []), ([()], [0], [0]), ([()], [-1], [1]), ([()], [0, 1], [1, 1]), ([], [0], [1])],
)
def test_inconsistent_rows_raise_an_error(tables, starts, counts):
    with pytest.raises(SpecError, match="step"):
        PackedBatch(block_tables=tables, starts=starts, counts=counts)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), WINDOWS, WINDOWS)
def test_queries_see_exactly_the_window_before_them(positions, window, chunk):
    mask = keys_before(torch.tensor(positions), torch.arange(61), window, chunk)
    for row, position in enumerate(positions):
        first = 0 if window is None else max(0, position - window + 1)
        while chunk is not None and first // chunk != position // chunk:
            first += 1
        assert ScoreOptions(scaling=1.0, window=window, chunk=chunk).first_seen(position) == first
        assert mask[row].nonzero().flatten().tolist() == list(range(first, position + 1))


def _expected(query, key, value, options):
    """Attention of the last T of S tokens of one row in float64: query [H, T, d]."""
    heads, count, _ = query.shape
    total = key.shape[1]
    key, value = (
        part.double().repeat_interleave(heads // part.shape[0], 0) for part in (key, value)
    )
    scores = query.double() @ key.mT * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.alibi is not None:
        scores = scores + options.alibi.bias[:, None, :total].double()
    visible = keys_before(
        torch.arange(total - count, total), torch.arange(total), options.window, options.chunk
    )
    scores = scores.masked_fill(~visible, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.double()[:, None, None].expand(-1, count, 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=5),
    free=st.permutations(range(60)),
    shape=st.sampled_from([(4, 2, 16), (3, 3, 32), (8, 2, 8), (6, 1, 16)]),
    kv_bits=st.sampled_from([None, 8, 4]),
    window=WINDOWS,
    chunk=WINDOWS,
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    has_bias=st.booleans(),
    returns_all=st.booleans(),
)
def test_attention_over_blocks_equals_attention_on_dense_tensors(
    rows, free, shape, kv_bits, window, chunk, softcap, has_sinks, has_bias, returns_all
):
    heads, kv_heads, dim = shape
    kv_bits = 8 if kv_bits == 4 and dim % 16 else kv_bits
    torch.manual_seed(sum(start for start, _ in rows))
    cache = KVCache(
        [KVShape(heads=kv_heads, head_dim=dim)], 0, num_blocks=60, dtype=torch.float32,
        kv_bits=kv_bits,
    )  # fmt: skip
    free, tables = list(free), []
    for start, count in rows:
        tables.append(tuple(free.pop() for _ in range(blocks_of(start + count))))
    starts, counts = zip(*rows, strict=True)
    cached = [(table, start) for table, start in zip(tables, starts, strict=True) if start]
    if cached:
        before = PackedBatch(
            block_tables=[table for table, _ in cached],
            starts=[0] * len(cached),
            counts=[start for _, start in cached],
        )
        old = torch.randn(2, 1, kv_heads, before.tokens, dim)
        view = cache.view(before, returns_all=True)  # stores at once
        view.update(old[0], old[1], 0)
    batch = PackedBatch(block_tables=tables, starts=starts, counts=counts)
    options = ScoreOptions(
        scaling=0.3,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=torch.randn(heads) if has_sinks else None,
        alibi=Alibi(heads=heads, longest=batch.longest, like=torch.zeros(1)) if has_bias else None,
    )
    query = torch.randn(1, heads, batch.tokens, dim)
    new = torch.randn(2, 1, kv_heads, batch.tokens, dim)
    view = cache.view(batch, returns_all=returns_all)
    key, value = view.update(new[0], new[1], 0)
    step = StepAttention(batch, view, returns_all=returns_all)
    made = step.attend(query, key, value, options)
    assert made.shape == (1, batch.tokens, heads, dim)
    for row, offset in enumerate(batch.offsets):
        own = slice(offset, offset + counts[row])
        keys, values = view.read(row)
        right = _expected(query[0, :, own], keys[0], values[0], options)
        torch.testing.assert_close(
            made[0, own].transpose(0, 1).double(), right, atol=2e-5, rtol=1e-5
        )


def test_a_layer_without_a_registered_attention_function_is_refused():
    with pytest.raises(SpecError, match="found no attention"):
        use_packed_attention(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 112])
def test_alibi_slopes_equal_the_paper(heads):
    # Press et al.: 2^(-8/n), 2^(-16/n), ...; between powers of two every other one of the next.
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
    torch.testing.assert_close(alibi_slopes(heads), torch.tensor(slopes))
    bias = alibi_bias(heads, 5, torch.zeros(1, dtype=torch.float32))
    assert bias.shape == (heads, 5)
    torch.testing.assert_close(bias[0], torch.tensor(slopes[0]) * torch.arange(5))
