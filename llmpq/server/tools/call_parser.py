"""Splits the text of an answer into text, reasoning and tool calls, while it arrives."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any

from llmpq.server.tools.arguments import read_quoted, read_tags
from llmpq.server.tools.call_format import (
    HARMONY_ENDS,
    CallFormat,
    IdStyle,
    TemplateFormat,
    pieces,
)
from llmpq.server.tools.events import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    Event,
    ReasoningDelta,
    TextDelta,
    join_events,
)
from llmpq.server.tools.text_source import Emit, Steps, TextSource

MakeId = Callable[[str, int], str]
_NAME = re.compile(r"[\w.:/\-]*")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([\w.:/\-]+)")
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?):(\d+)")
_ARGUMENTS_KEYS = ("arguments", "parameters")
_HARMONY_HEADS = ("<|channel|>", "<|start|>")
_HARMONY_HEAD_ENDS = ("<|message|>", *HARMONY_ENDS)
_HARMONY_BODY_ENDS = (*HARMONY_ENDS, *_HARMONY_HEADS)
_OTHER_KEYS = frozenset({"type", "id", "tool_call_id"})
_ALPHANUMERIC = string.ascii_letters + string.digits


def random_id(style: IdStyle) -> MakeId:
    """Return what makes the ids of calls.

    Args:
        style: of the template: nine letters or digits, name and number, or any.
    """

    def make(name: str, index: int) -> str:
        if style == "kimi":
            return f"functions.{name}:{index}"
        if style == "nine":
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    return make


class CallParser:
    """Splits one answer; the events joined do not depend on where its text was cut.

    White space around reasoning and calls is left out. What begins as a call and is none is text.

    Args:
        form: of the chat template; without ``calls`` only reasoning is split.
        schemas: of the arguments of each function.
        is_reasoning: whether the prompt has opened the reasoning.
        make_id: of a call from its name and its number in the answer.
    """

    def __init__(
        self,
        form: TemplateFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        is_reasoning: bool = False,
        make_id: MakeId | None = None,
    ) -> None:
        calls = form.calls
        self._form = form
        self._schemas = schemas
        self._make_id = make_id or random_id("random" if calls is None else calls.id_style)
        self._source = TextSource()
        self._events: list[Event] = []
        self._blanks = ""  # white space that is text if text follows
        self._reasoning_blanks = ""
        self._strips = False  # whether white space that follows is left out
        self._at_start = True  # whether no text stands before, but reasoning and calls
        self._num_calls = 0
        self._reasoning_spans: list[tuple[int, int | None]] = []  # one that is open has no end
        is_harmony = calls is not None and calls.kind == "harmony"
        self._steps = self._harmony() if is_harmony else self._answer(is_reasoning)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    @property
    def position(self) -> int:
        """Characters of the answer that were read."""
        return self._source.position

    def is_reasoning_at(self, offset: int) -> bool:
        """Return whether a character that was read stands between the marks of reasoning."""
        spans = self._reasoning_spans
        return any(start <= offset and (end is None or offset < end) for start, end in spans)

    def feed(self, text: str) -> list[Event]:
        """Take the text that follows; return what is certain by now."""
        self._source.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """Return what remains at the end of the answer."""
        self._source.is_finished = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        found, self._events = self._events, []
        return join_events(found)

    def _answer(self, is_reasoning: bool) -> Steps[None]:
        calls, reasoning, source = self._form.calls, self._form.reasoning, self._source
        triggers = () if calls is None else (calls.trigger, calls.second_trigger)
        marks = [mark for mark in (*triggers, reasoning.open if reasoning else "") if mark]
        if reasoning is not None and is_reasoning:
            yield from self._reasoning(reasoning.close)
        while True:
            if calls is not None and calls.is_bare and self._at_start:
                source.mark()
                if (yield from self._object_call(calls)):
                    yield from source.tokens(pieces(calls.separator))
                    continue
                source.rewind()
            mark = yield from source.until(marks, self._text)
            if not mark:
                break
            if calls is not None and mark in triggers:
                yield from self._group(calls, mark)
            elif reasoning is not None and self._at_start:
                yield from self._reasoning(reasoning.close)
            else:
                self._text(mark)
        self._end_text()

    def _text(self, text: str) -> None:
        """Emit text, but hold white space back: it may stand before a call."""
        if self._strips:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._events.append(TextDelta(self._blanks + body))
            self._blanks, self._strips, self._at_start = "", False, False
        self._blanks += text[len(body) :]

    def _end_text(self) -> None:
        if self._blanks:
            self._events.append(TextDelta(self._blanks))
            self._blanks = ""

    def _reasoning(self, close: str) -> Steps[None]:
        """Read reasoning, up to its mark or the end of the answer."""
        self._open_span()
        yield from self._source.blanks()
        mark = yield from self._source.until((close,), self._reason)
        self._close_span(len(mark))
        self._leave_blanks_out()

    def _open_span(self) -> None:
        self._reasoning_spans.append((self._source.position, None))

    def _close_span(self, mark_length: int) -> None:
        start, _ = self._reasoning_spans[-1]
        self._reasoning_spans[-1] = start, self._source.position - mark_length

    def _reason(self, text: str) -> None:
        text = self._reasoning_blanks + text
        body = text.rstrip()
        if body:
            self._events.append(ReasoningDelta(body))
        self._reasoning_blanks = text[len(body) :]

    def _leave_blanks_out(self) -> None:
        """Leave out the white space before and after this place."""
        self._blanks = self._reasoning_blanks = ""
        self._strips = True

    def _group(self, calls: CallFormat, mark: str) -> Steps[None]:
        """Read a group of calls behind its first mark, or behind the second without the first."""
        source = self._source
        source.mark()
        opening = pieces(calls.group_open + calls.call_open)
        is_whole = mark == calls.trigger
        is_opened = yield from source.tokens(opening[1 if is_whole else 2 :])
        if not (is_opened and (yield from self._call(calls, any_name=is_whole))):
            source.rewind()
            self._text(mark)
            return
        group, separator = pieces(calls.group_open), pieces(calls.separator)
        while group:
            source.mark()
            has_separator = bool(separator) and (yield from source.tokens(separator))
            opening = pieces(calls.call_open)
            follows = (yield from source.tokens(opening)) if opening else has_separator
            if not (follows and (yield from self._call(calls))):
                source.rewind()
                break
        for piece in pieces(calls.group_close):
            yield from source.tokens((piece,))

    def _call(self, calls: CallFormat, *, any_name: bool = True) -> Steps[bool]:
        """Read a call up to its end; ``False`` where there is none, or not of a function."""
        if calls.kind == "object":
            is_call = yield from self._object_call(calls)
        else:
            is_call = yield from self._named_call(calls, any_name=any_name)
        if not is_call:
            return False
        close = pieces(calls.call_close)
        if close and not (yield from self._source.tokens(close)):
            # What stands between the arguments and the end of the call has no meaning.
            marks = tuple(dict.fromkeys((close[0], calls.trigger)))
            mark = yield from self._source.until(marks, lambda _: None, is_read=False)
            if mark == close[0]:  # the marks that follow may be missing
                for piece in close:
                    yield from self._source.tokens((piece,))
        return True

    def _named_call(self, calls: CallFormat, *, any_name: bool) -> Steps[bool]:
        """Read a call whose name stands before its arguments."""
        source = self._source
        yield from source.blanks()
        name, _ = yield from source.collect(lambda take: source.run(_NAME, take, is_kept=True))
        found = _KIMI_ID.fullmatch(name) if calls.id_style == "kimi" else None
        is_name = bool(name) and (any_name or name in self._schemas)
        if not is_name or not (yield from self._arguments_follow(calls, is_sure=any_name)):
            return False
        index = self._begin(found[1] if found else name, found[0] if found else None)
        emit = self._arguments_of(index)
        if calls.kind == "tags":
            schema = self._schemas.get(name) or {}
            yield from read_tags(source, calls, schema, emit)
        elif calls.kind == "quoted":
            yield from read_quoted(source, calls.quote, emit)
        else:
            yield from source.blanks()
            if (yield from source.peek()) == "{":
                yield from source.json_value(emit)
            else:
                yield from self._raw_arguments(calls, emit)
        self._end(index)
        return True

    def _arguments_follow(self, calls: CallFormat, *, is_sure: bool) -> Steps[bool]:
        """Read what stands between the name and the arguments; ``False`` where there are none.

        Args:
            calls: their format.
            is_sure: whether a name is enough.
        """
        close = pieces(calls.name_close)
        if close and (yield from self._source.tokens(close)) and is_sure:
            return True
        follows = [*pieces(calls.key_open)[:1], *pieces(calls.call_close)[:1]]
        for text in follows if calls.kind == "tags" else ["{"]:
            if (yield from self._source.comes(text)):
                return True
        return False

    def _raw_arguments(self, calls: CallFormat, emit: Emit) -> Steps[None]:
        """Read arguments that are no object: the text up to the end of the call."""
        source, marks = self._source, pieces(calls.call_close)[:1] or (calls.trigger,)
        text, _ = yield from source.collect(lambda take: source.until(marks, take, is_read=False))
        emit(text.strip() or "{}")

    def _object_call(self, calls: CallFormat) -> Steps[bool]:
        """Read a call that is a JSON object; the arguments may stand before the name."""
        source, index, arguments = self._source, None, ""
        has_arguments = False
        if not (yield from source.tokens(("{",))):
            return False
        while not (yield from source.tokens(("}",))):
            yield from source.tokens((",",))
            key, is_key = yield from self._key()
            if not is_key:
                break
            if key == calls.name_key and index is None:
                name, is_whole = yield from source.collect(source.json_value)
                name = decoded(name) if is_whole else ""
                if not name or (calls.is_bare and name not in self._schemas):
                    return False
                index = self._begin(name)
                self._emit_arguments(index, arguments)
            elif key in (calls.arguments_key, *_ARGUMENTS_KEYS) and not has_arguments:
                has_arguments = True
                arguments = yield from self._object_arguments(index)
            elif index is None and calls.is_bare and key not in _OTHER_KEYS:
                return False
            else:
                yield from source.collect(source.json_value)
        if index is None:
            return False
        self._emit_arguments(index, "" if has_arguments else "{}")
        self._end(index)
        return True

    def _object_arguments(self, index: int | None) -> Steps[str]:
        """Read the arguments of a call that is an object; return them where no name came before."""
        source = self._source
        if index is not None and (yield from source.peek()) == "{":
            yield from source.json_value(self._arguments_of(index))
            return ""
        found, _ = yield from source.collect(source.json_value)
        self._emit_arguments(index, object_json(found))
        return object_json(found)

    def _key(self) -> Steps[tuple[str, bool]]:
        """Read a key of an object with its colon."""
        source = self._source
        yield from source.blanks()
        if (yield from source.peek()) != '"':
            return "", False
        key, _ = yield from source.collect(source.json_value)
        is_key = yield from source.tokens((":",))
        yield from source.blanks()
        return decoded(key), is_key

    def _begin(self, name: str, id: str | None = None) -> int:
        self._source.release()
        self._leave_blanks_out()
        self._at_start = True
        index = self._num_calls
        self._num_calls += 1
        self._events.append(CallBegin(index, id or self._make_id(name, index), name))
        return index

    def _arguments_of(self, index: int) -> Emit:
        return lambda text: self._emit_arguments(index, text)

    def _emit_arguments(self, index: int | None, text: str) -> None:
        if text and index is not None:
            self._events.append(ArgumentsDelta(index, text))

    def _end(self, index: int) -> None:
        self._events.append(CallEnd(index))

    def _harmony(self) -> Steps[None]:
        """Read messages of channels."""
        source = self._source
        while mark := (yield from source.until(_HARMONY_HEADS, self._text)):
            head, message = yield from source.collect(
                lambda take: source.until(_HARMONY_HEAD_ENDS, take)
            )
            if message != "<|message|>":
                continue
            channel, recipient = _CHANNEL.search(mark + head), _RECIPIENT.search(head)
            name = recipient[1].removeprefix("functions.") if recipient else ""
            if recipient and (recipient[1] != name or name in self._schemas):
                yield from self._harmony_call(name)
            elif recipient or (channel is not None and channel[1] == "analysis"):
                self._open_span()
                yield from source.until(_HARMONY_BODY_ENDS, self._reason, is_read=False)
                self._close_span(0)
                self._leave_blanks_out()
            else:
                yield from source.until(_HARMONY_BODY_ENDS, self._text, is_read=False)
            yield from source.any_of(HARMONY_ENDS)
        self._end_text()

    def _harmony_call(self, name: str) -> Steps[None]:
        index = self._begin(name)
        has_arguments = False

        def emit(text: str) -> None:
            nonlocal has_arguments
            has_arguments = has_arguments or bool(text.strip())
            self._emit_arguments(index, text)

        yield from self._source.blanks()
        yield from self._source.until(_HARMONY_BODY_ENDS, emit, is_read=False)
        self._emit_arguments(index, "" if has_arguments else "{}")
        self._end(index)


def decoded(text: str) -> str:
    """Return the text of a JSON string; empty where there is none."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def object_json(text: str) -> str:
    """Return the JSON of arguments that may stand in a string, or be null."""
    if text.startswith('"'):
        return decoded(text) or "{}"
    return "{}" if text in ("", "null") else text
