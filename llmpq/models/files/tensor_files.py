"""TensorFiles: the safetensors of one model directory, as one mapping from name to tensor.

Single or sharded safetensors; pickled weights are never read. Headers are checked when the
directory is opened, tensors are read on request. A file that changed in between is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from llmpq.errors import SpecError, bad_field
from llmpq.models.files.decoded import DecodedSource, decode_blocks
from llmpq.models.files.headers import Header, read_header, unique_keys
from llmpq.models.files.sources import (
    TORCH_DTYPES,
    Allocate,
    ByteRange,
    FileStamp,
    TensorSource,
    on_host,
    opened,
    read_blocks,
    read_into,
    read_source,
    will_need,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 32 * 1024 * 1024
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights that are not codes."""

_OF_CODES = ".scales"
_SAMPLE_BYTES = 4096
_MAX_SAMPLES = 16
_PICKLED = {".bin", ".pt", ".pth", ".ckpt"}


class TensorFiles:
    """The safetensors files of one directory, as one mapping from name to tensor.

    Args:
        model_dir: directory with ``model.safetensors`` or an index and its shards.

    Raises:
        SpecError: no such weights, a shard that is missing or outside the directory, a header
            that is not consistent, or an index that disagrees with the headers.
    """

    def __init__(self, model_dir: Path | str) -> None:
        self.directory = Path(model_dir)
        self.headers: dict[str, Header] = {}
        self._stamps: dict[str, FileStamp] = {}
        self._file_of: dict[str, str] = {}
        if (self.directory / SINGLE_FILE).exists():
            self._add_file(SINGLE_FILE)
            self._file_of = dict.fromkeys(self.headers[SINGLE_FILE].entries, SINGLE_FILE)
        elif (self.directory / INDEX_FILE).exists():
            self._add_shards(self.directory / INDEX_FILE)
        else:
            raise SpecError(self._no_weights())

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
        stored: Counter[torch.dtype] = Counter()
        for header in self.headers.values():
            for name, entry in header.entries.items():
                if TORCH_DTYPES[entry.dtype] in FLOATING and not name.endswith(_OF_CODES):
                    stored[TORCH_DTYPES[entry.dtype]] += entry.end - entry.begin
        if not stored:
            raise SpecError(f"{self.directory}: found no floating-point weights")
        return stored.most_common(1)[0][0]

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
        if not self._may_read(path):
            raise SpecError(f"{path}: leads outside the model directory")
        with opened(path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as stream:
            stamp = self._stamps[name] = FileStamp.of(descriptor)
            self.headers[name] = read_header(stream, file_bytes=stamp.size, where=str(path))

    def _may_read(self, path: Path) -> bool:
        """Return whether a link stays inside the directory, or in the blobs of its hub cache."""
        roots = [self.directory.resolve()]
        snapshots = roots[0].parent
        if snapshots.name == "snapshots":
            roots.append(snapshots.parent / "blobs")
        return any(path.resolve().is_relative_to(root) for root in roots)

    def _add_shards(self, index: Path) -> None:
        if not self._may_read(index):
            raise SpecError(f"{index}: leads outside the model directory")
        weight_map = _read_weight_map(index)
        for name in sorted(set(weight_map.values())):
            if PurePosixPath(name).name != name or "\\" in name or name in {"", ".", ".."}:
                raise bad_field(str(index), "weight_map", name, "a file of this directory")
            self._add_file(name)
        for tensor, file in weight_map.items():
            if tensor not in self.headers[file].entries:
                raise SpecError(f"{index}: tensor '{tensor}' is not in {file}")
        self._file_of = dict(weight_map)

    def _no_weights(self) -> str:
        pickled = [p.name for p in sorted(self.directory.glob("*")) if p.suffix in _PICKLED]
        if pickled:
            return (
                f"{self.directory}: found only pickled weights ({pickled[0]}), expected "
                "safetensors; pickles can run code and are never read: convert the checkpoint"
            )
        return f"{self.directory}: found no weights, expected {SINGLE_FILE} or {INDEX_FILE}"


def _sample(source: TensorSource) -> ByteRange:
    """Return the bytes in the middle of a tensor."""
    part = source.ranges[len(source.ranges) // 2]
    count = min(_SAMPLE_BYTES, part.nbytes)
    return ByteRange(file=part.file, begin=part.begin + (part.nbytes - count) // 2, nbytes=count)


def _read_weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise SpecError(f"{index}: larger than {MAX_INDEX_BYTES} bytes, expected an index")
    try:
        fields = json.loads(index.read_bytes(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError, OSError) as error:
        raise SpecError(f"{index}: not JSON: {error}") from error
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad_field(str(index), "weight_map", weight_map, "an object of tensors and files")
    for file in weight_map.values():
        if not isinstance(file, str):
            raise bad_field(str(index), "weight_map", file, "the name of a file")
    return weight_map
