"""Anthropic's own client against a server on a loopback port; chat completions are the oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import httpx
import pytest
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.served import (
    chat_text,
    last_request,
    make_service,
    prompt_text,
    serving,
)

TURN = {"role": "user", "content": "Say hello"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
GREEDY = {"temperature": 0}
"""Sampling, which the newest client has no arguments for."""
KEY = "a-key-of-many-letters"


@pytest.fixture
def client(served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as made:
        yield made


def test_message_is_the_answer_of_a_chat(client, served):
    answer = client.messages.create(
        model="demo", max_tokens=6, system="Be brief", messages=[TURN], extra_body=GREEDY
    )
    prompt = last_request(served).prompt_token_ids
    messages = [{"role": "system", "content": "Be brief"}, TURN]
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == chat_text(served, messages, max_tokens=6)
    assert last_request(served).prompt_token_ids == prompt
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "demo")
    assert answer.id.startswith("msg_")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt)
    assert usage.cache_read_input_tokens == len(prompt) // 16 * 16
    assert usage.output_tokens == 6


def test_blocks_are_the_same_as_texts(client, served):
    system = [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}]
    content = [{"type": "text", "text": "Say hello"}]
    client.messages.create(
        model="demo", max_tokens=1, system=system, messages=[{"role": "user", "content": content}]
    )
    assert prompt_text(served) == "<system>Be brief\n<user>Say hello\n<assistant>"


def test_a_last_answer_is_continued(client, served):
    turns = [TURN, {"role": "assistant", "content": "Once upon"}]
    client.messages.create(model="demo", max_tokens=1, messages=turns)
    assert prompt_text(served) == "<user>Say hello\n<assistant>Once upon"


def test_stop_sequence_ends_the_answer_and_is_named(client, served):
    whole = chat_text(served, [TURN], max_tokens=30)
    stop = whole[len(whole) // 2 :][:3]
    answer = client.messages.create(
        model="demo",
        max_tokens=30,
        stop_sequences=[stop],
        messages=[TURN],
        extra_body=GREEDY,
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == whole[: whole.index(stop)]


def test_stream_has_the_events_of_the_whole_answer_in_their_order(client, served):
    ask = {"model": "demo", "max_tokens": 9, "messages": [TURN]}
    body = {**ask, **GREEDY, "stream": True}
    text = httpx.post(f"{served.url}/v1/messages", json=body, timeout=PATIENCE_S).text
    events = [event.split("\n") for event in text.split("\n\n") if event]
    names = [name.removeprefix("event: ") for name, _ in events]
    values = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [value["type"] for value in values] == names
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert values[0]["message"]["usage"]["input_tokens"] == len(
        last_request(served).prompt_token_ids
    )
    with client.messages.stream(**ask, extra_body=GREEDY) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(**ask, extra_body=GREEDY)
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.stop_reason == whole.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 9
    assert streamed.usage.input_tokens == whole.usage.input_tokens


def test_counted_tokens_are_those_of_the_prompt(client, served):
    turns = [TURN, {"role": "assistant", "content": "Hello"}, TURN]
    counted = client.messages.count_tokens(model="demo", system="Be brief", messages=turns)
    client.messages.create(model="demo", max_tokens=1, system="Be brief", messages=turns)
    assert counted.input_tokens == len(last_request(served).prompt_token_ids)


def test_calls_and_results_of_tools_become_those_of_a_chat(served):
    """The demo's template shows tools alone: the messages are compared before it."""
    body = {
        "model": "demo",
        "max_tokens": 1,
        "tools": [TOOL],
        "messages": [
            TURN,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "a tree"},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    }
    assert httpx.post(f"{served.url}/v1/messages", json=body, timeout=PATIENCE_S).is_success
    own = last_request(served).prompt_token_ids
    call = {"name": "look", "arguments": '{"at": 1}'}
    messages = [
        TURN,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
        {"role": "user", "content": "And now?"},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    chat_text(served, messages, max_tokens=1, tools=[{"type": "function", "function": function}])
    assert own == last_request(served).prompt_token_ids


def test_longest_answer_is_cut_to_what_fits(client, served):
    answer = client.messages.create(model="demo", max_tokens=20_000, messages=[TURN])
    request = last_request(served)
    most = served.engine.max_model_len - len(request.prompt_token_ids)
    assert request.sampling.max_tokens == most == answer.usage.output_tokens
    assert answer.stop_reason == "model_context_window_exceeded"


def test_form_of_the_text_reaches_the_engine(client, served):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    client.messages.create(model="demo", max_tokens=1, messages=[TURN], output_config=form)
    assert json.loads(last_request(served).sampling.structured_outputs.json) == schema


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"model": "absent"}, anthropic.NotFoundError, "does not exist"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "without tools"),
        ({"tools": [{"type": "web_search_20250305"}]}, anthropic.BadRequestError, "tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, anthropic.BadRequestError, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "blocks of type text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]},
            anthropic.BadRequestError,
            "blocks of type text",
        ),
    ],
)
def test_errors_have_the_form_of_anthropics_api(client, fields, kind, text):
    with pytest.raises(kind, match=text) as caught:
        client.messages.create(**{"model": "demo", "max_tokens": 1, "messages": [TURN]} | fields)
    body = caught.value.body
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    names = {400: "invalid_request_error", 404: "not_found_error"}
    assert body["error"]["type"] == names[caught.value.status_code]


def test_failure_of_the_engine_is_an_error_in_a_stream():
    engine = FakeEngine()
    engine.fails_after = 3
    body = {"model": "demo", "max_tokens": 9, "messages": [TURN], "stream": True}
    with serving(make_service(engine)) as own:
        text = httpx.post(f"{own.url}/v1/messages", json=body, timeout=PATIENCE_S).text
    name, data = text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
    assert "secret" not in text


def test_key_may_stand_where_anthropics_client_puts_it():
    with serving(make_service(FakeEngine()), api_keys=(KEY,)) as own:
        for key, is_right in ((KEY, True), ("another-key-of-letters", False)):
            with anthropic.Anthropic(base_url=own.url, api_key=key, max_retries=0) as client:
                ask = {"model": "demo", "max_tokens": 1, "messages": [TURN]}
                if is_right:
                    assert client.messages.create(**ask).content
                else:
                    with pytest.raises(anthropic.AuthenticationError) as caught:
                        client.messages.create(**ask)
                    assert caught.value.body["error"]["type"] == "authentication_error"
