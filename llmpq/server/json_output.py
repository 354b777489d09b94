"""JSON of answers, made in parts where it is long."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response, StreamingResponse

PART_ITEMS = 32
"""Items of a list that become JSON at once: with 20 log-probabilities each, half a millisecond."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
SHORT_BODY = 1 << 20
"""Bytes of a body that is sent at once."""


def dump_json(value: object) -> bytes:
    """Return JSON in UTF-8; lone surrogates are escaped, as JSON allows."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


PING = b":\n\n"
"""A comment, which is no event of a stream."""


def event_of(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event; in the APIs whose events have types, the type is its name."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + dump_json(value) + b"\n\n"


class SharedItems:
    """Items that several lists begin with, whose JSON is made once.

    Attributes:
        items: of every list.
    """

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self._json: bytes | None = None

    def parts(self) -> Iterator[bytes]:
        """Yield the JSON of the items, without brackets."""
        if self._json is None:
            made = []
            for part in _item_parts(self.items):
                made.append(part)
                yield part
            self._json = b"".join(made)
        else:
            yield self._json


class SharedList(list[Any]):
    """A list that begins with shared items."""

    def __init__(self, shared: SharedItems, rest: Sequence[Any]) -> None:
        super().__init__([*shared.items, *rest])
        self.shared = shared


def json_parts(value: object) -> Iterator[bytes]:
    """Yield the JSON of :func:`dump_json` in parts, so that others can run between them.

    Objects are cut between their fields, long lists between their items.
    """
    if isinstance(value, dict):
        yield b"{"
        for place, (name, item) in enumerate(value.items()):
            yield b"," * (place > 0) + dump_json(name) + b":"
            yield from json_parts(item)
        yield b"}"
    elif isinstance(value, SharedList) and value.shared.items:
        yield b"["
        yield from value.shared.parts()
        rest = value[len(value.shared.items) :]
        yield b"," * bool(rest)
        yield from _item_parts(rest)
        yield b"]"
    elif isinstance(value, list) and len(value) > PART_ITEMS:
        yield b"["
        yield from _item_parts(value)
        yield b"]"
    else:
        yield dump_json(value)


def _item_parts(items: list[Any]) -> Iterator[bytes]:
    """Yield the JSON of a list in parts, without its brackets."""
    for start in range(0, len(items), PART_ITEMS):
        yield b"," * (start > 0) + dump_json(items[start : start + PART_ITEMS])[1:-1]


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer with a JSON body."""
    return Response(dump_json(value), status, headers, media_type="application/json")


def parts_response(parts: Sequence[bytes]) -> Response:
    """Return an answer with a JSON body; a long one is sent as fast as the client reads it."""
    size = sum(map(len, parts))
    if size <= SHORT_BODY:
        return Response(b"".join(parts), media_type="application/json")

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    headers = {"Content-Length": str(size)}
    return StreamingResponse(body(), headers=headers, media_type="application/json")
