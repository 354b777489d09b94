"""The stored tensors of a model directory: where their bytes are, how they are decoded and read.

A ``TensorSource`` has one byte range, or several for experts that are stored one by one.
Checkpoints are read and not mapped: a mapped file that shrinks ends the process with SIGBUS.

Tensors that are stored in another form than the model's are decoded row by row. Rows become float32
as they are read, a block at a time, so that no copy of a whole matrix is made besides the result.
Codes with scales are FP8 and integer weights, packed or not, AWQ, MXFP4, NVFP4, and bitsandbytes'.
All follow ``weight = (code - zero) * scale``, some with a table between code and number; they
differ in how codes are packed and in how many weights share a scale.

``TensorFiles`` are single or sharded safetensors, with or without an index; pickled weights are
never read. Headers are checked when the directory is opened, tensors are read on request. A file
that changed in between is an error.

Shape legend: E experts, N output features, K input features, G groups of a row, b bits, R rows of a
block.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.spec.model_files.weight_headers import (
    SafetensorsHeader,
    find_weights,
    read_safetensors_header,
    weights_dtype,
)

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
"""torch's dtype of each dtype of safetensors that ``headers`` accepts."""

_SETTLED_NS = 20_000_000  # twice the coarsest clock tick in use: a later write has another time

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Returns a tensor of some shape and dtype in host memory, with undefined content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """Identity and times of a file; equal stamps mean equal content.

    Attributes:
        size: in bytes.
        inode: number of the file in its file system.
        modified_ns: last change of its content; users can set it.
        changed_ns: last change of content or metadata; only the kernel sets it.
        settled: whether the file was old enough that any later write changes the times.
    """

    size: int
    inode: int
    modified_ns: int
    changed_ns: int
    settled: bool

    @classmethod
    def of(cls, descriptor: int) -> FileStamp:
        """Return the stamp of an open file."""
        found = os.fstat(descriptor)
        return cls(
            size=found.st_size,
            inode=found.st_ino,
            modified_ns=found.st_mtime_ns,
            changed_ns=found.st_ctime_ns,
            settled=time.time_ns() - found.st_ctime_ns > _SETTLED_NS,
        )

    def is_same_content(self, other: FileStamp) -> bool:
        """Return whether the content is unchanged; a new link or mode does not matter."""
        mine = (self.size, self.inode, self.modified_ns)
        return mine == (other.size, other.inode, other.modified_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Offset and length of a part of a file that holds a tensor.

    Attributes:
        file: its name inside the model directory.
        begin: first byte, from the start of the file.
        nbytes: length.
    """

    file: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """A tensor that has not been read.

    Attributes:
        name: of the stored tensor, or of its first part; for messages.
        dtype: as stored.
        shape: its dimensions.
        ranges: its bytes, in order.
        is_transposed: whether the file has the last two dimensions the other way round.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    ranges: tuple[ByteRange, ...]
    is_transposed: bool = False

    def transposed(self) -> TensorSource:
        """Return the source of the same bytes with the last two dimensions exchanged."""
        *lead, rows, columns = self.shape
        return replace(self, shape=(*lead, columns, rows), is_transposed=not self.is_transposed)

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return sum(part.nbytes for part in self.ranges)

    def rows(self) -> Iterator[TensorSource]:
        """Yield the slices along the first dimension, such as one matrix for each expert."""
        for row in range(self.shape[0]):
            yield replace(self.block(row, row + 1), shape=self.shape[1:])

    def block(self, begin: int, end: int) -> TensorSource:
        """Return rows ``[begin, end)`` of the first dimension."""
        each = self.nbytes // self.shape[0]
        ranges = tuple(_cut(self.ranges, begin * each, end * each))
        return replace(self, shape=(end - begin, *self.shape[1:]), ranges=ranges)


def _cut(ranges: tuple[ByteRange, ...], begin: int, end: int) -> Iterator[ByteRange]:
    position = 0
    for part in ranges:
        first = max(begin, position)
        last = min(end, position + part.nbytes)
        if first < last:
            start = part.begin + first - position
            yield ByteRange(file=part.file, begin=start, nbytes=last - first)
        position += part.nbytes


def on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return new memory of the host; the default :data:`Allocate`."""
    return torch.empty(shape, dtype=dtype)


def read_source(
    directory: Path,
    source: TensorSource,
    stamps: dict[str, FileStamp],
    allocate: Allocate = on_host,
) -> Tensor:
    """Read a tensor.

    Args:
        directory: of the files.
        source: what to read.
        stamps: of the files when their headers were checked.
        allocate: makes the memory.

    Raises:
        SpecError: a file cannot be read, is shorter than it was, or was written to since.
    """
    if source.is_transposed:
        stored = read_source(directory, source.transposed(), stamps)
        return allocate(source.shape, source.dtype).copy_(stored.mT)
    tensor = allocate(source.shape, source.dtype)
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    position = 0
    for part in source.ranges:
        path = directory / part.file
        with opened(path, stamps[part.file]) as descriptor:
            read_into(descriptor, part.begin, view[position : position + part.nbytes], str(path))
        position += part.nbytes
    return tensor


def read_blocks(
    directory: Path,
    source: TensorSource,
    stamps: dict[str, FileStamp],
    allocate: Allocate,
    rows: int,
) -> Iterator[Tensor]:
    """Read a matrix past the page cache where possible; yield blocks of ``rows`` rows once read.

    The disk writes into the reader's memory without a copy. ``allocate`` must return memory that
    begins at a page; it is called once, for up to two pages more than the tensor.

    Raises:
        SpecError: as :func:`read_source`.
    """
    part = source.ranges[0]
    lead = part.begin % mmap.PAGESIZE
    if len(source.ranges) > 1 or lead % source.dtype.itemsize or source.is_transposed:
        whole = read_source(directory, source, stamps, allocate)
        yield from (whole[first : first + rows] for first in range(0, len(whole), rows))
        return
    size = lead + source.nbytes
    memory = allocate((-(-size // mmap.PAGESIZE) * mmap.PAGESIZE,), torch.uint8)
    tensor = memory[lead:size].view(source.dtype).view(source.shape)
    view, start, path = memory.numpy().data, part.begin - lead, directory / part.file
    row_bytes, done = source.nbytes // len(tensor), 0
    with opened(path, stamps[part.file]) as descriptor:
        for first in range(0, len(tensor), rows):
            block = tensor[first : first + rows]
            end = lead + (first + len(block)) * row_bytes
            if done % mmap.PAGESIZE == 0:
                pages_end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
                done += _read_pages(descriptor, start + done, view[done:pages_end])
            read_into(descriptor, start + done, view[done:end], str(path))
            done = max(done, end)
            yield block


@contextlib.contextmanager
def opened(path: Path, stamp: FileStamp | None = None) -> Iterator[int]:
    """Open a file for reading and yield its descriptor.

    Args:
        path: of the file.
        stamp: from when its header was checked.

    Raises:
        SpecError: it cannot be read, or was written to since.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error
    try:
        if stamp is not None and not stamp.is_same_content(FileStamp.of(descriptor)):
            raise SpecError(f"{path}: was written to after its header had been checked")
        yield descriptor
    finally:
        os.close(descriptor)


def _read_pages(descriptor: int, begin: int, pages: memoryview) -> int:
    """Read whole pages past the page cache; return the bytes read, 0 if that is not possible."""
    done = 0
    if not hasattr(os, "O_DIRECT"):
        return done
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < len(pages) and done % mmap.PAGESIZE == 0:
            count = os.preadv(descriptor, [pages[done:]], begin + done)
            if count == 0:
                break
            done += count
    except OSError:  # a file system without direct reads, or memory that it cannot use
        pass
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


def will_need(descriptor: int, begin: int = 0, nbytes: int = 0) -> None:
    """Start reading bytes of a file into the page cache; by default all."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, begin, nbytes, os.POSIX_FADV_WILLNEED)


def read_into(descriptor: int, begin: int, view: memoryview, where: str) -> None:
    """Fill ``view`` from an open file.

    Raises:
        SpecError: the file ends before, or the disk fails.
    """
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], begin + done)
        except OSError as error:
            raise SpecError(f"{where}: cannot be read: {error}") from error
        if count == 0:
            raise SpecError(f"{where}: ends at byte {begin + done}, expected {begin + len(view)}")
        done += count


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
        levels: divides the scales, which are the largest numbers that codes stand for.
    """

    codes: TensorSource
    scales: TensorSource
    columns: int
    block: tuple[int, int]
    bits: int | None = None
    zeros: TensorSource | None = None
    groups: TensorSource | None = None
    levels: float = 1.0

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
        scales = self._grid(read(self.scales).to(torch.float32) / self.levels)
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
        if values.dim() > 2:  # ModelOpt's, of blocks: [rows, 1, columns, 1]
            values = values.squeeze(-1)
        return values.reshape(-1, values.shape[-1]) if values.dim() > 1 else values.view(-1, 1)

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
class Fp4Rows(Encoded):
    """A matrix of 4-bit floating-point codes (E2M1): MXFP4, or NVFP4 with a scale of all scales.

    Attributes:
        codes: uint8 ``[N, ...]``, ``K / 2`` a row, the lower half of a byte first.
        scales: ``[N, G]``: exponents plus 127 in uint8, or numbers in FP8.
        overall: one number that multiplies all scales; ``None`` without.
        divides: whether it divides them instead.
    """

    codes: TensorSource
    scales: TensorSource
    overall: TensorSource | None = None
    divides: bool = False

    @property
    def name(self) -> str:
        """Name of the stored codes."""
        return self.codes.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape once decoded."""
        return (self.codes.shape[0], 2 * math.prod(self.codes.shape[1:]))

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """Bytes of codes and scales."""
        parts = (self.codes, self.scales, self.overall)
        return tuple(one for part in parts if part is not None for one in part.ranges)

    def open(self, read: Read) -> Decode:
        """Read the scales; return a function that reads and scales rows of codes."""
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        scales = read(self.scales)
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        scales = scales.to(torch.float32)
        if self.overall is not None:
            overall = read(self.overall).to(torch.float32).view(())
            scales = scales / overall if self.divides else scales * overall

        def decode(first: int, end: int) -> Tensor:
            codes = read(self.codes.block(first, end)).view(end - first, scales.shape[1], -1)
            values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1)
            values *= scales[first:end, :, None, None]  # [R, G, K / 2G, 2]
            return values.view(end - first, -1)

        return decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Bnb4Rows(Encoded):
    """A matrix of bitsandbytes' 4-bit codes: places in a table, with a scale a block of weights.

    Attributes:
        codes: uint8 ``[N K / 2, 1]`` of all rows, the upper half of a byte first.
        table: float32 ``[16]``, the number of every code (NF4 or FP4).
        scales: of blocks of ``block`` weights, row by row: float32, or places in ``scale_table``.
        dims: N and K.
        block: weights that share a scale.
        scale_table: float32 ``[256]``, the number of every stored scale; ``None`` with float32.
        scale_scales: float32, of blocks of ``scale_block`` scales.
        scale_block: scales that share one.
        offset: added to the scales.
    """

    codes: TensorSource
    table: TensorSource
    scales: TensorSource
    dims: tuple[int, int]
    block: int
    scale_table: TensorSource | None = None
    scale_scales: TensorSource | None = None
    scale_block: int = 1
    offset: float = 0.0

    @property
    def name(self) -> str:
        """Name of the stored codes."""
        return self.codes.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape once decoded."""
        return self.dims

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """Bytes of codes, tables and scales."""
        parts = (self.codes, self.table, self.scales, self.scale_table, self.scale_scales)
        return tuple(one for part in parts if part is not None for one in part.ranges)

    def open(self, read: Read) -> Decode:
        """Read tables and scales; return a function that reads and scales rows of codes."""
        table = read(self.table).to(torch.float32)
        scales = read(self.scales).view(-1)
        if self.scale_table is not None and self.scale_scales is not None:
            of_scales = read(self.scale_scales).to(torch.float32).view(-1)
            of_scales = of_scales.repeat_interleave(self.scale_block)[: len(scales)]
            scales = read(self.scale_table).to(torch.float32)[scales.long()] * of_scales
            scales += self.offset
        scales = scales.to(torch.float32)
        columns = self.dims[1]

        def decode(first: int, end: int) -> Tensor:
            begin, stop = first * columns, end * columns
            codes = read(self.codes.block(begin // 2, -(-stop // 2))).view(-1)
            found = torch.stack((codes >> 4, codes & 15), -1).view(-1)
            values = table[found[begin % 2 :][: stop - begin].long()]
            values *= scales[torch.arange(begin, stop) // self.block]
            return values.view(end - first, columns)

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


FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights that are not codes."""

_SAMPLE_BYTES = 4096
_MAX_SAMPLES = 16


class TensorFiles:
    """The safetensors files of one directory, as one mapping from name to tensor.

    Args:
        model_dir: directory with the files that ``find_weights`` finds.

    Raises:
        SpecError: no such weights, a shard that is missing, a header that is not consistent, or
            an index that disagrees with the headers.
    """

    def __init__(self, model_dir: Path | str) -> None:
        self.directory = Path(model_dir)
        self.headers: dict[str, SafetensorsHeader] = {}
        self._stamps: dict[str, FileStamp] = {}
        files = find_weights(self.directory)
        for name in files.names:
            self._add_file(name)
        self._file_of = files.assign(self.headers)

    @property
    def names(self) -> Iterable[str]:
        """Every tensor, in the order of the files."""
        return self._file_of.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of most of the stored weights, by bytes, without scales of codes.

        Raises:
            SpecError: no tensor holds floating-point numbers.
        """
        name = weights_dtype(self.headers, self._file_of)
        if name is None:
            raise SpecError(f"{self.directory}: found no floating-point weights")
        found: torch.dtype = getattr(torch, name)
        return found

    @property
    def decodes(self) -> bool:
        """Whether matrices are decoded to float32 when they are read."""
        return False

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor, from the header alone."""
        return self.headers[self._file_of[name]].entries[name].shape

    def where(self, name: str) -> str:
        """File and tensor, for messages."""
        return f"{self.directory / self._file_of[name]}: tensor '{name}'"

    def source(self, name: str) -> TensorSource:
        """Return the location of a tensor, without reading it.

        Raises:
            SpecError: a tensor that does not exist.
        """
        if name not in self._file_of:
            raise SpecError(f"{self.directory}: found no tensor '{name}'")
        file = self._file_of[name]
        header = self.headers[file]
        entry = header.entries[name]
        begin = header.data_begin + entry.begin
        return TensorSource(
            name=name,
            dtype=TORCH_DTYPES[entry.dtype],
            shape=entry.shape,
            ranges=(ByteRange(file=file, begin=begin, nbytes=entry.end - entry.begin),),
        )

    def load(self, source: TensorSource, allocate: Allocate = on_host) -> Tensor:
        """Read a tensor, as :func:`read_source`; several threads may do so at once.

        Raises:
            SpecError: a file cannot be read, or has changed since it was checked.
        """
        if isinstance(source, DecodedSource):
            return next(decode_blocks(source, self.load, allocate))
        return read_source(self.directory, source, self._stamps, allocate)

    def load_blocks(self, source: TensorSource, allocate: Allocate, rows: int) -> Iterator[Tensor]:
        """Yield a matrix in blocks of rows, as :func:`read_blocks`; errors as :meth:`load`."""
        if isinstance(source, DecodedSource):
            return decode_blocks(source, self.load, allocate, rows)
        return read_blocks(self.directory, source, self._stamps, allocate, rows)

    def fingerprint(self, sources: Iterable[TensorSource]) -> str | None:
        """Return a key that changes if the stored bytes of some tensors may have changed.

        SHA-256 over their headers, the stamps of their files (size, inode and times; users cannot
        set the change time) and 4 KiB of up to sixteen of the tensors. A copied or touched model
        gets another key.

        Returns:
            ``None`` if a file is too young for its stamp, or has changed since it was opened.
        """
        sources = list(sources)
        files = sorted({part.file for source in sources for part in source.ranges})
        if any(not self._is_proven(file) for file in files):
            return None
        state = hashlib.sha256()
        for file in files:
            header, stamp = self.headers[file], self._stamps[file]
            state.update(repr((stamp.size, stamp.inode)).encode())
            state.update(repr((stamp.modified_ns, stamp.changed_ns)).encode())
            state.update(hashlib.sha256(header.raw).digest())
        for source in sources:
            state.update(repr(source).encode())
        samples = [_sample(one) for one in sources[:: -(-len(sources) // _MAX_SAMPLES) or 1]]
        for file in files:
            state.update(self._read_parts(file, [part for part in samples if part.file == file]))
        return state.hexdigest()

    def _is_proven(self, file: str) -> bool:
        before = self._stamps[file]
        with opened(self.directory / file) as descriptor:
            return before.settled and before == FileStamp.of(descriptor)

    def _read_parts(self, file: str, parts: Sequence[ByteRange]) -> bytes:
        """Return some bytes of a file, requested from the disk at once."""
        path = self.directory / file
        found = bytearray(sum(part.nbytes for part in parts))
        rest = memoryview(found)
        with opened(path) as descriptor:
            for part in parts:
                will_need(descriptor, part.begin, part.nbytes)
            for part in parts:
                read_into(descriptor, part.begin, rest[: part.nbytes], str(path))
                rest = rest[part.nbytes :]
        return bytes(found)

    def _add_file(self, name: str) -> None:
        path = self.directory / name
        if not path.is_file():
            raise SpecError(f"{path}: found no such file, expected a shard of the checkpoint")
        with opened(path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as stream:
            stamp = self._stamps[name] = FileStamp.of(descriptor)
            self.headers[name] = read_safetensors_header(
                stream, file_bytes=stamp.size, where=str(path)
            )


def _sample(source: TensorSource) -> ByteRange:
    """Return the bytes in the middle of a tensor."""
    part = source.ranges[len(source.ranges) // 2]
    count = min(_SAMPLE_BYTES, part.nbytes)
    return ByteRange(file=part.file, begin=part.begin + (part.nbytes - count) // 2, nbytes=count)
