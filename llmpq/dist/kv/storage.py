"""How the keys and values of one layer lie in memory: in the dtype of the run, or at 8 bits.

8-bit storage has, for every token and head, integers in [-127, 127] and one bfloat16 scale. The
largest value of the head is 127 steps, so an error is at most half a step. bfloat16 has the range
of float32, and its rounding never moves a value beyond the last code. A zero point would take two
more bytes and gain little (docs/evaluation.md).

Shapes: R rows, N tokens of a step, S tokens of a row so far, h KV heads, d head_dim, B tokens of a
block.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.cpu.paged_attention import PagedHeads
from llmpq.models import KVShape
from llmpq.spec.runtime_constants import KV_BLOCK_TOKENS

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
        blocks, offsets = [], []
        for table, start, count in zip(block_tables, starts, counts, strict=True):
            positions = torch.arange(start, start + count)
            blocks.append(torch.tensor(table)[positions // block_size])
            offsets.append(positions % block_size)
        return cls(block=torch.cat(blocks).to(device), offset=torch.cat(offsets).to(device))

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
        self._keys, self._values = (
            torch.zeros((blocks, shape.heads, tokens, dim), dtype=dtype, device=device)
            for dim in shape.dims
        )
        heads = PagedHeads(keys=self._keys, values=self._values)
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


class Int8KVStorage(KVStorage):
    """8-bit integers and a scale for every token and head.

    Values are further heads after those of the keys: half as many operations, which are small in
    decode. Holds ``2 * blocks * h * B * (d + 2)`` bytes.

    Args:
        shape: of one token's keys.
        size: blocks, and tokens of each.
        device: where it lies.
    """

    is_exact = False

    def __init__(self, shape: KVShape, size: tuple[int, int], device: torch.device) -> None:
        blocks, tokens = size
        whole, heads = (blocks, 2 * shape.heads, tokens), shape.heads
        codes = torch.zeros((*whole, shape.head_dim), dtype=torch.int8, device=device)
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
        codes, scales = quantize_keys_values(key, value)
        tokens.write(self._codes, codes[0])
        tokens.write(self._scales, scales[0])

    def read(
        self, tables: Tensor, dtype: torch.dtype, buffer: DequantizeBuffer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``[R, h, W * B, d]``, in the buffer if there is one."""
        stored = _gathered(self._codes, tables)  # [R, 2h, W, B, d]
        if buffer is None:
            read = torch.empty(stored.shape, dtype=dtype, device=stored.device)
        else:
            read = buffer.take(stored.shape, dtype)
        # Two passes in place: a product of mixed dtypes would convert into fresh memory first.
        read.copy_(stored).mul_(_gathered(self._scales, tables).unsqueeze(-1))
        read = read.flatten(2, 3)
        return read[:, : self.shape.heads], read[:, self.shape.heads :]


def token_bytes(shape: KVShape, dtype: torch.dtype, kv_bits: int | None) -> int:
    """Return the bytes of one token's keys and values in a layer, as stored."""
    if kv_bits == 8:
        return shape.heads * (sum(shape.dims) + 2 * SCALE_DTYPE.itemsize)
    return shape.heads * sum(shape.dims) * dtype.itemsize


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
