"""How the keys and values of one layer lie in memory: as they come, or at 8 bits.

The 8-bit store keeps, for every token and head, integers in [-127, 127] and one bfloat16 scale: the
largest of the head's values is 127 steps, so an error is at most half a step. bfloat16 reaches as
far as float32, which no key overflows; its rounding never pushes a value beyond the last code.
A zero point besides would cost two bytes more and buy next to nothing (docs/how/quantization.md).

What a store refuses to know: which slots and tokens belong to whom. ``Rows`` says.

Shapes: R rows, T new tokens per row, S cached tokens read, h KV heads, d head_dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmpq.kernels.cpu.slot_attention import SlotHeads
from llmpq.models import KVShape, MicroBatch

STEPS = 127
"""Steps between zero and the largest value of a token and head."""
SCALE_DTYPE = torch.bfloat16
BLOCK_TOKENS = 128
"""Tokens whose keys and values are in float32 at a time, on a CPU."""
_SMALLEST = torch.finfo(torch.float32).tiny
"""Divides what is all but zero: its codes are then zero or nearly."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Where the rows of one micro-batch lie in every layer's tensors.

    Attributes:
        slots: of each row, ``[R]``, on the cache's device.
        longest: tokens read of each slot.
        block: the slots as a slice when they lie side by side in order: reading copies nothing.
        span: the new tokens' positions when they are the same in every row and none is padding.
        row: row, and
        column: column of each valid new token when there is no such span, ``[n]``.
        slot: slot, and
        position: position of each valid new token, ``[n]``.
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
    def of(cls, batch: MicroBatch, device: torch.device) -> Rows:
        """Work out where the rows of ``batch`` lie."""
        slots = batch.slots.tolist()
        first = int(batch.positions[0, 0])
        is_block = slots == list(range(slots[0], slots[0] + len(slots)))
        is_flush = bool((batch.lengths == first + batch.width).all())
        is_level = bool((batch.positions[:, 0] == first).all())
        row, column = (batch.positions < batch.lengths[:, None]).nonzero(as_tuple=True)
        return cls(
            slots=batch.slots.to(device),
            longest=batch.longest,
            block=slice(slots[0], slots[0] + len(slots)) if is_block else None,
            span=slice(first, first + batch.width) if is_flush and is_level else None,
            row=row.to(device),
            column=column.to(device),
            slot=batch.slots[row].to(device),
            position=batch.positions[row, column].to(device),
        )

    @classmethod
    def of_places(cls, slots: Tensor, positions: Tensor, longest: int, block: slice | None) -> Rows:
        """Name one new token a row by tensors that may change under a captured graph.

        Args:
            slots: ``[R]`` int64 on the cache's device; equal ones must bring equal numbers.
            positions: of the new tokens, likewise.
            longest: tokens to read of each slot.
            block: the slots as a slice, where they lie side by side and always will.
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

    def write(self, store: Tensor, new: Tensor) -> None:
        """Put ``new [R, h, T, ...]`` into ``[slots, h, max_tokens, ...]``, padding left out."""
        if self.block is not None and self.span is not None:
            store[self.block, :, self.span] = new
        else:
            store[self.slot, :, self.position] = new[self.row, :, self.column].to(store.dtype)

    def read(self, store: Tensor) -> Tensor:
        """Give the rows' tokens so far, ``[R, h, S, ...]``: a view when slots lie side by side."""
        if self.block is not None:
            return store[self.block, :, : self.longest]
        return store[:, :, : self.longest].index_select(0, self.slots)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """The tokens of whole prompts in every layer's tensors.

    Attributes:
        slot: slot, and
        position: position of each token, ``[N]``, row after row.
    """

    slot: Tensor
    position: Tensor

    @classmethod
    def of(cls, slots: Sequence[int], lengths: Sequence[int], device: torch.device) -> Places:
        """Name the first ``lengths[i]`` tokens of ``slots[i]``, for every i."""
        counts = torch.tensor(lengths)
        positions = [torch.arange(length) for length in lengths]
        return cls(
            slot=torch.tensor(slots).repeat_interleave(counts).to(device),
            position=torch.cat(positions).to(device),
        )


class Store(Protocol):
    """Keys and values of one layer and every slot."""

    shape: KVShape

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def update(self, rows: Rows, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep ``[R, h, T, d]``; give the rows' tokens so far, ``[R, h, S, d]``.

        In the dtype of what came, whatever the store's; valid until the next update.
        """
        ...

    def pack(self, places: Places) -> Tensor:
        """Return the bytes of the places' keys and values, as they are stored: uint8 ``[N, B]``."""
        ...

    def unpack(self, places: Places, data: Tensor) -> None:
        """Put there what another store of this kind has packed."""
        ...

    @property
    def slot_heads(self) -> SlotHeads:
        """The layer's keys and values where they lie."""
        ...

    def clear(self, slots: list[int]) -> None:
        """Zero the slots."""
        ...


class PlainStore:
    """Keys and values in the dtype of the run.

    Args:
        shape: of one token's keys.
        size: slots and tokens of each.
        dtype: number format of what is kept.
        device: where it lives.
    """

    def __init__(
        self, shape: KVShape, size: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        slots, tokens = size
        whole = (slots, shape.heads, tokens, shape.head_dim)
        self._keys = torch.zeros(whole, dtype=dtype, device=device)
        self._values = torch.zeros(whole, dtype=dtype, device=device)
        self.slot_heads = SlotHeads(keys=self._keys, values=self._values)

    @property
    def nbytes(self) -> int:
        """Bytes held: ``2 * slots * h * max_tokens * d`` values."""
        return self._keys.nbytes + self._values.nbytes

    def update(self, rows: Rows, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep and give ``[R, h, *, d]``; the store itself when nothing must move."""
        rows.write(self._keys, key)
        rows.write(self._values, value)
        return rows.read(self._keys).to(key.dtype), rows.read(self._values).to(value.dtype)

    def pack(self, places: Places) -> Tensor:
        """Return keys, then values, of each token: ``B = 2 h d`` values."""
        parts = [
            stored[places.slot, :, places.position] for stored in (self._keys, self._values)
        ]  # [N, h, d]
        return torch.cat(parts, dim=1).flatten(1).view(torch.uint8)

    def unpack(self, places: Places, data: Tensor) -> None:
        """Put keys and values there."""
        heads = self.shape.heads
        new = data.view(self._keys.dtype).reshape(len(data), 2 * heads, self.shape.head_dim)
        new = new.to(self._keys.device)
        self._keys[places.slot, :, places.position] = new[:, :heads]
        self._values[places.slot, :, places.position] = new[:, heads:]

    def clear(self, slots: list[int]) -> None:
        """Zero the slots."""
        self._keys[slots] = 0
        self._values[slots] = 0


class ReadBuffer:
    """Memory that a stage's layers, one after the other, read their 8-bit keys or values into.

    Taken when the stage starts, for fresh memory is mapped and zeroed at every step; grows only
    when more is read than was announced.

    Args:
        values: numbers it holds at first.
        dtype: of the run.
        device: where it lives.
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


class Int8Store:
    """8-bit integers and a scale for every token and head.

    Values are heads like keys, after them: half as many operations, each of them small in decode.

    Args:
        shape: of one token's keys.
        size: slots and tokens of each.
        buffer: what is read goes there; shared with other layers, whose turn it is not.
        device: where it lives.
    """

    def __init__(
        self, shape: KVShape, size: tuple[int, int], buffer: ReadBuffer, device: torch.device
    ) -> None:
        self.shape = shape
        slots, tokens = size
        whole = (slots, 2 * shape.heads, tokens)
        self._codes = torch.zeros((*whole, shape.head_dim), dtype=torch.int8, device=device)
        self._scales = torch.zeros(whole, dtype=SCALE_DTYPE, device=device)
        self._buffer = buffer
        codes, scales, heads = self._codes, self._scales, shape.heads
        self.slot_heads = SlotHeads(
            keys=codes[:, :heads],
            values=codes[:, heads:],
            key_scales=scales[:, :heads],
            value_scales=scales[:, heads:],
        )

    @property
    def nbytes(self) -> int:
        """Bytes held: ``2 * slots * h * max_tokens * (d + 2)``."""
        return self._codes.nbytes + self._scales.nbytes

    def update(self, rows: Rows, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize and keep ``[R, h, T, d]``; give ``[R, h, S, d]`` in the shared buffer."""
        codes, scales = quantize_both(key, value)
        rows.write(self._codes, codes)
        rows.write(self._scales, scales)
        kept = rows.read(self._codes)  # [R, 2h, S, d]
        read = self._buffer.take(kept.shape, key.dtype)
        # Two passes in place: one product of mixed types would convert into fresh memory first.
        read.copy_(kept).mul_(rows.read(self._scales).unsqueeze(-1))
        return read[:, : self.shape.heads], read[:, self.shape.heads :]

    def pack(self, places: Places) -> Tensor:
        """Return codes, then scales, of each token: ``B = 2 h (d + 2)``."""
        codes = self._codes[places.slot, :, places.position]  # [N, 2h, d]
        scales = self._scales[places.slot, :, places.position]  # [N, 2h]
        return torch.cat((codes.flatten(1).view(torch.uint8), scales.view(torch.uint8)), dim=1)

    def unpack(self, places: Places, data: Tensor) -> None:
        """Put codes and scales there."""
        heads, width = 2 * self.shape.heads, self.shape.head_dim
        codes = data[:, : heads * width].view(torch.int8).reshape(len(data), heads, width)
        scales = data[:, heads * width :].contiguous().view(SCALE_DTYPE)
        self._codes[places.slot, :, places.position] = codes.to(self._codes.device)
        self._scales[places.slot, :, places.position] = scales.to(self._scales.device)

    def clear(self, slots: list[int]) -> None:
        """Zero the slots."""
        self._codes[slots] = 0
        self._scales[slots] = 0


def token_bytes(shape: KVShape, dtype: torch.dtype, kv_bits: int | None) -> int:
    """Return the bytes of one token's keys and values in a layer, as a store packs them."""
    heads = 2 * shape.heads
    if kv_bits == 8:
        return heads * (shape.head_dim + SCALE_DTYPE.itemsize)
    return heads * shape.head_dim * dtype.itemsize


def quantize_both(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize new keys, and values as further heads: codes ``[R, 2h, T, d]``, scales without d.

    On the way to 8 bits they are float32, twice. A prompt's are a block of tokens at a time, or
    they would take more than the feed-forward does.

    Args:
        key: ``[R, h, T, d]``.
        value: likewise.
    """
    rows, heads, width, dim = key.shape
    if rows * width <= BLOCK_TOKENS or key.device.type != "cpu":
        return quantize_tokens(torch.cat((key, value), dim=1))
    codes = torch.empty((rows, 2 * heads, width, dim), dtype=torch.int8)
    scales = torch.empty((rows, 2 * heads, width), dtype=SCALE_DTYPE)
    many = max(1, BLOCK_TOKENS // width)
    for row, first in itertools.product(range(0, rows, many), range(0, width, BLOCK_TOKENS)):
        block = slice(row, row + many), slice(None), slice(first, first + BLOCK_TOKENS)
        codes[block], scales[block] = quantize_tokens(torch.cat((key[block], value[block]), dim=1))
    return codes, scales


def quantize_tokens(new: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each token and head on its own.

    Args:
        new: ``[..., d]``, any floating dtype.

    Returns:
        int8 codes ``[..., d]`` in [-127, 127] and bfloat16 scales ``[...]``; a value is
        ``code * scale``, within half a scale of what it was. Where a value is infinite or not a
        number, so is the scale: an overflow is read back as one, not as a plausible number.
    """
    values = new.to(torch.float32)
    peak = values.abs().amax(dim=-1)  # [...]
    # Rounded to nearest, a scale is at most 2^-8 too small: the peak is then 127.496 steps.
    scales = peak.mul_(1 / STEPS).to(SCALE_DTYPE)
    steps = scales.to(torch.float32).clamp_(min=_SMALLEST).unsqueeze(-1)
    return (values / steps).round_().nan_to_num_(0.0).to(torch.int8), scales
