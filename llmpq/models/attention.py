"""Packed batches, the interface of the KV store, and the attention function of a stage's layers.

A step is a flat list of tokens. Each row is a sequence: the blocks that hold its keys and values,
the position of its first token in the step, and their number. Rows follow each other without
padding; a decode row has one token, a chunk of a prompt any number.

The attention function is registered in transformers by name; every other operator of a layer works
on tokens alone. The layer passes its mask argument on, which here is a :class:`LayerAttention` with
the rows of the step. Where the KV store attends, all rows attend to its blocks in place. Elsewhere
rows from position 0 on attend to their own new keys and values, and the blocks of other rows are
gathered.

Some families look up no registered function. Their records name the module here that replaces that
of transformers, with the same submodules and call; GPT-J and CodeGen compute their scores in one
method, which is replaced. ALiBi is the linear bias of BLOOM's and MPT's scores (Press et
al., "Train Short, Test Long", 2022); slopes are as in transformers' BLOOM.

Shapes: R rows, N tokens of the step, H heads, h KV heads, d head_dim, S tokens of a row so far; of
rows of one length, T queries and S keys of a row.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from llmpq.errors import SpecError
from llmpq.spec.families import Family, OwnModule
from llmpq.spec.runtime_constants import SCORE_BLOCK_TOKENS

if TYPE_CHECKING:
    from llmpq.models.states import SequenceStates


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Shape of the keys and values of one token in one layer.

    Attributes:
        heads: of keys and of values.
        head_dim: features of a key.
        value_dim: features of a value; ``None`` for as many.
        window: tokens that a query sees, itself included; ``None`` for all.
        chunk: a query sees the tokens of its own chunk of this size; ``None`` for all.
        is_latent: whether they are a latent vector and the rotated part of a key, which lie side by
            side, and are read together.
    """

    heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    chunk: int | None = None
    is_latent: bool = False

    @property
    def kept_tokens(self) -> int | None:
        """Tokens up to a query among which are all that it sees; ``None`` for all."""
        return self.chunk if self.window is None else self.window

    @property
    def dims(self) -> tuple[int, int]:
        """Features of a key and of a value."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    @property
    def read_dim(self) -> int:
        """Features of a key as a kernel reads it."""
        return sum(self.dims) if self.is_latent else self.head_dim


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
        slots: of the states of each row's sequence, in layers with a recurrent state.
        parent_slots: for each row of draft tokens the slot that its sequence had before them: the
            row before goes on there, and this one begins with its state; -1 for other rows, and
            empty for -1 in all.

    Raises:
        SpecError: the rows have no tokens, or begin before position 0.
    """

    block_tables: Sequence[Sequence[int]]
    starts: Sequence[int]
    counts: Sequence[int]
    rope_lengths: Sequence[int] = ()
    window_tables: Sequence[Sequence[int]] = ()
    slots: Sequence[int] = ()
    parent_slots: Sequence[int] = ()

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

    @cached_property
    def parents(self) -> Sequence[int]:
        """As ``parent_slots``, of every row."""
        return self.parent_slots or [-1] * self.rows

    @cached_property
    def sequence_rows(self) -> Tensor | None:
        """Tokens of each sequence: ``MixerRow`` of ``kernels/cpu/csrc/mixer.h``.

        That is first token, count, slot, 1 where it begins, tokens before its draft tokens, and the
        slot of the state after them. ``[sequences, 6]`` int64 on the host; ``None`` where rows of a
        sequence lie apart. Several rows of one sequence that follow each other are joined.
        """
        found: list[list[int]] = []
        for first, count, start, slot, parent in zip(
            self.offsets, self.counts, self.starts, self.slots, self.parents, strict=True
        ):
            own, last = (found[-1][2], found[-1][5]) if found else (-1, -1)
            if parent < 0 and slot == last:
                found[-1][1] += count
                found[-1][4] += count * (own == last)
            elif parent >= 0 and own == last == parent:
                found[-1][1] += count
                found[-1][5] = slot
            elif parent >= 0:
                found.append([first, count, parent, 0, 0, slot])
            else:
                found.append([first, count, slot, int(start == 0), count, slot])
        slots = [slot for row in found for slot in {row[2], row[5]}]
        return torch.tensor(found) if len({*slots}) == len(slots) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Alibi:
    """ALiBi's bias of the scores in one step; made when a layer reads it.

    Attributes:
        heads: H.
        longest: S, tokens of the longest sequence; 0 where slopes alone are read.
        like: tensor with the dtype and device of the layers.
        largest: largest exponent of MPT's slopes, whose bias is not rounded; ``None`` for BLOOM.
    """

    heads: int
    longest: int
    like: Tensor
    largest: int | None = None

    @property
    def slopes(self) -> Tensor:
        """Of every head, float32 ``[H]``."""
        return _slopes_on(self.heads, self.largest, self.like.device)

    @property
    def is_rounded(self) -> bool:
        """Whether the products of slopes and positions are rounded to the dtype of the layers."""
        return self.largest is None

    @cached_property
    def bias(self) -> Tensor:
        """Of the scores of every key, float32 ``[H, S]``."""
        return alibi_bias(self.heads, self.longest, self.like, largest=self.largest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreOptions:
    """How the scores of attention become weights.

    Attributes:
        scaling: factor of the scores.
        window: tokens a query sees, itself included; ``None`` for all.
        chunk: a query sees the tokens of its own chunk of this size; ``None`` for all.
        softcap: bound of the scores, by a hyperbolic tangent; ``None`` for none.
        sinks: ``[H]``, one more score of each head, without a value; ``None`` for none.
        alibi: bias of the scores, ``None`` for none.
    """

    scaling: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Alibi | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the scores are only scaled."""
        return self.softcap is None and self.sinks is None and self.alibi is None

    @property
    def writes_scores(self) -> bool:
        """Whether no kernel of torch computes the weights without writing out the scores."""
        return self.softcap is not None or self.sinks is not None

    def first_seen(self, position: int) -> int:
        """Return the first position that a query at ``position`` or later sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)


class RowsView(Protocol):
    """Keys and values of rows of one new token each, with the interface of a transformers cache.

    The calls after :meth:`update` belong to the layer of that update.
    """

    @property
    def states(self) -> SequenceStates | None:
        """States of the layers with a recurrent state, ``None`` without any."""
        ...

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[1, h, N, d]`` of a layer; return what its attention receives."""
        ...

    def select(self, layer_idx: int) -> None:
        """Let the next calls read a layer that has been updated and attended to in this step."""
        ...

    def attend_rows(
        self, query: Tensor, rows: Sequence[int], out: Tensor, options: ScoreOptions
    ) -> None:
        """Attend with the one new token of each of some rows to the stored keys and values.

        Args:
            query: of all tokens of the step, ``[1, H, N, d]``.
            rows: the same ones in every layer.
            out: ``[1, N, H, d]``, contiguous; receives the results of these tokens.
            options: of the scores.
        """
        ...


class KVView(RowsView, Protocol):
    """Keys and values of the rows of one step, of any number of new tokens."""

    @property
    def attends(self) -> bool:
        """Whether :meth:`attend` is available."""
        ...

    @property
    def attends_rows(self) -> bool:
        """Whether :meth:`attend_rows` is available."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether keys and values are read as they were written."""
        ...

    def attend(
        self, query: Tensor, options: ScoreOptions, rows: Sequence[int] | None = None
    ) -> Tensor:
        """Attend to the stored keys and values: ``[1, N, H, d]`` from ``[1, H, N, d]``.

        Args:
            query: of the tokens of all rows, or of ``rows``.
            options: of the scores.
            rows: the same ones in every layer, in their order; ``None`` for all.
        """
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

    @property
    def attends(self) -> bool:
        """Whether a compiled kernel attends to the blocks in place."""
        ...

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


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return numbers of the host on a device; to a GPU they are copied while the host goes on."""
    found = torch.from_numpy(values)
    if device.type != "cuda":
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)


LATENT = "llmpq_latent"
"""Name of the module, in one of latent attention, that attends to latent vectors as they are."""
PACKED_ATTENTION = "llmpq_packed"
"""Name of :func:`attend` in the registry of transformers."""
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"


class Attention(Protocol):
    """The attention of all layers of one step."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        """Return ``[1, N, H, d]`` from ``[1, H, N, d]`` and what the KV view's update returned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerAttention:
    """The mask argument of a layer.

    Attributes:
        step: computes the attention.
        window: tokens that a query sees, ``None`` for all.
        chunk: a query sees the tokens of its own chunk of this size; ``None`` for all.
        positions: of the tokens of the step, ``[1, N]`` int64; ``None`` if no layer needs them.
    """

    step: Attention
    window: int | None
    chunk: int | None = None
    positions: Tensor | None = None


def attend(  # noqa: PLR0913  the arguments of attention functions
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerAttention,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: ``[1, N, H, d]`` from ``[1, H, N, d]``."""
    options = ScoreOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=attention_mask.window,
        chunk=attention_mask.chunk,
        softcap=softcap,
        sinks=s_aux,
    )
    step, latent = attention_mask.step, getattr(module, LATENT, None)
    if latent is not None:
        return latent(query, key, value, step, options), None
    return step.attend(query, key, value, options), None


AttentionInterface.register(PACKED_ATTENTION, attend)


def use_packed_attention(layer: nn.Module) -> None:
    """Let ``layer`` call :func:`attend`.

    Raises:
        SpecError: no attention module of the layer looks up its function by name.
    """
    found = [part for part in layer.modules() if _looks_up(part)]
    if not found:
        raise SpecError(
            f"{type(layer).__name__}: found no attention that calls a registered function, "
            "expected one, or an own module in the family's record"
        )
    for part in found:
        config: Any = copy.copy(part.config)
        config._attn_implementation = PACKED_ATTENTION
        part.config = config


def _looks_up(part: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    return code is not None and _REGISTRY in code.co_names and hasattr(part, "config")


class StepAttention:
    """Attention of all sequences of one packed step, with their blocks and masks.

    Args:
        batch: the rows.
        view: their keys and values; ``None`` for whole sequences without a KV store.
        returns_all: whether the view's ``update`` returns all keys and values of the rows.
    """

    def __init__(
        self, batch: PackedBatch, view: KVView | None, *, returns_all: bool = False
    ) -> None:
        self._batch = batch
        self._view = view
        self._returns_all = returns_all
        self._single: list[int] = []  # rows
        self._single_places: Tensor | None = None  # their tokens in the step, their positions
        others = list(range(batch.rows))
        self._is_paged = view is not None and view.attends and not returns_all
        if view is not None and not returns_all:
            self._single = [row for row in others if batch.counts[row] == 1]
            others = [row for row in others if batch.counts[row] > 1]
        self._groups = self._grouped(others)
        is_one = len(self._groups) == 1 and len(self._groups[0]) == batch.rows
        self._is_uniform = is_one and not returns_all

    @property
    def batch(self) -> PackedBatch:
        """The rows."""
        return self._batch

    @property
    def paged_view(self) -> KVView | None:
        """Their keys and values, where a kernel attends to them in place."""
        return self._view if self._is_paged else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        """Return ``[1, N, H, d]``; see :class:`Attention`."""
        if self._is_paged:
            assert self._view is not None
            return self._view.attend(query, options)
        _, heads, tokens, _ = query.shape
        if self._is_uniform:
            made = self._attend_rows(self._groups[0], (query, key, value), options)
            return made.transpose(1, 2).reshape(1, tokens, heads, -1)
        out = query.new_empty(1, tokens, heads, value.shape[-1])
        if self._single:
            self._attend_single(query, options, out)
        if self._returns_all:
            self._attend_to_all(query, key, value, options, out)
            return out
        for rows in self._groups:
            made = self._attend_rows(rows, (query, key, value), options)
            count, first = self._batch.counts[rows[0]], self._batch.offsets[rows[0]]
            span = slice(first, first + len(rows) * count)
            out[0, span].view(len(rows), count, heads, -1).copy_(made.transpose(1, 2))
        return out

    def _grouped(self, rows: Sequence[int]) -> list[list[int]]:
        """Group rows that are computed together: neighbours from position 0 on, of one length."""
        groups: list[list[int]] = []
        for row in rows:
            last = groups[-1][-1] if groups else -1
            is_next = groups and row == last + 1 and not (self._reads(row) or self._reads(last))
            if is_next and self._batch.counts[row] == self._batch.counts[last]:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _reads(self, row: int) -> bool:
        """Whether a row's keys and values come from its blocks."""
        has_exact = self._view is None or self._view.is_exact
        return self._batch.starts[row] > 0 or not has_exact

    def _attend_rows(
        self, rows: Sequence[int], parts: tuple[Tensor, Tensor, Tensor], options: ScoreOptions
    ) -> Tensor:
        """Attend with the tokens of neighbouring rows of one length: ``[R, H, T, d]``."""
        count, first = self._batch.counts[rows[0]], self._batch.offsets[rows[0]]
        span = slice(first, first + len(rows) * count)
        query, key, value = (
            part[0, :, span].view(part.shape[1], len(rows), count, -1).transpose(0, 1)
            for part in parts
        )  # [R, *, T, d]
        if self._reads(rows[0]):
            assert self._view is not None
            key, value = self._view.read(rows[0])
        return attend_last(query, key, value, options)

    def _attend_single(self, query: Tensor, options: ScoreOptions, out: Tensor) -> None:
        """Attend with one token of each of several rows.

        Without a kernel that reads their blocks in place, to padded copies of them.
        """
        assert self._view is not None
        if self._view.attends_rows:
            self._view.attend_rows(query, self._single, out, options)
            return
        batch, device = self._batch, query.device
        if self._single_places is None:  # once a step
            found = [[batch.offsets[row], batch.starts[row]] for row in self._single]
            self._single_places = on_device(np.array(found).T.copy(), device)
        tokens, positions = self._single_places
        key, value, positions = self._view.read_rows(self._single, positions)  # [R, h, S, d]
        own = query[0].index_select(1, tokens).transpose(0, 1)[:, :, None]  # [R, H, 1, d]
        out[0, tokens] = _attend_to_rows(own, key, value, positions, options)[:, :, 0]

    def _attend_to_all(
        self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions, out: Tensor
    ) -> None:
        batch, before = self._batch, 0
        for row in range(batch.rows):
            own = slice(batch.offsets[row], batch.offsets[row] + batch.counts[row])
            seen = slice(before, before + batch.lengths[row])
            made = attend_last(query[:, :, own], key[:, :, seen], value[:, :, seen], options)
            out[:, own] = made.transpose(1, 2)
            before = seen.stop


class DecodeAttention:
    """The attention of one new token a row, computed on the device (for CUDA graphs).

    Args:
        view: keys and values of the rows, in blocks that a kernel reads in place.
    """

    def __init__(self, view: RowsView) -> None:
        self._view = view

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        """Return ``[1, R, H, d]``; see :class:`Attention`."""
        del key
        _, heads, rows, _ = query.shape
        out = query.new_empty(1, rows, heads, value.shape[-1])
        self._view.attend_rows(query, range(rows), out, options)
        return out


def _attend_to_rows(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, options: ScoreOptions
) -> Tensor:
    """Attend with a query ``[R, H, 1, d]`` of each row at ``positions`` ``[R]``."""
    bias = None if options.alibi is None else options.alibi.bias
    if bias is not None:  # it covers the longest row
        longest = bias.shape[1]
        key, value = key[:, :, :longest], value[:, :, :longest]
    keys = torch.arange(key.shape[2], device=query.device)
    places = positions[:, None, None]
    visible = keys_before(places, keys, options.window, options.chunk)  # [R, 1, 1, S]
    if not options.writes_scores:
        key, value = _repeated(query, key, value)
    return masked_attention(query, key, value, visible, options, bias)


def attend_last(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
    """Attend with the last T of S tokens: ``[R, H, T, d]`` from keys ``[R, h, S, d]``."""
    count, total = query.shape[2], key.shape[2]
    has_mask = options.first_seen(total - 1) > 0
    if options.is_plain and not has_mask and count in (1, total):
        is_causal = count > 1
        if query.device.type == "cpu":  # torch's own grouping has no fast kernel there
            key, value = _repeated(query, key, value)
        return scaled_dot_product_attention(
            query, key, value, scale=options.scaling, is_causal=is_causal,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    rows, heads = query.shape[:2]
    if rows > 1 and options.writes_scores:
        # Row by row, which bounds the memory of the scores.
        parts = [torch.split(part, 1) for part in (query, key, value)]
        return torch.cat([attend_last(q, k, v, options) for q, k, v in zip(*parts, strict=True)])
    if not options.writes_scores:
        key, value = _repeated(query, key, value)
    out = query.new_empty(rows, count, heads, value.shape[-1]).transpose(1, 2)
    places = torch.arange(total, device=query.device)
    for first in range(0, count, SCORE_BLOCK_TOKENS):
        block = slice(first, min(first + SCORE_BLOCK_TOKENS, count))
        before = total - count
        since = options.first_seen(before + first)
        seen = slice(since, before + block.stop)
        visible = keys_before(
            places[before:][block], places[seen], options.window, options.chunk
        )  # [T, S]
        bias = None if options.alibi is None else options.alibi.bias[:, seen]
        out[:, :, block] = masked_attention(
            query[:, :, block], key[:, :, seen], value[:, :, seen], visible, options, bias
        )
    return out


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    options: ScoreOptions,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend to the visible keys: ``[R, H, T, d]``.

    Args:
        query: ``[R, H, T, d]``.
        key: ``[R, H, S, d]``; of h heads where scores are written out.
        value: likewise.
        visible: bool, broadcast to ``[R, H, T, S]``.
        options: of the scores.
        bias: ALiBi's of these keys, float32 ``[H, S]``; ``None`` for none.
    """
    mask = visible
    if bias is not None:
        mask = bias[:, None, : key.shape[2]].to(query.dtype)  # [H, 1, S]
        mask = mask.masked_fill(~visible, -torch.inf)
    if not options.writes_scores:
        if mask.dim() == 3:
            mask = mask[None]
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=options.scaling
        )
    rows, heads, count, dim = query.shape
    groups = key.shape[1], heads // key.shape[1] * count
    # In float32: oneDNN would keep compiled code for every shape of 16-bit products.
    folded = query.float().reshape(rows, *groups, dim)
    scores = (folded @ key.float().mT).view(rows, heads, count, -1).mul_(options.scaling)
    # In place: they are the largest tensor of a step.
    if options.softcap is not None:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    if bias is not None:
        scores.add_(mask)
    scores.masked_fill_(~visible, -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    sinks = None if options.sinks is None else options.sinks.float()[:, None, None]
    if sinks is not None:
        highest = torch.maximum(highest, sinks)
    total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - highest).exp()
    made = (scores.view(rows, *groups, -1) @ value.float()).view(rows, heads, count, -1)
    return made.div_(total).to(query.dtype)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    return (key, value) if groups == 1 else (repeat_kv(key, groups), repeat_kv(value, groups))


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of every head, ``[heads]`` float32."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = _geometric(power, torch.arange(1, 1 + power))
    if power == heads:
        return slopes
    # Heads beyond the power of two take every other slope of the next one.
    extra = _geometric(2 * power, torch.arange(1, 1 + 2 * (heads - power), 2))
    return torch.cat([slopes, extra])


def unrounded_slopes(heads: int, largest: int) -> Tensor:
    """Return the slope of every head of MPT, ``[heads]`` float32; exponents end at ``largest``."""
    power = 2 ** math.ceil(math.log2(heads))
    exponents = torch.arange(1, power + 1).float() * (largest / power)
    slopes = 1.0 / torch.pow(2, exponents)
    return slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


def _geometric(heads: int, exponents: Tensor) -> Tensor:
    base = torch.full((), 2 ** (-(2 ** -(math.log2(heads) - 3))), dtype=torch.float32)
    return torch.pow(base, exponents.to(torch.int32))


@lru_cache(maxsize=64)
def _slopes_on(heads: int, largest: int | None, device: torch.device) -> Tensor:
    slopes = alibi_slopes(heads) if largest is None else unrounded_slopes(heads, largest)
    return slopes.to(device)


def alibi_bias(heads: int, keys: int, like: Tensor, *, largest: int | None = None) -> Tensor:
    """Return the bias of every key, float32 ``[heads, keys]``, rounded to the dtype of ``like``.

    It depends on the key alone: softmax cancels the constant of the query position.

    Args:
        heads: number of heads.
        keys: number of keys.
        like: tensor with the dtype and device of the layer.
        largest: largest exponent of MPT's slopes, which are not rounded; ``None`` for BLOOM.
    """
    slopes = _slopes_on(heads, largest, like.device)
    bias = slopes[:, None] * torch.arange(keys, device=like.device)
    if largest is not None:
        return bias
    return bias.to(like.dtype).to(torch.float32)


class AlibiAttention(nn.Module):
    """Self-attention of BLOOM on packed tokens; the same submodules and call.

    Args:
        attention: the self-attention module of transformers.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.query_key_value = attention.query_key_value
        self.dense = attention.dense
        self._heads: int = attention.num_heads
        self._head_dim: int = attention.head_dim
        self._layer: int = attention.layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Alibi,
        attention_mask: LayerAttention,
        layer_past: RowsView | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``[1, N, hidden]`` plus the residual."""
        tokens = hidden_states.shape[1]
        fused = self.query_key_value(hidden_states)
        parts = fused.view(1, tokens, self._heads, 3, self._head_dim).transpose(1, 2)
        query, key, value = parts.unbind(3)  # [1, H, N, d]
        if layer_past is not None:
            key, value = layer_past.update(key, value, self._layer)
        scaling, window = self._head_dim**-0.5, attention_mask.window
        options = ScoreOptions(scaling=scaling, window=window, alibi=alibi)
        attended = attention_mask.step.attend(query, key, value, options)  # [1, N, H, d]
        return residual + self.dense(attended.view(1, tokens, -1)), None


class PositionBiasAttention(nn.Module):
    """Self-attention of MPT on packed tokens; the same submodules and call.

    Args:
        attention: the self-attention module of transformers.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.Wqkv = attention.Wqkv
        self.out_proj = attention.out_proj
        self._heads: int = attention.n_heads
        self._layer: int = attention.layer_idx
        self._scaling: float = attention.softmax_scale
        self._largest: float | None = attention.clip_qkv

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Alibi,
        past_key_values: RowsView | None = None,
        attention_mask: LayerAttention | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``[1, N, hidden]``."""
        assert attention_mask is not None
        fused = self.Wqkv(hidden_states)
        if self._largest:
            fused = fused.clamp(min=-self._largest, max=self._largest)
        tokens = fused.shape[1]
        parts = fused.view(1, tokens, 3, self._heads, -1).transpose(1, 3)  # [1, H, 3, N, d]
        query, key, value = parts.unbind(2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self._layer)
        options = ScoreOptions(
            scaling=self._scaling, window=attention_mask.window, alibi=position_bias
        )
        attended = attention_mask.step.attend(query, key, value, options)  # [1, N, H, d]
        return self.out_proj(attended.reshape(1, tokens, -1)), None


class FusedRotaryAttention(nn.Module):
    """Self-attention of Falcon with rotary positions; grouped heads are cached once.

    Args:
        attention: the self-attention module of transformers.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.query_key_value = attention.query_key_value
        self.dense = attention.dense
        self._kv_heads: int = attention.num_kv_heads
        self._rotate = _beside(attention).apply_rotary_pos_emb
        self._head_dim: int = attention.head_dim
        self._layer: int = attention.layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        alibi: None,
        attention_mask: LayerAttention,
        layer_past: RowsView | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``[1, N, hidden]``; ``alibi`` is not supported."""
        assert alibi is None
        assert position_embeddings is not None
        tokens, dim = hidden_states.shape[1], self._head_dim
        fused = self.query_key_value(hidden_states)
        groups = fused.view(1, tokens, self._kv_heads, -1, dim)  # queries, a key and a value
        query = groups[:, :, :, :-2].reshape(1, tokens, -1, dim).transpose(1, 2)
        key, value = groups[:, :, :, -2].transpose(1, 2), groups[:, :, :, -1].transpose(1, 2)
        cos, sin = position_embeddings
        query, key = self._rotate(query, key, cos, sin)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self._layer)
        options = ScoreOptions(scaling=dim**-0.5, window=attention_mask.window)
        attended = attention_mask.step.attend(query, key, value, options)  # [1, N, H, d]
        return self.dense(attended.reshape(1, tokens, -1)), None


class ComplexRotaryAttention(nn.Module):
    """Self-attention of Llama 4; scales queries without rotation by their own positions.

    transformers counts positions from the length of the cache, the same for all tokens of a step.

    Args:
        attention: the self-attention module of transformers.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, getattr(attention, name))
        self.qk_norm: nn.Module | None = getattr(attention, "qk_norm", None)
        self._head_dim: int = attention.head_dim
        self._layer: int = attention.layer_idx
        self._rotates = bool(attention.use_rope)
        self._rotate = _beside(attention).apply_rotary_emb
        self._is_tuned = bool(attention.attn_temperature_tuning) and not self._rotates
        self._floor, self._scale = float(attention.floor_scale), float(attention.attn_scale)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: LayerAttention,
        past_key_values: RowsView | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``[1, N, hidden]``; ``position_embeddings`` are complex rotations."""
        tokens, dim = hidden_states.shape[1], self._head_dim
        query, key, value = (
            self.get_submodule(name)(hidden_states).view(1, tokens, -1, dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if self._rotates:
            query, key = self._rotate(query, key, position_embeddings)
        if self.qk_norm is not None:
            query, key = self.qk_norm(query), self.qk_norm(key)
        if self._is_tuned:
            assert attention_mask.positions is not None
            steps = torch.floor((attention_mask.positions.float() + 1.0) / self._floor)
            scales = torch.log1p(steps) * self._scale + 1.0  # [1, N]
            query = (query * scales[..., None, None]).to(query.dtype)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self._layer)
        options = ScoreOptions(
            scaling=dim**-0.5, window=attention_mask.window, chunk=attention_mask.chunk
        )
        attended = attention_mask.step.attend(query, key, value, options)  # [1, N, H, d]
        return self.get_submodule("o_proj")(attended.reshape(1, tokens, -1)), None


def _beside(part: nn.Module) -> Any:
    """Return the module of transformers in which the class of ``part`` is defined."""
    return sys.modules[type(part).__module__]


def _with_attend(part: Any) -> Any:
    part._attn = partial(_attend, part.head_dim**-0.5)
    return part


_OWN: dict[OwnModule, Callable[[Any], nn.Module]] = {
    "alibi": AlibiAttention,
    "position_bias": PositionBiasAttention,
    "fused_rotary": FusedRotaryAttention,
    "complex_rotary": ComplexRotaryAttention,
    "split_scores": _with_attend,
}


def use_own_attention(layer: nn.Module, family: Family) -> bool:
    """Replace the attention of a layer, if its record says so; return whether it does."""
    for name, kind in family.own_modules:
        if (make := _OWN.get(kind)) is not None:
            part = layer.get_submodule(name)
            if type(part).__module__.startswith("transformers."):
                layer.set_submodule(name, make(part))
            return True
    return False


def _attend(
    scaling: float, query: Tensor, key: Tensor, value: Tensor, attention_mask: LayerAttention
) -> tuple[Tensor, None]:
    """Attend in place of a method of transformers: ``[1, H, N, d]`` to the same shape."""
    options = ScoreOptions(scaling=scaling, window=attention_mask.window)
    attended = attention_mask.step.attend(query.to(value.dtype), key, value, options)
    return attended.transpose(1, 2), None
