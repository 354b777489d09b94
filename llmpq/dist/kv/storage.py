"""How the keys and values of one layer lie in memory: in the dtype of the run, or at 8 bits.

8-bit storage has, for every token and head, integers in [-127, 127] and one bfloat16 scale. The
largest value of the head is 127 steps, so an error is at most half a step. bfloat16 has the range
of float32, and its rounding never moves a value beyond the last code. A zero point would take two
more bytes and gain little (docs/evaluation.md).

Shapes: R rows, T new tokens per row, S cached tokens read, N tokens, h KV heads, d head_dim.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.cpu.slot_attention import SlotHeads
from llmpq.models import KVShape, MicroBatch
from llmpq.spec.runtime_constants import KV_BLOCK_TOKENS

STEPS = 127
"""Steps between zero and the largest value of a token and head."""
SCALE_DTYPE = torch.bfloat16
_SMALLEST = torch.finfo(torch.float32).tiny
"""Least divisor: a smaller scale is that of values that become zero."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotMapping:
    """Where the rows of one micro-batch lie in the tensors of every layer.

    Attributes:
        slots: of each row, ``[R]``, on the cache's device.
        longest: tokens read of each slot.
        block: the slots as a slice if they are consecutive: reading then copies nothing.
        span: positions of the new tokens if they are the same in every row, without padding.
        row, column: of each new token that is not padding, ``[n]``; used without a span.
        slot, position: of each of these tokens, ``[n]``.
    """

    slots: Tensor
    longest: int
    block: slice | None
    span: slice | None
    row: Tensor
    column: Tensor
    slot: Tensor
    position: Tensor

    @classmethod
    def of(cls, batch: MicroBatch, device: torch.device) -> SlotMapping:
        """Return the mapping of a micro-batch."""
        slots = batch.slots.tolist()
        first = int(batch.positions[0, 0])
        is_block = slots == list(range(slots[0], slots[0] + len(slots)))
        is_unpadded = bool((batch.lengths == first + batch.width).all())
        is_aligned = bool((batch.positions[:, 0] == first).all())
        row, column = (batch.positions < batch.lengths[:, None]).nonzero(as_tuple=True)
        return cls(
            slots=batch.slots.to(device),
            longest=batch.longest,
            block=slice(slots[0], slots[0] + len(slots)) if is_block else None,
            span=slice(first, first + batch.width) if is_unpadded and is_aligned else None,
            row=row.to(device),
            column=column.to(device),
            slot=batch.slots[row].to(device),
            position=batch.positions[row, column].to(device),
        )

    @classmethod
    def of_tensors(
        cls, slots: Tensor, positions: Tensor, longest: int, block: slice | None
    ) -> SlotMapping:
        """Return the mapping of one new token a row, by tensors that a CUDA graph may reuse.

        Args:
            slots: ``[R]`` int64 on the cache's device; rows of one slot must have equal values.
            positions: of the new tokens, likewise.
            longest: tokens to read of each slot.
            block: the slots as a slice if they always are consecutive.
        """
        row = torch.arange(len(slots), device=slots.device)
        return cls(
            slots=slots,
            longest=longest,
            block=block,
            span=None,
            row=row,
            column=torch.zeros_like(row),
            slot=slots,
            position=positions,
        )

    def write(self, stored: Tensor, new: Tensor) -> None:
        """Put ``new [R, h, T, ...]`` into ``[slots, h, max_tokens, ...]``, without padding."""
        if self.block is not None and self.span is not None:
            stored[self.block, :, self.span] = new
        else:
            stored[self.slot, :, self.position] = new[self.row, :, self.column].to(stored.dtype)

    def read(self, stored: Tensor) -> Tensor:
        """Return the rows' tokens so far, ``[R, h, S, ...]``: a view of consecutive slots."""
        if self.block is not None:
            return stored[self.block, :, : self.longest]
        return stored[:, :, : self.longest].index_select(0, self.slots)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenIndex:
    """The tokens of whole prompts in the tensors of every layer.

    Attributes:
        slot, position: of each token, ``[N]``, row after row.
    """

    slot: Tensor
    position: Tensor

    @classmethod
    def of(cls, slots: Sequence[int], lengths: Sequence[int], device: torch.device) -> TokenIndex:
        """Return the first ``lengths[i]`` tokens of ``slots[i]``, for every i."""
        counts = torch.tensor(lengths)
        positions = [torch.arange(length) for length in lengths]
        return cls(
            slot=torch.tensor(slots).repeat_interleave(counts).to(device),
            position=torch.cat(positions).to(device),
        )


class KVStorage(ABC):
    """Keys and values of one layer and every slot.

    Args:
        shape: of one token's keys.
        slot_heads: the layer's keys and values as the attention kernel reads them.
        tensors: all that is held, each ``[slots, heads, max_tokens, ...]``.
    """

    def __init__(self, shape: KVShape, slot_heads: SlotHeads, tensors: Sequence[Tensor]) -> None:
        self.shape = shape
        self.slot_heads = slot_heads
        self._tensors = tensors

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @abstractmethod
    def update(self, mapping: SlotMapping, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[R, h, T, d]``; return the rows' tokens so far, ``[R, h, S, d]``.

        The result has the dtype of ``key`` and is valid until the next update.
        """

    def pack(self, tokens: TokenIndex) -> Tensor:
        """Return the stored bytes of some tokens: uint8 ``[N, B]``."""
        parts = [tensor[tokens.slot, :, tokens.position] for tensor in self._tensors]
        return torch.cat([part.flatten(1).view(torch.uint8) for part in parts], dim=1)

    def unpack(self, tokens: TokenIndex, data: Tensor) -> None:
        """Store what the storage of the same layer on another rank has packed."""
        first = 0
        for tensor in self._tensors:
            shape = tensor[0, :, 0].shape
            end = first + shape.numel() * tensor.itemsize
            part = data[:, first:end].contiguous().view(tensor.dtype).reshape(-1, *shape)
            tensor[tokens.slot, :, tokens.position] = part.to(tensor.device)
            first = end

    def clear(self, slots: list[int]) -> None:
        """Zero the slots."""
        for tensor in self._tensors:
            tensor[slots] = 0


class PlainKVStorage(KVStorage):
    """Keys and values in the dtype of the run: ``2 * slots * h * max_tokens * d`` values.

    Args:
        shape: of one token's keys.
        size: slots, and tokens of each.
        dtype: of what is stored.
        device: where it lies.
    """

    def __init__(
        self, shape: KVShape, size: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        slots, tokens = size
        whole = (slots, shape.heads, tokens, shape.head_dim)
        self._keys = torch.zeros(whole, dtype=dtype, device=device)
        self._values = torch.zeros(whole, dtype=dtype, device=device)
        heads = SlotHeads(keys=self._keys, values=self._values)
        super().__init__(shape, heads, (self._keys, self._values))

    def update(self, mapping: SlotMapping, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store and return ``[R, h, *, d]``, as views of the storage where possible."""
        mapping.write(self._keys, key)
        mapping.write(self._values, value)
        return mapping.read(self._keys).to(key.dtype), mapping.read(self._values).to(value.dtype)


class DequantizeBuffer:
    """Memory that the layers of a stage, one after the other, dequantize into.

    Allocated when the stage starts, since the system maps and zeroes fresh memory at every step;
    it grows only if more is read than announced.

    Args:
        values: numbers it holds at first.
        dtype: of the run.
        device: where it lies.
    """

    def __init__(self, values: int, dtype: torch.dtype, device: torch.device) -> None:
        self._values = torch.zeros(values, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._values.nbytes

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory of ``shape`` with undefined content, valid until the next ``take``."""
        count = shape.numel()
        if self._values.numel() < count or self._values.dtype != dtype:
            self._values = torch.empty(count, dtype=dtype, device=self._values.device)
        return self._values[:count].view(shape)


class Int8KVStorage(KVStorage):
    """8-bit integers and a scale for every token and head.

    Values are further heads after those of the keys: half as many operations, which are small in
    decode. Holds ``2 * slots * h * max_tokens * (d + 2)`` bytes.

    Args:
        shape: of one token's keys.
        size: slots, and tokens of each.
        buffer: receives what is read; shared by all layers.
        device: where it lies.
    """

    def __init__(
        self, shape: KVShape, size: tuple[int, int], buffer: DequantizeBuffer, device: torch.device
    ) -> None:
        slots, tokens = size
        whole, heads = (slots, 2 * shape.heads, tokens), shape.heads
        codes = torch.zeros((*whole, shape.head_dim), dtype=torch.int8, device=device)
        scales = torch.zeros(whole, dtype=SCALE_DTYPE, device=device)
        self._codes, self._scales, self._buffer = codes, scales, buffer
        slot_heads = SlotHeads(
            keys=codes[:, :heads],
            values=codes[:, heads:],
            key_scales=scales[:, :heads],
            value_scales=scales[:, heads:],
        )
        super().__init__(shape, slot_heads, (codes, scales))

    def update(self, mapping: SlotMapping, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize and store ``[R, h, T, d]``; return ``[R, h, S, d]`` in the shared buffer."""
        codes, scales = quantize_keys_values(key, value)
        mapping.write(self._codes, codes)
        mapping.write(self._scales, scales)
        stored = mapping.read(self._codes)  # [R, 2h, S, d]
        read = self._buffer.take(stored.shape, key.dtype)
        # Two passes in place: a product of mixed dtypes would convert into fresh memory first.
        read.copy_(stored).mul_(mapping.read(self._scales).unsqueeze(-1))
        return read[:, : self.shape.heads], read[:, self.shape.heads :]


def token_bytes(shape: KVShape, dtype: torch.dtype, kv_bits: int | None) -> int:
    """Return the bytes of one token's keys and values in a layer, as stored."""
    heads = 2 * shape.heads
    if kv_bits == 8:
        return heads * (shape.head_dim + SCALE_DTYPE.itemsize)
    return heads * shape.head_dim * dtype.itemsize


def quantize_keys_values(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize new keys, and values as further heads: codes ``[R, 2h, T, d]``, scales without d.

    They are float32 on the way. On a CPU a prompt is quantized in blocks of tokens: whole, its
    float32 copies would take more memory than the feed-forward.

    Args:
        key: ``[R, h, T, d]``.
        value: likewise.
    """
    rows, heads, width, dim = key.shape
    if rows * width <= KV_BLOCK_TOKENS or key.device.type != "cpu":
        return quantize_tokens(torch.cat((key, value), dim=1))
    codes = torch.empty((rows, 2 * heads, width, dim), dtype=torch.int8)
    scales = torch.empty((rows, 2 * heads, width), dtype=SCALE_DTYPE)
    block_rows = max(1, KV_BLOCK_TOKENS // width)
    starts = range(0, rows, block_rows), range(0, width, KV_BLOCK_TOKENS)
    for row, first in itertools.product(*starts):
        block = slice(row, row + block_rows), slice(None), slice(first, first + KV_BLOCK_TOKENS)
        codes[block], scales[block] = quantize_tokens(torch.cat((key[block], value[block]), dim=1))
    return codes, scales


def quantize_tokens(new: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each token and head on its own.

    Args:
        new: ``[..., d]``, any floating dtype.

    Returns:
        int8 codes ``[..., d]`` in [-127, 127] and bfloat16 scales ``[...]``; a value is
        ``code * scale``, within half a scale of the input. Where a value is infinite or not a
        number, so is the scale: an overflow is read back as one.
    """
    values = new.to(torch.float32)
    peak = values.abs().amax(dim=-1)  # [...]
    # Rounded to nearest, a scale is at most 2^-8 too small: the peak is then 127.496 steps.
    scales = peak.mul_(1 / STEPS).to(SCALE_DTYPE)
    steps = scales.to(torch.float32).clamp_(min=_SMALLEST).unsqueeze(-1)
    return (values / steps).round_().nan_to_num_(0.0).to(torch.int8), scales
