"""Tables and positions on the device against those of each step; what is copied there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.dist.kv import decode_tables
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.kv.decode_tables import DecodeTables
from llmpq.errors import CapacityError, StageError
from llmpq.models import KVShape, PackedBatch

BLOCK, BLOCKS, MOST = 16, 64, 120


def _cache(has_windows):
    shapes = [KVShape(heads=1, head_dim=8), KVShape(heads=1, head_dim=8, window=20)]
    return KVCache(
        shapes, 0, num_blocks=BLOCKS, dtype=torch.float32,
        num_window_blocks=BLOCKS if has_windows else None,
    )  # fmt: skip


def _check(tables, batch, rows):
    """The device holds the tables of the step up to the length of each row, the last one again."""
    kinds = [batch.block_tables, *([batch.window_tables] if batch.window_tables else [])]
    for row in range(rows):
        own = min(row, batch.rows - 1)
        assert tables.positions(rows)[row] == batch.starts[own]
        for kind, wanted in enumerate(kinds):
            width = len(wanted[own])
            assert tables._tables[kind, row, :width].tolist() == list(wanted[own])


@pytest.fixture
def copies(monkeypatch):
    """Sizes of the copies to the device."""
    found, real = [], decode_tables.on_device

    def noted(values, device):
        found.append(values.shape)
        return real(values, device)

    monkeypatch.setattr(decode_tables, "on_device", noted)
    return found


@pytest.mark.parametrize("has_windows", [False, True])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_steps(has_windows, data):
    """Sequences come, grow, move to other rows and end; their blocks go to others."""
    tables = DecodeTables(_cache(has_windows), 4, MOST)
    running, free = {}, list(range(BLOCKS))
    for _ in range(data.draw(st.integers(1, 12))):
        if not running or (len(running) < 4 and data.draw(st.booleans())):
            running[len(free), len(running), data.draw(st.integers())] = (
                data.draw(st.integers(0, 40)), [], [],
            )  # fmt: skip
        order = data.draw(st.permutations(list(running)))
        rows = data.draw(st.integers(1, len(order)))
        starts, blocks, windows = [], [], []
        for name in order[:rows]:
            start, own, other = running[name]
            while len(own) * BLOCK <= start:
                own.append(free.pop(data.draw(st.integers(0, len(free) - 1))))
                other.append(data.draw(st.integers(0, BLOCKS - 1)))
            starts.append(start)
            blocks.append(tuple(own))
            windows.append(tuple(other))
            running[name] = (start + 1, own, other)
        batch = PackedBatch(
            block_tables=blocks, starts=starts, counts=[1] * rows,
            window_tables=windows if has_windows else (),
        )  # fmt: skip
        count = data.draw(st.integers(rows, 4))
        tables.place(batch, count)
        _check(tables, batch, count)
        if data.draw(st.booleans()):
            _, own, _ = running.pop(order[0])
            free += own


def test_a_step_copies_what_changed(copies):
    """Nothing between blocks, a block of each row when they fill one, at once."""
    tables = DecodeTables(_cache(has_windows=False), 3, MOST)
    for step in range(40):
        own = [tuple(range(20 * row, 20 * row + 1 + (10 + step) // BLOCK)) for row in range(3)]
        tables.place(PackedBatch(block_tables=own, starts=[10 + step] * 3, counts=[1] * 3), 3)
    assert copies == [(2, 6), (2, 3), (2, 3), (2, 3)]


def test_another_sequence_in_the_same_blocks_is_placed_anew(copies):
    tables = DecodeTables(_cache(has_windows=False), 1, MOST)
    for start in (5, 6, 3, 3):
        batch = PackedBatch(block_tables=[(7,)], starts=[start], counts=[1])
        tables.place(batch, 1)
        _check(tables, batch, 1)
    assert copies == [(2, 2), (2, 1)]


def test_a_wrong_step_raises_an_error_and_changes_nothing():
    tables = DecodeTables(_cache(has_windows=False), 2, MOST)
    good = PackedBatch(block_tables=[(1,), (2,)], starts=[3, 4], counts=[1, 1])
    tables.place(good, 2)
    for blocks, starts, error in (
        ([(1,), (1,)], [4, 4], StageError),
        ([(1,), (BLOCKS,)], [4, 5], StageError),
        ([(1,), (2,)], [16, 5], CapacityError),
    ):
        with pytest.raises(error, match="KV cache"):
            tables.place(PackedBatch(block_tables=blocks, starts=starts, counts=[1, 1]), 2)
        _check(tables, good, 2)
