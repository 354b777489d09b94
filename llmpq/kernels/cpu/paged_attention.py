"""Attention of single tokens on the blocks of a KV cache (compiled, CPU).

torch's attention needs sequences of one length in one tensor: blocks are gathered, groups repeated,
a mask built, and every row costs as much as the longest. ``csrc/attention.c`` reads the blocks of
each sequence in place, up to the position of its query.

Shapes: N tokens of the step, H heads, h KV heads, d head_dim, B tokens of a block, S tokens read.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmpq.kernels.cpu.native import TYPES, Attention, has_attention, instruction_set, library
from llmpq.spec.runtime_constants import HEAD_LANES, MAX_PAGED_HEAD_DIM

STORED_TYPES = {**TYPES, torch.int8: 3}
"""Numbers of the types of stored heads in ``csrc/attention.c``."""


def can_attend(dtype: torch.dtype, stored: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Return whether queries of ``dtype`` can attend to heads stored as ``stored`` here."""
    fits = head_dim % HEAD_LANES == 0 and head_dim <= MAX_PAGED_HEAD_DIM
    fits &= block_size >= HEAD_LANES and block_size & (block_size - 1) == 0
    is_known = dtype in TYPES and stored in STORED_TYPES
    return fits and is_known and library() is not None and has_attention(instruction_set())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedHeads:
    """Keys and values of one layer in the cache.

    Attributes:
        keys: ``[blocks, h, B, d]``, tokens contiguous; may be every other run of heads of a tensor.
        values: likewise, with the same strides.
        key_scales: bf16 ``[blocks, h, B]`` when keys and values are int8 codes, else ``None``.
        value_scales: likewise.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


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
        sizes = [len(table) for table in block_tables]
        blocks = np.fromiter((b for table in block_tables for b in table), np.int32, sum(sizes))
        offsets = np.cumsum([0, *sizes[:-1]])
        lengths = np.array(starts) + 1
        if max(counts) > 1:
            ends = np.cumsum(counts)
            own = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
            offsets = np.repeat(offsets, counts)
            lengths = np.repeat(lengths, counts) + own
        self._blocks, self._offsets, self._lengths = blocks, offsets, lengths
        self._chosen: Tensor | None = None  # referenced while its address is in use
        self._call = Attention(
            tables=blocks.ctypes.data,
            starts=offsets.ctypes.data,
            lengths=lengths.ctypes.data,
            threads=torch.get_num_threads(),
        )

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
        chosen: Tensor | None = None,
        new: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
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
            chosen: int64 indices of the tokens to attend with; ``None`` for all.
            new: keys and values of the tokens, ``[1, h, N, d]`` in the query's dtype, to be
                written first; the sequences of the chosen tokens must then differ.
            out: ``[1, N, H, d]``, contiguous, written at the chosen tokens; by default a new one.

        Returns:
            ``out``.
        """
        query = _dense(query)
        _, count, tokens, dim = query.shape
        if out is None:
            out = torch.empty((1, tokens, count, dim), dtype=query.dtype)
        self._set_heads(heads, chosen)
        kept = None if new is None else self._set_new(new)
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
        call = self._call
        call.query, call.out, call.type = query.data_ptr(), out.data_ptr(), TYPES[query.dtype]
        call.group = count // call.kv_heads
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
        self._set_heads(heads, None)
        kept = self._set_new(new)
        loaded = library()
        assert loaded is not None
        loaded.kernels_store(byref(self._call))
        del kept

    def read(self, token: int, heads: PagedHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values up to a token of its sequence, ``[1, h, S, d]`` each."""
        _, kv_heads, _, dim = heads.keys.shape
        shape = (1, kv_heads, int(self._lengths[token]), dim)
        key, value = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        self._set_heads(heads, torch.tensor([token]))
        call = self._call
        call.query, call.out, call.type = key.data_ptr(), value.data_ptr(), TYPES[dtype]
        loaded = library()
        assert loaded is not None
        loaded.kernels_read(byref(call))
        return key, value

    def _set_new(self, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Set the fields of new keys and values; return the tensors whose addresses are set."""
        key, value = _dense(new[0]), _dense(new[1])
        call = self._call
        call.new_key, call.new_value = key.data_ptr(), value.data_ptr()
        call.key_head, call.key_token = key.stride()[1:3]
        call.value_head, call.value_token = value.stride()[1:3]
        call.type = TYPES[key.dtype]
        return key, value

    def _set_heads(self, heads: PagedHeads, chosen: Tensor | None) -> None:
        call, self._chosen = self._call, chosen
        call.chosen = None if chosen is None else chosen.data_ptr()
        call.count = len(self._lengths) if chosen is None else len(chosen)
        call.keys, call.values = heads.keys.data_ptr(), heads.values.data_ptr()
        if heads.key_scales is not None and heads.value_scales is not None:
            call.key_scales = heads.key_scales.data_ptr()
            call.value_scales = heads.value_scales.data_ptr()
        _, call.kv_heads, block_size, call.dim = heads.keys.shape
        call.block_bits = block_size.bit_length() - 1
        call.block_stride, call.head_stride = heads.keys.stride()[:2]
        call.stored = STORED_TYPES[heads.keys.dtype]


def _dense(part: Tensor) -> Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()
