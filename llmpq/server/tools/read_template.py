"""Reads from a chat template how its model writes tool calls and reasoning.

The template renders small conversations with marked texts. What stands around the marks is the
format, whatever the template's source looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

from llmpq.server.errors import ApiError
from llmpq.server.tools.call_format import (
    ID_PLACE,
    CallFormat,
    ReasoningFormat,
    TemplateFormat,
)

Json = dict[str, Any]
_USER, _ANSWER, _THOUGHT = "QzUser", "QzAnswer", "QzThought"
_NAMES = ("qzfirst", "qzsecond")
_KEYS = ("qzone", "qztwo")
_VALUES = ("qzval", "qzvalb")
_IDS = ("qzid00001", "qzid00002")
"""Nine letters and digits: some templates take no others."""
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
_PRINTED = re.compile("""["']tool_calls["']""")
"""In a message that is printed whole: that is no form of a call."""
_REASONING = (
    ReasoningFormat(open="<think>", close="</think>"),
    ReasoningFormat(open="[THINK]", close="[/THINK]"),
    ReasoningFormat(open="<seed:think>", close="</seed:think>"),
    ReasoningFormat(open="<|START_THINKING|>", close="<|END_THINKING|>"),
    ReasoningFormat(open="<|channel>thought", close="<channel|>"),
)
"""Of templates that leave reasoning out of the history."""
_HARMONY = CallFormat(kind="harmony", is_parallel=False)
_KIMI = CallFormat(
    kind="json",
    group_open="<|tool_calls_section_begin|>",
    call_open="<|tool_call_begin|>",
    name_close="<|tool_call_argument_begin|>",
    call_close="<|tool_call_end|>",
    group_close="<|tool_calls_section_end|>",
    id_style="kimi",
)


class Render(Protocol):
    """Renders a conversation: ``ChatTemplate.render``."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
    ) -> str:
        """Return the prompt; raise ``ApiError`` where the template rejects the messages."""
        ...


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a template writes around an answer of text.

    Attributes:
        before: between the text of the user and the answer.
        after: behind the answer.
    """

    before: str
    after: str


def read_template(render: Render, source: str | Mapping[str, str]) -> TemplateFormat:
    """Return what a chat template says about answers, and what it needs in messages.

    Args:
        render: the template.
        source: of the template; read for marks only, where the template renders none.
    """
    text = source if isinstance(source, str) else "\n".join(source.values())
    probe = _Probe(render)
    if _USER not in (probe.turn(None) or ""):
        return TemplateFormat()
    frame = probe.frame()
    if "<|channel|>" in text and "<|message|>" in text:
        return replace(_needs(probe), calls=_HARMONY)
    found = _needs(probe)
    calls = None if frame is None else _read_calls(probe, frame, found)
    if calls is None and _KIMI.group_open in text:
        calls = _KIMI
    if calls is not None:
        calls = _with_details(calls, probe, text)
    return replace(found, calls=calls, reasoning=_read_reasoning(probe, text))


class _Probe:
    """Renders marked conversations; ``None`` stands for what a template rejects."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.takes_text_arguments = False
        self.needs_text_arguments = False

    def frame(self) -> _Frame | None:
        """Return what stands around an answer of text."""
        found = self.turn({"content": _ANSWER})
        if found is None or _ANSWER not in found:
            return None
        before, _, after = found.partition(_ANSWER)
        return _Frame(before, after)

    def calls(self, *calls: tuple[str, object], ids: Sequence[str] = _IDS) -> str | None:
        """Return an answer with tool calls, from the text of the user on."""
        made = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, (name, arguments) in zip(ids, calls, strict=False)
        ]
        return self.turn({"content": "", "tool_calls": made})

    def turn(self, answer: Json | None) -> str | None:
        """Return what stands behind the text of the user; without an answer, all of the prompt."""
        messages: list[Json] = [{"role": "user", "content": _USER}]
        if answer is not None:
            messages.append({"role": "assistant", **answer})
        try:
            text = self._render(messages, tools=_tools(), add_generation_prompt=answer is None)
        except ApiError:
            return None
        if answer is None:
            return text
        return text.rpartition(_USER)[2] if _USER in text else None


def _tools() -> list[Json]:
    properties = {key: {"type": "string", "description": "d"} for key in _KEYS}
    parameters = {"type": "object", "properties": properties, "required": list(_KEYS)}
    return [
        {
            "type": "function",
            "function": {"name": name, "description": "d", "parameters": parameters},
        }
        for name in _NAMES
    ]


def _arguments(count: int = 1) -> Json:
    return dict(zip(_KEYS[:count], _VALUES, strict=False))


def _needs(probe: _Probe) -> TemplateFormat:
    """Return what the template needs in messages."""
    one = json.dumps(_arguments())
    as_object = probe.calls((_NAMES[0], _arguments()))
    as_text = probe.calls((_NAMES[0], one))
    takes_text = as_text is not None and one in as_text
    takes_object = as_object is not None and _VALUES[0] in as_object
    is_python = as_object is not None and str(_arguments()) in as_object
    probe.needs_text_arguments = takes_text and (is_python or not takes_object)
    return TemplateFormat(
        needs_text_arguments=probe.needs_text_arguments,
        takes_text_arguments=as_text is not None,
    )


def _read_calls(probe: _Probe, frame: _Frame, needs: TemplateFormat) -> CallFormat | None:
    def given(count: int) -> object:
        return json.dumps(_arguments(count)) if needs.needs_text_arguments else _arguments(count)

    one = probe.calls((_NAMES[0], given(1)))
    one = "" if one is None else _without_frame(one, frame)
    if _NAMES[0] not in one or _PRINTED.search(one):
        return None
    two = probe.calls((_NAMES[0], given(1)), (_NAMES[1], given(1)))
    two = None if two is None or _NAMES[1] not in two else _without_frame(two, frame)
    name = one.index(_NAMES[0])
    found = _json_call(one, name)
    if found is not None:
        return _split_group(*found, one, two)
    if f"call:{_NAMES[0]}{{" in one:
        return _quoted_call(one, two, name)
    both = probe.calls((_NAMES[0], given(2)))
    return None if both is None else _tag_call(one, two, _without_frame(both, frame))


def _without_frame(text: str, frame: _Frame) -> str:
    """Leave out what also stands around an answer of text."""
    end = _common_end(text, frame.after)
    text = text[: len(text) - len(end)]
    head = _common_start(text, frame.before)
    return text[len(_whole_marks(head)) :]


def _whole_marks(text: str) -> str:
    """Return a text up to a mark that is cut at its end."""
    for opened, closed in ("<>", "[]"):
        if text.rfind(opened) > text.rfind(closed):
            text = text[: text.rfind(opened)]
    return text


def _json_call(text: str, name: int) -> tuple[CallFormat, int, int] | None:
    """Return the format of a call whose arguments are JSON, and where the call stands."""
    span = _json_around(text, text.find(_KEYS[0]))
    if span is None:
        return None
    start, end = span
    outer = next(iter(_objects_around(text, name, end)), None)
    if outer is None:
        close = text[name + len(_NAMES[0]) : start]
        return CallFormat(kind="json", name_close=close), name, end
    begin, finish, value = outer
    keys = {json.dumps(item): key for key, item in value.items()}
    opened = text[begin:name].replace(_IDS[0], ID_PLACE)
    form = CallFormat(
        kind="object",
        name_open=opened,
        name_close=text[name + len(_NAMES[0]) : start],
        object_close=text[end:finish].replace(_IDS[0], ID_PLACE),
        name_key=keys[json.dumps(_NAMES[0])],
        arguments_key=next(key for key, item in value.items() if item == _arguments()),
    )
    return form, begin, finish


def _json_around(text: str, place: int) -> tuple[int, int] | None:
    """Return where the arguments stand, if they are JSON."""
    start = text.rfind("{", 0, max(place, 0))
    if start < 0:
        return None
    try:
        found, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    return (start, end) if found == _arguments() else None


def _objects_around(text: str, name: int, end: int) -> list[tuple[int, int, Json]]:
    """Return the JSON objects with the name and the arguments, the inner first."""
    found = []
    for match in re.finditer(r"\{", text[:name]):
        try:
            value, finish = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        if finish > end and _NAMES[0] in value.values() and _arguments() in value.values():
            found.append((match.start(), finish, value))
    return found[::-1]


def _quoted_call(one: str, two: str | None, name: int) -> CallFormat:
    match = re.search(re.escape(_KEYS[0]) + r":(\S+?)" + _VALUES[0], one)
    quote = match[1] if match else '"'
    end = one.find("}", name) + 1 or len(one)
    form = CallFormat(kind="quoted", quote=quote)
    return _split_group(form, name, end, one, two)


def _tag_call(one: str, two: str | None, both: str) -> CallFormat | None:
    """Return the format of a call whose arguments stand between marks."""
    places = [both.find(text) for text in (_NAMES[0], _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])]
    if min(places) < 0 or places != sorted(places) or _VALUES[0] not in one:
        return None
    name, key, value, next_key, last = places
    after = both[last + len(_VALUES[1]) :]
    between = both[value + len(_VALUES[0]) : next_key]
    before_key = both[name + len(_NAMES[0]) : key]
    key_open = _common_end(between, before_key)
    value_close = _after_mark(_common_start(between, after))
    if not key_open.strip() or not value_close.strip():
        return None
    value_close = between[: len(between) - len(key_open)]
    form = CallFormat(
        kind="tags",
        name_close=before_key.removesuffix(key_open),
        key_open=key_open,
        key_close=both[key + len(_KEYS[0]) : value],
        value_close=value_close,
    )
    end = one.index(_VALUES[0]) + len(_VALUES[0]) + len(value_close)
    return _split_group(form, one.index(_NAMES[0]), end, one, two)


def _after_mark(text: str) -> str:
    """Return a text up to the end of its last whole mark and the line end behind."""
    end = max(text.rfind(">"), text.rfind("]")) + 1
    return text[: end + (text[end : end + 1] == "\n")]


def _common_start(first: str, second: str) -> str:
    """Return the start that two texts share."""
    pairs = zip(first, second, strict=False)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _common_end(first: str, second: str) -> str:
    """Return the end that two texts share, from where a mark begins."""
    found = _common_start(first[::-1], second[::-1])[::-1]
    opened, closed = found.find("<"), found.find(">")
    if closed >= 0 and (opened < 0 or closed < opened):
        return found[closed + 1 :]
    return found


def _split_group(form: CallFormat, start: int, end: int, one: str, two: str | None) -> CallFormat:
    """Tell what stands around a group of calls from what stands around each.

    Args:
        form: of the inside of a call.
        start: of the first call in ``one``, and in ``two``.
        end: of the first call.
        one: an answer with one call.
        two: an answer with two calls; ``None`` if the template has no such answer.
    """
    before, after = one[:start], one[end:]
    if two is None:
        return replace(form, call_open=before, call_close=after, is_parallel=False)
    shift = one[start:end].replace(_NAMES[0], _NAMES[1])
    shift = shift.replace(_IDS[0], _IDS[1])
    second = two.find(shift, end)
    if second < 0:
        return replace(form, call_open=before, call_close=after, is_parallel=False)
    between = two[end:second]
    close = _after_mark(_common_start(between, after))
    opened = _common_end(between[len(close) :], before)
    return replace(
        form,
        group_open=before.removesuffix(opened) if opened else before,
        call_open=opened,
        call_close=close,
        separator=between[len(close) : len(between) - len(opened)],
        group_close=after[len(close) :],
    )


def _with_details(calls: CallFormat, probe: _Probe, source: str) -> CallFormat:
    """Add what the marks of one call do not show."""
    if calls.is_bare and "<|python_tag|>" in source:
        calls = replace(calls, optional_open="<|python_tag|>", separator=calls.separator or ";")
    if calls.id_style == "random":
        given = json.dumps(_arguments()) if probe.needs_text_arguments else _arguments()
        long_id = probe.calls((_NAMES[0], given), ids=["call_0123456789abcdef01234567"])
        if long_id is None:
            calls = replace(calls, id_style="nine")
    return calls


def _read_reasoning(probe: _Probe, source: str) -> ReasoningFormat | None:
    message = {"content": _ANSWER, "reasoning_content": _THOUGHT}
    text = probe.turn(message)
    if text is not None and _THOUGHT in text and _ANSWER in text.partition(_THOUGHT)[2]:
        before, _, rest = text.partition(_THOUGHT)
        between = rest.partition(_ANSWER)[0]
        opened, closed = _MARK.findall(before.rstrip()), _MARK.findall(between)
        if opened and closed and before.rstrip().endswith(opened[-1]):
            return ReasoningFormat(open=opened[-1], close=closed[0])
    return next((form for form in _REASONING if form.close in source), None)
