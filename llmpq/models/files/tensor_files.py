"""TensorFiles: the safetensors of one model directory, as one mapping from name to tensor.

Single or sharded safetensors, with or without an index; pickled weights are never read. Headers are
checked when the directory is opened, tensors are read on request. A file that changed in between is
an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from llmpq.errors import SpecError
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
from llmpq.models.files.tensor_formats import DecodedSource, decode_blocks
from llmpq.spec.safetensors.files import find_weights, weights_dtype
from llmpq.spec.safetensors.headers import SafetensorsHeader, read_header

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
            self.headers[name] = read_header(stream, file_bytes=stamp.size, where=str(path))


def _sample(source: TensorSource) -> ByteRange:
    """Return the bytes in the middle of a tensor."""
    part = source.ranges[len(source.ranges) // 2]
    count = min(_SAMPLE_BYTES, part.nbytes)
    return ByteRange(file=part.file, begin=part.begin + (part.nbytes - count) // 2, nbytes=count)
