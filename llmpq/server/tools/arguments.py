"""Arguments of calls that a model does not write as JSON, read as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llmpq.server.tools.call_format import CallFormat, pieces
from llmpq.server.tools.text_source import Emit, Steps, TextSource, is_json

_MAX_DEPTH = 64
_MAX_REFERENCES = 16
"""That lead from one to the next."""
_ANY: Mapping[str, Any] = {}
_BARE_KEY = re.compile(r"[^:{},\[\]<]*")
_BARE_VALUE = re.compile(r"[^,}\]<]*")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def escaped(text: str) -> str:
    """Return the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def resolved(schema: object, root: object) -> Mapping[str, Any]:
    """Return a schema, followed through references to the definitions of its root.

    One that is no object, lies elsewhere or has no end allows anything.
    """
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return _ANY
        name = schema.get("$ref")
        if not isinstance(name, str):
            return schema
        if not f"{name}/".startswith("#/"):
            return _ANY
        schema = root
        for part in name.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return _ANY


def value_types(schema: object, root: object) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty where it does not say.

    Args:
        schema: of a value.
        root: schema with the definitions that it refers to.
    """
    return _types_of(schema, root, {}, 0)


def _types_of(
    schema: object, root: object, found: dict[int, frozenset[str]], depth: int
) -> frozenset[str]:
    """Return the types; those of a schema to which many refer are found once."""
    schema = resolved(schema, root)
    if depth > _MAX_DEPTH:
        return frozenset()
    if id(schema) not in found:
        found[id(schema)] = frozenset()  # of what refers to itself
        found[id(schema)] = _stated_types(schema, root, found, depth + 1)
    return found[id(schema)]


def _stated_types(
    schema: Mapping[str, Any], root: object, found: dict[int, frozenset[str]], depth: int
) -> frozenset[str]:
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset({stated})
    if isinstance(stated, list):
        return frozenset(filter(_TYPES.__contains__, map(str, stated)))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return frozenset(_type_of(value) for value in values)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            parts = [_types_of(part, root, found, depth) for part in schema[name]]
            if name == "allOf":
                parts = [part for part in parts if part]
                return frozenset.intersection(*parts) if parts else frozenset()
            return frozenset().union(*parts) if all(parts) else frozenset()
    return frozenset()


def value_json(text: str, schema: object, root: object = None) -> str:
    """Return the JSON of a value that may be a text or JSON, as a schema wants it.

    Args:
        text: of the value.
        schema: of the value.
        root: schema with the definitions that it refers to.
    """
    types, bare = value_types(schema, root), text.strip()
    bare = {"True": "true", "False": "false", "None": "null"}.get(bare, bare)
    if is_json(bare):
        found = _type_of(json.loads(bare))
        fits = found in types or (found == "integer" and "number" in types)
        if fits or "string" not in types:
            return bare
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: object) -> str:
    kind = type(value)
    return next((name for name, types in _TYPES.items() if kind in types), "object")


def read_tags(
    source: TextSource, form: CallFormat, schema: Mapping[str, Any], emit: Emit
) -> Steps[None]:
    """Read arguments between marks, and emit them as one JSON object.

    Args:
        source: behind the name of the function.
        form: of the calls.
        schema: of the arguments.
        emit: takes the JSON.
    """
    properties = resolved(schema, schema).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    key_close = pieces(form.key_close)
    value_close = pieces(form.value_close)[0]
    # The line ends of a value belong to the marks where the template writes them.
    ends: tuple[str, ...] = (value_close,)
    others: tuple[str, ...] = ()
    if form.value_close.startswith("\n"):
        ends = ("\n" + value_close, value_close)
        # Models leave the mark out: a value ends where the next one or the end of the call begins.
        others = ("\n" + form.key_open.strip(), "\n" + form.call_close.strip())
    is_first = True
    while (yield from source.tokens(pieces(form.key_open))):
        key, mark = yield from source.collect(lambda take: source.until(key_close[:1], take))
        if not mark or not (yield from source.tokens(key_close[1:])):
            return
        if form.key_close.endswith("\n"):
            yield from source.literal("\n")
        key = key.strip()
        emit(("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        is_first = False
        wanted = properties.get(key)
        if value_types(wanted, schema) == {"string"}:
            emit('"')
            mark = yield from source.until(
                (*ends, *others), lambda text: emit(escaped(text)), is_read=False
            )
            emit('"' * bool(mark))
        else:
            value, mark = yield from source.collect(
                lambda take: source.until((*ends, *others), take, is_read=False)
            )
            emit(value_json(value, wanted, schema) if mark else value)
        if not mark:
            return
        yield from source.any_of(ends)
    emit("{}" if is_first else "}")


def read_quoted(source: TextSource, quote: str, emit: Emit, depth: int = 0) -> Steps[bool]:
    """Read a value whose keys are bare and whose texts stand between quotes; emit it as JSON.

    Returns:
        Whether the value is whole; one that is nested too deep is not.
    """
    if depth > _MAX_DEPTH:
        return False
    yield from source.blanks()
    if (yield from source.literal(quote)):
        emit('"')
        mark = yield from source.until((quote,), lambda text: emit(escaped(text)))
        emit('"' * bool(mark))
        return bool(mark)
    if (yield from source.literal("{")):
        return (yield from _read_items(source, quote, emit, "}", depth))
    if (yield from source.literal("[")):
        return (yield from _read_items(source, quote, emit, "]", depth))
    text, _ = yield from source.collect(lambda take: source.run(_BARE_VALUE, take))
    emit(value_json(text.strip(), None))
    return bool(text.strip())


def _read_items(source: TextSource, quote: str, emit: Emit, end: str, depth: int) -> Steps[bool]:
    """Read the rest of an object or of a list."""
    emit("{" if end == "}" else "[")
    separator = ""
    while True:
        if (yield from source.tokens((end,))):
            emit(end)
            return True
        if separator and not (yield from source.tokens((",",))):
            return False
        emit(separator)
        separator = ", "
        if end == "}":
            yield from source.blanks()
            key = yield from _key(source, quote)
            if not (yield from source.tokens((":",))):
                return False
            emit(json.dumps(key, ensure_ascii=False) + ": ")
        if not (yield from read_quoted(source, quote, emit, depth + 1)):
            return False


def _key(source: TextSource, quote: str) -> Steps[str]:
    if (yield from source.literal(quote)):
        found, _ = yield from source.collect(lambda take: source.until((quote,), take))
        return found
    found, _ = yield from source.collect(lambda take: source.run(_BARE_KEY, take))
    return found.strip()
