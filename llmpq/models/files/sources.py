"""TensorSource: the files and byte ranges of one tensor, and reading them.

A tensor has one byte range, or several for experts that are stored one by one. Checkpoints are read
and not mapped: a mapped file that shrinks ends the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from llmpq.errors import SpecError

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
