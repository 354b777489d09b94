"""Block tables and positions of decode steps, kept on the device.

From one step to the next a sequence's position grows by one, and its table by a block whenever it
fills one. Both stay on the device; only what a step changes is copied there, at once for all rows.

Shapes: R rows, W blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from llmpq.batching.blocks import blocks_of
from llmpq.dist.kv.cache import KVCache, TensorView
from llmpq.models import PackedBatch
from llmpq.models.attention import on_device

_ALIGNED = 16
"""Multiple of the sizes of tensors that kernels are compiled for."""


class DecodeTables:
    """Tables and positions of up to R rows of one token each.

    Args:
        cache: of the keys and values.
        rows: R.
        most_tokens: of a sequence.
    """

    def __init__(self, cache: KVCache, rows: int, most_tokens: int) -> None:
        self._cache = cache
        self._kinds = 1 if cache.num_window_blocks is None else 2
        width = _aligned(blocks_of(most_tokens, cache.block_size))
        self._first = _aligned(rows)  # of the tables, after the positions
        shape = self._kinds, rows, width
        size = self._first + self._kinds * rows * width
        self._values = torch.zeros(size, dtype=torch.int32, device=cache.device)
        self._tables = self._values[self._first :].view(shape)
        self._positions = self._values[:rows]
        self._starts = [0] * rows
        self._known: list[list[tuple[int, ...]]] = [[()] * rows for _ in range(self._kinds)]
        self.most_tokens = min(most_tokens, width * cache.block_size)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self._values.nbytes

    def positions(self, rows: int) -> torch.Tensor:
        """Return the positions of the first rows, int32 ``[R]``: the same memory in every step."""
        return self._positions[:rows]

    def view(self, rows: int) -> TensorView:
        """Return the keys and values of the first rows."""
        tables = [self._tables[kind, :rows] for kind in range(self._kinds)]
        return self._cache.view_of_tensors(
            tables[0], self.positions(rows), tables[1] if self._kinds > 1 else None
        )

    def place(self, batch: PackedBatch, rows: int) -> None:
        """Check a step and bring its tables and positions to the device.

        Copies of the last row fill the rows up to ``rows``.

        Raises:
            CapacityError: a row is longer than its blocks.
            StageError: a block does not exist, or two rows write to one place of it.
        """
        wanted = [self._wanted(batch, kind, rows) for kind in range(self._kinds)]
        new = [
            row
            for row in range(batch.rows)
            if any(own[row] != known[row] for own, known in zip(wanted, self._known, strict=True))
        ]
        self._cache.check(batch, new)
        starts = [*batch.starts, *[batch.starts[-1]] * (rows - batch.rows)]
        places: list[int] = []
        values: list[int] = []
        if starts == [start + 1 for start in self._starts[:rows]]:
            self.positions(rows).add_(1)
        elif starts != self._starts[:rows]:
            places += range(rows)
            values += starts
        self._starts[:rows] = starts
        for kind, own in enumerate(wanted):
            for row in [*new, *range(batch.rows, rows)]:
                first, blocks = _changed(self._known[kind][row], own[row])
                at = self._first + (kind * len(self._starts) + row) * self._tables.shape[2] + first
                places += range(at, at + len(blocks))
                values += blocks
                self._known[kind][row] = own[row]
        if places:
            at, found = on_device(np.array([places, values]), self._values.device)
            self._values[at] = found.int()

    def _wanted(self, batch: PackedBatch, kind: int, rows: int) -> list[tuple[int, ...]]:
        """Return the tables of a step, as far as there is room for them."""
        tables: Sequence[Sequence[int]] = batch.window_tables if kind else batch.block_tables
        width = self._tables.shape[2]
        own = [tuple(table) if len(table) <= width else tuple(table[:width]) for table in tables]
        return [*own, *own[-1:] * (rows - len(own))]


def _changed(known: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the index of the first changed block, and the blocks from there on."""
    first = len(known) if blocks[: len(known)] == known else 0
    return first, blocks[first:]


def _aligned(count: int) -> int:
    return -count // _ALIGNED * -_ALIGNED
