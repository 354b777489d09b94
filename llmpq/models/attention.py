"""Packed batches: the tokens of one step, and the interface of the KV store.

A step is a flat list of tokens. Each row is a sequence: the blocks that hold its keys and values,
the position of its first token in the step, and their number. Rows follow each other without
padding; a decode row has one token, a chunk of a prompt any number.

Shapes: R rows, N tokens of the step, h KV heads, d head_dim, S tokens of a row so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from llmpq.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Shape of the keys and values of one token in one layer.

    Attributes:
        heads: of keys and of values.
        head_dim: features of a key.
        value_dim: features of a value; ``None`` for as many.
        window: tokens that a query sees, itself included; ``None`` for all.
        chunk: a query sees the tokens of its own chunk of this size; ``None`` for all.
    """

    heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    chunk: int | None = None

    @property
    def kept_tokens(self) -> int | None:
        """Tokens up to a query among which are all that it sees; ``None`` for all."""
        return self.chunk if self.window is None else self.window

    @property
    def dims(self) -> tuple[int, int]:
        """Features of a key and of a value."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """The rows of one step.

    Attributes:
        block_tables: blocks of each row, in the order of its tokens; empty without a KV store.
        starts: position of each row's first token in this step.
        counts: tokens of each row in this step.
        rope_lengths: length of each row's sequence for rotary angles that depend on it, which is
            more than its tokens so far in a chunk of a prompt; empty for its tokens so far.
        window_tables: blocks of each row in layers with windows, where these have blocks of their
            own: as many, of which those before the window may belong to others; else empty.

    Raises:
        SpecError: the rows have no tokens, or begin before position 0.
    """

    block_tables: Sequence[Sequence[int]]
    starts: Sequence[int]
    counts: Sequence[int]
    rope_lengths: Sequence[int] = ()
    window_tables: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        if not len(self.block_tables) == len(self.starts) == len(self.counts) > 0:
            raise SpecError(
                f"step: found {len(self.block_tables)} block tables, {len(self.starts)} starts and "
                f"{len(self.counts)} counts, expected one of each for at least one row"
            )
        if min(self.starts) < 0 or min(self.counts) < 1:
            raise SpecError(
                f"step: found rows of {list(self.counts)} tokens from {list(self.starts)} on, "
                "expected at least one token from position 0 on"
            )

    @classmethod
    def whole(cls, counts: Sequence[int]) -> PackedBatch:
        """Return whole sequences from position 0, for layers without a KV store."""
        return cls(block_tables=[()] * len(counts), starts=[0] * len(counts), counts=counts)

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.counts)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all rows in this step."""
        return sum(self.counts)

    @cached_property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return self.tokens == self.rows

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row after this step."""
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    @property
    def longest(self) -> int:
        """Tokens of the longest row after this step."""
        return max(self.lengths)

    @cached_property
    def offsets(self) -> list[int]:
        """Index of each row's first token in the step."""
        return [0, *np.cumsum(self.counts).tolist()[:-1]]

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, ``[1, N]`` int64 on the host."""
        starts = np.array(self.starts)
        if not self.is_decode:
            starts = np.repeat(starts - self.offsets, self.counts) + np.arange(self.tokens)
        return torch.from_numpy(starts)[None]

    @cached_property
    def last_tokens(self) -> Tensor:
        """Index of each row's last token in the step, ``[R]`` int64 on the host."""
        return torch.from_numpy(np.cumsum(self.counts) - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreOptions:
    """How the scores of attention become weights.

    Attributes:
        scaling: factor of the scores.
        window: tokens a query sees, itself included; ``None`` for all.
        chunk: a query sees the tokens of its own chunk of this size; ``None`` for all.
        softcap: bound of the scores, by a hyperbolic tangent; ``None`` for none.
        sinks: ``[H]``, one more score of each head, without a value; ``None`` for none.
        bias: float32 ``[H, S]``, added to the scores of the keys; ``None`` for none.
    """

    scaling: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the scores are only scaled."""
        return self.softcap is None and self.sinks is None and self.bias is None

    @property
    def writes_scores(self) -> bool:
        """Whether no kernel of torch computes the weights without writing out the scores."""
        return self.softcap is not None or self.sinks is not None

    def first_seen(self, position: int) -> int:
        """Return the first position that a query at ``position`` or later sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)


class KVView(Protocol):
    """Keys and values of the rows of one step, with the interface of a transformers cache.

    The calls after :meth:`update` belong to the layer of that update.
    """

    @property
    def attends(self) -> bool:
        """Whether :meth:`attend` is available."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether keys and values are read as they were written."""
        ...

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[1, h, N, d]`` of a layer; return what its attention receives."""
        ...

    def select(self, layer_idx: int) -> None:
        """Let the next calls read a layer that has been updated and attended to in this step."""
        ...

    def attend(self, query: Tensor, options: ScoreOptions) -> Tensor:
        """Attend to the stored keys and values: ``[1, N, H, d]`` from ``[1, H, N, d]``."""
        ...

    def read(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a row so far, ``[1, h, S, d]`` each.

        In a layer with a window, the first ones that no query sees are left out.
        """
        ...

    def read_rows(self, rows: Sequence[int], positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of several rows, ``[R, h, S, d]``; undefined after a row's end.

        Args:
            rows: of one new token each.
            positions: of the new tokens, ``[R]`` on the device.

        Returns:
            Keys, values, and the positions counted from the first key of each row: in a layer with
            a window, the first ones that no query sees are left out.
        """
        ...


class KVStore(Protocol):
    """Keys and values in blocks, such as ``llmpq.dist.kv.cache.KVCache``."""

    def view(self, batch: PackedBatch, *, returns_all: bool = False) -> KVView:
        """Return the view of the rows of ``batch`` for one forward pass.

        Args:
            batch: the rows.
            returns_all: whether ``update`` returns all keys and values of the rows, one row after
                the other, in place of the new ones.
        """
        ...


def keys_before(
    positions: Tensor, keys: Tensor, window: int | None, chunk: int | None = None
) -> Tensor:
    """Return which keys the queries at ``positions`` attend to.

    A query at position ``p`` sees the tokens ``(p - window, p]`` of its chunk, as in transformers.

    Args:
        positions: of the queries, ``[..., T]``; the host reads no value.
        keys: positions of the keys, ``[S]`` on the same device.
        window: tokens a query sees, ``None`` for all.
        chunk: size of the chunks, ``None`` for a single one.

    Returns:
        ``[..., T, S]`` bool.
    """
    queries = positions[..., None]
    visible = keys <= queries
    if window is not None:
        visible = visible & (keys > queries - window)
    if chunk is not None:
        visible = visible & (keys >= queries // chunk * chunk)
    return visible
