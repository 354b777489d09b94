"""KVCache: keys and values of a stage's layers, preallocated in blocks.

All memory is allocated when the stage starts. A sequence's tokens lie in the blocks of its table,
in any order; several sequences may share blocks that they only read. A ``KVStorage`` has the values
of one layer, in the run's dtype or at 8 or 4 bits.

8-bit storage has, for every token and head, integers in [-127, 127] and one bfloat16 scale. The
largest value of the head is 127 steps, so an error is at most half a step. bfloat16 has the range
of float32, and its rounding never moves a value beyond the last code. A zero point would take two
more bytes and gain little (docs/evaluation.md).

4-bit storage has the odd numbers in [-15, 15] and one bfloat16 scale, half a step. The head is
multiplied by a Hadamard matrix first, which spreads large features over all of them (QuaRot:
Ashkboos et al., 2024): the largest value is then about 2.5 standard deviations of 64.

Shapes: R rows, N tokens of a step, S tokens of a row so far, h KV heads, d head_dim, B tokens of a
block.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from llmpq.batching.blocks import blocks_of, blocks_written_twice, tokens_written_twice
from llmpq.errors import CapacityError, SpecError, StageError
from llmpq.kernels.cpu.paged_attention import PagedCall, PagedHeads, can_attend
from llmpq.kernels.gpu import paged_decode
from llmpq.kernels.gpu.paged_decode import DecodeRows
from llmpq.models import KVShape, PackedBatch
from llmpq.models.attention import ScoreOptions, on_device
from llmpq.models.states import SequenceStates
from llmpq.spec.runtime_constants import HEAD_LANES, KV_BLOCK_SIZE, KV_BLOCK_TOKENS, KV_CODE_BITS

STEPS = 127
"""Steps between zero and the largest value of a token and head."""
SCALE_DTYPE = torch.bfloat16
_SMALLEST = torch.finfo(torch.float32).tiny
"""Least divisor: a smaller scale is that of values that become zero."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenIndex:
    """Where some tokens lie in the tensors of every layer.

    Attributes:
        block: of each token, ``[N]``.
        offset: of each token in its block, ``[N]``.
    """

    block: Tensor
    offset: Tensor

    @classmethod
    def of(
        cls,
        block_tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
        block_size: int,
        device: torch.device,
    ) -> TokenIndex:
        """Return the tokens ``[starts[r], starts[r] + counts[r])`` of every row."""
        found = []
        for table, start, count in zip(block_tables, starts, counts, strict=True):
            positions = np.arange(start, start + count)
            first = start // block_size
            own = np.array(table[first : blocks_of(start + count, block_size)], dtype=np.int64)
            blocks = own[positions // block_size - first]
            found.append(np.stack((blocks, positions % block_size)))
        block, offset = on_device(np.concatenate(found, axis=1), device)
        return cls(block=block, offset=offset)

    @classmethod
    def of_tensors(cls, tables: Tensor, positions: Tensor, block_size: int) -> TokenIndex:
        """Return the tokens at ``positions [R]`` of block tables ``[R, W]``, on the device."""
        blocks = tables.gather(1, (positions // block_size)[:, None].long())[:, 0]
        return cls(block=blocks.long(), offset=(positions % block_size).long())

    def write(self, stored: Tensor, new: Tensor) -> None:
        """Put ``new [h, N, ...]`` into ``[blocks, h, B, ...]``."""
        stored[self.block, :, self.offset] = new.transpose(0, 1).to(stored.dtype)


class KVStorage(ABC):
    """Keys and values of one layer in all blocks.

    Args:
        shape: of one token's keys.
        paged_heads: the layer's keys and values as the attention kernel reads them.
        tensors: all that is held, each ``[blocks, heads, B, ...]``.
    """

    is_exact: bool
    """Whether values are read as they were written."""

    def __init__(self, shape: KVShape, paged_heads: PagedHeads, tensors: Sequence[Tensor]) -> None:
        self.shape = shape
        self.paged_heads = paged_heads
        self._tensors = tensors

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: those that ``pack`` returns."""
        return sum(tensor[0, :, 0].nbytes for tensor in self._tensors)

    @abstractmethod
    def write(self, tokens: TokenIndex, key: Tensor, value: Tensor) -> None:
        """Store ``[1, h, N, d]``."""

    @abstractmethod
    def read(
        self, tables: Tensor, dtype: torch.dtype, buffer: DequantizeBuffer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return all tokens of block tables ``[R, W]``: ``[R, h, W * B, d]`` of ``dtype``.

        Args:
            tables: blocks of each row.
            dtype: of the result.
            buffer: receives what is dequantized, which is then valid until the next read into it;
                ``None`` allocates.
        """

    def pack(self, tokens: TokenIndex) -> Tensor:
        """Return the stored bytes of some tokens: uint8 ``[N, B]``."""
        parts = [tensor[tokens.block, :, tokens.offset] for tensor in self._tensors]
        return torch.cat([part.flatten(1).view(torch.uint8) for part in parts], dim=1)

    def unpack(self, tokens: TokenIndex, data: Tensor) -> None:
        """Store what the storage of the same layer on another rank has packed."""
        first = 0
        for tensor in self._tensors:
            shape = tensor[0, :, 0].shape
            end = first + shape.numel() * tensor.itemsize
            part = data[:, first:end].contiguous().view(tensor.dtype).reshape(-1, *shape)
            tensor[tokens.block, :, tokens.offset] = part.to(tensor.device)
            first = end

    def clear(self, blocks: list[int]) -> None:
        """Zero the blocks."""
        for tensor in self._tensors:
            tensor[blocks] = 0


def _gathered(stored: Tensor, tables: Tensor) -> Tensor:
    """Return the blocks of ``tables [R, W]`` of ``[blocks, h, B, ...]``: ``[R, h, W, B, ...]``."""
    rows, width = tables.shape
    picked = stored.index_select(0, tables.reshape(-1))
    return picked.view(rows, width, *stored.shape[1:]).transpose(1, 2)


class PlainKVStorage(KVStorage):
    """Keys and values in the dtype of the run: ``2 * blocks * h * B * d`` values in most families.

    Args:
        shape: of one token's keys.
        size: blocks, and tokens of each.
        dtype: of what is stored.
        device: where it lies.
    """

    is_exact = True

    def __init__(
        self, shape: KVShape, size: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        blocks, tokens = size
        whole = blocks, shape.heads, tokens
        if not shape.is_latent:
            self._keys, self._values = (
                torch.zeros((*whole, dim), dtype=dtype, device=device) for dim in shape.dims
            )
            heads = PagedHeads(keys=self._keys, values=self._values)
        else:  # side by side, and read as keys that are values, too
            both = torch.zeros((*whole, sum(shape.dims)), dtype=dtype, device=device)
            self._keys, self._values = torch.split(both, list(shape.dims), dim=-1)
            heads = PagedHeads(keys=both, values=both)
        super().__init__(shape, heads, (self._keys, self._values))

    def write(self, tokens: TokenIndex, key: Tensor, value: Tensor) -> None:
        """Store ``[1, h, N, d]``."""
        tokens.write(self._keys, key[0])
        tokens.write(self._values, value[0])

    def read(
        self, tables: Tensor, dtype: torch.dtype, buffer: DequantizeBuffer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``[R, h, W * B, d]`` in memory of its own."""
        del buffer
        key, value = (_gathered(part, tables).flatten(2, 3) for part in self._tensors)
        return key.to(dtype), value.to(dtype)


class DequantizeBuffer:
    """Memory of a CPU that the layers of a stage, one after the other, dequantize into.

    It is kept, since the system maps and zeroes fresh memory at every step, and grows to what is
    read. Accelerators have none: torch keeps their memory mapped, and a CUDA graph would go on
    writing to the address of a buffer that has been replaced by a larger one.

    Args:
        dtype: of the run.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._values = torch.zeros(0, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._values.nbytes

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory of ``shape`` with undefined content, valid until the next ``take``."""
        count = shape.numel()
        if self._values.numel() < count or self._values.dtype != dtype:
            self._values = torch.empty(count, dtype=dtype)
        return self._values[:count].view(shape)


class CodeKVStorage(KVStorage):
    """Integers of 8 or 4 bits and a scale for every token and head.

    Values are further heads after those of the keys: half as many operations, which are small in
    decode. Holds ``2 * blocks * h * B * (d * bits / 8 + 2)`` bytes.

    Args:
        shape: of one token's keys.
        size: blocks, and tokens of each.
        device: where it lies.
        bits: 8 or 4.
    """

    is_exact = False

    def __init__(
        self, shape: KVShape, size: tuple[int, int], device: torch.device, bits: int
    ) -> None:
        blocks, tokens = size
        whole, heads = (blocks, 2 * shape.heads, tokens), shape.heads
        self._bits, dtype = bits, torch.int8 if bits == 8 else torch.uint8
        codes = torch.zeros((*whole, shape.head_dim * bits // 8), dtype=dtype, device=device)
        scales = torch.zeros(whole, dtype=SCALE_DTYPE, device=device)
        self._codes, self._scales = codes, scales
        paged_heads = PagedHeads(
            keys=codes[:, :heads],
            values=codes[:, heads:],
            key_scales=scales[:, :heads],
            value_scales=scales[:, heads:],
        )
        super().__init__(shape, paged_heads, (codes, scales))

    def write(self, tokens: TokenIndex, key: Tensor, value: Tensor) -> None:
        """Quantize and store ``[1, h, N, d]``."""
        codes, scales = quantize_keys_values(key, value, self._bits)
        tokens.write(self._codes, codes[0])
        tokens.write(self._scales, scales[0])

    def read(
        self, tables: Tensor, dtype: torch.dtype, buffer: DequantizeBuffer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``[R, h, W * B, d]``, in the buffer if there is one."""
        (rows, width), (_, heads, tokens, _) = tables.shape, self._codes.shape
        shape = torch.Size((rows, heads, width, tokens, self.shape.head_dim))
        if buffer is None:
            read = torch.empty(shape, dtype=dtype, device=tables.device)
        else:
            read = buffer.take(shape, dtype)
        if self._bits == 8:
            # Two passes in place: a product of mixed dtypes would convert into fresh memory first.
            read.copy_(_gathered(self._codes, tables))
            read.mul_(_gathered(self._scales, tables).unsqueeze(-1))
        else:
            self._read_rotated(tables, read)
        read = read.flatten(2, 3)
        return read[:, : self.shape.heads], read[:, self.shape.heads :]

    def _read_rotated(self, tables: Tensor, read: Tensor) -> None:
        """Write numbers of 4 bits to ``[R, 2h, W, B, d]``, some blocks at a time in float32."""
        count = max(1, KV_BLOCK_TOKENS // self._codes.shape[2])
        for row, first in itertools.product(range(len(tables)), range(0, tables.shape[1], count)):
            blocks = tables[row, first : first + count]
            numbers = unpacked_numbers(self._codes[blocks]).mul_(self._scales[blocks].unsqueeze(-1))
            read[row, :, first : first + count] = rotated(numbers).transpose(0, 1)


def token_bytes(shape: KVShape, dtype: torch.dtype, kv_bits: int | None) -> int:
    """Return the bytes of one token's keys and values in a layer, as stored."""
    if kv_bits in KV_CODE_BITS:
        return shape.heads * (sum(shape.dims) * kv_bits // 8 + 2 * SCALE_DTYPE.itemsize)
    return shape.heads * sum(shape.dims) * dtype.itemsize


def quantize_keys_values(key: Tensor, value: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Quantize new keys, and values as further heads: codes ``[R, 2h, T, d]``, scales without d.

    Codes of 4 bits are packed: ``[R, 2h, T, d / 2]``.

    They are float32 on the way. On a CPU a prompt is quantized in blocks of tokens: whole, its
    float32 copies would take more memory than the feed-forward.

    Args:
        key: ``[R, h, T, d]``.
        value: likewise.
        bits: 8 or 4.
    """
    rows, heads, width, dim = key.shape
    quantize, dtype = (quantize_tokens, torch.int8) if bits == 8 else (rotate_tokens, torch.uint8)
    if rows * width <= KV_BLOCK_TOKENS or key.device.type != "cpu":
        return quantize(torch.cat((key, value), dim=1))
    codes = torch.empty((rows, 2 * heads, width, dim * bits // 8), dtype=dtype)
    scales = torch.empty((rows, 2 * heads, width), dtype=SCALE_DTYPE)
    block_rows = max(1, KV_BLOCK_TOKENS // width)
    starts = range(0, rows, block_rows), range(0, width, KV_BLOCK_TOKENS)
    for row, first in itertools.product(*starts):
        block = slice(row, row + block_rows), slice(None), slice(first, first + KV_BLOCK_TOKENS)
        codes[block], scales[block] = quantize(torch.cat((key[block], value[block]), dim=1))
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


def rotated(x: Tensor) -> Tensor:
    """Multiply ``[..., d]`` by a Hadamard matrix of the largest power of two that divides d.

    It is applied to each block of so many features; symmetric, and its own inverse. Additions are
    in the order of ``csrc/attention.h``.
    """
    dim, step = x.shape[-1], 1
    size = dim & -dim
    whole = x.shape
    while step < size:
        first, second = x.reshape(*whole[:-1], dim // (2 * step), 2, step).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2)
        step *= 2
    return x.reshape(whole) * float(np.float32(1) / np.sqrt(np.float32(size)))


def rotate_tokens(new: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each token and head, and quantize it on its own to 4 bits.

    Args:
        new: ``[..., d]``, any floating dtype, d a multiple of 16.

    Returns:
        Packed codes, uint8 ``[..., d / 2]``, and bfloat16 scales ``[...]``; a rotated value is
        ``(2 code - 15) * scale``, within a scale of the input's. Where a value is infinite or not a
        number, the scale is infinite or not a number.
    """
    values = rotated(new.to(torch.float32))
    # Where the largest value lies half a step behind the last number, steps are smallest.
    scales = values.abs().amax(dim=-1).mul_(1 / 16).to(SCALE_DTYPE)  # [...]
    halves = scales.to(torch.float32).clamp_(min=_SMALLEST).unsqueeze(-1)
    codes = (values / halves).add_(15).mul_(0.5).round_().nan_to_num_(0.0).clamp_(0, 15)
    return packed_nibbles(codes.to(torch.uint8)), scales


def packed_nibbles(codes: Tensor) -> Tensor:
    """Return uint8 ``[..., d / 2]`` of codes ``[..., d]`` in [0, 15].

    16 codes are two words of 4 bytes: the even ones and the odd ones, lower bits first. A vector of
    16 words shifts them into place at once.
    """
    *rows, dim = codes.shape
    places = codes.view(*rows, dim // 16, 4, 2, 2)  # [..., 16th, byte, nibble, word]
    low, high = places.unbind(-2)
    return (low | high << 4).transpose(-1, -2).flatten(-3)


def unpacked_numbers(packed: Tensor) -> Tensor:
    """Return ``2 code - 15`` of packed codes ``[..., d / 2]``: float32 ``[..., d]``."""
    *rows, width = packed.shape
    places = packed.reshape(*rows, width // 8, 2, 4).transpose(-1, -2)  # [..., 16th, byte, word]
    codes = torch.stack((places & 15, places >> 4), dim=-2).flatten(-4)
    return codes.to(torch.float32).mul_(2).sub_(15)


class KVCache:
    """Preallocated keys and values of each layer, in ``num_blocks`` blocks.

    At 8 and 4 bits on a CPU all layers read into one buffer, so what a view reads is valid until it
    reads again. The layers of transformers run one after the other.

    Args:
        shapes: of each layer, in order, from ``kv_shapes``.
        first_layer: index of the first of them in the whole model.
        num_blocks: blocks of each layer.
        num_window_blocks: blocks of each layer with a window, in tables of their own; ``None``:
            these have the same as the others.
        dtype: of the run, and of keys and values unless ``kv_bits`` is 8 or 4.
        block_size: tokens of a block, a power of two.
        device: where they lie.
        kv_bits: 8 or 4 to quantize keys and values per token and head; ``None`` or the width of
            ``dtype`` to keep them.
        states: of the layers that have a recurrent state instead, ``None`` without any.

    Raises:
        CapacityError: there are no blocks or no tokens.
        SpecError: ``kv_bits`` is none of these, 8 or 4 with keys and values of different sizes, or
            4 with heads of no multiple of 16 features, or on another device than a CPU.
    """

    def __init__(  # noqa: PLR0913  sizes, dtypes and device
        self,
        shapes: Sequence[KVShape],
        first_layer: int,
        *,
        num_blocks: int,
        dtype: torch.dtype,
        num_window_blocks: int | None = None,
        block_size: int = KV_BLOCK_SIZE,
        device: torch.device | str = "cpu",
        kv_bits: int | None = None,
        states: SequenceStates | None = None,
    ) -> None:
        if min(num_blocks, block_size, num_window_blocks or 1) < 1:
            raise CapacityError(f"KV cache: found {num_blocks} blocks of {block_size} tokens")
        width = 8 * dtype.itemsize
        if kv_bits not in (None, *KV_CODE_BITS, width):
            raise SpecError(
                f"KV cache: found {kv_bits} bits, expected 4, 8 or the {width} of {dtype}"
            )
        self.first_layer = first_layer
        self.num_blocks = num_blocks
        self.num_window_blocks = num_window_blocks
        self._window = max((shape.kept_tokens or 1 for shape in shapes), default=1)
        self.block_size = block_size
        self.device = torch.device(device)
        self.dtype = dtype
        self.kv_bits = kv_bits
        self.states = states
        sizes = [
            (num_window_blocks or num_blocks if shape.kept_tokens else num_blocks, block_size)
            for shape in shapes
        ]
        self._buffer: DequantizeBuffer | None = None
        self._layers: list[KVStorage]
        if kv_bits in KV_CODE_BITS:
            _check_codes(shapes, kv_bits, self.device, f"{width} bits")
            if self.device.type == "cpu":
                self._buffer = DequantizeBuffer(dtype)
            self._layers = [
                CodeKVStorage(shape, size, self.device, kv_bits)
                for shape, size in zip(shapes, sizes, strict=True)
            ]
        else:
            self._layers = [
                PlainKVStorage(shape, size, dtype, self.device)
                for shape, size in zip(shapes, sizes, strict=True)
            ]

    def repeat_layers(self, shapes: Sequence[KVShape]) -> None:
        """Append layers that share the blocks of the last one of their shape, to be timed only.

        Raises:
            SpecError: no layer has this shape.
        """
        for shape in shapes:
            found = next((one for one in reversed(self._layers) if one.shape == shape), None)
            if found is None:
                raise SpecError(f"KV cache: found {shape}, expected the shape of an earlier layer")
            self._layers.append(found)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, ``2 * num_blocks * h * block_size`` heads in each layer, and states.

        Layers with windows may have fewer blocks. A head has ``d`` values; at 8 and 4 bits ``d``
        codes and a scale of two bytes.
        """
        states = 0 if self.states is None else self.states.nbytes
        return sum(layer.nbytes for layer in self._layers) + states

    @property
    def token_bytes(self) -> list[int]:
        """Bytes of a token in each layer."""
        return [layer.token_bytes for layer in self._layers]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer that quantized keys and values are read into, so far."""
        return 0 if self._buffer is None else self._buffer.nbytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks hold."""
        return self.num_blocks * self.block_size

    @cached_property
    def attends(self) -> bool:
        """Whether a compiled kernel attends to the blocks in place.

        False if there is no such kernel: not a CPU, no compiler, an unsupported head size.
        """
        shapes = [layer.shape for layer in self._layers]
        if any(one.value_dim is not None and not one.is_latent for one in shapes):
            return False
        stored = self._layers[0].paged_heads.keys.dtype
        dims = {layer.shape.read_dim for layer in self._layers}
        is_known = all(can_attend(self.dtype, stored, dim, self.block_size) for dim in dims)
        return self.device.type == "cpu" and is_known

    @cached_property
    def attends_rows(self) -> bool:
        """Whether a kernel of GPUs attends to the blocks of rows of one token in place."""
        if any(layer.shape.is_latent for layer in self._layers):
            return False
        dims = {dim for layer in self._layers for dim in layer.shape.dims}
        return not self.attends and paged_decode.can_attend(self.device, self.dtype, *dims)

    @property
    def is_exact(self) -> bool:
        """Whether keys and values are read as they were written."""
        return self._layers[0].is_exact

    def view(self, batch: PackedBatch, *, returns_all: bool = False) -> KVCacheView:
        """Open the blocks of ``batch`` for one forward pass.

        Args:
            batch: rows of the step.
            returns_all: whether ``update`` returns all keys and values of the rows.

        Raises:
            CapacityError: a row is longer than its blocks.
            StageError: a block does not exist, or two rows write to one place of it.
        """
        self.check(batch)
        return KVCacheView(self, batch, returns_all=returns_all)

    def view_of_tensors(
        self, tables: Tensor, positions: Tensor, window_tables: Tensor | None = None
    ) -> TensorView:
        """Open the blocks of one new token a row, given by tensors on the device.

        The caller passes every batch to :meth:`check` before it fills the tensors.

        Args:
            tables: int32 ``[R, W]``, the blocks of each row, undefined after its last one; rows
                with equal tables and positions must have equal values.
            positions: of the new tokens, int32 ``[R]``.
            window_tables: those of layers with windows, where these have blocks of their own.
        """
        return TensorView(self, tables, positions, window_tables)

    def check(self, batch: PackedBatch, rows: Iterable[int] | None = None) -> None:
        """Check that the rows fit their blocks, and that no two rows write to one place.

        Args:
            batch: the rows.
            rows: those whose blocks have not been checked before; ``None`` for all.

        Raises:
            CapacityError: a row is longer than its blocks.
            StageError: a block does not exist, or two rows write to one place of it.
        """
        if self.states is not None:
            self.states.check(batch)
        size, new = self.block_size, range(batch.rows) if rows is None else [*rows]
        for table, length in zip(batch.block_tables, batch.lengths, strict=True):
            if length > size * len(table):
                raise CapacityError(
                    f"KV cache: a row has {length} tokens, its blocks hold {size * len(table)}"
                )
        for table in (batch.block_tables[row] for row in new):
            if min(table) < 0 or max(table) >= self.num_blocks:
                raise StageError(
                    f"KV cache: found blocks {list(table)}, expected those of "
                    f"[0, {self.num_blocks})"
                )
        self._check_windows(batch, new)
        if tokens_written_twice(_places(batch), size):
            raise StageError(
                f"KV cache: found tokens written twice in blocks {list(batch.block_tables)}, "
                f"expected places of their own"
            )

    def _check_windows(self, batch: PackedBatch, new: Sequence[int]) -> None:
        """Check the tables of layers with windows, if these have blocks of their own."""
        expected = [] if self.num_window_blocks is None else [*map(len, batch.block_tables)]
        found = [*map(len, batch.window_tables)]
        if found != expected:
            raise StageError(
                f"KV cache: found tables of {found} blocks for layers with windows, expected "
                f"{expected}"
            )
        for table in (batch.window_tables[row] for row in new if batch.window_tables):
            if not 0 <= min(table) <= max(table) < (self.num_window_blocks or 0):
                raise StageError(
                    f"KV cache: found blocks {list(table)} of layers with windows, expected those "
                    f"of [0, {self.num_window_blocks})"
                )

    def has_window(self, layer_idx: int) -> bool:
        """Whether a layer has the blocks of layers with windows."""
        is_apart = self.num_window_blocks is not None
        return is_apart and self.layer(layer_idx).shape.kept_tokens is not None

    def own_blocks(self, batch: PackedBatch, row: int, *, has_window: bool) -> list[int]:
        """Return the blocks of a row's tokens, in layers with a window or in the others.

        Blocks before the window may belong to other sequences: the first one inside stands for
        them.
        """
        tables = batch.window_tables if has_window else batch.block_tables
        table = list(tables[row][: blocks_of(batch.lengths[row], self.block_size)])
        if has_window:
            first = max(0, batch.starts[row] - self._window + 1) // self.block_size
            table[:first] = [table[first]] * first
        return table

    def tables_of(self, batch: PackedBatch, layer_idx: int) -> Sequence[Sequence[int]]:
        """Return the block tables of a layer for the rows of a step."""
        return batch.window_tables if self.has_window(layer_idx) else batch.block_tables

    def pack(self, layer_idx: int, tokens: TokenIndex) -> Tensor:
        """Return the stored bytes of some tokens of a layer: uint8 ``[N, B]``.

        :meth:`unpack` of another rank's cache of that layer stores the same values, also at 8 and 4
        bits.
        """
        return self._layers[layer_idx - self.first_layer].pack(tokens)

    def unpack(self, layer_idx: int, tokens: TokenIndex, data: Tensor) -> None:
        """Store what another cache has packed."""
        self._layers[layer_idx - self.first_layer].unpack(tokens, data)

    def index_of(
        self, block_tables: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]
    ) -> TokenIndex:
        """Return where the tokens ``[starts[r], starts[r] + counts[r])`` of each row lie."""
        return TokenIndex.of(block_tables, starts, counts, self.block_size, self.device)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero the blocks, but for layers with windows that have blocks of their own.

        Stale values are masked, but zero times infinity is not zero: clear the blocks of a request
        whose numbers overflowed.
        """
        for index, layer in enumerate(self._layers, self.first_layer):
            if not self.has_window(index):
                layer.clear(list(blocks))

    @property
    def buffer(self) -> DequantizeBuffer | None:
        """Where uncaptured steps dequantize to, ``None`` where they allocate."""
        return self._buffer

    def heads_of(self, layer_idx: int) -> PagedHeads:
        """Return the keys and values of a layer as the attention kernel reads them."""
        return self._layers[layer_idx - self.first_layer].paged_heads

    def storage_of(self, layer_idx: int, key: Tensor, value: Tensor) -> KVStorage:
        """Return the storage of a layer whose new keys and values are ``[1, h, N, d]``.

        Raises:
            StageError: the layer is not of this stage.
            SpecError: the keys or values do not have the configured heads.
        """
        layer = self.layer(layer_idx)
        shape = layer.shape
        for new, dim in zip((key, value), shape.dims, strict=True):
            if (new.shape[1], new.shape[3]) != (shape.heads, dim):
                raise SpecError(
                    f"KV cache: layer {layer_idx} makes {new.shape[1]} heads of {new.shape[3]}, "
                    f"its configuration says {shape.heads} of {dim}"
                )
        return layer

    def layer(self, layer_idx: int) -> KVStorage:
        """Return the storage of a layer.

        Raises:
            StageError: the layer is not of this stage.
        """
        layer = layer_idx - self.first_layer
        if not 0 <= layer < len(self._layers):
            raise StageError(f"KV cache: found layer {layer_idx}, which is not of this stage")
        return self._layers[layer]


def _check_codes(shapes: Sequence[KVShape], bits: int, device: torch.device, expected: str) -> None:
    """Check that keys and values of these shapes can be codes of so many bits."""
    for shape in (shape for shape in shapes if shape.heads):
        key, value = shape.dims
        if key != value:
            raise SpecError(
                f"KV cache: found {bits} bits for keys of {key} and values of {value} features "
                f"(latent attention), expected {expected}"
            )
        if bits == 4 and key % HEAD_LANES:
            raise SpecError(
                f"KV cache: found 4 bits for heads of {key} features, expected a multiple of "
                f"{HEAD_LANES} or other bits"
            )
    if bits == 4 and device.type != "cpu":
        raise SpecError(f"KV cache: found 4 bits on '{device}', expected a CPU or other bits")


class KVCacheView:
    """The rows of one step, as the attention of transformers calls a cache.

    Args:
        cache: of the keys and values.
        batch: rows of the step, checked.
        returns_all: whether ``update`` returns all keys and values of the rows, one row after the
            other.
    """

    def __init__(self, cache: KVCache, batch: PackedBatch, *, returns_all: bool) -> None:
        self._cache = cache
        self._batch = batch
        self._returns_all = returns_all
        self.states = cache.states
        self.attends = cache.attends and not returns_all
        self.attends_rows = cache.attends_rows and not returns_all
        self.is_exact = cache.is_exact
        # By whether a layer has blocks of its own, and rows.
        self._calls: dict[tuple[bool, tuple[int, ...] | None], PagedCall] = {}
        self._tokens: dict[bool, TokenIndex] = {}
        self._decode_rows: dict[bool, DecodeRows] = {}
        self._tables: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        # Rows of one sequence need each other's keys and values.
        is_apart = not blocks_written_twice(_places(batch), cache.block_size)
        self._stores_late = self.attends and batch.is_decode and is_apart
        self._layer: tuple[KVStorage, torch.dtype] | None = None
        self._layer_idx = cache.first_layer
        self._new: tuple[Tensor, Tensor] | None = None  # to be stored by ``attend``

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[1, h, N, d]`` of one layer; return them, or those of all rows so far.

        Where every row is one token of another sequence, :meth:`attend` stores them.
        """
        layer = self._cache.storage_of(layer_idx, key, value)
        self._layer, self._layer_idx = (layer, key.dtype), layer_idx
        if not self.attends:
            layer.write(self.index(), key, value)
        else:
            new = key, value
            if layer.shape.is_latent:
                new = (torch.cat(new, dim=-1),) * 2
            if self._stores_late:
                self._new = new
            else:
                self._call().store(new, layer.paged_heads)
        if not self._returns_all:
            return key, value
        parts = []
        for row in range(self._batch.rows):
            keys, values = self._read_row(row, 0)
            parts.append((keys.clone(), values.clone()))  # the next read overwrites them
        return torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2)

    def select(self, layer_idx: int) -> None:
        """Let the next calls read a layer that has been updated and attended to in this step."""
        self._layer, self._layer_idx = (self._cache.layer(layer_idx), self._cache.dtype), layer_idx

    def attend(
        self, query: Tensor, options: ScoreOptions, rows: Sequence[int] | None = None
    ) -> Tensor:
        """Attend to the blocks in place; see ``KVView``."""
        layer, _ = self._last_update()
        new, self._new = self._new, None  # not kept beyond the layer
        return self._call(rows).attend(
            query,
            layer.paged_heads,
            new=new,
            scaling=options.scaling,
            window=options.window,
            chunk=options.chunk,
            softcap=options.softcap,
            sinks=options.sinks,
            bias=None if options.alibi is None else options.alibi.bias,
        )

    def attend_rows(
        self, query: Tensor, rows: Sequence[int], out: Tensor, options: ScoreOptions
    ) -> None:
        """Attend with the new token of each of some rows; see ``KVView``."""
        layer, _ = self._last_update()
        key = self._cache.has_window(self._layer_idx)
        if key not in self._decode_rows:
            tables = self._cache.tables_of(self._batch, self._layer_idx)
            self._decode_rows[key] = decode_rows_of(
                [tables[row] for row in rows], self._batch, rows, self._cache.device
            )
        _attend_rows(query, layer, self._decode_rows[key], out, options)

    def read(self, row: int) -> tuple[Tensor, Tensor]:
        """Return ``[1, h, S, d]`` of a row; valid until the next read.

        In a layer with a window they begin with the first block that the row sees.
        """
        return self._read_row(row, self._first_block(row))

    def read_rows(self, rows: Sequence[int], positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``[R, h, S, d]`` of several rows, and positions among them; see ``KVView``.

        Valid until the next read.
        """
        layer, dtype = self._last_update()
        tables, left_out = self._tables_from([(row, self._first_block(row)) for row in rows])
        return *layer.read(tables, dtype, self._cache.buffer), positions - left_out

    def _tables_from(self, rows: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Return tables of the blocks of rows, and the tokens before them: once a step.

        Args:
            rows: each with its first block.
        """
        key = self._cache.has_window(self._layer_idx), *rows
        if key not in self._tables:
            chosen = [self._table(row)[start:] for row, start in rows]
            width = max(map(len, chosen))
            filled = [[*table, *[table[-1]] * (width - len(table))] for table in chosen]
            left_out = np.array([start for _, start in rows]) * self._cache.block_size
            joined = np.concatenate((np.array(filled, dtype=np.int64), left_out[:, None]), axis=1)
            own = on_device(joined, self._cache.device)
            self._tables[key] = own[:, :-1], own[:, -1]
        return self._tables[key]

    def _first_block(self, row: int) -> int:
        """Return the first block of a row that the layer's window sees."""
        window = self._last_update()[0].shape.window
        first = 0 if window is None else max(0, self._batch.starts[row] - window + 1)
        return first // self._cache.block_size

    def _read_row(self, row: int, first_block: int) -> tuple[Tensor, Tensor]:
        layer, dtype = self._last_update()
        tables, _ = self._tables_from([(row, first_block)])
        found, other = layer.read(tables, dtype, self._cache.buffer)
        length = self._batch.lengths[row] - first_block * self._cache.block_size
        return found[:, :, :length], other[:, :, :length]

    def _table(self, row: int) -> list[int]:
        has_window = self._cache.has_window(self._layer_idx)
        return self._cache.own_blocks(self._batch, row, has_window=has_window)

    def _rows(self) -> tuple[Sequence[Sequence[int]], Sequence[int], Sequence[int]]:
        tables = self._cache.tables_of(self._batch, self._layer_idx)
        return tables, self._batch.starts, self._batch.counts

    def _call(self, rows: Sequence[int] | None = None) -> PagedCall:
        """Return the kernel call of the layer's blocks, for some rows or all."""
        key = self._cache.has_window(self._layer_idx), None if rows is None else tuple(rows)
        if key not in self._calls:
            parts = self._rows()
            chosen = parts if rows is None else [[part[row] for row in rows] for part in parts]
            self._calls[key] = PagedCall(*chosen)
        return self._calls[key]

    def index(self) -> TokenIndex:
        """Return where the new tokens lie in the blocks of the selected layer."""
        key = self._cache.has_window(self._layer_idx)
        if key not in self._tokens:
            self._tokens[key] = self._cache.index_of(*self._rows())
        return self._tokens[key]

    def _last_update(self) -> tuple[KVStorage, torch.dtype]:
        assert self._layer is not None, "update comes first"
        return self._layer


def _places(batch: PackedBatch) -> list[tuple[Sequence[int], int, int]]:
    return list(zip(batch.block_tables, batch.starts, batch.lengths, strict=True))


def decode_rows_of(
    tables: Sequence[Sequence[int]], batch: PackedBatch, rows: Sequence[int], device: torch.device
) -> DecodeRows:
    """Return where rows of one token have their keys, in one copy to the device.

    Sizes are multiples that Triton compiles no other kernel for.

    Args:
        tables: blocks of each of the rows.
        batch: the step.
        rows: those of one token.
        device: of the cache.
    """
    count, width = -len(rows) // 4 * -4, max(map(len, tables)) // 16 * 16 + 16
    packed = np.zeros((2 + width, count), dtype=np.int32)
    packed[0, : len(rows)] = [batch.starts[row] for row in rows]
    packed[1, : len(rows)] = [batch.offsets[row] for row in rows]
    filled = packed[2:].reshape(count, width)
    for place, table in enumerate(tables):
        filled[place, : len(table)] = table
    own = on_device(packed, device)
    is_all = len(rows) == batch.tokens
    return DecodeRows(
        tables=own[2:].view(count, width)[: len(rows)],
        positions=own[0, : len(rows)],
        tokens=None if is_all else own[1, : len(rows)],
    )


def _attend_rows(
    query: Tensor, layer: KVStorage, rows: DecodeRows, out: Tensor, options: ScoreOptions
) -> None:
    alibi = options.alibi
    paged_decode.attend(
        query,
        layer.paged_heads,
        rows,
        out,
        scaling=options.scaling,
        window=options.window,
        chunk=options.chunk,
        softcap=options.softcap,
        sinks=options.sinks,
        slopes=None if alibi is None else alibi.slopes,
        rounds_bias=alibi is not None and alibi.is_rounded,
    )


class TensorView:
    """One new token a row in blocks given by tensors on the device, for CUDA graphs.

    Where the tokens lie is computed when the view is made, for all layers.

    Args:
        cache: of the keys and values.
        tables: int32 ``[R, W]``.
        positions: int32 ``[R]``.
        window_tables: those of layers with windows, where these have blocks of their own.
    """

    states = None

    def __init__(
        self,
        cache: KVCache,
        tables: Tensor,
        positions: Tensor,
        window_tables: Tensor | None = None,
    ) -> None:
        self._cache = cache
        both = [tables] if window_tables is None else [tables, window_tables]
        self._rows = [DecodeRows(tables=one, positions=positions) for one in both]
        self._tokens = [TokenIndex.of_tensors(one, positions, cache.block_size) for one in both]
        self._layer: KVStorage | None = None
        self._layer_idx = cache.first_layer

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[1, h, R, d]`` of one layer and return it."""
        self._layer = self._cache.storage_of(layer_idx, key, value)
        self._layer_idx = layer_idx
        self._layer.write(self.index(), key, value)
        return key, value

    def index(self) -> TokenIndex:
        """Return where the new tokens lie in the blocks of the selected layer."""
        return self._tokens[self._cache.has_window(self._layer_idx)]

    def select(self, layer_idx: int) -> None:
        """Let the next calls read a layer that has been updated in this step."""
        self._layer, self._layer_idx = self._cache.layer(layer_idx), layer_idx

    def attend_rows(
        self, query: Tensor, rows: Sequence[int], out: Tensor, options: ScoreOptions
    ) -> None:
        """Attend with all rows; see ``KVView``."""
        del rows
        assert self._layer is not None, "update comes first"
        own = self._rows[self._cache.has_window(self._layer_idx)]
        _attend_rows(query, self._layer, own, out, options)
