"""WeightCache: quantized layers on disk, so that the next start does not quantize them again.

One safetensors file holds the matrices of one layer at one precision, each in the form that its
kernel reads: tiles, which are multiplied where the file is mapped, or packed rows. Its name, the
key, covers the source of the weights (``TensorFiles.fingerprint``), how they were quantized, the
dtype and the form, so plans share entries. Files are written under a temporary name and renamed,
so ranks of one host need no locks. CRC-32 checksums detect damage; a damaged file is deleted and
the layer is quantized again. The folder belongs to one user (mode 0700, files 0600): no other user
can change a mapped file. No failure of the cache ends a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.kernels.base import PackedWeight, packed_row_bytes
from llmpq.kernels.cpu.native import TiledWeight, tiled_shapes
from llmpq.logging import get_logger
from llmpq.models.tensor_files import TORCH_DTYPES, read_into
from llmpq.quant.modules.layer import Matrix
from llmpq.spec.model_files.weight_headers import DTYPE_BITS
from llmpq.spec.precision import Precision

_logger = get_logger(__name__)

FORMAT = 5
"""Part of every key. Increase it when entries or tiles change, or a quantizer gives other codes."""

_ALIGNMENT = 64  # of tiles in the file and so in memory: what a kernel loads is one cache line
_PIECE_BYTES = 512 << 10
_ABANDONED_S = 24 * 3600.0
_CHECKSUMS = "checksums"
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor by its name."""


class EntryLayout:
    """Names, dtypes, shapes and file positions of the tensors of an entry.

    Args:
        tensors: of the entry.

    Attributes:
        header: first bytes of the file; the checksums follow, then the tensors.
        places: begin and end of each tensor in the file.
        checksums: begin and end of the checksums: one of the header, one of each tensor.
        file_bytes: size of the file.
    """

    def __init__(self, tensors: Shapes) -> None:
        # Tiles first: their sizes are multiples of a cache line, those of scales need not be.
        self.tensors = dict(
            sorted(tensors.items(), key=lambda item: not item[0].endswith(".tiles"))
        )
        whole: Shapes = {_CHECKSUMS: (torch.uint32, (len(tensors) + 1,)), **self.tensors}
        self.header = _header(whole)
        edges = accumulate(map(_nbytes, whole.values()), initial=len(self.header))
        self.places = dict(zip(whole, pairwise(edges), strict=True))
        self.checksums = self.places.pop(_CHECKSUMS)
        self.file_bytes = max(end for _, end in self.places.values())


def entry_layout(
    matrices: Sequence[Matrix], precision: Precision, dtype: torch.dtype, tiled: frozenset[str]
) -> EntryLayout:
    """Return the layout of a layer's entry.

    Args:
        matrices: of the layer.
        precision: of all of them.
        dtype: of the run, in which scales and zeros are stored, and weights of 16 bits.
        tiled: names of the matrices that are stored in tiles; the others are packed rows.
    """
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for matrix in matrices:
        rows, columns = matrix.out_features, matrix.in_features
        parts: Shapes
        if precision.bits == 16:
            parts = {"tiles": (dtype, (rows, columns))}
        elif matrix.name in tiled:
            parts = tiled_shapes(rows, columns, precision, dtype)
        else:
            groups = (rows, columns // precision.effective_group(columns))
            row_bytes = packed_row_bytes(columns, precision.bits)
            parts = {"codes": (torch.uint8, (rows, row_bytes)), "scales": (dtype, groups)}
            if not precision.symmetric:
                parts = {**parts, "zeros": (dtype, groups)}
        tensors |= {f"{matrix.name}.{part}": item for part, item in parts.items()}
    return EntryLayout(tensors)


def dense_weight_of(matrix: Matrix, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a matrix of 16 bits out of its layer's entry, in the order that was written."""
    return tensors[f"{matrix.name}.tiles"]


def weight_of(
    matrix: Matrix, precision: Precision, tensors: Mapping[str, Tensor]
) -> PackedWeight | TiledWeight:
    """Return a matrix made of the tensors of its layer's entry, without copying them."""
    rows, columns = matrix.out_features, matrix.in_features
    names = ("tiles", "codes", "scales", "zeros")
    parts = {part: tensors.get(f"{matrix.name}.{part}") for part in names}
    found = {part: tensor for part, tensor in parts.items() if tensor is not None}
    if "tiles" in found:
        return TiledWeight(out_features=rows, in_features=columns, precision=precision, **found)
    return PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=precision,
        codes=found["codes"],
        scales=found["scales"],
        zeros=found.get("zeros"),
    )


def entry_key(fingerprint: str, parts: Sequence[str]) -> str:
    """Return the name of an entry: a SHA-256.

    Args:
        fingerprint: of the weights, from ``TensorFiles.fingerprint``.
        parts: everything else that determines the tensors: precision, dtype, names and forms.
    """
    text = json.dumps([FORMAT, fingerprint, *parts])
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCache:
    """A folder of quantized layers.

    Attributes:
        directory: the folder; made by :meth:`opened`.
        limit_bytes: its maximum size; the entries unused for longest are deleted first.
    """

    directory: Path
    limit_bytes: int

    @classmethod
    def opened(cls, directory: Path, limit_bytes: int) -> WeightCache:
        """Make the folder if it is missing.

        Raises:
            SpecError: it cannot be made, or other users can access it.
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

    def read(self, key: str, layout: EntryLayout) -> dict[str, Tensor] | None:
        """Return the tensors of an entry, mapped from its file; ``None`` if there is none.

        Every byte is checked first; an entry that is damaged or has another layout is deleted.
        """
        try:
            return _map_entry(self._path(key), layout)
        except SpecError as error:
            _logger.warning("%s; removed, will be quantized again", error)
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            _logger.warning("store %s: cannot read: %s", self.directory, error)
        return None

    def open(self, key: str) -> int | None:
        """Open the file of an entry for reading; ``None`` if there is none."""
        try:
            return os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None

    def write(self, key: str, layout: EntryLayout) -> EntryWriter | None:
        """Begin an entry; ``None`` if it is larger than the limit or cannot be written."""
        if layout.file_bytes > self.limit_bytes:
            return None
        try:
            return EntryWriter(self, key, layout)
        except OSError as error:
            _logger.warning("store %s: cannot write: %s", self.directory, error)
            return None

    def commit(self, key: str, temporary: Path) -> None:
        """Rename a complete file to its key, then delete old entries above the limit."""
        temporary.replace(self._path(key))
        self._evict(keep=self._path(key))

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.safetensors"

    def _evict(self, keep: Path) -> None:
        """Delete the entries used longest ago until the rest fits, and abandoned files."""
        entries: list[tuple[float, int, Path]] = []
        now = time.time()
        for path in self.directory.iterdir():
            try:
                found = path.stat()
            except FileNotFoundError:  # deleted by another rank
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheEntry:
    """The place of some matrices in a cache.

    Attributes:
        cache: the folder.
        key: name of the entry.
        layout: of its tensors.
        is_valid: whether the weights are still those that the key names.
    """

    cache: WeightCache
    key: str
    layout: EntryLayout
    is_valid: Callable[[], bool]

    def read(self) -> dict[str, Tensor] | None:
        """Return its tensors; see :meth:`WeightCache.read`."""
        return self.cache.read(self.key, self.layout)

    def open(self) -> int | None:
        """Open its file; see :meth:`WeightCache.open`."""
        return self.cache.open(self.key)

    def write(self) -> EntryWriter | None:
        """Begin it; see :meth:`WeightCache.write`."""
        return self.cache.write(self.key, self.layout)


class EntryWriter:
    """Writes one entry, tensor by tensor, in any order; for one thread.

    Args:
        cache: that gets the entry.
        key: its name.
        layout: of its tensors.
    """

    def __init__(self, cache: WeightCache, key: str, layout: EntryLayout) -> None:
        self._cache = cache
        self._key = key
        self._layout = layout
        self._checksums: dict[str, int] = {}
        descriptor, name = tempfile.mkstemp(prefix=key, suffix=".tmp", dir=cache.directory)
        self._temporary = Path(name)
        self._stream = os.fdopen(descriptor, "wb", buffering=0)
        self._write(0, layout.header)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; if the disk fails, the entry is abandoned with a warning."""
        if self._stream.closed:
            return
        assert self._layout.tensors[name] == (tensor.dtype, tuple(tensor.shape))
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._checksums[name] = zlib.crc32(content)
        self._write(self._layout.places[name][0], content)

    def commit(self) -> None:
        """Write the checksums and rename the file; all tensors must have been added."""
        if self._stream.closed:
            return
        checksums = [self._checksums[name] for name in self._layout.tensors]
        sums = _joined([zlib.crc32(self._layout.header), *checksums])
        if self._write(self._layout.checksums[0], sums):
            self._stream.close()
            try:
                self._cache.commit(self._key, self._temporary)
            except OSError as error:
                self._give_up(error)

    def abort(self) -> None:
        """Delete the unfinished file; does nothing after ``commit``."""
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
        _logger.warning("store %s: cannot write: %s", self._cache.directory, error)
        self.abort()


class BackgroundWriter:
    """Writes finished matrices to the cache in a thread, one entry after another.

    Leaving the context waits until everything is written; after an error the entry in progress is
    deleted. The methods are for one thread.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load-write")
        self._entry: CacheEntry | None = None
        self._file: EntryWriter | None = None
        self._written: list[Future[None]] = []

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if self._file is not None:
            self._file.abort()
        if kind is None:
            for done in self._written:
                done.result()

    def add(self, entry: CacheEntry, name: str, weight: PackedWeight | TiledWeight) -> None:
        """Write a matrix of an entry, which the first one begins.

        Tiles stay in the model; packed rows are dropped, so wait for them.
        """
        if entry is not self._entry:
            self._entry, self._file = entry, entry.write()
        if self._file is None:
            return
        if isinstance(weight, TiledWeight):
            parts = weight.parts
        else:
            parts = {"codes": weight.codes, "scales": weight.scales}
            parts |= {} if weight.zeros is None else {"zeros": weight.zeros}
        for part, tensor in parts.items():
            self._written.append(self._thread.submit(self._file.add, f"{name}.{part}", tensor))
        if isinstance(weight, PackedWeight):
            self._written[-1].result()

    def end(self) -> None:
        """Finish the entry, or delete it if it is not valid once all is written."""
        if self._entry is not None and self._file is not None:
            finish = self._thread.submit(finish_entry, self._file, self._entry)
            self._written.append(finish)
        self._entry = self._file = None


def finish_entry(writer: EntryWriter, entry: CacheEntry) -> None:
    """Commit an entry, or delete it if its weights have changed meanwhile."""
    if entry.is_valid():
        writer.commit()
    else:
        writer.abort()


def _map_entry(path: Path, layout: EntryLayout) -> dict[str, Tensor]:
    """Map a file and check all of its bytes.

    Raises:
        SpecError: the file has another layout, or a checksum does not match.
        OSError: it cannot be opened or mapped.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.utime(descriptor)  # the entry used last is evicted last
        if os.fstat(descriptor).st_size != layout.file_bytes:
            raise SpecError(f"{path}: found another layout than the layer's")
        # Writable because torch wants it so; private, so that a write would not reach the file.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        memory = mmap.mmap(descriptor, layout.file_bytes, flags=mmap.MAP_PRIVATE, prot=access)
        header_end, (begin, end) = len(layout.header), layout.checksums
        front = os.pread(descriptor, end, 0)
        if front[:header_end] != layout.header:
            raise SpecError(f"{path}: found another layout than the layer's")
        ranges = [(0, header_end), *layout.places.values()]
        if front[begin:] != _joined([_checksum(descriptor, *span, path) for span in ranges]):
            raise SpecError(f"{path}: found another checksum than was written")
    finally:
        os.close(descriptor)
    return {
        name: torch.frombuffer(
            memory, dtype=dtype, count=torch.Size(shape).numel(), offset=layout.places[name][0]
        ).view(shape)
        for name, (dtype, shape) in layout.tensors.items()
    }


def _checksum(descriptor: int, begin: int, end: int, path: Path) -> int:
    """Return the CRC-32 of bytes of a file, read in pieces that stay in a core's cache."""
    checksum, piece = 0, memoryview(bytearray(min(_PIECE_BYTES, end - begin)))
    for first in range(begin, end, _PIECE_BYTES):
        part = piece[: end - first]
        read_into(descriptor, first, part, str(path))
        checksum = zlib.crc32(part, checksum)
    return checksum


def _header(tensors: Shapes) -> bytes:
    """Return length and JSON of a safetensors file whose first tensor is the checksums."""
    fields: dict[str, object] = {"__metadata__": {"format": f"llmpq-store-{FORMAT}"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + _nbytes((dtype, shape))
        fields[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text) + _nbytes(tensors[_CHECKSUMS])) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _joined(checksums: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in checksums)


def _nbytes(tensor: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = tensor
    return torch.Size(shape).numel() * DTYPE_BITS[_DTYPE_NAMES[dtype]] // 8
