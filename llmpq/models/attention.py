"""Micro-batches of rows of different lengths: positions, masks and the interface to the KV cache.

The layers attend with transformers' own registered function (``sdpa``, or ``eager`` for families
that need a soft cap), so a stage computes what the library computes, bit for bit where shapes
agree; BLOOM's, which knows none, is ``alibi``'s business. What this module owns is everything
around that call: which cached token each query may see, and when no mask is needed at all (the fast
kernels take none).

A KV store is any object with ``view(batch)``.

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
    """Keys (or values) that one token leaves in one layer: ``heads x head_dim`` values."""

    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Where the tokens of one step live; kept on the host, for the host decides with it.

    Attributes:
        slots: KV slot of each row, ``[R]`` int64, all different.
        positions: absolute position of each token, ``[R, T]`` int64, rising by one along a row;
            right padding continues the count.
        lengths: valid tokens of each row after this step, ``[R]`` int64; a token is padding when
            its position is not below it.

    Raises:
        SpecError: when the three do not describe such rows.
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
        # Steps are short: NumPy's calls cost a third of torch's, and Python's numbers less yet.
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
        """Describe rows that add ``counts[r]`` tokens after the ``starts[r]`` they have cached."""
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
        """Cached tokens of the longest row after this step: as much of the store as is read."""
        return int(self.lengths.max())

    @property
    def query_positions(self) -> Tensor:
        """``positions`` with padding held at its row's last valid token, ``[R, T]``.

        A padded query then sees what that token sees: never nothing (which would make NaN), and
        never a position that the model has no embedding for.
        """
        return torch.minimum(self.positions, self.lengths[:, None] - 1)


class KVView(Protocol):
    """The keys and values of one micro-batch, as transformers' attention layers call them."""

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[R, heads, T, head_dim]`` of a layer; return its ``[R, heads, S, head_dim]``."""
        ...


class KVStore(Protocol):
    """Keys and values of every slot; implemented by ``llmpq.dist.kv.cache.KVCache``."""

    def view(self, batch: MicroBatch) -> KVView:
        """Open the slots of ``batch`` for one forward pass."""
        ...


def needs_no_mask(
    batch: MicroBatch, window: int | None, *, implied_causal: bool, masks_decode: bool = False
) -> bool:
    """Whether attention over the longest row's tokens is right, and fast, without any mask.

    Decode: every row is as long as the longest. Prefill from an empty slot: the causal pattern is
    the same for all rows whatever their lengths, for padding lies to the right, and the attention
    function applies it by itself (``implied_causal``; only ``sdpa`` does).

    Args:
        batch: the micro-batch.
        window: tokens a query sees, ``None`` for all.
        implied_causal: whether a prefill without a mask is causal.
        masks_decode: whether decode is faster with a mask that hides nothing, as it is on a CPU
            with grouped heads: without one, transformers asks for torch's own grouping, which has
            no fast kernel there; with one, it makes a group's queries rows of one head.
    """
    longest = batch.longest
    if window is not None and longest > window:
        return False
    if batch.width == 1:
        return not masks_decode and bool((batch.lengths == longest).all())
    return implied_causal and longest == batch.width and not bool(batch.positions[:, 0].any())


def visible_keys(batch: MicroBatch, window: int | None, device: torch.device) -> Tensor:
    """Which cached tokens each query attends to, ``[R, 1, T, S]`` bool.

    A query at position ``p`` sees the tokens ``(p - window, p]``, transformers' own definition of
    a sliding window.
    """
    return keys_before(batch.query_positions.to(device), batch.longest, window)


def keys_before(positions: Tensor, count: int, window: int | None) -> Tensor:
    """Which of the first ``count`` cached tokens queries at ``positions`` ``[R, T]`` attend to.

    Args:
        positions: on the device of the answer; nothing is decided on the host.
        count: S; at least the longest row's.
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


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask into the bias that ``eager`` attention adds to its scores."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min)
