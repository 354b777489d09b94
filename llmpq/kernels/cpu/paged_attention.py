"""Attention on the blocks of a KV cache (compiled, CPU).

torch's attention needs sequences of one length in one tensor: blocks are gathered, groups repeated,
a mask built, and every row costs as much as the longest. The kernels read the blocks of each
sequence in place, up to the position of its query: ``csrc/attention.c`` for single tokens,
``csrc/prefill_attention.c`` for runs of neighbouring tokens, such as prompts.

Shapes: N tokens of the step, H heads, h KV heads, d head_dim, B tokens of a block, S tokens read.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmpq.kernels.cpu.native import TYPES, AttentionCall, library
from llmpq.spec.runtime_constants import HEAD_LANES, MAX_PAGED_HEAD_DIM

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
STORED_TYPES = {**TYPES, torch.int8: 3, torch.uint8: 4}
"""Numbers of the types of stored heads in ``csrc/attention.h``."""
MAX_SINGLE_TOKENS = 16
"""Most tokens of a row that attend one by one."""


def can_attend(dtype: torch.dtype, stored: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Return whether queries of ``dtype`` can attend to heads stored as ``stored`` here."""
    fits = head_dim % HEAD_LANES == 0 and head_dim <= MAX_PAGED_HEAD_DIM
    fits &= block_size >= HEAD_LANES and block_size & (block_size - 1) == 0
    is_known = dtype in TYPES and stored in STORED_TYPES
    return fits and is_known and library() is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedHeads:
    """Keys and values of one layer in the cache.

    Attributes:
        keys: ``[blocks, h, B, d]``, tokens contiguous; may be every other run of heads of a tensor.
            Codes of 4 bits are uint8 ``[blocks, h, B, d / 2]``, of rotated keys and values.
        values: likewise, with the same strides.
        key_scales: bf16 ``[blocks, h, B]`` when keys and values are codes, else ``None``.
        value_scales: likewise.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def dim(self) -> int:
        """Features of a key: d."""
        return self.keys.shape[-1] * self._numbers

    @property
    def strides(self) -> tuple[int, int]:
        """Numbers from one block to the next, and from one head to the next."""
        block, head = self.keys.stride()[:2]
        return block * self._numbers, head * self._numbers

    @property
    def _numbers(self) -> int:
        """Numbers in an element of ``keys``."""
        return 2 if self.keys.dtype == torch.uint8 else 1


class PagedTokens:
    """Where the tokens of a step are in the blocks of their sequences.

    Args:
        block_tables: blocks of each sequence, in order.
        starts: first position of each sequence's tokens in this step.
        counts: how many there are.
        window_tables: blocks in layers with windows, as many; empty: the same.

    Attributes:
        blocks: of all sequences, int32.
        window_blocks: likewise, in layers with windows.
        offsets: of the blocks of each token's sequence, ``[N]``.
        lengths: of each token's sequence up to itself, ``[N]``.
        chosen: tokens that attend one by one; ``None`` for all.
        runs: first token of the others of each sequence, and how many there are, ``[runs, 2]``.
    """

    def __init__(
        self,
        block_tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
        window_tables: Sequence[Sequence[int]] = (),
    ) -> None:
        sizes = [len(table) for table in block_tables]
        self.blocks = np.fromiter(
            (b for table in block_tables for b in table), np.int32, sum(sizes)
        )
        self.window_blocks = self.blocks
        if window_tables:
            self.window_blocks = np.fromiter(
                (b for table in window_tables for b in table), np.int32, sum(sizes)
            )
        self.offsets = np.cumsum([0, *sizes[:-1]])
        self.lengths = np.array(starts) + 1
        self.chosen: IntArray | None = None
        self.runs: IntArray | None = None
        if max(counts) > 1:
            ends = np.cumsum(counts)
            own = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
            self.offsets = np.repeat(self.offsets, counts)
            self.lengths = np.repeat(self.lengths, counts) + own
        if max(counts) > MAX_SINGLE_TOKENS:
            whole, ends = np.array(counts), np.cumsum(counts)
            is_long = whole > MAX_SINGLE_TOKENS
            self.chosen = np.flatnonzero(np.repeat(~is_long, counts)).astype(np.int64)
            self.runs = np.stack((ends - whole, whole), axis=1)[is_long]

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, first: int, end: int) -> PagedTokens:
        """Return the tokens ``[first, end)``; each attends as it does among all."""
        part = object.__new__(PagedTokens)
        part.blocks, part.window_blocks = self.blocks, self.window_blocks
        part.offsets, part.lengths = self.offsets[first:end], self.lengths[first:end]
        part.chosen = part.runs = None
        if self.chosen is not None and self.runs is not None:
            chosen = self.chosen[(self.chosen >= first) & (self.chosen < end)]
            starts = np.maximum(self.runs[:, 0], first)
            counts = np.minimum(self.runs.sum(axis=1), end) - starts
            part.chosen = chosen - first
            part.runs = np.stack((starts - first, counts), axis=1)[counts > 0]
        return part

    @property
    def fields(self) -> dict[str, int | None]:
        """Fields of :class:`AttentionCall`, with addresses of these arrays."""
        found: dict[str, int | None] = {
            "tables": self.blocks.ctypes.data,
            "starts": self.offsets.ctypes.data,
            "lengths": self.lengths.ctypes.data,
        }
        if self.chosen is not None and self.runs is not None:
            found |= {"chosen": self.chosen.ctypes.data, "runs": self.runs.ctypes.data}
        return found

    @property
    def single_count(self) -> int:
        """How many tokens attend one by one."""
        return len(self) if self.chosen is None else len(self.chosen)

    @property
    def run_count(self) -> int:
        """How many sequences have runs."""
        return 0 if self.runs is None else len(self.runs)


class PagedCall:
    """The part of a kernel call that all layers of one step share.

    Args:
        block_tables: blocks of each sequence, in order.
        starts: first position of each sequence's tokens in this step.
        counts: how many there are.
    """

    def __init__(
        self,
        block_tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        self._tokens = PagedTokens(block_tables, starts, counts)
        fields = self._tokens.fields
        self._chosen = fields.get("chosen")
        self._call = AttentionCall(**fields, threads=torch.get_num_threads())
        self._call.run_count = self._tokens.run_count

    def attend(
        self,
        query: Tensor,
        heads: PagedHeads,
        *,
        scaling: float,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend to all tokens of a query's sequence up to its own position.

        Args:
            query: ``[1, H, N, d]``.
            heads: of this layer.
            scaling: factor of the scores.
            window: tokens a query sees, itself included; ``None`` for all.
            chunk: a query sees the tokens of its own chunk of this size; ``None`` for all.
            softcap: bound of the scores, by a hyperbolic tangent; ``None`` for none.
            sinks: ``[H]``, one more score of each head, without a value; ``None`` for none.
            bias: float32 ``[H, S]``, added to the scores of a sequence's first S tokens, at least
                as many as the longest has; ``None`` for none.
            new: keys and values of the tokens, ``[1, h, N, d]`` in the query's dtype, to be
                written first; the sequences of all tokens must then differ.

        Returns:
            ``[1, N, H, d]``.
        """
        query = _dense(query)
        _, count, tokens, dim = query.shape
        out = torch.empty((1, tokens, count, dim), dtype=query.dtype)
        self._set_heads(heads)
        kept = None if new is None else self._set_new(new)
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
        call = self._call
        call.query, call.out, call.type = query.data_ptr(), out.data_ptr(), TYPES[query.dtype]
        call.group = count // call.kv_heads
        call.chosen = self._chosen
        call.count = self._tokens.single_count
        call.query_head, call.query_token = query.stride()[1:3]
        call.window, call.chunk = window or 0, chunk or 0
        call.scaling, call.softcap = scaling, softcap or 0.0
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.bias = None if bias is None else bias.data_ptr()
        call.bias_head = 0 if bias is None else bias.stride(0)
        call.stores = new is not None
        loaded = library()
        assert loaded is not None
        loaded.kernels_attend(byref(call))
        del kept
        return out

    def store(self, new: tuple[Tensor, Tensor], heads: PagedHeads) -> None:
        """Write the new keys and values ``[1, h, N, d]`` of all tokens into their blocks."""
        self._set_heads(heads)
        self._call.chosen, self._call.count = None, len(self._tokens)
        kept = self._set_new(new)
        loaded = library()
        assert loaded is not None
        loaded.kernels_store(byref(self._call))
        del kept

    def _set_new(self, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Set the fields of new keys and values; return the tensors whose addresses are set."""
        key, value = _dense(new[0]), _dense(new[1])
        call = self._call
        call.new_key, call.new_value = key.data_ptr(), value.data_ptr()
        call.key_head, call.key_token = key.stride()[1:3]
        call.value_head, call.value_token = value.stride()[1:3]
        call.type = TYPES[key.dtype]
        return key, value

    def _set_heads(self, heads: PagedHeads) -> None:
        call = self._call
        call.keys, call.values = heads.keys.data_ptr(), heads.values.data_ptr()
        if heads.key_scales is not None and heads.value_scales is not None:
            call.key_scales = heads.key_scales.data_ptr()
            call.value_scales = heads.value_scales.data_ptr()
        _, call.kv_heads, block_size, _ = heads.keys.shape
        call.dim = heads.dim
        call.block_bits = block_size.bit_length() - 1
        call.block_stride, call.head_stride = heads.strides
        call.stored = STORED_TYPES[heads.keys.dtype]


def _dense(part: Tensor) -> Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()
