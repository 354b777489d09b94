"""Attention of one new token for each row, directly on the slots of a KV cache (compiled, CPU).

torch's attention needs rows of one length in one tensor: slots are gathered, groups repeated, a
mask built, and every row costs as much as the longest. ``csrc/attention.c`` reads each row in
place, up to its length.

Shapes: R rows, H heads, h KV heads, d head_dim, S slots, T tokens a slot.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.cpu.native import TYPES, Attention, has_attention, instruction_set, library
from llmpq.spec.runtime_constants import MAX_SLOT_HEAD_DIM, SLOT_LANES

_STORED_TYPES = {**TYPES, torch.int8: 3}


def can_attend(dtype: torch.dtype, stored: torch.dtype, head_dim: int) -> bool:
    """Return whether queries of ``dtype`` can attend to heads stored as ``stored`` here."""
    fits = head_dim % SLOT_LANES == 0 and head_dim <= MAX_SLOT_HEAD_DIM
    is_known = dtype in TYPES and stored in _STORED_TYPES
    return fits and is_known and library() is not None and has_attention(instruction_set())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotHeads:
    """Keys and values of one layer in the cache.

    Attributes:
        keys: ``[S, h, T, d]``, tokens contiguous; may be every other block of heads of a tensor.
        values: likewise, with the same strides.
        key_scales: bf16 ``[S, h, T]`` when keys and values are int8 codes, else ``None``.
        value_scales: likewise.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class SlotCall:
    """The part of a call that all layers of one step share.

    Args:
        slots: of each row, ``[R]`` int64 on the host.
        lengths: tokens of each row, the new one included, ``[R]`` int64 on the host.
    """

    def __init__(self, slots: Tensor, lengths: Tensor) -> None:
        self._slots = slots.contiguous()
        self._lengths = lengths.contiguous()
        self._call = Attention(
            slots=self._slots.data_ptr(),
            lengths=self._lengths.data_ptr(),
            rows=len(slots),
            threads=torch.get_num_threads(),
        )

    def attend(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        heads: SlotHeads,
        *,
        scaling: float,
        window: int | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values into their slots, and attend to all tokens up to them.

        Args:
            query: ``[R, H, 1, d]``.
            new: the new token's keys and values, ``[R, h, 1, d]`` in the query's dtype.
            heads: of this layer.
            scaling: of the scores.
            window: tokens a query sees, itself included; ``None`` for all.
            bias: float32 ``[H, S']`` added to the scaled scores of a row's first tokens, at least
                as many as the longest row has; ``None`` for none.

        Returns:
            ``[R, 1, H, d]``, contiguous.
        """
        query, key, value = (_dense(part) for part in (query, *new))
        rows, count, _, dim = query.shape
        out = torch.empty((rows, 1, count, dim), dtype=query.dtype)
        call = self._call
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.new_key, call.new_value = key.data_ptr(), value.data_ptr()
        call.keys, call.values = heads.keys.data_ptr(), heads.values.data_ptr()
        if heads.key_scales is not None and heads.value_scales is not None:
            call.key_scales = heads.key_scales.data_ptr()
            call.value_scales = heads.value_scales.data_ptr()
        call.kv_heads, call.group, call.dim = key.shape[1], count // key.shape[1], dim
        call.query_row, call.query_head = query.stride()[:2]
        call.key_row, call.key_head = key.stride()[:2]
        call.value_row, call.value_head = value.stride()[:2]
        call.slot_stride, call.head_stride = heads.keys.stride()[:2]
        call.window, call.scaling = window or 0, scaling
        call.bias = None if bias is None else bias.data_ptr()
        call.bias_head = 0 if bias is None else bias.stride(0)
        call.type, call.stored = TYPES[query.dtype], _STORED_TYPES[heads.keys.dtype]
        loaded = library()
        assert loaded is not None
        loaded.kernels_attend(byref(call))
        return out


def _dense(part: Tensor) -> Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()
