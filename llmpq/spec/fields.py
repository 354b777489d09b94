"""Strict reading and canonical writing of JSON and text files.

Every error names the file, the dotted path of the field, the value found and what was expected. An
unknown field is an error, so that a misspelt option does not silently mean its default.

Text is read as programs of today write it: PowerShell and Notepad begin UTF-8 with a byte-order
mark, and PowerShell's ``>`` writes UTF-16.

``from_json`` and ``to_json`` are derived from the annotations of dataclasses. A field is stored
under its own name, in the order of the class. ``Annotated[..., Rule(...)]`` states what the type
does not. Numbers are at least 0 and texts are not empty unless a rule says otherwise;
``tuple[tuple[K, V], ...]`` is a JSON object, any other tuple an array. A class with ``SCHEMA``
stores that version first.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from llmpq.errors import SpecError, bad_field, missing_field

T = TypeVar("T", bound=str)

MAX_FILE_BYTES = 64 * 1024 * 1024
SCHEMA = 1
FileKind = Literal["strategy", "fleet", "cluster", "sensitivity", "workload"]
_KINDS: dict[FileKind, tuple[str, str]] = {
    "strategy": ("stages", "llmpq-algo makes one"),
    "fleet": ("replicas", "llmpq-algo --replicas makes one"),
    "cluster": ("nodes", "it lists your devices"),
    "sensitivity": ("omega", "llmpq-indicator makes one"),
    "workload": ("prompt_tokens", "it has batch, prompt_tokens and new_tokens"),
}
"""Field by which a kind of file is known, in this order, and where such a file comes from."""
_STANDARD_OUTPUT = 1
LFS_BYTES = 24
"""Bytes at the start of a file that :func:`check_downloaded` needs."""
_LFS_POINTER = b"version https://git-lfs"
_LEAST_BYTES = 8
_MARK_BYTES = 3


class Fields:
    """The fields of one JSON object; each is taken once, and ``done`` rejects the rest.

    Args:
        value: the parsed JSON value; anything but an object is an error.
        where: name of the file, for messages.
        path: dotted path of this object inside the file, empty at the top.
    """

    def __init__(self, value: object, where: str, path: str = "") -> None:
        self.where = where
        self.path = path
        if not isinstance(value, Mapping):
            raise bad_field(where, path or "(top level)", value, "a JSON object")
        self._left = {str(key): item for key, item in value.items()}

    def name_of(self, field: str) -> str:
        """Return the dotted path of ``field`` for a message."""
        return f"{self.path}.{field}" if self.path else field

    def error(self, field: str, found: object, expected: str) -> SpecError:
        """Build the error for one of this object's fields."""
        return bad_field(self.where, self.name_of(field), found, expected)

    def has(self, field: str) -> bool:
        """Return whether ``field`` is present, not yet taken, and not null."""
        return self._left.get(field) is not None

    def names(self) -> tuple[str, ...]:
        """Return the names of all fields not yet taken."""
        return tuple(self._left)

    def drop_null(self, field: str) -> None:
        """Take ``field`` if it is null."""
        if self._left.get(field, ...) is None:
            del self._left[field]

    def take(self, field: str) -> Any:
        """Return the raw value of a required field."""
        if field not in self._left:
            raise missing_field(self.where, self.name_of(field))
        return self._left.pop(field)

    def text(self, field: str, choices: Iterable[str] | None = None) -> str:
        """Return a required non-empty string, one of ``choices`` when given."""
        value = self.take(field)
        if not isinstance(value, str) or not value:
            raise self.error(field, value, "a non-empty string")
        if choices is not None and value not in (allowed := sorted(choices)):
            raise self.error(field, value, f"one of {', '.join(allowed)}")
        return value

    def integer(self, field: str, minimum: int = 0, maximum: int = 2**62) -> int:
        """Return a required whole number in ``[minimum, maximum]``."""
        value = self.take(field)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(field, value, f"a whole number in [{minimum}, {maximum}]")
        return value

    def number(self, field: str, minimum: float = 0.0, maximum: float = math.inf) -> float:
        """Return a required finite number in ``[minimum, maximum]``."""
        value = self.take(field)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        # A whole number may be too large for a float, and is then no finite one.
        if not good or not (abs(value) <= sys.float_info.max and minimum <= value <= maximum):
            raise self.error(field, value, f"a finite number in [{minimum}, {maximum}]")
        return float(value)

    def flag(self, field: str) -> bool:
        """Return a required true or false."""
        value = self.take(field)
        if not isinstance(value, bool):
            raise self.error(field, value, "true or false")
        return value

    def optional_text(self, field: str) -> str | None:
        """Return a string, or ``None`` when the field is absent or null."""
        return self.text(field) if self._present(field) else None

    def optional_integer(self, field: str, minimum: int = 0, maximum: int = 2**62) -> int | None:
        """Return a whole number, or ``None`` when the field is absent or null."""
        return self.integer(field, minimum, maximum) if self._present(field) else None

    def optional_number(self, field: str) -> float | None:
        """Return a number from 0, or ``None`` when the field is absent or null."""
        return self.number(field) if self._present(field) else None

    def items(self, field: str, minimum: int = 0) -> list[Any]:
        """Return a required array of at least ``minimum`` entries, raw."""
        value = self.take(field)
        if not isinstance(value, list) or len(value) < minimum:
            raise self.error(field, value, f"an array of at least {minimum} entries")
        return value

    def entries(self, field: str, minimum: int = 0) -> Fields:
        """Return the entries of a required array as fields ``field[0]``, ``field[1]``, ..."""
        items = self.items(field, minimum)
        named = {f"{field}[{index}]": item for index, item in enumerate(items)}
        return Fields(named, self.where, self.path)

    def integers(self, field: str, count: int, minimum: int, maximum: int) -> list[int]:
        """Return a required array of at least ``count`` whole numbers in ``[minimum, maximum]``."""
        items = self.items(field, count)
        # An array may have 100,000 numbers: only loops in C are fast enough here.
        if items and (
            set(map(type, items)) != {int} or min(items) < minimum or max(items) > maximum
        ):
            entries = {f"{field}[{index}]": item for index, item in enumerate(items)}
            named = Fields(entries, self.where, self.path)
            for name in entries:
                named.integer(name, minimum, maximum)
        return items

    def child(self, field: str) -> Fields:
        """Return a required nested object."""
        return Fields(self.take(field), self.where, self.name_of(field))

    def children(self, field: str, minimum: int = 0) -> list[Fields]:
        """Return a required array of objects."""
        entries = self.entries(field, minimum)
        return [entries.child(name) for name in entries.names()]

    def schema(self, version: int = SCHEMA, latest: int | None = None) -> int:
        """Take and return the field ``schema``: from ``version`` to ``latest``, which it is too."""
        return self.integer("schema", minimum=version, maximum=latest or version)

    def done(self) -> None:
        """Raise an error if a field was not taken."""
        for field, value in self._left.items():
            raise self.error(field, value, "no such field")

    def _present(self, field: str) -> bool:
        self.drop_null(field)
        return field in self._left


def read_fields(path: str | Path, kind: FileKind) -> Fields:
    """Read a JSON file of some kind.

    Raises:
        SpecError: it cannot be read, or is a file of another kind.
    """
    value = read_json(path)
    found = [
        one for one, (field, _) in _KINDS.items() if isinstance(value, dict) and field in value
    ]
    if found and kind not in found:
        raise SpecError(f"{path}: is a {found[0]} file, expected a {kind} file ({_KINDS[kind][1]})")
    return Fields(value, str(path))


def read_json(path: str | Path, *, allows_constants: bool = False) -> Any:
    """Return the parsed JSON file.

    Args:
        path: of the file.
        allows_constants: whether ``Infinity`` and ``NaN`` are numbers, as Python writes them.

    Raises:
        SpecError: it cannot be read or is no JSON; names the file, line and column.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SpecError(f"{path}: larger than {MAX_FILE_BYTES} bytes, expected a small file")
        data = path.read_bytes()
        check_downloaded(path, data)
        constant = None if allows_constants else _no_constant
        return json.loads(decode_text(data, str(path)), parse_constant=constant)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a directory, expected a JSON file") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{path}: line {error.lineno} column {error.colno}: not JSON: {error.msg}"
        ) from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{path}: not acceptable JSON: {error}") from None


def encoding_of(head: bytes) -> str:
    """Return the encoding of a text file by its first bytes, a mark included."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "utf-8-sig"


def encoding_of_file(path: Path) -> str:
    """Return the encoding of a text file; a pipe or a device is UTF-8 without a mark.

    Raises:
        OSError: it cannot be read.
    """
    if not path.is_file():
        return "utf-8"
    with path.open("rb") as stream:
        return encoding_of(stream.read(_MARK_BYTES))


def decode_text(data: bytes, where: str) -> str:
    """Return the text of a file's bytes, without a mark.

    Raises:
        SpecError: they are neither UTF-8 nor UTF-16 with a mark.
    """
    try:
        return data.decode(encoding_of(data))
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{where}: found {error.object[error.start : error.start + 1]!r} at byte "
            f"{error.start}, expected text in UTF-8: save the file as UTF-8"
        ) from None


def read_text(path: Path) -> str:
    """Return the text of a file, without a mark; every end of a line becomes a line feed.

    Raises:
        OSError: it cannot be read.
        SpecError: as :func:`decode_text`.
    """
    text = decode_text(path.read_bytes(), str(path))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_downloaded(where: str | os.PathLike[str], head: bytes) -> None:
    """Check that a file is not a pointer of Git LFS, as a clone without git-lfs has them.

    Args:
        where: name of the file.
        head: its first bytes, at least 8 of them.

    Raises:
        SpecError: it is one.
    """
    head = head[: len(_LFS_POINTER)]
    if len(head) >= _LEAST_BYTES and _LFS_POINTER.startswith(head):
        raise SpecError(
            f"{os.fspath(where)}: found a pointer of Git LFS: the file itself was not downloaded; "
            "run 'git lfs pull' in its folder, or download the model with 'hf download'"
        )


def dump_json(value: object) -> str:
    """Return the canonical text of a file: two-space indent, given order, one final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_text(path: str | Path, text: str) -> None:
    """Write a file atomically: a reader never sees a part of it.

    Bytes of file names that are no text become escapes of JSON. A link stays and its target is
    written; a pipe or a device gets the text, and so does the standard output under whatever name.

    Raises:
        SpecError: it cannot be written.
    """
    path, data = Path(path), encode_text(text)
    try:
        found = path.stat() if path.exists() else None
        if found is not None and _is_standard_output(found):
            sys.stdout.flush()
            _write_all(_STANDARD_OUTPUT, data)
        elif found is not None and not stat.S_ISREG(found.st_mode):
            path.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data, found)
    except OSError as error:
        raise SpecError(f"{path}: cannot be written: {error.strerror or error}") from None


def encode_text(text: str) -> bytes:
    """Return UTF-8, with escapes for surrogates: bytes of a file name in another encoding."""
    return text.encode("utf-8", "backslashreplace")


def _replace(path: Path, data: bytes, found: os.stat_result | None) -> None:
    """Put a new file in the place of a regular one, with its mode, or where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of this thread alone: two hosts of a run may have the same health file.
    partial = path.with_name(f"{path.name}.{threading.get_native_id()}.partial")
    partial.write_bytes(data)
    if found is not None:
        partial.chmod(stat.S_IMODE(found.st_mode))
    partial.replace(path)


def _is_standard_output(found: os.stat_result) -> bool:
    try:
        return os.path.samestat(found, os.fstat(_STANDARD_OUTPUT))
    except OSError:  # it is closed
        return False


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def digest_of(value: object) -> str:
    """Return a short stable digest of a JSON-able value (order of keys does not matter)."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(encode_text(text)).hexdigest()[:16]


def _no_constant(name: str) -> float:
    raise ValueError(f"'{name}' is not a JSON number")


Stored = TypeVar("Stored")

MAX_INTEGER = 2**62
_SCALARS = frozenset({int, float, str, bool, type(None)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a field is stored.

    Attributes:
        minimum: least number; of an array, least number of entries.
        maximum: largest number.
        choices: accepted texts or numbers; of an object, accepted keys.
        key: name in the file, ``None`` for the field's own.
        optional: the field may be left out of a file, which means the class's default. Fields
            that can be ``None`` always may.
        null: ``None`` is written as null instead of being left out.
    """

    minimum: float = 0
    maximum: float = math.inf
    choices: Sequence[Any] | None = None
    key: str | None = None
    optional: bool = False
    null: bool = False


_PLAIN = Rule()


@dataclass(frozen=True, slots=True)
class _Member:
    """One field of a class: its name, its name in a file, its type without ``None``."""

    name: str
    key: str
    kind: Any
    rule: Rule
    optional: bool


def from_json(kind: type[Stored], source: Fields) -> Stored:
    """Build a dataclass from its JSON object.

    Raises:
        SpecError: a field is missing, unknown or not acceptable; names the file and the field.
    """
    found = None
    if (version := getattr(kind, "SCHEMA", None)) is not None:
        found = source.schema(version, getattr(kind, "LATEST_SCHEMA", None))
    values = {}
    for member in _members(kind):  # type: ignore[arg-type]  # a class is hashable
        # A free number or text may be null where it may be absent; anything else is left out.
        if not member.optional or source.has(member.key):
            values[member.name] = _read(member.kind, member.rule, source, member.key)
        elif member.kind in (int, float, str) and member.rule.choices is None:
            source.drop_null(member.key)
    source.done()
    try:
        made = kind(**values)
    except SpecError as error:
        raise SpecError(f"{source.where}: {error}") from None
    needed = getattr(made, "schema", found)
    if found is not None and needed is not None and needed > found:
        raise source.error("schema", found, f"{needed}, which has fields that this file uses")
    return made


def to_json(value: Any) -> dict[str, Any]:
    """Return the JSON object of a dataclass."""
    version = getattr(value, "schema", getattr(value, "SCHEMA", None))
    found: dict[str, Any] = {} if version is None else {"schema": version}
    for member in _members(type(value)):  # type: ignore[arg-type]
        item = getattr(value, member.name)
        if item is not None or member.rule.null:
            found[member.key] = item if type(item) in _SCALARS else _plain(item, member.kind)
    return found


@cache
def _members(kind: type) -> tuple[_Member, ...]:
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in fields(kind):
        hint, rule = _ruled(hints[field.name])
        is_nullable = get_origin(hint) in (Union, UnionType)
        if is_nullable:
            hint, rule = _ruled(next(one for one in get_args(hint) if one is not type(None)), rule)
        optional = rule.optional or is_nullable
        assert not optional or field.default is not MISSING, f"{kind}: {field.name} has no default"
        found.append(_Member(field.name, rule.key or field.name, hint, rule, optional))
    return tuple(found)


def _ruled(hint: Any, rule: Rule = _PLAIN) -> tuple[Any, Rule]:
    return get_args(hint) if get_origin(hint) is Annotated else (hint, rule)


def _read(kind: Any, rule: Rule, source: Fields, key: str) -> Any:
    if get_origin(kind) is tuple:
        return tuple(_read_items(get_args(kind), rule, source, key))
    if get_origin(kind) is Literal:
        return source.text(key, get_args(kind))
    if kind is Any:
        return source.take(key)
    if kind is str:
        return source.text(key, rule.choices)
    if kind is bool:
        return source.flag(key)
    if kind is int:
        return source.integer(key, int(rule.minimum), _largest(rule))
    if kind is float:
        return source.number(key, rule.minimum, rule.maximum)
    if kind is Path:
        return Path(source.text(key, rule.choices))
    if is_dataclass(kind):
        return from_json(kind, source.child(key))  # type: ignore[arg-type]
    return kind(source.text(key, tuple(kind)))  # an enumeration of texts


def _largest(rule: Rule) -> int:
    return MAX_INTEGER if rule.maximum == math.inf else int(rule.maximum)


def _read_items(kinds: tuple[Any, ...], rule: Rule, source: Fields, key: str) -> Iterator[Any]:
    if _is_object(kinds):
        name_kind, hint = get_args(kinds[0])
        value_kind, value_rule = _ruled(hint, rule)
        entries = source.child(key)
        names = entries.names()
        if not names and rule.minimum > 0 and rule.choices is not None:
            raise source.error(key, {}, f"an object with some of {', '.join(rule.choices)}")
        for name in names:
            if rule.choices is not None and name not in rule.choices:
                raise entries.error(name, name, f"one of {', '.join(rule.choices)}")
            if name_kind is int and not name.isdecimal():
                raise entries.error(name, name, "a whole number as the key")
            yield name_kind(name), _read(value_kind, value_rule, entries, name)
        return
    is_fixed = kinds[-1] is not Ellipsis
    item_kind, item_rule = _ruled(kinds[0])
    if not is_fixed and item_kind is int:
        limits = int(item_rule.minimum), _largest(item_rule)
        yield from source.integers(key, int(rule.minimum), *limits)
        return
    entries = source.entries(key, len(kinds) if is_fixed else int(rule.minimum))
    names = entries.names()
    if is_fixed and len(names) != len(kinds):
        raise source.error(key, f"{len(names)} entries", f"an array of {len(kinds)} entries")
    for name, item in zip(names, kinds if is_fixed else repeat(kinds[0]), strict=False):
        yield _read(*_ruled(item), entries, name)


def _is_object(kinds: tuple[Any, ...]) -> bool:
    return get_origin(kinds[0]) is tuple and get_args(kinds[0])[-1] is not Ellipsis


def _plain(value: Any, kind: Any) -> Any:
    if isinstance(value, tuple):
        kinds = get_args(kind)
        if _is_object(kinds):
            item_kind = _ruled(get_args(kinds[0])[1])[0]
            return {str(name): _plain(item, item_kind) for name, item in value}
        item_kind = _ruled(kinds[0])[0]
        return list(value) if item_kind is int else [_plain(item, item_kind) for item in value]
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, Path):
        return str(value)
    return value.value if isinstance(value, Enum) else value
