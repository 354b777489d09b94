"""The file of one stored layer: a safetensors file with checksums.

What stays where it is read comes first, from a multiple of 64 bytes on, so that kernels can
multiply by it there; what passes follows. Nothing is handed out of which a single bit differs from
what was written. This module refuses to know folders and keys (``quant.store``).
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.models.direct import PAGE_BYTES, pages_around, read_pages
from llmpq.models.headers import DTYPE_BITS
from llmpq.models.sources import TORCH_DTYPES, Allocate, read_into

_logger = get_logger(__name__)

FORMAT = 2
"""Part of every key: raise it when entries or tiles change, or any quantizer gives other codes."""

CODES = ".codes"
"""How the name of a tensor of codes ends."""

_CHECKSUMS = "checksums"
_ALIGNMENT = 64  # where tensors begin: a cache line, and a vector of the kernels
_PIECE_BYTES = 4 << 20  # whole pages, and as much as keeps a disk busy
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensors in order: dtype and shape by name."""


class EntryLayout:
    """What an entry holds, and where.

    Args:
        lasting: tensors that a kernel multiplies by as they are: they stay where they are read.
        passing: tensors that come after them, and are soon dropped or copied.

    Attributes:
        header: what the file begins with.
        places: where in the file each tensor begins and ends, in their order.
        end: of the last tensor; the checksums follow.
        file_bytes: size of the file.
    """

    def __init__(self, lasting: Layout, passing: Layout) -> None:
        self.lasting = lasting
        self.passing = passing
        self.whole: Layout = {**lasting, **passing}
        self.header = _header(self.whole)
        sizes = (_nbytes(*item) for item in self.whole.values())
        edges = list(accumulate(sizes, initial=len(self.header)))
        self.places = dict(zip(self.whole, pairwise(edges), strict=True))
        self.end = edges[-1]
        self.file_bytes = self.end + 4 * (len(self.whole) + 1)


def read_entry(
    descriptor: int, layouts: Sequence[EntryLayout], where: str, *, stay: Allocate, lend: Allocate
) -> dict[str, Tensor]:
    """Return the tensors of an open file, once every byte of it has proved to be as written.

    Args:
        descriptor: of the file, read by nobody else meanwhile.
        layouts: what it may hold: it is read as the one that its header tells of.
        where: its name, for messages.
        stay: makes the memory of lasting tensors.
        lend: makes the memory of passing ones, in which codes stay: most kernels copy them into a
            layout of their own and drop them. The rest is copied, for kernels may keep it.

    Raises:
        SpecError: the file has another layout, ends before, or holds other bytes than were written.
    """
    found = os.pread(descriptor, max(len(layout.header) for layout in layouts), 0)
    size = os.fstat(descriptor).st_size
    for layout in layouts:
        if found.startswith(layout.header) and size == layout.file_bytes:
            return _Reading(descriptor, layout, where).run(stay, lend)
    raise SpecError(f"{where}: found another layout than the layer's")


class _Reading:
    """One entry being read, whose header was found right."""

    def __init__(self, descriptor: int, layout: EntryLayout, where: str) -> None:
        self._descriptor = descriptor
        self._layout = layout
        self._where = where
        self._found: dict[str, Future[int]] = {}

    def run(self, stay: Allocate, lend: Allocate) -> dict[str, Tensor]:
        layout = self._layout
        sums = bytearray(layout.file_bytes - layout.end)
        # Sums are taken of what has come while more is read: both run without Python's lock.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load-check") as checking:
            lasting = self._read(layout.lasting, stay, checking)
            passing = self._read(layout.passing, lend, checking)
            read_into(self._descriptor, layout.end, memoryview(sums), self._where)
        found = [self._found[name].result() for name in layout.places]
        if sums != _joined([zlib.crc32(layout.header), *found]):
            raise SpecError(f"{self._where}: found another checksum than was written")
        contents = lasting | {
            name: content if name.endswith(CODES) else content.clone()
            for name, content in passing.items()
        }
        return {
            name: contents[name].view(dtype).view(shape)
            for name, (dtype, shape) in layout.whole.items()
        }

    def _read(
        self, part: Layout, allocate: Allocate, checking: ThreadPoolExecutor
    ) -> dict[str, Tensor]:
        """Read neighbouring tensors as bytes; the sum of each is taken when its last has come."""
        if not part:
            return {}
        names = deque(part)
        begin, end = self._layout.places[names[0]][0], self._layout.places[names[-1]][1]
        origin = begin // PAGE_BYTES * PAGE_BYTES
        whole = allocate((pages_around(begin, end - begin),), torch.uint8)
        memory = whole.numpy().data
        inside = {
            name: slice(*(edge - origin for edge in self._layout.places[name])) for name in names
        }
        for piece in range(origin, end, _PIECE_BYTES):
            first, last = max(begin, piece), min(end, piece + _PIECE_BYTES)
            pages = memory[piece - origin :][: pages_around(first, last - first)]
            done = read_pages(self._descriptor, first, last - first, pages)
            rest = pages[first - piece + done : last - piece]
            read_into(self._descriptor, first + done, rest, self._where)
            while names and inside[names[0]].stop <= last - origin:
                name = names.popleft()
                self._found[name] = checking.submit(zlib.crc32, memory[inside[name]])
        return {name: whole[place] for name, place in inside.items()}


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
        assert self._layout.whole[name] == (tensor.dtype, tuple(tensor.shape))
        view = _bytes_of(tensor.detach().cpu().contiguous())
        self._checksums[name] = zlib.crc32(view)
        self._write(self._layout.places[name][0], view)

    def commit(self) -> None:
        """Finish the entry and give it its name."""
        if self._stream.closed:
            return
        assert self._checksums.keys() == self._layout.whole.keys()
        sums = [
            zlib.crc32(self._layout.header),
            *(self._checksums[name] for name in self._layout.whole),
        ]
        if self._write(self._layout.end, _joined(sums)):
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
    """Return length and JSON of an entry; the checksums are its last tensor.

    One CRC-32 for the header and one for each tensor: a store is read at every start, and CRC runs
    at the speed of memory where SHA-256 would take longer than the disk.
    """
    fields: dict[str, object] = {"__metadata__": {"format": f"llmpq-store-{FORMAT}"}}
    position = 0
    whole = {**layout, _CHECKSUMS: (torch.uint32, (len(layout) + 1,))}
    for name, (dtype, shape) in whole.items():
        end = position + _nbytes(dtype, shape)
        fields[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _joined(checksums: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in checksums)


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * DTYPE_BITS[_NAMES[dtype]] // 8
