"""The official clients of /v1/messages and /v1/responses get reasoning and tool calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from helpers.clocks import PATIENCE_S
from helpers.served import Served
from model_templates import CALLS, MODELS, TOOLS
from served_answer import serving_answer

NAMES = ["qwen3", "glm", "llama3", "mistral_args", "gemma", "harmony"]
QWEN3 = MODELS["qwen3"]
PLAN = f"<think>\nHm.\n</think>\n\nI look.\n{QWEN3.both}"
"""Reasoning, text and two calls."""
TURN = {"role": "user", "content": "hi"}
FUNCTIONS = [tool["function"] for tool in TOOLS]
OF_MESSAGES = [
    {
        "name": tool["name"],
        "description": tool["description"],
        "input_schema": tool["parameters"],
    }
    for tool in FUNCTIONS
]
OF_RESPONSES = [{"type": "function", **function} for function in FUNCTIONS]
NAMED = "get_time"


@contextlib.contextmanager
def messages_of(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@contextlib.contextmanager
def responses_of(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def message_ask(**fields: object) -> dict:
    ask = {"model": "demo", "max_tokens": 400, "messages": [TURN], "tools": OF_MESSAGES}
    return ask | fields


def response_ask(**fields: object) -> dict:
    ask = {"model": "demo", "max_output_tokens": 400, "input": [TURN], "tools": OF_RESPONSES}
    return ask | fields


def block_values(message) -> list:
    """Return the content of a message, without ids."""
    fields = {"text": ["text"], "thinking": ["thinking"], "tool_use": ["name", "input"]}
    return [
        (block.type, *(getattr(block, field) for field in fields[block.type]))
        for block in message.content
    ]


def item_values(response) -> list:
    """Return the items of a response, without ids."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.name, json.loads(item.arguments)))
        else:
            (content,) = item.content
            found.append((item.type, content.text))
    return found


def last_request(server: Served):
    return list(server.engine.requests.values())[-1]


def prompt_of_chat(server: Served, messages: list) -> tuple[int, ...]:
    """Return the prompt that a chat completion has."""
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.is_success
    return last_request(server).prompt_token_ids


def chat_calls(ids: list[str]) -> list:
    """Return ``CALLS`` as chat has them."""
    return [
        {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for id, (name, arguments) in zip(ids, CALLS, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_blocks_of_a_message(name):
    model = MODELS[name]
    expected = [("tool_use", *call) for call in CALLS[: 1 if model.both is None else 2]]
    with serving_answer(name, model.both or model.one) as server, messages_of(server) as client:
        whole = client.messages.create(**message_ask())
        with client.messages.stream(**message_ask()) as stream:
            streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert block_values(answer) == expected
        assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
        assert len({block.id for block in answer.content}) == len(expected)


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_items_of_a_response(name):
    model = MODELS[name]
    expected = [("function_call", *call) for call in CALLS[: 1 if model.both is None else 2]]
    with serving_answer(name, model.both or model.one) as server, responses_of(server) as client:
        whole = client.responses.create(**response_ask())
        with client.responses.stream(**response_ask()) as stream:
            streamed = stream.get_final_response()
    for answer in (whole, streamed):
        assert item_values(answer) == expected
        assert answer.status == "completed"
        assert len({item.call_id for item in answer.output}) == len(expected)


@pytest.mark.parametrize("at_once", [1, 1000])
def test_reasoning_text_and_calls_of_a_message_follow_each_other(at_once):
    expected = [("thinking", "Hm."), ("text", "I look."), *(("tool_use", *call) for call in CALLS)]
    with serving_answer("qwen3", PLAN, at_once=at_once) as server, messages_of(server) as client:
        assert block_values(client.messages.create(**message_ask())) == expected
        events = list(client.messages.create(**message_ask(stream=True)))
        with client.messages.stream(**message_ask()) as stream:
            assert block_values(stream.get_final_message()) == expected
    steps: list[tuple[str, int]] = []
    for event in events:
        place = (event.type.removeprefix("content_block_"), getattr(event, "index", -1))
        if place not in steps:
            steps.append(place)
    blocks = [(kind, index) for index in range(4) for kind in ("start", "delta", "stop")]
    assert steps == [("message_start", -1), *blocks, ("message_delta", -1), ("message_stop", -1)]
    starts = [event.content_block for event in events if event.type == "content_block_start"]
    assert (starts[0].thinking, starts[0].signature, starts[1].text) == ("", "", "")
    assert [block.input for block in starts[2:]] == [{}, {}]
    for index, (_, arguments) in enumerate(CALLS, start=2):
        pieces = [
            event.delta.partial_json
            for event in events
            if event.type == "content_block_delta" and event.index == index
        ]
        assert json.loads("".join(pieces)) == arguments


@pytest.mark.parametrize("at_once", [1, 1000])
def test_reasoning_text_and_calls_of_a_response_follow_each_other(at_once):
    calls = [("function_call", *call) for call in CALLS]
    expected = [("reasoning", "Hm."), ("message", "I look."), *calls]
    with serving_answer("qwen3", PLAN, at_once=at_once) as server, responses_of(server) as client:
        assert item_values(client.responses.create(**response_ask())) == expected
        events = list(client.responses.create(**response_ask(stream=True)))
        with client.responses.stream(**response_ask()) as stream:
            assert item_values(stream.get_final_response()) == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))
    steps: list[str] = []
    for event in events:
        kind = event.type.removeprefix("response.")
        if not (kind.endswith(".delta") and steps[-1] == kind):
            steps.append(kind)
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert steps == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *call, "output_item.done"),
        *("output_item.added", *call, "output_item.done"),
        "completed",
    ]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done]
    assert done == events[-1].response.output
    assert [item.status for item in added] == ["in_progress"] * 4
    assert [item.arguments for item in added[2:]] == ["", ""]
    for item in added[2:]:
        pieces = [
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta" and event.item_id == item.id
        ]
        (whole,) = [found.arguments for found in done if found.id == item.id]
        assert "".join(pieces) == whole


def test_an_answer_that_is_cut_is_no_call():
    with serving_answer("qwen3", QWEN3.both) as server:
        length = len(server.engine.script)
        with messages_of(server) as client:
            message = client.messages.create(**message_ask(max_tokens=length - 14))
            with client.messages.stream(**message_ask(max_tokens=length - 14)) as stream:
                assert stream.get_final_message().stop_reason == "max_tokens"
        with responses_of(server) as client:
            ask = response_ask(max_output_tokens=length - 14)
            response = client.responses.create(**ask)
            last = list(client.responses.create(**ask, stream=True))[-1]
    assert message.stop_reason == "max_tokens"
    assert block_values(message)[0] == ("tool_use", *CALLS[0])
    assert (response.status, last.type) == ("incomplete", "response.incomplete")
    for found in (response, last.response):
        assert [item.status for item in found.output] == ["completed", "incomplete"]


def grammar_of(server: Served) -> str | None:
    outputs = last_request(server).sampling.structured_outputs
    return None if outputs is None else outputs.grammar


def test_choices_of_a_message():
    with serving_answer("qwen3", QWEN3.one) as server, messages_of(server) as client:
        found = {}
        for kind in ("auto", "any", "tool", "none"):
            choice = {"type": kind} | ({"name": NAMED} if kind == "tool" else {})
            answer = client.messages.create(**message_ask(tool_choice=choice))
            found[kind] = grammar_of(server)
            expected = "text" if kind in ("none", "tool") else "tool_use"
            if kind != "tool":  # the script is not what the grammar of this choice allows
                assert [block.type for block in answer.content] == [expected]
        many = found["any"]
        client.messages.create(
            **message_ask(tool_choice={"type": "any", "disable_parallel_tool_use": True})
        )
        assert grammar_of(server) not in (None, many)
        with pytest.raises(anthropic.BadRequestError, match="expected one of tools"):
            client.messages.create(**message_ask(tool_choice={"type": "tool", "name": "other"}))
    assert found["auto"] is found["none"] is None
    assert "get_weather" in found["any"]
    assert NAMED in found["tool"]
    assert "get_weather" not in found["tool"]


def test_choices_of_a_response():
    named = {"type": "function", "name": NAMED}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    with serving_answer("qwen3", QWEN3.one) as server, responses_of(server) as client:
        found = []
        for choice in ("auto", "required", named, allowed, "none"):
            answer = client.responses.create(**response_ask(tool_choice=choice))
            found.append(grammar_of(server))
        assert [item.type for item in answer.output] == ["message"]
        client.responses.create(**response_ask(tool_choice="required", parallel_tool_calls=False))
        assert grammar_of(server) not in (None, found[1])
        for choice in ({"type": "function", "name": "other"}, {"type": "allowed_tools"}):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                client.responses.create(**response_ask(tool_choice=choice))
    assert found[0] is found[4] is None
    assert "get_weather" in found[1]
    for grammar in found[2:4]:
        assert NAMED in grammar
        assert "get_weather" not in grammar


def test_a_message_goes_on_with_the_results_of_its_calls():
    with serving_answer("qwen3", PLAN) as server, messages_of(server) as client:
        answer = client.messages.create(**message_ask())
        ids = [block.id for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": id, "content": f"of {id}"} for id in ids]
        turns = [
            TURN,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results},
        ]
        client.messages.create(**message_ask(messages=turns))
        own = last_request(server).prompt_token_ids
        assert own == prompt_of_chat(server, conversation(ids))


def test_a_conversation_goes_on_after_a_tool_returned_an_image():
    """The image stays in the history: refused, no later request could be answered."""
    call = chat_calls(["a", "b"])[:1]
    note = "[image: this model reads text only]"
    chat = [
        TURN,
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "tool", "tool_call_id": "a", "content": f"Seen\n{note}"},
    ]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    name, arguments = CALLS[0]
    use = {"type": "tool_use", "id": "a", "name": name, "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "a"}
    turns = [
        TURN,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{**result, "content": [
            {"type": "text", "text": "Seen"}, image]}]},
    ]  # fmt: skip
    items = [
        TURN,
        {"type": "function_call", "call_id": "a", **call[0]["function"]},
        {"type": "function_call_output", "call_id": "a", "output": [
            {"type": "input_text", "text": "Seen"},
            {"type": "input_image", "image_url": "data:image/png;base64,"}]},
    ]  # fmt: skip
    with serving_answer("qwen3", "ok") as server:
        found = [prompt_of_chat(server, chat)]
        asks = {"messages": message_ask(messages=turns), "responses": response_ask(input=items)}
        for path, body in asks.items():
            answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=PATIENCE_S)
            assert answer.is_success, answer.text
            found.append(last_request(server).prompt_token_ids)
    assert found[0] == found[1] == found[2]


def test_what_claude_code_changes_in_each_request_is_not_in_the_prompt():
    """So the next request finds the prefix of this one in the cache."""
    prompts = []
    with serving_answer("qwen3", "ok") as server:
        for head in ("x-anthropic-billing-header: cch=1;", "x-anthropic-billing-header: cch=2;"):
            blocks = [{"type": "text", "text": text} for text in (head, "You are an agent")]
            for path in ("messages", "messages/count_tokens"):
                body = message_ask(system=blocks)
                answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=PATIENCE_S)
                assert answer.is_success
            prompts.append(last_request(server).prompt_token_ids)
            assert answer.json()["input_tokens"] == len(prompts[-1])
        plain = [{"role": "system", "content": "You are an agent"}, TURN]
        prompts.append(prompt_of_chat(server, plain))
    assert prompts[0] == prompts[1] == prompts[2]


def conversation(ids: list[str]) -> list:
    """Return the conversation after ``PLAN`` as chat has it."""
    return [
        TURN,
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": chat_calls(ids),
        },
        *({"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in ids),
    ]


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_response_goes_on_with_the_results_of_its_calls(is_stored):
    """The client names the response, or sends its items back."""
    with serving_answer("qwen3", PLAN) as server, responses_of(server) as client:
        answer = client.responses.create(**response_ask())
        ids = [item.call_id for item in answer.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": id, "output": f"of {id}"} for id in ids
        ]
        if is_stored:
            ask = response_ask(previous_response_id=answer.id, input=results)
        else:
            sent = [item.model_dump(exclude_none=True) for item in answer.output]
            ask = response_ask(input=[TURN, *sent, *results])
        client.responses.create(**ask)
        own = last_request(server).prompt_token_ids
        assert own == prompt_of_chat(server, conversation(ids))
