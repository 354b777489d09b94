"""Safetensors headers, checked before any weight is read.

A weight file is untrusted input. Its header must be short JSON and describe tensors that fill the
file without gaps or overlaps; anything else is a SpecError that names file and tensor.
Format: 8 bytes little-endian length, that many bytes of JSON, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from llmpq.errors import SpecError
from llmpq.spec.fields import check_downloaded

# A third of the format's own limit, enough for 300,000 tensors: parsed JSON takes up to ten times
# its size in memory.
MAX_HEADER_BYTES = 32 * 1024 * 1024
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


def read_header(stream: BinaryIO, *, file_bytes: int, where: str) -> SafetensorsHeader:
    """Read and check the header of an open file of ``file_bytes``.

    Raises:
        SpecError: a header that is too long, is not JSON, or describes tensors that overlap, leave
            gaps or leave the file.
    """
    first = stream.read(_LENGTH_BYTES)
    check_downloaded(where, first)
    length = int.from_bytes(first, "little")
    available = file_bytes - _LENGTH_BYTES
    if not 2 <= length <= min(MAX_HEADER_BYTES, available):
        raise SpecError(
            f"{where}: found a header of {length} bytes, expected 2 to "
            f"{max(2, min(MAX_HEADER_BYTES, available))}"
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
        SpecError: as :func:`read_header`.
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
