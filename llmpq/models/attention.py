"""Micro-batches of rows of different lengths: positions, masks and the interface of the KV store.

Layers call an attention function registered in transformers (``sdpa``, or ``eager`` for families
with a soft cap). This module provides its masks, and decides when none is needed.

Shapes: R rows, T new tokens per row (padded right), S cached tokens read (the longest row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from llmpq.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Shape of the keys (or values) of one token in one layer."""

    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Slots and positions of the tokens of one step; tensors on the host.

    Attributes:
        slots: KV slot of each row, ``[R]`` int64, distinct.
        positions: absolute position of each token, ``[R, T]`` int64, rising by one along a row;
            right padding continues the count.
        lengths: valid tokens of each row after this step, ``[R]`` int64; tokens from this position
            on are padding.

    Raises:
        SpecError: the tensors do not describe such rows.
    """

    slots: Tensor
    positions: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        rows = self.slots.shape
        if len(rows) != 1 or self.lengths.shape != rows or self.positions.shape[:1] != rows:
            raise SpecError(
                f"micro-batch: found slots {tuple(self.slots.shape)}, positions "
                f"{tuple(self.positions.shape)}, lengths {tuple(self.lengths.shape)}, "
                "expected [R], [R, T], [R]"
            )
        if self.positions.dim() != 2 or self.positions.numel() == 0:
            raise SpecError("micro-batch: expected at least one row and one token")
        # NumPy calls on small arrays cost a third of those of torch, Python numbers still less.
        width, positions = self.width, self.positions.numpy()
        first: list[int] = positions[:, 0].tolist()
        is_rising = width == 1 or (positions == positions[:, :1] + np.arange(width)).all()
        if min(first) < 0 or not is_rising:
            raise SpecError("micro-batch: expected positions from 0 on, rising by one along a row")
        lengths: list[int] = self.lengths.tolist()
        added = [length - start for length, start in zip(lengths, first, strict=True)]
        if min(added) < 1 or max(added) > width:
            raise SpecError(
                f"micro-batch: found rows with {added} new tokens, expected 1 to {width} in each"
            )

    @classmethod
    def build(
        cls, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> MicroBatch:
        """Build rows that add ``counts[r]`` tokens to ``starts[r]`` cached tokens."""
        first = torch.tensor(starts, dtype=torch.int64)
        count = torch.tensor(counts, dtype=torch.int64)
        width = max(counts, default=0)
        return cls(
            slots=torch.tensor(slots, dtype=torch.int64),
            positions=first[:, None] + torch.arange(width),
            lengths=first + count,
        )

    @property
    def rows(self) -> int:
        """Sequences in the micro-batch."""
        return self.positions.shape[0]

    @property
    def width(self) -> int:
        """Tokens per row in this step, padding included."""
        return self.positions.shape[1]

    @property
    def longest(self) -> int:
        """Cached tokens of the longest row after this step."""
        return int(self.lengths.max())

    @property
    def query_positions(self) -> Tensor:
        """``positions`` with padding clamped to the last valid token of its row, ``[R, T]``.

        A padded query thus sees at least one token (none would give NaN), and its position has an
        embedding.
        """
        return torch.minimum(self.positions, self.lengths[:, None] - 1)


class KVView(Protocol):
    """Keys and values of one micro-batch, with the interface of a transformers cache."""

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[R, heads, T, head_dim]`` of a layer; return all ``[R, heads, S, head_dim]``."""
        ...


class KVStore(Protocol):
    """Keys and values of all slots, such as ``llmpq.dist.kv.cache.KVCache``."""

    def view(self, batch: MicroBatch) -> KVView:
        """Return the view of the slots of ``batch`` for one forward pass."""
        ...


def needs_no_mask(
    batch: MicroBatch, window: int | None, *, implied_causal: bool, masks_decode: bool = False
) -> bool:
    """Whether attention is correct and fast without a mask.

    Decode: all rows have the same length. Prefill from empty slots: the causal pattern is the same
    for all rows, as padding is on the right, and the attention function applies it
    (``implied_causal``; ``sdpa`` only).

    Args:
        batch: the micro-batch.
        window: tokens a query sees, ``None`` for all.
        implied_causal: whether prefill without a mask is causal.
        masks_decode: whether decode is faster with a mask that hides nothing, as on a CPU with
            grouped heads: without a mask transformers uses torch's grouping, which has no fast
            kernel there.
    """
    longest = batch.longest
    if window is not None and longest > window:
        return False
    if batch.width == 1:
        return not masks_decode and bool((batch.lengths == longest).all())
    return implied_causal and longest == batch.width and not bool(batch.positions[:, 0].any())


def visible_keys(batch: MicroBatch, window: int | None, device: torch.device) -> Tensor:
    """Return the cached tokens that each query attends to, ``[R, 1, T, S]`` bool.

    A query at position ``p`` sees the tokens ``(p - window, p]``, as in transformers.
    """
    return keys_before(batch.query_positions.to(device), batch.longest, window)


def keys_before(positions: Tensor, count: int, window: int | None) -> Tensor:
    """Return which of the first ``count`` cached tokens the queries at ``positions`` attend to.

    Args:
        positions: ``[R, T]`` on the device of the result; the host reads no value.
        count: S, at least the length of the longest row.
        window: tokens a query sees, ``None`` for all.

    Returns:
        ``[R, 1, T, S]`` bool.
    """
    queries = positions[:, None, :, None]  # [R, 1, T, 1]
    keys = torch.arange(count, device=positions.device)  # [S]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return visible


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias that ``eager`` attention adds to its scores for a boolean mask."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min)
