"""DecodedSource: tensors that are stored in another form than the model's, decoded row by row.

Rows become float32 as they are read, a block at a time, so that no copy of a whole matrix is made
besides the result.

Shape legend: E experts, N output features, K input features.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

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
class SomeRows(WrappedRows):
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
                found.append(part if whole else SomeRows(stored=part, first=first, end=last))
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
