"""Tools that agents declare besides functions: custom ones, namespaces, and those of a service."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import openai
import pytest
from helpers.clocks import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st
from model_templates import MODELS, TOOLS
from served_answer import serving_answer

from llmpq.server.tools.custom import CustomInputs
from llmpq.server.tools.events import ArgumentsDelta, CallBegin, CallEnd, join_events

PATCH = '*** Begin Patch\n*** Update File: "a\\b.py"\n+x = "\u00e9 \U0001f600\\d"\n*** End Patch'
GRAMMAR = "start: /.+/s"
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "name": "read", "strict": False, "parameters": PARAMETERS}
OF_CODEX: list[dict[str, Any]] = [
    {**READ, "name": "exec_command"},
    APPLY_PATCH,
    {"type": "namespace", "name": "mcp__files", "description": "Files", "tools": [READ]},
    {"type": "namespace", "name": "functions", "tools": [{**READ, "name": "wait"}]},
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation"},
]
"""Tools as Codex sends them to any server; ``read`` is one of an MCP server."""
FILE = {"path": "a.txt"}


def answer_of(*calls: tuple[str, dict[str, str]]) -> str:
    """Return an answer of Qwen 3 with calls."""
    texts = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


TURN = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Edit it"}]}
ANSWER = answer_of(("apply_patch", {"input": PATCH}), ("mcp__files__read", FILE), ("wait", FILE))


def inputs_of(pieces: list[str]) -> str:
    """Return the input of a call whose arguments come in pieces."""
    inputs = CustomInputs({"edit"})
    events = [CallBegin(0, "id", "edit"), *(ArgumentsDelta(0, one) for one in pieces), CallEnd(0)]
    found = [event for one in events for event in inputs.events([one])]
    begin, *texts, _ = join_events(found)
    assert begin == CallBegin(0, "id", "edit", is_custom=True)
    return "".join(one.text for one in texts if isinstance(one, ArgumentsDelta))


def pieces_of(text: str, places: list[int]) -> list[str]:
    cuts = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[first:end] for first, end in itertools.pairwise(cuts)]


@given(st.text(), st.booleans(), st.lists(st.integers(0, 1 << 16)))
def test_an_input_is_decoded_wherever_it_is_cut(text, is_ascii, places):
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    assert inputs_of(pieces_of(arguments, places)) == text


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"patch": "x\\ny"}', "x\ny"),  # the model chose another name
        ('"x\\ny"', "x\ny"),
        ('{"input": "a\nb"}', "a\nb"),
        (r'{"input": "\d+\n"}', "\\d+\n"),  # no escape of JSON
        (r'{"input": "\uzz"}', r"\uzz"),
        (r'{"input": "\ud800z"}', "\ufffdz"),
        ('{"input": ["x"]}', '{"input": ["x"]}'),
        ("{}", ""),
    ],
)
def test_what_is_no_object_with_an_input_is_kept(arguments, wanted):
    assert inputs_of(list(arguments)) == wanted
    assert inputs_of([arguments]) == wanted


def test_calls_of_functions_stay():
    events = [CallBegin(0, "id", "read"), ArgumentsDelta(0, '{"input": "x"}'), CallEnd(0)]
    assert CustomInputs({"edit"}).events(events) == events


def codex_ask(**fields: Any) -> dict[str, Any]:
    """Return a body with the fields that Codex sends."""
    return {
        "model": "demo",
        "instructions": "You are an agent",
        "input": [{**TURN, "role": "developer"}, TURN],
        "tools": OF_CODEX,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        **fields,
    }


def called(response: Any) -> list[tuple[Any, ...]]:
    """Return the calls of a response."""
    return [
        (item.type, getattr(item, "namespace", None), item.name,
         item.input if item.type == "custom_tool_call" else json.loads(item.arguments))
        for item in response.output
    ]  # fmt: skip


CALLED = [
    ("custom_tool_call", None, "apply_patch", PATCH),
    ("function_call", "mcp__files", "read", FILE),
    ("function_call", "functions", "wait", FILE),
]


@pytest.mark.parametrize("at_once", [1, 1000])
def test_codex_gets_its_calls(at_once):
    with (
        serving_answer("qwen3", ANSWER, at_once=at_once) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.responses.create(**codex_ask())
        events = list(client.responses.create(**codex_ask(stream=True)))
    assert called(whole) == called(events[-1].response) == CALLED
    kinds = [tool.type for tool in whole.tools]
    assert kinds == ["function", "custom", "namespace", "namespace"]
    added, done = (
        [event.item for event in events if event.type == f"response.output_item.{end}"]
        for end in ("added", "done")
    )
    assert [item.id for item in added] == [item.id for item in done]
    assert done == events[-1].response.output
    assert added[0].input == ""
    name = "response.custom_tool_call_input"
    pieces = [event.delta for event in events if event.type == f"{name}.delta"]
    (end,) = [event for event in events if event.type == f"{name}.done"]
    assert "".join(pieces) == end.input == PATCH
    assert end.item_id == done[0].id
    if at_once == 1:
        assert len(pieces) > len(PATCH) // 8


def test_a_history_of_codex_is_that_of_the_same_functions():
    functions = [
        {"type": "function", "name": "mcp__files__read", "parameters": PARAMETERS},
        {"type": "function", "name": "edit", "parameters": PARAMETERS},
    ]
    edit = {"input": PATCH}
    plain = [
        {"type": "function_call", "call_id": "1", "name": "edit", "arguments": json.dumps(edit)},
        {"type": "function_call_output", "call_id": "1", "output": "Done"},
        {"type": "function_call", "call_id": "2", "name": "mcp__files__read",
         "arguments": json.dumps(FILE)},
        {"type": "function_call_output", "call_id": "2", "output": "empty"},
    ]  # fmt: skip
    codex = [
        {"type": "custom_tool_call", "call_id": "1", "name": "edit", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Done"},
        {"type": "function_call", "call_id": "2", "name": "read", "namespace": "mcp__files",
         "arguments": json.dumps(FILE)},
        {"type": "function_call_output", "call_id": "2", "output": "empty"},
    ]  # fmt: skip
    prompts = []
    with serving_answer("qwen3", "ok") as server:
        for items in (plain, codex):
            body = codex_ask(input=[TURN, *items], tools=functions)
            answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE_S)
            assert answer.is_success, answer.text
            prompts.append(list(server.engine.requests.values())[-1].prompt_token_ids)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "function "}, "function, custom or namespace"),
        ({"type": "namespace", "name": "a"}, "function, custom or namespace"),
        ({"type": "namespace", "tools": []}, "namespace with a name"),
        ({"type": "custom", "name": "a b"}, "letters, digits"),
    ],
)
def test_tools_of_another_form_are_refused(tool, message):
    with serving_answer("qwen3", "ok") as server:
        body = codex_ask(tools=[tool])
        answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["qwen3", "harmony"])
def test_custom_tools_of_chat_completions(name):
    own = {key: value for key, value in APPLY_PATCH.items() if key != "type"}
    grammar = {"syntax": "lark", "definition": GRAMMAR}
    tool = {"type": "custom", "custom": {**own, "format": {"type": "grammar", "grammar": grammar}}}
    if name == "qwen3":
        text = answer_of(("apply_patch", {"input": PATCH}))
    else:
        text = MODELS[name].one.replace("get_weather", "apply_patch")
        start, end = text.index("{"), text.rindex("}") + 1
        text = text[:start] + json.dumps({"input": PATCH}) + text[end:]
    ask: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Edit it"}],
        "tools": [tool, *TOOLS],
        "max_tokens": 400,
    }
    with (
        serving_answer(name, text) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        choice = client.chat.completions.create(**ask).choices[0]
        chunks = list(client.chat.completions.create(**ask, stream=True))
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "apply_patch", PATCH)
        calls = [
            one.model_dump() for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()
        ]
        assert calls[0]["type"] == "custom"
        assert calls[0]["custom"]["name"] == "apply_patch"
        assert "".join(one["custom"]["input"] for one in calls) == PATCH
        history = [
            *ask["messages"],
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "Done"},
        ]
        assert client.chat.completions.create(**{**ask, "messages": history}).choices
