"""What a request says about tools is checked and fitted to a template."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from model_templates import MODELS, TOOLS, format_of, render

from llmpq.server.errors import ApiError
from llmpq.server.tools import TemplateFormat, prepare

USER = {"role": "user", "content": "hi"}
BROKEN = '{"x": 1'


def body(**fields):
    values = {"messages": [USER], "tools": TOOLS, "tool_choice": None, "parallel_tool_calls": True}
    return SimpleNamespace(**values | fields)


def prepared(name: str = "qwen3", **fields):
    return prepare(body(**fields), format_of(MODELS[name].source))


def named(name: str):
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "wanted", "functions"),
    [
        (None, "auto", 2),
        ("auto", "auto", 2),
        ("none", "none", 0),
        ("required", "required", 2),
        (named("get_time"), "required", 1),
    ],
)
def test_tool_choice_says_what_may_be_called(choice, wanted, functions):
    found = prepared(tool_choice=choice)
    assert found.choice == wanted
    assert len(found.functions) == functions
    assert (found.tools is None) == (wanted == "none")
    assert found.is_parallel == (not isinstance(choice, dict))
    assert not prepared(tool_choice=choice, parallel_tool_calls=False).is_parallel


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "the name 'a b'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "twice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "schema"),
        ({"tools": None, "tool_choice": "required"}, "without tools"),
        ({"tool_choice": named("other")}, "'other'"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "name"),
        ({"messages": [{"role": "tool", "tool_call_id": 1, "content": ""}]}, "tool_call_id"),
    ],
)
def test_fields_of_another_form_are_refused(fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        prepared(**fields)
    assert caught.value.status == 400


def test_a_template_without_calls_cannot_be_forced():
    with pytest.raises(ApiError, match="no tool calls"):
        prepare(body(tool_choice="required"), TemplateFormat())
    assert prepare(body(), TemplateFormat()).is_plain
    assert prepare(body(), TemplateFormat()).tools is not None


def history(arguments, id="a"):
    call = {"id": id, "type": "function", "function": {"name": "get_time", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": [{"type": "text", "text": "error"}]},
    ]


def arguments_of(found):
    return found.messages[1]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("qwen3", BROKEN), ("deepseek_v3", BROKEN), ("glm", {"arguments": BROKEN})],
)
def test_malformed_arguments_of_the_history_are_passed_as_text(name, wanted):
    found = prepared(name, messages=history(BROKEN))
    assert arguments_of(found) == wanted
    model = MODELS[name]
    assert BROKEN in render(model.source, found.messages, tools=TOOLS, add_generation_prompt=True)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "harmony"])
def test_a_history_is_rendered_by_every_template(name):
    found = prepared(name, messages=history('{"zone": "CET"}', "call_0123456789abcdef"))
    text = render(MODELS[name].source, found.messages, tools=TOOLS, add_generation_prompt=True)
    assert "CET" in text
    assert '\\"zone' not in text
    assert found.messages[2]["name"] == "get_time"
    assert found.messages[2]["tool_call_id"] == found.messages[1]["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", {}),
        (None, {}),
        ("[1]", "[1]"),
        ({"a": 1}, {"a": 1}),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a": ' * 100 + "1" + "}" * 100, '{"a": ' * 100 + "1" + "}" * 100),
        ('{"a": ' * 10**5, '{"a": ' * 10**5),
    ],
)
def test_arguments_become_objects_where_they_are(given, wanted):
    assert arguments_of(prepared(messages=history(given))) == wanted


def test_arguments_become_text_where_the_template_needs_it():
    found = arguments_of(prepared("deepseek_v3", messages=history({"zone": "é"})))
    assert json.loads(found) == {"zone": "é"}


def test_the_older_form_of_calls_is_read():
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "done"},
    ]
    found = prepared(messages=messages).messages
    assert found[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert found[2]["role"] == "tool"
    assert found[2]["tool_call_id"] == found[1]["tool_calls"][0]["id"]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "harmony"])
def test_the_prompt_says_whether_reasoning_is_open(name):
    model = MODELS[name]
    prompt = render(model.source, [USER], tools=TOOLS, add_generation_prompt=True)
    assert prepared(name).is_reasoning(prompt) == model.is_opened


def test_marks_that_are_special_tokens_are_kept():
    kept = prepared("gemma").kept_tokens(['<|"|>', "<|tool_call>", "<|channel>", "<bos>"])
    assert kept == {'<|"|>', "<|tool_call>", "<|channel>"}


def test_without_a_tool_nothing_is_a_call():
    parser = prepared(tool_choice="none").parser("")
    events = parser.feed("<think>a</think>" + MODELS["qwen3"].one) + parser.finish()
    assert parser.num_calls == 0
    assert events[-1].text == MODELS["qwen3"].one
