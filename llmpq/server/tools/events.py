"""Events of an answer, and the messages and deltas of chat completions that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The first event of a tool call: its id and the name of its function.

    Attributes:
        index: number of the call in the answer, from 0.
        id: that the result names.
        name: of the function.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """New text of the arguments of a call, which together are JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has ended."""

    index: int


Event = TextDelta | ReasoningDelta | CallBegin | ArgumentsDelta | CallEnd


def join_events(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbours of one kind joined."""
    joined: list[Event] = []
    for _, same in groupby(events, _kind):
        first, *others = same
        texts = [event.text for event in others if not isinstance(event, CallBegin | CallEnd)]
        match first:
            case TextDelta(text) | ReasoningDelta(text) | ArgumentsDelta(_, text) if texts:
                joined.append(replace(first, text="".join([text, *texts])))
            case _:
                joined.append(first)
    return joined


def _kind(event: Event) -> tuple[type, int]:
    """Return what neighbours share that are joined."""
    match event:
        case TextDelta() | ReasoningDelta():
            return type(event), 0
        case CallBegin(index) | ArgumentsDelta(index) | CallEnd(index):
            return type(event), index


def chat_delta(events: Iterable[Event]) -> dict[str, Any]:
    """Return the ``delta`` object of a chunk of chat completions."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in join_events(events):
        match event:
            case TextDelta(text):
                delta["content"] = delta.get("content", "") + text
            case ReasoningDelta(text):
                text = delta.get("reasoning_content", "") + text
                delta |= {"reasoning_content": text, "reasoning": text}
            case CallBegin(index, id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": id, "type": "function", "function": function}
            case ArgumentsDelta(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
            case CallEnd():
                pass
    return delta | {"tool_calls": list(calls.values())} if calls else delta


@dataclass(slots=True)
class AnswerParts:
    """Collects the events of an answer into the message of a chat completion.

    Attributes:
        text: for the user.
        reasoning: before it.
        calls: in OpenAI's form.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Add the events that follow."""
        for event in events:
            match event:
                case TextDelta(text):
                    self.text += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case CallBegin(_, id, name):
                    function = {"name": name, "arguments": ""}
                    self.calls.append({"id": id, "type": "function", "function": function})
                case ArgumentsDelta(index, text):
                    self.calls[index]["function"]["arguments"] += text
                case CallEnd():
                    pass

    def message(self) -> dict[str, Any]:
        """Return the fields of the assistant's message of a chat completion."""
        found: dict[str, Any] = {"content": self.text if self.text or not self.calls else None}
        if self.reasoning:
            found |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.calls:
            found["tool_calls"] = self.calls
        return found
