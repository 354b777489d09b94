"""Headers of GGUF files: metadata, and the place and type of every tensor.

A weight file is untrusted input: counts, lengths and offsets are checked before they are used.
Long arrays (the tokenizer's) are skipped; only their length is kept.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import LFS_BYTES, check_downloaded

Value = int | float | bool | str | tuple[int | float | bool | str, ...]

MAX_HEADER_BYTES = 256 * 1024 * 1024
_MAX_STRING = 1 << 20
_MAX_KEPT = 4096  # entries of an array that is kept
_MAX_COUNT = 1 << 24
_MAGIC = b"GGUF"
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_PROJECTOR = "clip"
"""Architecture of all projectors of images, which older files do not call so by their type."""
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgmlType:
    """A number format of ggml: ``weights`` consecutive weights of a row take ``nbytes``."""

    name: str
    weights: int
    nbytes: int


GGML_TYPES: dict[int, GgmlType] = {
    number: GgmlType(name=name, weights=weights, nbytes=nbytes)
    for number, name, weights, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
    )
}
"""The number formats that are read, by their number in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Shape, number format and place of one tensor in a GGUF file.

    Attributes:
        file: its path.
        shape: dimensions, the fastest-varying last (a file lists them in the other order).
        type: its number format.
        begin: first byte in the file.
        nbytes: length.
    """

    file: Path
    shape: tuple[int, ...]
    type: GgmlType
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Everything but the weights of a model in one file or in several.

    Attributes:
        path: of the first file.
        files: of all files, in order.
        metadata: values by key; arrays of more than 4096 entries are left out.
        lengths: of all arrays, by key.
        tensors: by name.
    """

    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, Value]
    lengths: Mapping[str, int]
    tensors: Mapping[str, GgufTensor]


def find_gguf(model: Path | str) -> Path | None:
    """Return the first GGUF file of a model: the file itself, or the only one of a directory.

    Of a model in several files, any of them stands for it. Files that go with a model, such as the
    projector of its images, are none. A directory with a ``config.json`` is a model of transformers
    unless its only weights are GGUF.

    Raises:
        SpecError: a directory has several GGUF models.
    """
    path = Path(model)
    if path.is_file() and (path.suffix == ".gguf" or _has_magic(path)):
        return _files_of(path)[0]
    if not path.is_dir():
        return None
    found = [file for file in sorted(path.glob("*.gguf")) if _part_of(file) == 1]
    if found and (path / "config.json").exists() and _has_other_weights(path):
        return None
    if len(found) > 1:
        found = [file for file in found if _is_model(file)]
    if len(found) > 1:
        raise SpecError(
            f"{path}: found {len(found)} GGUF models ({found[0].name}, {found[1].name}, ...), "
            "expected the path of one"
        )
    return found[0] if found else None


def _has_other_weights(folder: Path) -> bool:
    return any(next(folder.glob(f"*{suffix}"), None) for suffix in _OTHER_WEIGHTS)


def _is_model(file: Path) -> bool:
    """Return whether a file is a model of text; one that cannot be read counts as one."""
    try:
        metadata = read_header(file).metadata
    except SpecError:
        return True
    kind = metadata.get("general.type", "model")
    return kind == "model" and metadata.get("general.architecture") != _PROJECTOR


def _has_magic(path: Path) -> bool:
    """Return whether a file of any name begins as a GGUF file, such as a blob of a hub cache."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF model; ``path`` is any of its files.

    Raises:
        SpecError: a file is missing, or no valid GGUF.
    """
    files = _files_of(path)
    return _read_files(files[0], tuple(_stamp(file) for file in files))


@lru_cache(maxsize=8)
def _read_files(path: Path, stamps: tuple[tuple[Path, int, int], ...]) -> GgufHeader:
    """Read all files of a model; ``stamps`` make the cache notice a changed file."""
    parts = [_read_file(file, size) for file, size, _ in stamps]
    tensors: dict[str, GgufTensor] = {}
    for _, _, found in parts:
        for name, tensor in found.items():
            if name in tensors:
                raise SpecError(f"{tensor.file}: tensor '{name}': found twice, expected once")
            tensors[name] = tensor
    metadata, lengths, _ = parts[0]
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise bad_field(str(path), "split.tensors.count", total, f"{len(tensors)} tensors found")
    return GgufHeader(
        path=path,
        files=tuple(file for file, _, _ in stamps),
        metadata=metadata,
        lengths=lengths,
        tensors=tensors,
    )


def _part_of(file: Path) -> int:
    found = _SPLIT.fullmatch(file.name)
    return int(found[2]) if found else 1


def _files_of(path: Path) -> list[Path]:
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    names = [f"{found[1]}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]
    return [path.with_name(name) for name in names]


def _stamp(file: Path) -> tuple[Path, int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise SpecError(f"{file}: cannot be read: {error.strerror}") from None
    return file, found.st_size, found.st_mtime_ns


Parsed = tuple[dict[str, Value], dict[str, int], dict[str, GgufTensor]]


def _read_file(path: Path, file_bytes: int) -> Parsed:
    try:
        with path.open("rb") as stream:
            check_downloaded(path, stream.read(LFS_BYTES))
            stream.seek(0)
            return _Reader(stream, path, file_bytes).parse()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


class _Reader:
    """Parses one file."""

    def __init__(self, stream: BinaryIO, path: Path, file_bytes: int) -> None:
        self._stream = stream
        self._path = path
        self._file_bytes = file_bytes
        self._limit = min(MAX_HEADER_BYTES, file_bytes)
        self._position = 0

    def parse(self) -> Parsed:
        if self._take(4) != _MAGIC:
            raise self._error("found other first bytes, expected 'GGUF'")
        version = self._number("<I")
        if version not in (2, 3):
            raise self._error(f"found version {version}, expected 2 or 3 (little-endian)")
        num_tensors = self._count("tensors")
        metadata: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for _ in range(self._count("keys")):
            self._pair(metadata, lengths)
        return metadata, lengths, self._tensors(num_tensors, metadata)

    def _pair(self, metadata: dict[str, Value], lengths: dict[str, int]) -> None:
        key, kind = self._text(), self._number("<I")
        if key in metadata or key in lengths:
            raise self._error(f"key '{key}': found twice, expected once")
        if kind != _ARRAY:
            metadata[key] = self._value(kind)
            return
        item, count = self._number("<I"), self._count("entries")
        lengths[key] = count
        if count <= _MAX_KEPT:
            metadata[key] = tuple(self._value(item) for _ in range(count))
        elif item == _STRING:
            for _ in range(count):
                self._skip(self._length())
        elif item in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[item]))
        else:
            raise self._error(f"found values of type {item}, expected one of the format")

    def _tensors(self, count: int, metadata: Mapping[str, Value]) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise bad_field(str(self._path), "general.alignment", alignment, "a power of two")
        found = [self._tensor_info() for _ in range(count)]
        data_begin = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in found:
            nbytes = math.prod(shape) // kind.weights * kind.nbytes
            begin = data_begin + offset
            if begin + nbytes > self._file_bytes:
                end = begin + nbytes
                raise self._error(f"tensor '{name}': ends at byte {end} of {self._file_bytes}")
            if name in tensors:
                raise self._error(f"tensor '{name}': found twice, expected once")
            tensors[name] = GgufTensor(
                file=self._path, shape=shape, type=kind, begin=begin, nbytes=nbytes
            )
        return tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GgmlType, int]:
        name, rank = self._text(), self._number("<I")
        if rank > 4:
            raise self._error(f"tensor '{name}': found {rank} dimensions, expected at most 4")
        shape = tuple(reversed([self._number("<Q") for _ in range(rank)]))
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in GGML_TYPES:
            raise self._error(
                f"tensor '{name}': found number format {kind}, expected one of "
                f"{', '.join(one.name for one in GGML_TYPES.values())}"
            )
        if not shape or min(shape) < 1 or shape[-1] % GGML_TYPES[kind].weights:
            raise self._error(
                f"tensor '{name}': found shape {list(shape)}, expected rows of whole blocks of "
                f"{GGML_TYPES[kind].weights}"
            )
        return name, shape, GGML_TYPES[kind], offset

    def _value(self, kind: int) -> int | float | bool | str:
        if kind == _STRING:
            return self._text()
        if kind not in _SCALARS:
            raise self._error(f"found a value of type {kind}, expected one of the format")
        found: int | float | bool = struct.unpack(
            _SCALARS[kind], self._take(struct.calcsize(_SCALARS[kind]))
        )[0]
        return found

    def _text(self) -> str:
        length = self._length()
        if length > _MAX_STRING:
            raise self._error(f"found a string of {length} bytes, expected at most {_MAX_STRING}")
        return self._take(length).decode("utf-8", errors="replace")

    def _length(self) -> int:
        return self._number("<Q")

    def _count(self, what: str) -> int:
        count = self._number("<Q")
        if count > _MAX_COUNT:
            raise self._error(f"found {count} {what}, expected at most {_MAX_COUNT}")
        return count

    def _number(self, form: str) -> int:
        found: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return found

    def _skip(self, count: int) -> None:
        self._advance(count)
        if count < _MAX_KEPT:
            self._stream.read(count)  # faster than moving in a buffered file
        else:
            self._stream.seek(count, 1)

    def _take(self, count: int) -> bytes:
        self._advance(count)
        return self._stream.read(count)

    def _advance(self, count: int) -> None:
        self._position += count
        if self._position > self._limit:
            raise self._error(f"ends at byte {self._limit}, inside its header")

    def _error(self, text: str) -> SpecError:
        return SpecError(f"{self._path}: {text}")
