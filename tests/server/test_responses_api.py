"""The Responses API by OpenAI's own client; chat completions are the oracle."""

from __future__ import annotations

import json

import openai
import pytest
from helpers.fake_engine import FakeEngine
from helpers.served import (
    chat_text,
    last_request,
    make_service,
    prompt_text,
    serving,
)

from llmpq.server.apis.responses import ResponseStore
from llmpq.server.errors import ApiError
from llmpq.server.json_output import dump_json

BEGINNING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
END = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_response_is_the_answer_of_a_chat(client, served):
    answer = client.responses.create(
        model="demo", input="Say hello", max_output_tokens=6, temperature=0
    )
    prompt = last_request(served).prompt_token_ids
    turn = {"role": "user", "content": "Say hello"}
    assert answer.output_text == chat_text(served, [turn], max_tokens=6) != ""
    assert last_request(served).prompt_token_ids == prompt
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(prompt), 6)
    assert usage.total_tokens == len(prompt) + 6
    assert usage.input_tokens_details.cached_tokens == len(prompt) // 16 * 16


def test_an_answer_that_ends_by_itself_is_completed():
    with (
        serving(make_service(FakeEngine(script=[300, 400]))) as own,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="none") as client,
    ):
        answer = client.responses.create(model="demo", input="x")
        with client.responses.stream(model="demo", input="x") as stream:
            assert stream.get_final_response().output_text == answer.output_text
    assert (answer.status, answer.incomplete_details) == ("completed", None)
    assert answer.output[0].status == "completed"


def test_instructions_developers_and_parts_make_one_prompt(client, served):
    items = [
        {"role": "developer", "content": "No jokes"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
        {"role": "user", "content": "Say hello"},
    ]
    client.responses.create(model="demo", instructions="Be brief", input=items, max_output_tokens=1)
    assert prompt_text(served) == (
        "<system>Be brief\nNo jokes\n<user>Hi\n<assistant>Yes?\n<user>Say hello\n<assistant>"
    )


def test_stream_has_the_events_of_the_whole_answer_in_their_order(client):
    ask = {"model": "demo", "input": "Say hello", "max_output_tokens": 9, "temperature": 0}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    names = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert names == [*BEGINNING, *["response.output_text.delta"] * len(deltas), *END]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in deltas) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage == whole.usage
    assert last.id == events[0].response.id
    assert last.output[0].id == deltas[0].item_id


def test_a_conversation_goes_on_without_its_instructions(client, served):
    first = client.responses.create(
        model="demo", instructions="Be brief", input="Say hello", max_output_tokens=3, temperature=0
    )
    stream = client.responses.create(
        model="demo",
        input="Again",
        previous_response_id=first.id,
        max_output_tokens=3,
        temperature=0,
        stream=True,
    )
    second = list(stream)[-1].response
    messages = [
        {"role": "user", "content": "Say hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Again"},
    ]
    assert second.output_text == chat_text(served, messages, max_tokens=3)
    assert second.previous_response_id == first.id
    client.responses.create(
        model="demo", input="More", previous_response_id=second.id, max_output_tokens=1
    )
    prompt = last_request(served).prompt_token_ids
    more = {"role": "user", "content": "More"}
    answer = {"role": "assistant", "content": second.output_text}
    chat_text(served, [*messages, answer, more], max_tokens=1)
    assert last_request(served).prompt_token_ids == prompt


def test_what_is_not_stored_is_not_found(client):
    first = client.responses.create(model="demo", input="x", max_output_tokens=1, store=False)
    with pytest.raises(openai.BadRequestError, match="not found") as caught:
        client.responses.create(model="demo", input="y", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_store_drops_what_was_not_used_for_longest():
    message = [{"role": "user", "content": "x" * 10}]
    store = ResponseStore(max_bytes=3 * len(dump_json(message)))
    for name in "abc":
        store.keep(name, message)
    assert store.messages("a") == message
    store.keep("d", message)
    assert [store.messages(name) for name in "acd"] == [message] * 3
    with pytest.raises(ApiError, match="'b' not found"):
        store.messages("b")
    store.keep("e", message * 4)
    with pytest.raises(ApiError, match="'e' not found"):
        store.messages("e")
    assert store.messages("d") == message


def test_calls_and_outputs_of_functions_become_those_of_a_chat(client, served):
    items = [
        {"role": "user", "content": "Look"},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a tree"},
        {"type": "function_call_output", "call_id": "c2", "output": "a house"},
    ]
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
    client.responses.create(model="demo", input=items, tools=[tool], max_output_tokens=1)
    prompt = last_request(served).prompt_token_ids
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": text}}
        for name, text in (("c1", "{}"), ("c2", '{"at": 1}'))
    ]
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
        {"role": "tool", "tool_call_id": "c2", "content": "a house"},
    ]
    function = {name: value for name, value in tool.items() if name != "type"}
    chat_text(served, messages, max_tokens=1, tools=[{"type": "function", "function": function}])
    assert last_request(served).prompt_token_ids == prompt


def test_form_of_the_text_reaches_the_engine(client, served):
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    answer = client.responses.create(
        model="demo", input="x", text={"format": form}, max_output_tokens=1
    )
    assert json.loads(last_request(served).sampling.structured_outputs.json) == SCHEMA
    assert answer.text.format.name == "a"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"background": True}, "background"),
        ({"tool_choice": "required"}, "without tools"),
        ({"tools": [{"type": "web_search"}]}, "type function"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text only"),
    ],
)
def test_what_cannot_be_served_is_refused(client, fields, text):
    with pytest.raises(openai.BadRequestError, match=text):
        client.responses.create(**{"model": "demo", "input": "x"} | fields)


def test_failure_of_the_engine_ends_a_stream():
    engine = FakeEngine()
    engine.fails_after = 3
    with (
        serving(make_service(engine)) as own,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="none") as client,
    ):
        last = list(client.responses.create(model="demo", input="x", stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.code == "server_error"
