"""The file of one stored layer: a safetensors file with checksums.

Several threads read it, tensor by tensor, into memory or where it lies (``entry_map``).
Nothing is handed out of which a single bit differs from what was written. This module refuses to
know folders and keys (``quant.store``).
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.models.files.direct import PAGE_BYTES, pages_around, read_pages
from llmpq.models.files.headers import DTYPE_BITS
from llmpq.models.files.sources import TORCH_DTYPES, Allocate, on_host, read_into
from llmpq.quant.loading.entry_map import ALIGNMENT, FileMap

_logger = get_logger(__name__)

FORMAT = 3
"""Part of every key: raise it when entries or tiles change, or any quantizer gives other codes."""

_CHECKSUMS = "checksums"
_PASSING = (".codes", ".tiles")  # how the names of tensors end that are left in borrowed memory
_PIECE_BYTES = 512 << 10  # of a mapped file, read at once: they are summed in the core's cache
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensors in order: dtype and shape by name."""


class EntryLayout:
    """What an entry holds, and where.

    Args:
        tensors: that go into it, in order.

    Attributes:
        header: what the file begins with; the checksums follow, then the tensors.
        places: where in the file each tensor begins and ends, in their order.
        file_bytes: size of the file.
    """

    def __init__(self, tensors: Layout) -> None:
        self.tensors = tensors
        whole: Layout = {_CHECKSUMS: (torch.uint32, (len(tensors) + 1,)), **tensors}
        self.header = _header(whole)
        sizes = (_nbytes(*item) for item in whole.values())
        edges = list(accumulate(sizes, initial=len(self.header)))
        places = dict(zip(whole, pairwise(edges), strict=True))
        self.checksums_end = places.pop(_CHECKSUMS)[1]
        self.places = places
        self.file_bytes = edges[-1]


class Entry:
    """A stored layer whose header was found right; its tensors are read when asked for.

    Args:
        path: of the file.
        layouts: what it may hold: it is read as the one that its header tells of.

    Attributes:
        layout: what it holds.

    Raises:
        SpecError: it has another layout.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, layouts: Sequence[EntryLayout]) -> None:
        self._path = path
        descriptor = self._open()
        try:
            os.utime(descriptor)  # used now: the last to be evicted
            found = os.fstat(descriptor)
            front = os.pread(descriptor, max(one.checksums_end for one in layouts), 0)
        finally:
            os.close(descriptor)
        self._identity = (found.st_dev, found.st_ino)
        self.layout = self._choose(layouts, front, found.st_size)
        header_bytes = len(self.layout.header)
        sums = front[header_bytes : self.layout.checksums_end]
        if sums[:4] != _joined([zlib.crc32(self.layout.header)]):
            raise self.damage()
        parts = (sums[at : at + 4] for at in range(4, len(sums), 4))
        self._sums = dict(zip(self.layout.tensors, parts, strict=True))
        self._map: FileMap | None = None

    def read(self, names: Sequence[str], lend: Allocate) -> dict[str, Tensor]:
        """Return tensors, once every byte of them has proved to be as written.

        Several threads may do so at once.

        Args:
            names: of the tensors.
            lend: makes the memory of codes and tiles, to be dropped soon. The others are in memory
                of their own, for kernels may keep them.

        Raises:
            SpecError: the file ends before, holds other bytes than were written, or is another.
            OSError: it is gone.
        """
        with self._opened() as descriptor:
            return {name: self._read(descriptor, name, lend) for name in names}

    def map(self) -> bool:
        """Map the file; ``False`` where that cannot be."""
        with contextlib.suppress(SpecError, OSError, ValueError), self._opened() as descriptor:
            self._map = FileMap(descriptor, self.layout.file_bytes)
        return self._map is not None

    def mapped(self, lend: Allocate) -> dict[str, Tensor]:
        """Return the tensors where they lie in the file: those that have proved to be as written.

        All in one go and in the order of the file, which a disk and reading ahead like best; once
        the file is mapped.

        Args:
            lend: makes memory to read through.

        Raises:
            SpecError: the file ends before, or is another.
            OSError: it is gone.
        """
        assert self._map is not None
        piece = lend((_PIECE_BYTES,), torch.uint8).numpy().data
        sound: dict[str, Tensor] = {}
        with self._opened() as descriptor:
            for name, (begin, end) in self.layout.places.items():
                if self._is_sum(name, self._sum(descriptor, begin, end, piece)):
                    sound[name] = self._map.tensor(begin, *self.layout.tensors[name])
        self._map.populate(self.layout.checksums_end, self.layout.file_bytes)
        return sound

    def damage(self) -> SpecError:
        """Return what to say of bytes that are not those that were written."""
        return SpecError(f"{self._path}: found another checksum than was written")

    def _read(self, descriptor: int, name: str, lend: Allocate) -> Tensor:
        begin, end = self.layout.places[name]
        lead = begin % PAGE_BYTES
        if name.endswith(_PASSING):
            whole = lend((pages_around(begin, end - begin),), torch.uint8)
            done = read_pages(descriptor, begin, end - begin, whole.numpy().data)
            content = whole[lead : lead + end - begin]
        else:
            content, done = on_host((end - begin,), torch.uint8), 0
        view = content.numpy().data
        read_into(descriptor, begin + done, view[done:], str(self._path))
        if not self._is_sum(name, zlib.crc32(view)):
            raise self.damage()
        dtype, shape = self.layout.tensors[name]
        return content.view(dtype).view(shape)

    def _sum(self, descriptor: int, begin: int, end: int, piece: memoryview) -> int:
        """Return the checksum of bytes that are thereby brought into the system's pages."""
        checksum = 0
        for first in range(begin, end, len(piece)):
            part = piece[: end - first]
            read_into(descriptor, first, part, str(self._path))
            checksum = zlib.crc32(part, checksum)
        return checksum

    def _is_sum(self, name: str, checksum: int) -> bool:
        return _joined([checksum]) == self._sums[name]

    def _open(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the file that the header was read from, and no other."""
        descriptor = self._open()
        try:
            found = os.fstat(descriptor)
            if self._identity != (found.st_dev, found.st_ino):
                raise SpecError(f"{self._path}: was replaced while it was read")
            yield descriptor
        finally:
            os.close(descriptor)

    def _choose(self, layouts: Sequence[EntryLayout], front: bytes, size: int) -> EntryLayout:
        for layout in layouts:
            if front.startswith(layout.header) and size == layout.file_bytes:
                return layout
        raise SpecError(f"{self._path}: found another layout than the layer's")


class EntryWriter:
    """One entry on its way to the disk, tensor by tensor, so that none of it is held back.

    Args:
        directory: of the store.
        key: its name there.
        layout: what will come, in any order.
        settle: called with the finished file.
    """

    def __init__(
        self, directory: Path, key: str, layout: EntryLayout, settle: Callable[[Path], None]
    ) -> None:
        self._directory = directory
        self._layout = layout
        self._settle = settle
        self._checksums: dict[str, int] = {}
        descriptor, name = tempfile.mkstemp(prefix=key, suffix=".tmp", dir=directory)
        self._temporary = Path(name)
        self._stream = os.fdopen(descriptor, "wb", buffering=0)
        self._write(0, layout.header)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to its place; a full disk ends the entry, not the run."""
        if self._stream.closed:
            return
        assert name not in self._checksums
        assert self._layout.tensors[name] == (tensor.dtype, tuple(tensor.shape))
        view = _bytes_of(tensor.detach().cpu().contiguous())
        self._checksums[name] = zlib.crc32(view)
        self._write(self._layout.places[name][0], view)

    def commit(self) -> None:
        """Finish the entry and give it its name."""
        if self._stream.closed:
            return
        assert self._checksums.keys() == self._layout.tensors.keys()
        sums = [
            zlib.crc32(self._layout.header),
            *(self._checksums[name] for name in self._layout.tensors),
        ]
        if self._write(len(self._layout.header), _joined(sums)):
            self._stream.close()
            try:
                self._settle(self._temporary)
            except OSError as error:
                self._give_up(error)

    def abort(self) -> None:
        """Forget the entry; harmless after ``commit``."""
        self._stream.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, begin: int, data: bytes | memoryview) -> bool:
        rest = memoryview(data)
        try:
            while rest:
                done = os.pwrite(self._stream.fileno(), rest, begin)
                rest, begin = rest[done:], begin + done
        except OSError as error:
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: OSError) -> None:
        _logger.warning("store %s: cannot write: %s", self._directory, error)
        self.abort()


def _header(layout: Layout) -> bytes:
    """Return length and JSON of an entry; the checksums are its first tensor.

    One CRC-32 for the header and one for each tensor: a store is read at every start, and CRC runs
    at the speed of memory where SHA-256 would take longer than the disk.
    """
    fields: dict[str, object] = {"__metadata__": {"format": f"llmpq-store-{FORMAT}"}}
    position = 0
    for name, (dtype, shape) in layout.items():
        end = position + _nbytes(dtype, shape)
        fields[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    # The first of the others is aligned, and every one after it whose size the format leaves so.
    text += b" " * (-(8 + len(text) + _nbytes(*layout[_CHECKSUMS])) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _joined(checksums: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in checksums)


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * DTYPE_BITS[_NAMES[dtype]] // 8
