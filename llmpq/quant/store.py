"""The store: layers that were quantized once, on disk, so that nobody quantizes them again.

One safetensors file for each layer and precision, named by its key. A key covers where the weights
came from (``TensorFiles.fingerprint``), how they were quantized, for which dtype, and the format
below: another plan finds what this one made. Entries are written beside their place and renamed
into it, so ranks of one host need no locks; each carries checksums, and one that fails them is
removed and made anew. The folder is its owner's alone (0700, files 0600): checksums find accidents,
permissions keep out others. Losing an entry costs time, so no failure of the store ends a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.models.direct import pages_around, read_pages
from llmpq.models.headers import DTYPE_BITS
from llmpq.models.sources import TORCH_DTYPES, Allocate, on_host, read_into

_logger = get_logger(__name__)

FORMAT = 1
"""Part of every key: raise it when entries change, or when any quantizer gives other codes."""

CODES = ".codes"
"""How the name of a tensor of codes ends."""

_CHECKSUMS = "checksums"
_PIECE_BYTES = 8 << 20  # whole pages, and as much as keeps a disk busy
_ABANDONED_S = 24 * 3600.0
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""The tensors of an entry in order: dtype and shape by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A folder of quantized layers.

    Attributes:
        directory: the folder; made by :meth:`opened`.
        limit_bytes: what it may hold; the entries unused for longest go first.
    """

    directory: Path
    limit_bytes: int

    @classmethod
    def opened(cls, directory: Path, limit_bytes: int) -> Store:
        """Make the folder where it is missing.

        Raises:
            SpecError: it cannot be made, or others can write into it.
        """
        if limit_bytes < 0:
            raise SpecError(f"store: found a limit of {limit_bytes} bytes, expected at least 0")
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = directory.stat()
        except OSError as error:
            raise SpecError(f"store {directory}: cannot be made: {error}") from error
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise SpecError(
                f"store {directory}: found mode {stat.S_IMODE(found.st_mode):o} of user "
                f"{found.st_uid}, expected a folder of this user alone (mode 700): weights that "
                "others can write are not to be trusted"
            )
        return cls(directory=directory, limit_bytes=limit_bytes)

    def read(
        self, key: str, layout: Layout, allocate: Allocate = on_host
    ) -> dict[str, Tensor] | None:
        """Return an entry's tensors; ``None`` when there is none that is whole.

        A damaged entry is removed with a warning. ``allocate`` makes the memory of the entry, in
        which the codes stay: most kernels copy them into a layout of their own and drop them. The
        rest is copied, for kernels may keep it.
        """
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            tensors = _read_entry(descriptor, layout, str(path), allocate)
            os.utime(descriptor)  # used now: the last to be evicted
        except (SpecError, OSError) as error:
            _logger.warning("%s; removed, will be quantized again", error)
            path.unlink(missing_ok=True)
            return None
        finally:
            os.close(descriptor)
        return tensors

    def writer(self, key: str, layout: Layout) -> EntryWriter | None:
        """Begin an entry; ``None`` when the store cannot hold it."""
        size = sum(_nbytes(*item) for item in layout.values())
        if size > self.limit_bytes:
            return None
        try:
            return EntryWriter(self, key, layout)
        except OSError as error:
            _logger.warning("store %s: cannot write: %s", self.directory, error)
            return None

    def settle(self, temporary: Path, key: str) -> None:
        """Give a finished entry its name, then make room."""
        temporary.replace(self._path(key))
        self._evict(keep=self._path(key))

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.safetensors"

    def _evict(self, keep: Path) -> None:
        """Remove the entries used longest ago until the rest fits, and what crashes left behind."""
        entries: list[tuple[float, int, Path]] = []
        now = time.time()
        for path in self.directory.iterdir():
            try:
                found = path.stat()
            except FileNotFoundError:  # another rank was faster
                continue
            if path.suffix == ".safetensors":
                entries.append((found.st_mtime, found.st_size, path))
            elif path.suffix == ".tmp" and now - found.st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit_bytes:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size


class EntryWriter:
    """One entry on its way to the disk, tensor by tensor, so that none of it is held back.

    Args:
        store: where it goes.
        key: its name.
        layout: what will come, in order.
    """

    def __init__(self, store: Store, key: str, layout: Layout) -> None:
        self._store = store
        self._key = key
        self._left = list(layout)
        self._layout = layout
        header = _header(layout)
        self._checksums = [zlib.crc32(header)]
        descriptor, name = tempfile.mkstemp(prefix=key, suffix=".tmp", dir=store.directory)
        self._temporary = Path(name)
        self._stream = os.fdopen(descriptor, "wb", buffering=0)
        self._write(header)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, the next of the layout; a full disk ends the entry, not the run."""
        if self._stream.closed:
            return
        expected = self._left.pop(0)
        assert expected == name
        assert self._layout[name] == (tensor.dtype, tuple(tensor.shape))
        view = _bytes_of(tensor.detach().cpu().contiguous())
        self._checksums.append(zlib.crc32(view))
        self._write(view)

    def commit(self) -> None:
        """Finish the entry and give it its name."""
        if self._stream.closed:
            return
        assert not self._left
        if self._write(_joined(self._checksums)):
            self._stream.close()
            try:
                self._store.settle(self._temporary, self._key)
            except OSError as error:
                self._give_up(error)

    def abort(self) -> None:
        """Forget the entry; harmless after ``commit``."""
        self._stream.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview) -> bool:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._stream.write(rest) or 0 :]
        except OSError as error:
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: OSError) -> None:
        _logger.warning("store %s: cannot write: %s", self._store.directory, error)
        self.abort()


def entry_key(fingerprint: str, parts: Sequence[str]) -> str:
    """Return the name of an entry: SHA-256 over its format, its weights' fingerprint and more.

    Args:
        fingerprint: from ``TensorFiles.fingerprint``.
        parts: whatever else decides about the codes: precision, dtype, names of the matrices.
    """
    text = json.dumps([FORMAT, fingerprint, *parts])
    return hashlib.sha256(text.encode()).hexdigest()


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
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_entry(
    descriptor: int, layout: Layout, where: str, allocate: Allocate
) -> dict[str, Tensor]:
    expected = _header(layout)
    sizes = [len(expected), *(_nbytes(*item) for item in layout.values())]
    total = sum(sizes) + 4 * len(sizes)
    if os.fstat(descriptor).st_size != total:
        raise SpecError(f"{where}: found another layout than the layer's")
    whole = allocate((pages_around(0, total),), torch.uint8)
    memory = whole.numpy().data
    ends = list(accumulate(sizes))
    # Sums are taken of what has come while more is read: both run without Python's lock.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load-check") as checking:
        found: list[Future[int]] = []
        for begin in range(0, total, _PIECE_BYTES):
            piece = memory[begin : begin + _PIECE_BYTES]
            done = read_pages(descriptor, begin, min(len(piece), total - begin), piece)
            read_into(descriptor, begin + done, piece[done : total - begin], where)
            while len(found) < len(ends) and ends[len(found)] <= begin + len(piece):
                end = ends[len(found)]
                part = memory[end - sizes[len(found)] : end]
                found.append(checking.submit(zlib.crc32, part))
    if memory[: len(expected)] != expected:
        raise SpecError(f"{where}: found another layout than the layer's")
    if memory[ends[-1] : total] != _joined([checksum.result() for checksum in found]):
        raise SpecError(f"{where}: found another checksum than was written")
    parts = zip(layout.items(), pairwise(ends), strict=True)
    return {name: _tensor(name, whole[begin:end], item) for (name, item), (begin, end) in parts}


def _tensor(name: str, content: Tensor, item: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
    """Return one tensor of an entry: codes where they were read, of the rest a copy."""
    dtype, shape = item
    own = content if name.endswith(CODES) else content.clone()
    return own.view(dtype).view(shape)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _joined(checksums: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in checksums)


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * DTYPE_BITS[_NAMES[dtype]] // 8
