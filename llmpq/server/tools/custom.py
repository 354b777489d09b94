"""Custom tools, whose input is any text: a model is offered functions that take it as JSON.

Agents declare so what edits files (``apply_patch``). Chat templates know functions only. A call of
such a function is given back as one of the custom tool, its text decoded while it arrives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from llmpq.server.tools.events import ArgumentsDelta, CallBegin, CallEnd, Event

Json = dict[str, Any]
CUSTOM = "custom"
INPUT = "input"
"""The parameter of the functions."""
_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_PIECE = re.compile(
    rf'[^"\\]+|{_HALF}(?:\\u[0-9a-fA-F]{{4}}|(?=[^\\]|\\[^u]))'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u]"
)
"""Text of a JSON string that can be decoded alone: half of a surrogate pair waits for the other."""
_CLOSING = re.compile(r'"\s*\}?\s*$')


def as_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function that stands for a custom tool of chat completions, or the tool."""
    custom = tool.get(CUSTOM)
    if tool.get("type") != CUSTOM or not isinstance(custom, Mapping):
        return tool
    form = custom.get("format")
    form = form if isinstance(form, Mapping) else {}
    grammar = form.get("grammar", form)  # responses have its fields in the format itself
    texts = [str(custom.get("description") or "")]
    if isinstance(grammar, Mapping) and grammar.get("definition"):
        syntax = grammar.get("syntax") or "lark"
        texts.append(f"The input has the form of this {syntax} grammar:\n{grammar['definition']}")
    description = "\n\n".join(text for text in texts if text)
    function = {"name": custom.get("name"), "description": description, "parameters": _PARAMETERS}
    return {"type": "function", "function": function}


def as_function_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call of the history as one of the function, or as it is."""
    custom = call.get(CUSTOM)
    if call.get("type") != CUSTOM or not isinstance(custom, Mapping):
        return call
    function = {"name": custom.get("name"), "arguments": {INPUT: custom.get(INPUT, "")}}
    return {"id": call.get("id"), "type": "function", "function": function}


class CustomInputs:
    """Turns calls of the functions of one answer into calls of custom tools.

    Args:
        names: of the custom tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._readers: dict[int, _InputReader] = {}

    def events(self, events: Iterable[Event]) -> list[Event]:
        """Return events whose arguments are the input where a custom tool is called."""
        found: list[Event] = []
        for event in events:
            match event:
                case CallBegin(index, _, name) if name in self._names:
                    self._readers[index] = _InputReader()
                    found.append(replace(event, is_custom=True))
                case ArgumentsDelta(index, text) if index in self._readers:
                    found += _input_of(index, self._readers[index].feed(text))
                case CallEnd(index) if index in self._readers:
                    found += [*_input_of(index, self._readers[index].finish()), event]
                case _:
                    found.append(event)
        return found


def _input_of(index: int, text: str) -> list[Event]:
    return [ArgumentsDelta(index, text, is_custom=True)] if text else []


class _InputReader:
    """Decodes ``{"input": "..."}`` while it arrives; of other arguments, the only text, or all."""

    def __init__(self) -> None:
        self._text = ""
        self._is_open = self._is_closed = False

    def feed(self, text: str) -> str:
        """Return the input that the next text of the arguments makes certain."""
        self._text += text
        if not self._is_open:
            opening = _OPENING.match(self._text)
            if opening is None:
                return ""
            self._is_open, self._text = True, self._text[opening.end() :]
        end = 0
        while not self._is_closed and (piece := _PIECE.match(self._text, end)) is not None:
            end = piece.end()
        whole, self._text = self._text[:end], self._text[end:]
        self._is_closed = self._is_closed or self._text.startswith('"')
        return "".join(map(_decoded, _PIECE.findall(whole)))

    def finish(self) -> str:
        """Return what remains at the end of the call."""
        if self._is_open:  # what is left of a text that is open is no JSON
            return "" if self._is_closed else _CLOSING.sub("", self._text)
        try:
            found = json.loads(self._text)
        except (ValueError, RecursionError):
            return self._text
        values = list(found.values()) if isinstance(found, dict) else [found]
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
        return self._text if values else ""


def _decoded(piece: str) -> str:
    """Return the text of a piece; models write escapes that JSON has not, which stay."""
    if not piece.startswith("\\"):
        return piece
    try:
        text = str(json.loads(f'"{piece}"'))
    except ValueError:
        return piece
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
