"""Micro-batches and masks compared with a mask computed token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from llmpq.errors import SpecError
from llmpq.models.alibi import alibi_bias, alibi_slopes
from llmpq.models.attention import MicroBatch, additive_mask, needs_no_mask, visible_keys

ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=4)
WINDOWS = st.none() | st.integers(1, 8)


def _batch(rows):
    starts, counts = zip(*rows, strict=True)
    return MicroBatch.build(range(len(rows)), starts, counts)


def test_positions_continue_through_padding():
    batch = MicroBatch.build([4, 2], [3, 0], [1, 3])
    assert batch.positions.tolist() == [[3, 4, 5], [0, 1, 2]]
    assert batch.lengths.tolist() == [4, 3]
    assert (batch.rows, batch.width, batch.longest) == (2, 3, 4)
    assert batch.query_positions.tolist() == [[3, 3, 3], [0, 1, 2]]


@pytest.mark.parametrize(
    ("slots", "positions", "lengths"),
    [
        ([0], [[0]], [1, 1]),
        ([0, 1], [[0]], [1, 1]),
        ([0], [0], [1]),
        ([], [], []),
        ([0], [[]], [0]),
        ([0], [[-1]], [0]),
        ([0], [[2, 2]], [4]),
        ([0], [[2, 3]], [2]),
        ([0], [[2, 3]], [5]),
    ],
)
def test_inconsistent_rows_raise_an_error(slots, positions, lengths):
    with pytest.raises(SpecError, match="micro-batch"):
        MicroBatch(
            slots=torch.tensor(slots, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            lengths=torch.tensor(lengths, dtype=torch.int64),
        )


@given(ROWS, WINDOWS)
def test_valid_queries_see_exactly_the_window_before_them(rows, window):
    mask = visible_keys(_batch(rows), window, torch.device("cpu"))
    for row, (start, count) in enumerate(rows):
        for token in range(count):
            position = start + token
            first = 0 if window is None else max(0, position - window + 1)
            seen = mask[row, 0, token].nonzero().flatten().tolist()
            assert seen == list(range(first, position + 1))


@given(ROWS, WINDOWS)
def test_padded_queries_see_at_least_one_key(rows, window):
    assert bool(visible_keys(_batch(rows), window, torch.device("cpu")).any(-1).all())


@given(ROWS, WINDOWS)
@example([(2, 1), (0, 3)], None)  # as many tokens cached as new, and yet a row begins late
@example([(4, 1), (4, 1)], 4)
def test_mask_is_omitted_only_when_it_has_no_effect(rows, window):
    batch = _batch(rows)
    mask = visible_keys(batch, window, torch.device("cpu"))
    if batch.width == 1:
        assert needs_no_mask(batch, window, implied_causal=False) == bool(mask.all())
    elif needs_no_mask(batch, window, implied_causal=True):
        causal = torch.ones(batch.width, batch.longest, dtype=torch.bool).tril()
        for row, (_, count) in enumerate(rows):
            assert torch.equal(mask[row, 0, :count], causal[:count])


def test_ragged_prefill_from_empty_slots_needs_no_mask():
    batch = MicroBatch.build([0, 1], [0, 0], [5, 3])
    assert needs_no_mask(batch, None, implied_causal=True)
    assert not needs_no_mask(batch, None, implied_causal=False)
    assert not needs_no_mask(batch, 4, implied_causal=True)


def test_additive_mask_forbids_with_the_smallest_number():
    bias = additive_mask(torch.tensor([True, False]), torch.float16)
    assert bias.tolist() == [0.0, torch.finfo(torch.float16).min]


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


def test_decode_uses_a_mask_where_that_is_faster():
    level = MicroBatch.build([0, 1], [4, 4], [1, 1])
    assert needs_no_mask(level, None, implied_causal=True)
    assert not needs_no_mask(level, None, implied_causal=True, masks_decode=True)
    assert bool(visible_keys(level, None, torch.device("cpu")).all())
    prefill = MicroBatch.build([0, 1], [0, 0], [4, 2])
    assert needs_no_mask(prefill, None, implied_causal=True, masks_decode=True)
