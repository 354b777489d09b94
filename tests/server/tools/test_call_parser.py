"""Answers are split into text, reasoning and calls, whatever their cuts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_templates import CALLS, MODELS, TOOLS, format_of, render

from llmpq.server.tools import (
    AnswerParts,
    CallBegin,
    CallEnd,
    CallParser,
    ReasoningDelta,
    TextDelta,
    chat_delta,
    join_events,
)
from llmpq.server.tools.arguments import value_types

SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
PARALLEL = [name for name, model in MODELS.items() if model.both is not None]
WITH_TAIL = [name for name in MODELS if name not in ("llama3", "harmony")]


def parser_of(name: str, *, is_reasoning: bool = False) -> CallParser:
    return CallParser(
        format_of(MODELS[name].source),
        SCHEMAS,
        is_reasoning=is_reasoning,
        make_id=lambda function, index: f"{function}-{index}",
    )


def events_of(parser: CallParser, parts):
    found = [event for part in parts for event in parser.feed(part)]
    return join_events([*found, *parser.finish()])


def parts_of(parser: CallParser, text: str) -> AnswerParts:
    parts = AnswerParts()
    parts.add(events_of(parser, [text]))
    return parts


def calls_of(parts: AnswerParts):
    found = [call["function"] for call in parts.calls]
    return [(call["name"], json.loads(call["arguments"])) for call in found]


@pytest.mark.parametrize("name", MODELS)
def test_a_call_is_parsed_exactly(name):
    parts = parts_of(parser_of(name), MODELS[name].one)
    assert calls_of(parts) == CALLS[:1]
    assert (parts.text, parts.reasoning) == ("", "")


VALUE = {"city": "a <b>\nc", "days": 2}
PARTS = "<parameter=city>\na <b>\nc\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
CALL = f"<function=get_weather>\n{PARTS}</function>"
NO_CLOSE = CALL.replace("\n</parameter>", "")


@pytest.mark.parametrize(
    ("name", "close"), [("qwen_coder", "</tool_call>"), ("seed_oss", "</seed:tool_call>")]
)
def test_marks_that_models_leave_out_may_be_missing(name, close):
    """Qwen's coders often begin a call with its second mark, and skip the end of a value."""
    trigger = close.replace("/", "")
    answers = {
        CALL: ("", 1),
        f"I look.\n{CALL}\n{close}": ("I look.", 1),
        f"{CALL}\n{close}\n{trigger}\n{CALL}\n{close}": ("", 2),
        f"{CALL}\n{CALL}": ("", 2),
        f"{trigger}\n{CALL}": ("", 1),
        f"{trigger}\n{CALL}\nBye": ("Bye", 1),
        f"{trigger}\n{NO_CLOSE}\n{close}": ("", 1),
    }
    for answer, (text, count) in answers.items():
        whole = parts_of(parser_of(name), answer)
        assert (whole.text, calls_of(whole)) == (text, [("get_weather", VALUE)] * count), answer
        cut = AnswerParts()
        cut.add(events_of(parser_of(name), answer))
        assert cut.message() == whole.message()


@pytest.mark.parametrize(
    "text",
    [
        "Use <function=get_weather> for it",
        "<function=get_weather>",
        CALL.replace("get_weather", "unknown"),
    ],
)
def test_a_second_mark_alone_is_text(text):
    parts = parts_of(parser_of("qwen_coder"), text)
    assert (parts.text, parts.calls) == (text, [])


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_calls_are_parsed_exactly(name):
    parts = parts_of(parser_of(name), MODELS[name].both)
    assert calls_of(parts) == CALLS
    assert len({call["id"] for call in parts.calls}) == 2
    assert parts.text == ""


@pytest.mark.parametrize("name", WITH_TAIL)
def test_text_around_calls_is_text(name):
    parts = parts_of(parser_of(name), f"I look.\n\n{MODELS[name].one}\n And then")
    assert calls_of(parts) == CALLS[:1]
    assert parts.text == "I look.And then"


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].thinking])
def test_reasoning_is_split(name):
    model = MODELS[name]
    parts = parts_of(parser_of(name, is_reasoning=model.is_opened), model.thinking)
    assert (parts.reasoning, parts.text, parts.calls) == ("Hm.", "Hello", [])
    if name == "harmony":
        return
    text = model.thinking.removesuffix("Hello") + model.one
    parts = parts_of(parser_of(name, is_reasoning=model.is_opened), text)
    assert (parts.reasoning, parts.text, calls_of(parts)) == ("Hm.", "", CALLS[:1])


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_gives_the_same_events(name):
    model = MODELS[name]
    for text in filter(None, (f"{model.thinking or ''}", model.both or model.one)):
        whole = events_of(parser_of(name, is_reasoning=model.is_opened), [text])
        for cut in range(len(text) + 1):
            parser = parser_of(name, is_reasoning=model.is_opened)
            assert events_of(parser, [text[:cut], text[cut:]]) == whole
        assert events_of(parser_of(name, is_reasoning=model.is_opened), text) == whole


def marks_of(name: str) -> list[str]:
    model = MODELS[name]
    marks = sorted(format_of(model.source).marks)
    whole = [model.one, model.both or "", model.thinking or ""]
    return [*marks, *whole, *(f"{mark[:-1]}x" for mark in marks if mark)]


PIECES = [
    "{",
    "}",
    '"',
    "\\",
    "\n",
    " ",
    "a",
    "get_time",
    '{"name": "get_time"',
    ": ",
    ",",
    "漢",
    "<",
]


@settings(max_examples=60)
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)), is_reasoning=st.booleans())
def test_any_text_gives_the_same_events_whatever_its_cuts(data, name, is_reasoning):
    pieces = st.sampled_from(marks_of(name) + PIECES)
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    places = sorted({0, len(text), *cuts})
    parts = [text[start:end] for start, end in pairwise(places)]
    whole = events_of(parser_of(name, is_reasoning=is_reasoning), [text])
    assert events_of(parser_of(name, is_reasoning=is_reasoning), parts) == whole
    assert events_of(parser_of(name, is_reasoning=is_reasoning), text) == whole
    begun = [event.index for event in whole if isinstance(event, CallBegin)]
    assert begun == [event.index for event in whole if isinstance(event, CallEnd)]
    assert begun == list(range(len(begun)))


QUESTION = "longer than any city"
CITIES = st.text(st.characters(codec="utf-8", exclude_characters="<{}\r"), max_size=12)
VALUES = {
    "days": st.integers(-(10**9), 10**9),
    "hourly": st.booleans(),
}


@settings(max_examples=60)
@given(
    name=st.sampled_from([name for name in MODELS if name not in ("kimi", "harmony")]),
    arguments=st.fixed_dictionaries({"city": CITIES}, optional=VALUES),
)
def test_what_the_template_renders_is_parsed_back(name, arguments):
    model = MODELS[name]
    form = format_of(model.source)
    value = json.dumps(arguments, ensure_ascii=False) if form.needs_text_arguments else arguments
    call = {"id": "abcdefghi", "type": "function"}
    call |= {"function": {"name": "get_weather", "arguments": value}}
    user = {"role": "user", "content": QUESTION}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = render(model.source, [user, answer], tools=TOOLS, add_generation_prompt=False)
    _, _, text = text.partition(QUESTION)
    if form.calls.is_bare:
        _, _, text = text.partition("\n\n")
    parts = parts_of(parser_of(name), text)
    ((found, values),) = calls_of(parts)
    assert found == "get_weather"
    assert values == arguments


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "Use <tool_call> in a text."),
        ("qwen3", '<tool_call>\n{"city": 1}\n</tool_call>'),
        ("qwen3", "a < b <tool_cal"),
        ("qwen3", "Hello\n"),
        ("qwen3", "It says <think> here."),
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"name": "Alice", "age": 3}'),
        ("llama3", 'I send {"name": "get_time", "parameters": {}}.'),
        ("glm", "The <tool_call> mark"),
        ("mistral_args", "[TOOL_CALLS] {"),
        ("kimi", "<|tool_calls_section_begin|>no call"),
        ("gemma", "<|tool_call>call:"),
    ],
)
def test_what_is_no_call_is_text(name, text):
    assert events_of(parser_of(name), [text]) == [TextDelta(text)]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("qwen3", '<tool_call>{"arguments": {"zone": "a"}, "name": "get_time"}', '{"zone": "a"}'),
        ("qwen3", '<tool_call>{"name": "get_time"}</tool_call>', "{}"),
        ("qwen3", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', "{}"),
        (
            "qwen3",
            '<tool_call>{"name": "get_time", "arguments": "{\\"zone\\": 1}"}</tool_call>',
            '{"zone": 1}',
        ),
        ("qwen3", '<tool_call>{"name": "get_time", "arguments": {"zone": "a', '{"zone": "a'),
        ("qwen3", '<tool_call>{"name": "get_time", "arguments": {"z": 1</tool_call>', '{"z": 1'),
        ("qwen3", '<tool_call>{"name": "get_time", "arguments": {}}}</tool_call>', "{}"),
        ("qwen_coder", "<tool_call><function=get_time></function></tool_call>", "{}"),
        ("glm", "<tool_call>get_time</tool_call>", "{}"),
        ("glm", "<tool_call>get_time\n<arg_key>zone</arg_key><arg_value>1", '{"zone": "1'),
        ("gemma", "<|tool_call>call:get_time{}<tool_call|>", "{}"),
        (
            "gemma",
            '<|tool_call>call:get_time{a:[1,<|"|>}<|"|>],b:{c:true}}<tool_call|>',
            '{"a": [1, "}"], "b": {"c": true}}',
        ),
        ("kimi", MODELS["kimi"].one.replace("get_weather", "get_time")[:-60], None),
        ("llama3", '<|python_tag|>{"name": "get_time", "parameters": {"zone": "a"}}', None),
        ("harmony", "<|channel|>commentary to=functions.get_time<|message|><|call|>", "{}"),
    ],
)
def test_unusual_calls_keep_their_arguments(name, text, arguments):
    parts = parts_of(parser_of(name), text)
    (call,) = parts.calls
    assert call["function"]["name"] == "get_time"
    assert arguments is None or call["function"]["arguments"] == arguments
    assert parts.text == ""


DEFINED = {
    "text": {"type": "string"},
    "level": {"enum": ["1", "2"]},
    "same": {"$ref": "#/$defs/text"},
    "either": {"anyOf": [{"$ref": "#/$defs/level"}, {"type": "null"}]},
    "all": {"allOf": [{"$ref": "#/$defs/level"}, {"description": "d"}]},
    "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "string"}]},
    "loop": {"$ref": "#/$defs/loop"},
    "count": {"type": "integer"},
}


@pytest.mark.parametrize(
    ("definition", "value"),
    [
        (name, 1 if name in ("tree", "loop", "count", "none") else "1")
        for name in (*DEFINED, "none")
    ],
)
def test_arguments_have_the_types_of_definitions(definition, value):
    """What says no type, and what does not end, is read as JSON."""
    schema = {"properties": {"zone": {"$ref": f"#/$defs/{definition}"}}, "$defs": DEFINED}
    parser = CallParser(format_of(MODELS["qwen_coder"].source), {"f": schema}, is_reasoning=False)
    text = "<tool_call>\n<function=f>\n<parameter=zone>\n1\n</parameter>\n</function>\n</tool_call>"
    (call,) = parts_of(parser, text).calls
    assert json.loads(call["function"]["arguments"]) == {"zone": value}


def test_types_of_many_references_are_found_at_once():
    parts = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 9} for n in range(60)}
    root = {"$defs": {**parts, "60": {"type": "string"}}}
    assert value_types({"$ref": "#/$defs/0"}, root) == {"string"}


@pytest.mark.parametrize("name", ["gemma", "qwen3", "glm"])
def test_values_that_are_nested_without_end_are_read(name):
    deep = {"gemma": "{a:", "qwen3": '{"a": ', "glm": '{"a": '}[name] * 10**4
    text = {
        "gemma": f"<|tool_call>call:get_time{deep}",
        "qwen3": f'<tool_call>{{"name": "get_time", "arguments": {deep}',
        "glm": f"<tool_call>get_time<arg_key>a</arg_key><arg_value>{deep}</arg_value>",
    }
    parts = parts_of(parser_of(name), text[name])
    assert [call["function"]["name"] for call in parts.calls] == ["get_time"]


def test_arguments_arrive_while_the_model_writes_them():
    parser = parser_of("qwen3")
    parser.feed('<tool_call>\n{"name": "get_time", "arguments": ')
    (event,) = parser.feed('{"zone": "C')
    assert event.text == '{"zone": "C'
    parser = parser_of("glm")
    parser.feed("<tool_call>get_time\n<arg_key>zone</arg_key>\n<arg_value>")
    (event,) = parser.feed("CE")
    assert event.text == "CE"


def test_ids_have_the_form_of_the_template():
    for name, length in (("mistral_list", 9), ("qwen3", 29)):
        form = format_of(MODELS[name].source)
        parts = parts_of(CallParser(form, SCHEMAS), MODELS[name].both)
        assert [len(call["id"]) for call in parts.calls] == [length] * 2
    parts = parts_of(CallParser(format_of(MODELS["kimi"].source), SCHEMAS), MODELS["kimi"].both)
    assert [call["id"] for call in parts.calls] == [
        "functions.get_weather:0",
        "functions.get_time:1",
    ]


def test_events_become_deltas_and_a_message():
    parser = parser_of("qwen3")
    events = events_of(parser, ["<think>why</think>", MODELS["qwen3"].one])
    assert ReasoningDelta("why") in events
    assert chat_delta(events[:1]) == {"reasoning_content": "why", "reasoning": "why"}
    (call,) = chat_delta(events)["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "get_weather")
    assert json.loads(call["function"]["arguments"]) == CALLS[0][1]
    assert chat_delta(events[-1:]) == {}
    parts = AnswerParts()
    parts.add(events)
    message = parts.message()
    assert message["content"] is None
    assert message["reasoning_content"] == message["reasoning"] == "why"
    assert message["tool_calls"][0]["id"] == "get_weather-0"
