"""Which files hold the weights of a model, and their headers: safetensors and GGUF, without torch.

A weight file is untrusted input: lengths, counts and offsets are checked before they are used, and
an error names file and tensor.

Safetensors: 8 bytes little-endian length, that many bytes of JSON, then the tensors' bytes. The
header must be short and describe tensors that fill the file without gaps or overlaps. A model is
one file, shards with an index, or shards without one, whose tensors are those of their headers. An
index counts before a single file, as its other readers do, unless a shard of it is missing; a
tensor is where the index says, whatever else a shard holds. Links are followed wherever they lead:
hub caches and folders of links are made of them. A name in an index is a name, not a path.

GGUF: metadata, and the place and type of every tensor. Long arrays (the tokenizer's) are skipped;
only their length is kept. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md,
versions 2 and 3, little-endian.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import LFS_BYTES, check_downloaded

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 32 * 1024 * 1024
FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""torch's name of each dtype of weights that are not codes."""

_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)")
_ADAPTER = "adapter_model"
_OF_CODES = (".scales", ".absmax")
_PICKLED = {".bin", ".pt", ".pth", ".ckpt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The safetensors files of a model directory.

    Attributes:
        directory: where they are.
        names: of the files, each once.
        index: path of the index, ``None`` without one.
        file_of: file of every tensor by the index, empty without one.
    """

    directory: Path
    names: tuple[str, ...]
    index: Path | None
    file_of: Mapping[str, str]

    def assign(self, headers: Mapping[str, SafetensorsHeader]) -> dict[str, str]:
        """Return the file of every tensor.

        Args:
            headers: of all files, by name.

        Raises:
            SpecError: the index disagrees with the headers, or two files have a tensor.
        """
        if self.index is not None:
            for tensor, file in self.file_of.items():
                if tensor not in headers[file].entries:
                    raise SpecError(f"{self.index}: tensor '{tensor}' is not in {file}")
            return dict(self.file_of)
        found: dict[str, str] = {}
        for file in self.names:
            for tensor in headers[file].entries:
                if tensor in found:
                    raise SpecError(
                        f"{self.directory}: tensor '{tensor}' is in {found[tensor]} and in {file}, "
                        "expected once"
                    )
                found[tensor] = file
        return found


def find_weights(directory: Path) -> WeightFiles:
    """Find the safetensors files of a model directory, without reading them.

    Raises:
        SpecError: there are none, some of them are missing, or those of several models.
    """
    is_single = (directory / SINGLE_FILE).exists()
    index = directory / INDEX_FILE
    if index.exists():
        file_of = _read_weight_map(index)
        names = tuple(sorted(set(file_of.values())))
        for name in names:
            if PurePosixPath(name).name != name or "\\" in name or name in {"", ".", ".."}:
                raise bad_field(str(index), "weight_map", name, "a file of this directory")
        if not is_single or all((directory / name).exists() for name in names):
            return WeightFiles(directory=directory, names=names, index=index, file_of=file_of)
    names = (SINGLE_FILE,) if is_single else _without_index(directory)
    return WeightFiles(directory=directory, names=names, index=None, file_of={})


def read_headers(files: WeightFiles) -> dict[str, SafetensorsHeader]:
    """Read the headers of all files, by name.

    Raises:
        SpecError: a file cannot be read, or its header is not consistent.
    """
    return {name: _read(files.directory / name) for name in files.names}


def weights_dtype(
    headers: Mapping[str, SafetensorsHeader], file_of: Mapping[str, str]
) -> str | None:
    """Return torch's name of the dtype of most weights, by bytes, without scales of codes.

    Args:
        headers: of all files, by name.
        file_of: file of every tensor of the model; shards may hold others.

    Returns:
        ``None`` if no tensor holds floating-point numbers.
    """
    stored: Counter[str] = Counter()
    for name, file in file_of.items():
        entry = headers[file].entries[name]
        if entry.dtype in FLOATING and not name.endswith(_OF_CODES):
            stored[FLOATING[entry.dtype]] += entry.end - entry.begin
    return stored.most_common(1)[0][0] if stored else None


def _read(path: Path) -> SafetensorsHeader:
    try:
        with path.open("rb") as stream:
            return read_safetensors_header(stream, file_bytes=path.stat().st_size, where=str(path))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None


def _without_index(directory: Path) -> tuple[str, ...]:
    """Return the files of the only checkpoint of a directory without an index."""
    found: dict[str, list[str]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        shard = _SHARD.fullmatch(path.stem)
        found.setdefault(shard[1] if shard else path.stem, []).append(path.name)
    adapters = found.pop(_ADAPTER, [])
    if len(found) > 1 and "model" in found:
        found = {"model": found["model"]}  # beside copies in other layouts (consolidated)
    if len(found) > 1:
        raise SpecError(
            f"{directory}: found the weights {', '.join(names[0] for names in found.values())}, "
            f"expected one checkpoint, or {INDEX_FILE}"
        )
    if not found:
        raise SpecError(_no_weights(directory, adapters))
    ((stem, names),) = found.items()
    _check_shards(directory, stem, names)
    return tuple(names)


def _check_shards(directory: Path, stem: str, names: Sequence[str]) -> None:
    """Check that no shard is missing."""
    shards = [found for name in names if (found := _SHARD.fullmatch(Path(name).stem))]
    counts = {shard[3] for shard in shards}
    if not counts:
        return
    if len(counts) > 1 or len(shards) != len(names):
        raise SpecError(
            f"{directory}: found {', '.join(names[:3])}, expected shards of one checkpoint"
        )
    (count,) = counts
    known = {int(shard[2]) for shard in shards}
    missing = [number for number in range(1, int(count) + 1) if number not in known]
    if missing:
        width = len(shards[0][2])
        raise SpecError(
            f"{directory}: found {len(known)} of {int(count)} shards, "
            f"'{stem}-{missing[0]:0{width}d}-of-{count}.safetensors' is missing"
        )


def _no_weights(directory: Path, adapters: Sequence[str]) -> str:
    pickled = [path.name for path in sorted(directory.glob("*")) if path.suffix in _PICKLED]
    if pickled:
        return (
            f"{directory}: found only pickled weights ({pickled[0]}), expected "
            "safetensors; pickles can run code and are never read: convert the checkpoint"
        )
    if adapters:
        return f"{directory}: found only an adapter ({adapters[0]}), expected a whole model"
    return f"{directory}: found no weights, expected {SINGLE_FILE} or {INDEX_FILE}"


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise SpecError(f"{index}: larger than {MAX_INDEX_BYTES} bytes, expected an index")
        data = index.read_bytes()
        check_downloaded(index, data)
        fields = json.loads(data, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{index}: not JSON: {error}") from error
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad_field(str(index), "weight_map", weight_map, "an object of tensors and files")
    for file in weight_map.values():
        if not isinstance(file, str):
            raise bad_field(str(index), "weight_map", file, "the name of a file")
    return weight_map


# A third of the format's own limit, enough for 300,000 tensors: parsed JSON takes up to ten times
# its size in memory.
MAX_SAFETENSORS_BYTES = 32 * 1024 * 1024
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 64

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Name, dtype, shape and byte range of one tensor in a safetensors file.

    Attributes:
        dtype: the format's name, such as ``BF16``.
        shape: its dimensions; empty for a scalar.
        begin: first byte, counted from the end of the header.
        end: byte after the last.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """A checked header of a safetensors file: its tensors, and where their bytes start.

    Attributes:
        raw: the header's bytes as stored, for digests.
        entries: its tensors by name.
    """

    raw: bytes
    entries: Mapping[str, TensorEntry]

    @property
    def data_begin(self) -> int:
        """Byte of the file at which the tensors' bytes begin."""
        return _LENGTH_BYTES + len(self.raw)


def read_safetensors_header(stream: BinaryIO, *, file_bytes: int, where: str) -> SafetensorsHeader:
    """Read and check the header of an open file of ``file_bytes``.

    Raises:
        SpecError: a header that is too long, is not JSON, or describes tensors that overlap, leave
            gaps or leave the file.
    """
    first = stream.read(_LENGTH_BYTES)
    check_downloaded(where, first)
    length = int.from_bytes(first, "little")
    available = file_bytes - _LENGTH_BYTES
    if not 2 <= length <= min(MAX_SAFETENSORS_BYTES, available):
        raise SpecError(
            f"{where}: found a header of {length} bytes, expected 2 to "
            f"{max(2, min(MAX_SAFETENSORS_BYTES, available))}"
        )
    raw = stream.read(length)
    if len(raw) != length:
        raise SpecError(f"{where}: ends at byte {len(raw) + _LENGTH_BYTES}, inside its header")
    return parse_header(raw, data_bytes=available - length, where=where)


def parse_header(raw: bytes, *, data_bytes: int, where: str) -> SafetensorsHeader:
    """Check a header's JSON against the bytes that follow it.

    Args:
        raw: the JSON.
        data_bytes: size of the file after the header.
        where: name of the file, for messages.

    Raises:
        SpecError: as :func:`read_safetensors_header`.
    """
    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: header is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SpecError(f"{where}: header is a JSON {type(fields).__name__}, expected an object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise SpecError(f"{where}: header's __metadata__ is not an object of strings")
    entries = {
        name: _entry(f"{where}: tensor '{_short(name)}'", value) for name, value in fields.items()
    }
    _check_layout(entries, data_bytes, where)
    return SafetensorsHeader(raw=raw, entries=entries)


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; an ``object_pairs_hook`` that rejects duplicate keys.

    Raises:
        ValueError: a key occurs twice.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _short(text: str) -> str:
    """Shorten and escape a string of a file, for a message."""
    plain = text[:120].encode("unicode_escape").decode("ascii")
    return plain if plain == text else plain[:117] + "..."


def _entry(where: str, value: object) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise SpecError(f"{where}: expected an object of dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise SpecError(f"{where}: found dtype {_short(repr(dtype))}, expected a known one")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise SpecError(f"{where}: found shape {_short(repr(shape))}, expected sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise SpecError(f"{where}: found offsets {_short(repr(offsets))}, expected two")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if end - begin != expected:
        raise SpecError(
            f"{where}: found offsets {begin} to {end}, expected {_short(str(expected))} bytes"
        )
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _are_sizes(value: object) -> bool:
    # type() and not isinstance(): true is an int in Python, and no size in JSON.
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _check_layout(entries: Mapping[str, TensorEntry], data_bytes: int, where: str) -> None:
    """Check that tensors fill the file without overlaps or gaps (the format's own rule)."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        tensor = f"{where}: tensor '{_short(name)}'"
        if entry.begin < position:
            raise SpecError(f"{tensor}: begins at {entry.begin}, inside the tensor before it")
        if entry.begin > position:
            raise SpecError(f"{tensor}: begins at {entry.begin}, expected {position} (a gap)")
        if entry.end > data_bytes:
            raise SpecError(f"{tensor}: ends at byte {entry.end} of {data_bytes}")
        position = entry.end
    if position != data_bytes:
        raise SpecError(f"{where}: tensors end at byte {position} of {data_bytes}")


Value = int | float | bool | str | tuple[int | float | bool | str, ...]

MAX_GGUF_BYTES = 256 * 1024 * 1024
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
        (40, "NVFP4", 64, 36),
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
        metadata = read_gguf_header(file).metadata
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


def read_gguf_header(path: Path) -> GgufHeader:
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


def read_gguf_arrays(path: Path, keys: Collection[str]) -> dict[str, tuple[Value, ...]]:
    """Return the arrays of these keys that a GGUF model has, however long.

    Raises:
        SpecError: a file is missing, or no valid GGUF.
    """
    file, size, _ = _stamp(_files_of(path)[0])
    found = _read_file(file, size, frozenset(keys))[0]
    return {key: value for key in keys if isinstance(value := found.get(key), tuple)}


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


def _read_file(path: Path, file_bytes: int, kept: frozenset[str] = frozenset()) -> Parsed:
    try:
        with path.open("rb") as stream:
            check_downloaded(path, stream.read(LFS_BYTES))
            stream.seek(0)
            return _Reader(stream, path, file_bytes, kept).parse()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


class _Reader:
    """Parses one file; arrays of the keys ``kept`` are returned however long."""

    def __init__(self, stream: BinaryIO, path: Path, file_bytes: int, kept: frozenset[str]) -> None:
        self._stream = stream
        self._path = path
        self._kept = kept
        self._file_bytes = file_bytes
        self._limit = min(MAX_GGUF_BYTES, file_bytes)
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
        if count <= _MAX_KEPT or key in self._kept:
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
