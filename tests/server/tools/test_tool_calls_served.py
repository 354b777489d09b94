"""OpenAI's own client gets tool calls and reasoning from a server on a loopback port."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import openai
import pytest
from helpers.fake_engine import FakeEngine
from helpers.served import Served, demo_tokenizer
from model_templates import CALLS, MODELS, TOOLS
from served_answer import serving_answer

from llmpq.dist.io.structured_outputs import grammar_of

MESSAGES = [{"role": "user", "content": "hi"}]
NAMES = ["qwen3", "glm", "llama3", "mistral_args", "gemma", "harmony"]
CASE = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "error: arguments are not JSON"},
]


@contextlib.contextmanager
def asking(name: str, answer: str) -> Iterator[tuple[openai.OpenAI, FakeEngine]]:
    """Serve a model that gives one answer to everything."""
    with (
        serving_answer(name, answer) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, server.engine


def ask(client: openai.OpenAI, **fields):
    fields = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 400, **fields}
    return client.chat.completions.create(model="demo", **fields)


def calls_of(message):
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]


@pytest.mark.parametrize("name", NAMES)
def test_calls_arrive_whole_and_streamed(name):
    model = MODELS[name]
    answer = model.both or model.one
    with asking(name, answer) as (client, _):
        whole = ask(client).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        assert calls_of(whole.message) == CALLS[: len(whole.message.tool_calls)]
        assert len(whole.message.tool_calls) == (1 if model.both is None else 2)
        with client.chat.completions.stream(
            model="demo", messages=MESSAGES, tools=TOOLS, max_tokens=400
        ) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert calls_of(streamed.message) == calls_of(whole.message)
        ids = {call.id for call in streamed.message.tool_calls}
        assert len(ids) == len(streamed.message.tool_calls)


def test_reasoning_is_split_from_the_answer():
    with asking("qwen3", "<think>\nHm.\n</think>\n\nHello") as (client, _):
        message = ask(client).choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm.", "Hello")
        chunks = [chunk.choices[0].delta for chunk in ask(client, stream=True)]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in chunks]
    assert "".join(thoughts) == "Hm."
    assert "".join(delta.content or "" for delta in chunks) == "Hello"


def tokens_before_and_between(
    server: Served, answer: str, opening: str, close: str
) -> tuple[int, int]:
    """Return the tokens of an answer whose text begins before a mark's end, and up to another."""
    tokenizer = server.service.model.tokenizer
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    starts = [
        len(tokenizer.decode(tokens[:end], skip_special_tokens=False)) for end in range(len(tokens))
    ]
    first = answer.index(opening) + len(opening)
    end = answer.index(close, first)
    return sum(start < first for start in starts), sum(first <= start < end for start in starts)


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize(
    ("name", "answer", "marks"),
    [
        ("qwen3", "<think>\nHm, let me see.\n</think>\n\nHello", ("<think>", "</think>")),
        ("nemotron", "Hm, let me see.\n</think>\n\nHello", ("", "</think>")),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm, let me see.<|end|><|start|>assistant<|channel|>final"
            "<|message|>Hello",
            ("<|message|>", "<|end|>"),
        ),
    ],
)
def test_usage_counts_the_tokens_of_the_reasoning(name, answer, marks, at_once):
    with (
        serving_answer(name, answer, at_once=at_once) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        before, expected = tokens_before_and_between(server, answer, *marks)
        assert expected > 3
        whole = ask(client, n=2).usage
        assert whole.completion_tokens_details.reasoning_tokens == 2 * expected
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(ask(client, stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] == 0
        assert counts[-1] == expected
        text = {"model": "demo", "input": "hi", "max_output_tokens": 400}
        response = client.responses.create(**text)
        assert response.usage.output_tokens_details.reasoning_tokens == expected
        last = list(client.responses.create(**text, stream=True))[-1].response
        assert last.usage == response.usage
        cut = ask(client, max_tokens=before + 3).usage  # it ends in the reasoning
        assert cut.completion_tokens_details.reasoning_tokens == 3


def test_special_tokens_that_are_no_marks_have_no_text():
    answer = f"He<s>llo{MODELS['granite'].one}"
    with asking("granite", answer) as (client, _):
        message = ask(client).choices[0].message
    assert message.content == "Hello"
    assert calls_of(message) == CALLS[:1]


def test_without_tools_a_call_is_text():
    answer = MODELS["qwen3"].one
    with asking("qwen3", answer) as (client, _):
        for fields in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
            choice = ask(client, **fields).choices[0]
            assert (choice.message.content, choice.finish_reason) == (answer, "stop")


def test_a_required_call_gives_the_answer_a_form():
    named = {"type": "function", "function": {"name": "get_time"}}
    with asking("qwen3", MODELS["qwen3"].one) as (client, engine):
        for choice in ("auto", "required", named):
            ask(client, tool_choice=choice)
        forms = [request.sampling.structured_outputs for request in engine.requests.values()]
        assert forms[0] is None
        assert "get_weather" in forms[1].grammar
        assert "get_weather" not in forms[2].grammar
        for mode in ("auto", "required"):
            allowed = {"mode": mode, "tools": [named]}
            ask(client, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
            request = list(engine.requests.values())[-1]
            prompt = demo_tokenizer().decode(request.prompt_token_ids)
            assert "get_time" in prompt
            assert "get_weather" not in prompt
            form = request.sampling.structured_outputs
            assert (form is None) == (mode == "auto")
            assert form is None or "get_weather" not in form.grammar
        for allowed in (None, {"mode": "auto"}, {"mode": "auto", "tools": {}}):
            with pytest.raises(openai.BadRequestError, match="allowed_tools with tools"):
                ask(client, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            ask(client, tool_choice="required", response_format={"type": "json_object"})
        with pytest.raises(openai.BadRequestError, match="name 'a b'"):
            ask(client, tools=[{"type": "function", "function": {"name": "a b"}}])


def test_the_form_of_an_answer_begins_behind_its_reasoning():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    with asking("nemotron", 'Hm.\n</think>\n\n{"a": 1}') as (client, engine):
        message = ask(client, response_format=form, tools=openai.NOT_GIVEN).choices[0].message
        assert (message.content, message.reasoning_content) == ('{"a": 1}', "Hm.")
        sent = list(engine.requests.values())[-1].sampling.structured_outputs
        assert "</think>" in sent.grammar
        assert '"integer"' in sent.grammar
        grammar_of(sent)
        with pytest.raises(openai.BadRequestError, match="structured_outputs"):
            ask(client, extra_body={"structured_outputs": {"json": "{"}})


def test_a_history_with_malformed_arguments_goes_on():
    with asking("qwen3", "Hello") as (client, engine):
        assert ask(client, messages=CASE).choices[0].message.content == "Hello"
        (request,) = engine.requests.values()
    assert '{"x": 1' in demo_tokenizer(MODELS["qwen3"].source).decode(request.prompt_token_ids)
