"""The attention function of a stage's layers, registered in transformers by name.

Every other operator of a layer works on tokens alone. The layer passes its mask argument on, which
here is a :class:`LayerAttention` with the rows of the step. Where the KV store attends, all rows
attend to its blocks in place. Elsewhere rows from position 0 on attend to their own new keys and
values, and the blocks of other rows are gathered.

Shapes: R rows of one length, T queries of a row, S keys of a row, N tokens of the step, H heads,
h KV heads, d head_dim.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from llmpq.errors import SpecError
from llmpq.models.attention import KVView, PackedBatch, ScoreOptions, keys_before
from llmpq.spec.runtime_constants import SCORE_BLOCK_TOKENS

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
    del module
    options = ScoreOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=attention_mask.window,
        chunk=attention_mask.chunk,
        softcap=softcap,
        sinks=s_aux,
    )
    return attention_mask.step.attend(query, key, value, options), None


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
            "expected one as in transformers' Llama"
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
        others = list(range(batch.rows))
        self._is_paged = view is not None and view.attends and not returns_all
        if view is not None and not returns_all:
            self._single = [row for row in others if batch.counts[row] == 1]
            others = [row for row in others if batch.counts[row] > 1]
        self._groups = self._grouped(others)
        is_one = len(self._groups) == 1 and len(self._groups[0]) == batch.rows
        self._is_uniform = is_one and not returns_all

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
        """Attend with one token of each of several rows to padded copies of their blocks."""
        assert self._view is not None
        batch, device = self._batch, query.device
        tokens = torch.tensor([batch.offsets[row] for row in self._single], device=device)
        positions = torch.tensor([batch.starts[row] for row in self._single], device=device)
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
        positions: of the new tokens, ``[R]`` int64 on the device.
        view: keys and values of the rows.
    """

    def __init__(self, positions: Tensor, view: KVView) -> None:
        self._positions = positions
        self._view = view

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        """Return ``[1, R, H, d]``; see :class:`Attention`."""
        del key, value
        keys, values, positions = self._view.read_rows((), self._positions)
        own = query[0].transpose(0, 1)[:, :, None]  # [R, H, 1, d]
        return _attend_to_rows(own, keys, values, positions, options)[None, :, :, 0]


def _attend_to_rows(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, options: ScoreOptions
) -> Tensor:
    """Attend with a query ``[R, H, 1, d]`` of each row at ``positions`` ``[R]``."""
    if options.bias is not None:  # it covers the longest row
        longest = options.bias.shape[1]
        key, value = key[:, :, :longest], value[:, :, :longest]
    keys = torch.arange(key.shape[2], device=query.device)
    places = positions[:, None, None]
    visible = keys_before(places, keys, options.window, options.chunk)  # [R, 1, 1, S]
    if not options.writes_scores:
        key, value = _repeated(query, key, value)
    return masked_attention(query, key, value, visible, options)


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
        bias = None if options.bias is None else options.bias[:, seen]
        out[:, :, block] = masked_attention(
            query[:, :, block], key[:, :, seen], value[:, :, seen], visible,
            replace(options, bias=bias),
        )  # fmt: skip
    return out


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: ScoreOptions
) -> Tensor:
    """Attend to the visible keys: ``[R, H, T, d]``.

    Args:
        query: ``[R, H, T, d]``.
        key: ``[R, H, S, d]``; of h heads where scores are written out.
        value: likewise.
        visible: bool, broadcast to ``[R, H, T, S]``.
        options: of the scores; its bias is that of these keys.
    """
    mask = visible
    if options.bias is not None:
        bias = options.bias[:, None, : key.shape[2]].to(query.dtype)  # [H, 1, S]
        mask = bias.masked_fill(~visible, -torch.inf)
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
    if options.bias is not None:
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
