"""JSON codec of dataclasses: strict reading and canonical writing, derived from the annotations.

A field is stored under its own name, in the order of the class. ``Annotated[..., Rule(...)]``
states what the type does not. Numbers are at least 0 and texts are not empty unless a rule says
otherwise; ``tuple[tuple[K, V], ...]`` is a JSON object, any other tuple an array. A class with
``SCHEMA`` stores that version first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from llmpq.errors import SpecError
from llmpq.spec.fields import Fields

T = TypeVar("T")

MAX_INTEGER = 2**62
_SCALARS = frozenset({int, float, str, bool, type(None)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a field is stored.

    Attributes:
        minimum: least number; of an array, least number of entries.
        maximum: largest number.
        choices: accepted texts; of an object, accepted keys.
        key: name in the file, ``None`` for the field's own.
        optional: the field may be left out of a file, which means the class's default. Fields
            that can be ``None`` always may.
        null: ``None`` is written as null instead of being left out.
    """

    minimum: float = 0
    maximum: float = math.inf
    choices: Sequence[str] | None = None
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


def from_json(kind: type[T], source: Fields) -> T:
    """Build a dataclass from its JSON object.

    Raises:
        SpecError: a field is missing, unknown or not acceptable; names the file and the field.
    """
    if (version := getattr(kind, "SCHEMA", None)) is not None:
        source.schema(version)
    values = {}
    for member in _members(kind):  # type: ignore[arg-type]  # a class is hashable
        # A free number or text may be null where it may be absent; anything else is left out.
        if not member.optional or source.has(member.key):
            values[member.name] = _read(member.kind, member.rule, source, member.key)
        elif member.kind in (int, float, str) and member.rule.choices is None:
            source.drop_null(member.key)
    source.done()
    try:
        return kind(**values)
    except SpecError as error:
        raise SpecError(f"{source.where}: {error}") from None


def to_json(value: Any) -> dict[str, Any]:
    """Return the JSON object of a dataclass."""
    version = getattr(value, "SCHEMA", None)
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
