"""Events of an answer, the parts that they make, and messages and deltas of chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple


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
        is_custom: whether it is a custom tool, whose arguments are any text.
    """

    index: int
    id: str
    name: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """New text of the arguments of a call, which together are JSON, or a custom tool's input."""

    index: int
    text: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has ended."""

    index: int


_FIELDS = {False: ("function", "arguments"), True: ("custom", "input")}
"""Of calls in chat completions: the object, and its field of the arguments."""
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
            case CallBegin(index, id, name, is_custom):
                calls[index] = {"index": index, **chat_call(id, name, "", is_custom=is_custom)}
            case ArgumentsDelta(index, text, is_custom):
                kind, key = _FIELDS[is_custom]
                call = calls.setdefault(index, {"index": index, kind: {key: ""}})
                call[kind][key] += text
            case CallEnd():
                pass
    return delta | {"tool_calls": list(calls.values())} if calls else delta


def chat_call(id: str, name: str, arguments: str, *, is_custom: bool) -> dict[str, Any]:
    """Return a call as chat completions have it."""
    kind, key = _FIELDS[is_custom]
    return {"id": id, "type": kind, kind: {"name": name, key: arguments}}


@dataclass(slots=True)
class AnswerPart:
    """Text, reasoning or a call, between parts of other kinds.

    Attributes:
        kind: of the part.
        id: of a call.
        name: of the function that is called.
        pieces: of its text so far.
        is_complete: whether the model has ended it, or begun another one.
        is_custom: whether a custom tool is called.
    """

    kind: Literal["text", "reasoning", "call"]
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False
    is_custom: bool = False

    @property
    def text(self) -> str:
        """The text so far; of a call, its arguments."""
        return "".join(self.pieces)


class PartStep(NamedTuple):
    """What an event changes in the parts of an answer.

    Attributes:
        kind: whether the part begins, gets text, or ends.
        place: of the part in the answer, from 0.
        part: after the step; later steps do not change it where it begins.
        text: that is new.
    """

    kind: Literal["begin", "delta", "end"]
    place: int
    part: AnswerPart
    text: str = ""


@dataclass(slots=True)
class AnswerParts:
    """Collects the events of an answer into its parts, each of which ends before the next begins.

    Attributes:
        parts: in their order.
    """

    parts: list[AnswerPart] = field(default_factory=list)

    @property
    def text(self) -> str:
        """For the user."""
        return self._joined("text")

    @property
    def reasoning(self) -> str:
        """The model's reasoning."""
        return self._joined("reasoning")

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's form."""
        return [
            chat_call(part.id, part.name, part.text, is_custom=part.is_custom)
            for part in self.parts
            if part.kind == "call"
        ]

    def add(self, events: Iterable[Event]) -> list[PartStep]:
        """Add the events that follow; return what they change."""
        return [step for event in events for step in self._steps(event)]

    def finish(self) -> list[PartStep]:
        """End the answer; one without any part has an empty text."""
        steps = [] if self.parts else list(self._begin(AnswerPart("text")))
        if self._is_open:
            steps.append(PartStep("end", len(self.parts) - 1, self.parts[-1]))
        return steps

    def message(self) -> dict[str, Any]:
        """Return the fields of the assistant's message of a chat completion."""
        text, reasoning, calls = self.text, self.reasoning, self.calls
        found: dict[str, Any] = {"content": text if text or not calls else None}
        if reasoning:
            found |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            found["tool_calls"] = calls
        return found

    @property
    def _is_open(self) -> bool:
        return bool(self.parts) and not self.parts[-1].is_complete

    def _joined(self, kind: str) -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)

    def _steps(self, event: Event) -> Iterator[PartStep]:
        match event:
            case TextDelta("") | ReasoningDelta("") | ArgumentsDelta(_, ""):
                pass
            case TextDelta(text):
                yield from self._extend("text", text)
            case ReasoningDelta(text):
                yield from self._extend("reasoning", text)
            case CallBegin(_, id, name, is_custom):
                yield from self._begin(AnswerPart("call", id=id, name=name, is_custom=is_custom))
            case ArgumentsDelta(_, text):
                yield from self._extend("call", text)
            case CallEnd():
                yield from self._end()

    def _begin(self, part: AnswerPart) -> Iterator[PartStep]:
        yield from self._end()
        self.parts.append(part)
        yield PartStep("begin", len(self.parts) - 1, replace(part, pieces=[]))

    def _extend(self, kind: Literal["text", "reasoning", "call"], text: str) -> Iterator[PartStep]:
        if not self._is_open or self.parts[-1].kind != kind:
            yield from self._begin(AnswerPart(kind))
        part = self.parts[-1]
        part.pieces.append(text)
        yield PartStep("delta", len(self.parts) - 1, part, text)

    def _end(self) -> Iterator[PartStep]:
        if self._is_open:
            self.parts[-1].is_complete = True
            yield PartStep("end", len(self.parts) - 1, self.parts[-1])
