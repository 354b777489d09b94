"""Tensors that are stored in another form than the model's, decoded row by row.

Rows become float32 as they are read, a block at a time, so that no copy of a whole matrix is made
besides the result. Codes with scales are FP8 and integer weights, packed or not, AWQ, and MXFP4.
All follow ``weight = (code - zero) * scale``; they differ in how codes are packed and in how many
weights share a scale.

Shape legend: E experts, N output features, K input features, G groups of a row, b bits, R rows of a
block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from llmpq.models.files.sources import Allocate, ByteRange, TensorSource

Read = Callable[[TensorSource], Tensor]
"""Reads a stored tensor from its file."""

Decode = Callable[[int, int], Tensor]
"""Returns rows ``[first, end)``, float32 ``[end - first, K]``, or ``[end - first]``."""

BLOCK_WEIGHTS = 1 << 21
"""Weights decoded at once: 8 MiB."""


class Encoded(ABC):
    """A stored matrix or vector whose rows are decoded when they are read."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the stored tensor, for messages."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape once decoded: ``[N, K]`` or ``[N]``."""

    @property
    @abstractmethod
    def ranges(self) -> tuple[ByteRange, ...]:
        """Every byte range that it is made from."""

    @abstractmethod
    def open(self, read: Read) -> Decode:
        """Read what all rows need, such as scales, and return the function that decodes rows.

        Raises:
            SpecError: a file cannot be read, or holds values that do not fit.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows(Encoded):
    """Base of rows that are decoded from a single tensor of a file.

    Attributes:
        source: the tensor.
    """

    source: TensorSource

    @property
    def name(self) -> str:
        """Name of the stored tensor."""
        return self.source.name

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """Bytes of the stored tensor."""
        return self.source.ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRows(StoredRows):
    """A tensor of floating-point numbers as it is stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as stored."""
        return self.source.shape

    def open(self, read: Read) -> Decode:
        """Return a function that reads rows and widens them."""
        return lambda first, end: read(self.source.block(first, end)).to(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedRows(Encoded):
    """Rows made from those of another encoded tensor of the same shape.

    Attributes:
        stored: the other tensor.
    """

    stored: Encoded

    @property
    def name(self) -> str:
        """Name of the stored tensor."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the other tensor."""
        return self.stored.shape

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """Bytes of the other tensor, of which fewer may be read."""
        return self.stored.ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice(WrappedRows):
    """Rows ``[first, end)`` of another encoded tensor.

    Attributes:
        first: first row.
        end: row after the last.
    """

    first: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows."""
        return (self.end - self.first, *self.stored.shape[1:])

    def open(self, read: Read) -> Decode:
        """Open the whole tensor and return a function that counts rows from ``first``."""
        decode = self.stored.open(read)
        return lambda first, end: decode(self.first + first, self.first + end)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedSource(TensorSource):
    """A tensor of decoded parts, stacked along the rows.

    ``shape`` is ``[N]``, ``[N, K]`` or ``[E, N, K]``; ``dtype`` is float32.

    Attributes:
        parts: the stored tensors, in order.
    """

    parts: tuple[Encoded, ...]

    @classmethod
    def of(cls, parts: tuple[Encoded, ...], shape: tuple[int, ...]) -> DecodedSource:
        """Return the tensor ``shape`` made from ``parts``."""
        return cls(
            name=parts[0].name,
            dtype=torch.float32,
            shape=shape,
            ranges=tuple(one for part in parts for one in part.ranges),
            parts=parts,
        )

    def transposed(self) -> DecodedSource:
        """Return the source itself: parts are decoded with outputs as rows in any format."""
        return self

    def rows(self) -> Iterator[TensorSource]:
        """Yield the slices along the first dimension, such as one matrix for each expert."""
        for index in range(self.shape[0]):
            one = self.block(index, index + 1)
            yield replace(one, shape=self.shape[1:])

    def block(self, begin: int, end: int) -> DecodedSource:
        """Return rows ``[begin, end)`` of the first dimension."""
        each = math.prod(self.shape[1:-1]) if len(self.shape) > 2 else 1
        found, position = [], 0
        for part in self.parts:
            count = part.shape[0]
            first = max(0, begin * each - position)
            last = min(count, end * each - position)
            if first < last:
                whole = first == 0 and last == count
                found.append(part if whole else RowSlice(stored=part, first=first, end=last))
            position += count
        return DecodedSource.of(tuple(found), (end - begin, *self.shape[1:]))


def parts_of(source: TensorSource) -> tuple[Encoded, ...]:
    """Return the parts that a tensor is decoded from; a plain one is its only part."""
    return source.parts if isinstance(source, DecodedSource) else (PlainRows(source=source),)


def decode_blocks(
    source: DecodedSource, read: Read, allocate: Allocate, rows: int | None = None
) -> Iterator[Tensor]:
    """Decode a tensor into memory of ``allocate``; yield blocks of its rows once they are there.

    Args:
        source: what to decode.
        read: reads stored tensors.
        allocate: makes the memory; called once.
        rows: of a block; ``None`` yields the whole tensor at the end.

    Raises:
        SpecError: as ``Encoded.open``.
    """
    result = allocate(source.shape, source.dtype)
    flat = result.view(-1, *source.shape[-1:]) if len(source.shape) > 1 else result
    position, done = 0, 0
    for part in source.parts:
        decode = part.open(read)
        step = max(1, BLOCK_WEIGHTS // math.prod(part.shape[1:]))
        for first in range(0, part.shape[0], step):
            end = min(first + step, part.shape[0])
            flat[position + first : position + end] = decode(first, end)
            while rows is not None and done + rows <= position + end:
                yield result[done : done + rows]
                done += rows
        position += part.shape[0]
    if done < position:
        yield result if rows is None else result[done:]


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight consecutive outputs in a word of AWQ's GEMM layout, in units of 4 bits."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCodes(Encoded):
    """A matrix of codes with a grid of scales.

    Attributes:
        codes: ``[N, K]`` in FP8 or int8, or int32 words of packed unsigned codes ``[N, words]``.
        scales: one, ``[N]``, ``[N, 1]``, or ``[rows of the grid, columns of the grid]``.
        zeros: of the grid, in int8, or packed as codes along the rows; ``None`` without.
        groups: int32 ``[K]``, the column of the grid of every input; ``None`` if in order.
        columns: K.
        bits: of packed codes; ``None`` for codes that are not packed.
        block: rows and columns that share a scale; a size of 0 is a whole row or column.
    """

    codes: TensorSource
    scales: TensorSource
    columns: int
    block: tuple[int, int]
    bits: int | None = None
    zeros: TensorSource | None = None
    groups: TensorSource | None = None

    @property
    def name(self) -> str:
        """Name of the stored codes."""
        return self.codes.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape once decoded."""
        return (self.codes.shape[0], self.columns)

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """Bytes of codes, scales and zeros."""
        parts = (self.codes, self.scales, self.zeros, self.groups)
        return tuple(one for part in parts if part is not None for one in part.ranges)

    def open(self, read: Read) -> Decode:
        """Read scales and zeros; return a function that reads and scales rows of codes."""
        scales = self._grid(read(self.scales).to(torch.float32))
        zeros = None if self.zeros is None else self._grid(self._zeros(read(self.zeros)))
        groups = None if self.groups is None else read(self.groups).long()

        def decode(first: int, end: int) -> Tensor:
            codes = self._codes(read(self.codes.block(first, end)))  # [R, K]
            rows = torch.arange(first, end)
            if zeros is not None:
                codes -= self._spread(zeros, rows, groups)
            codes *= self._spread(scales, rows, groups)
            return codes

        return decode

    def _grid(self, values: Tensor) -> Tensor:
        return values.view(-1, values.shape[-1]) if values.dim() > 1 else values.view(-1, 1)

    def _codes(self, stored: Tensor) -> Tensor:
        if self.bits is None:
            return stored.to(torch.float32)
        return unpack_words(stored, self.bits, self.columns).to(torch.float32).sub_(self._half)

    def _zeros(self, stored: Tensor) -> Tensor:
        if self.bits is None or stored.dtype != torch.int32:
            return stored.to(torch.float32)
        count = self.codes.shape[0]
        unpacked = unpack_words(stored.T.contiguous(), self.bits, count)  # [G, N]
        return unpacked.T.to(torch.float32) - self._half

    @property
    def _half(self) -> int:
        return 0 if self.bits is None else 1 << (self.bits - 1)

    def _spread(self, grid: Tensor, rows: Tensor, groups: Tensor | None) -> Tensor:
        """Return the values of some rows ``[R, K]``, or ``[R, 1]`` if all columns share one."""
        height, width = self.block
        found = grid[rows // height if height else torch.zeros_like(rows)]
        if groups is not None:
            return found[:, groups]
        if found.shape[1] == 1:
            return found
        return found.repeat_interleave(width, dim=1)[:, : self.columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(Encoded):
    """A matrix in AWQ's GEMM layout of 4 bits.

    Attributes:
        codes: int32 ``[K, N / 8]``.
        zeros: int32 ``[G, N / 8]``.
        scales: ``[G, N]``.
    """

    codes: TensorSource
    zeros: TensorSource
    scales: TensorSource

    @property
    def name(self) -> str:
        """Name of the stored codes."""
        return self.codes.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape once decoded."""
        return (self.scales.shape[1], self.codes.shape[0])

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """Bytes of codes, zeros and scales."""
        return (*self.codes.ranges, *self.zeros.ranges, *self.scales.ranges)

    def open(self, read: Read) -> Decode:
        """Read the whole matrix, a byte for each weight: its rows are columns of the file."""
        codes = unpack_awq(read(self.codes)).T.contiguous()  # [N, K]
        zeros = unpack_awq(read(self.zeros)).T.to(torch.float32)  # [N, G]
        scales = read(self.scales).T.to(torch.float32)  # [N, G]

        def decode(first: int, end: int) -> Tensor:
            rows = codes[first:end].to(torch.float32)
            grouped = rows.view(end - first, scales.shape[1], -1)  # [R, G, K/G]
            grouped -= zeros[first:end].unsqueeze(-1)
            grouped *= scales[first:end].unsqueeze(-1)
            return rows

        return decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Expert(Encoded):
    """An expert of gpt_oss in MXFP4: 32 weights of 4 bits share a power of two.

    Attributes:
        blocks: uint8 ``[N, K / 32, 16]``, the lower half of a byte first.
        scales: uint8 ``[N, K / 32]``, exponents plus 127.
    """

    blocks: TensorSource
    scales: TensorSource

    @property
    def name(self) -> str:
        """Name of the stored blocks."""
        return self.blocks.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape once decoded."""
        return (self.blocks.shape[0], self.blocks.shape[1] * 32)

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """Bytes of blocks and scales."""
        return (*self.blocks.ranges, *self.scales.ranges)

    def open(self, read: Read) -> Decode:
        """Read the exponents; return a function that reads and scales rows of blocks."""
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        exponents = read(self.scales).to(torch.int32) - _E8M0_BIAS

        def decode(first: int, end: int) -> Tensor:
            blocks = read(self.blocks.block(first, end))  # [R, K / 32, 16]
            values = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1)
            values = torch.ldexp(values, exponents[first:end, :, None, None])  # [R, K/32, 16, 2]
            return values.view(end - first, -1)

        return decode


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return unsigned codes ``[R, count]``, uint8, of int32 words ``[R, words]``.

    Codes are one little-endian bit stream, or whole codes in each word, as older versions of
    compressed-tensors pack 3, 5, 6 and 7 bits.
    """
    if words.shape[1] == -(-count * bits // 32):
        stream = words.contiguous().view(torch.uint8).numpy()
        found = np.unpackbits(stream, axis=1, count=count * bits, bitorder="little")
        powers = (1 << np.arange(bits)).astype(np.uint8)
        return torch.from_numpy(found.reshape(len(stream), count, bits) @ powers)
    shifts = torch.arange(32 // bits) * bits
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)  # [R, words, codes of a word]
    return codes.view(len(words), -1)[:, :count].to(torch.uint8)


def unpack_awq(words: Tensor) -> Tensor:
    """Return the codes of AWQ's words ``[R, N / 8]``: uint8 ``[R, N]``."""
    shifts = torch.tensor(AWQ_ORDER) * 4
    codes = (words.unsqueeze(-1) >> shifts) & 15
    return codes.view(len(words), -1).to(torch.uint8)
