"""OpenAI's Responses API: items to conversations, and deltas to items and typed events."""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator

from llmpq.server.apis.openai import chat_of, chat_request
from llmpq.server.errors import ApiError, bad_request
from llmpq.server.json_output import dump_json
from llmpq.server.protocol import (
    MAX_MESSAGES,
    ModelBody,
    RequestBody,
    Text,
    Tools,
    check_json_text,
)
from llmpq.server.service import ChoiceDelta, Json, PreparedRequest, ServedModel, TokenUsage

STORED_BYTES = 64 << 20
"""Conversations that ``previous_response_id`` finds, together; the oldest are dropped."""
_TEXT_PARTS = ("input_text", "output_text", "text")

Input = Annotated[
    str | list[dict[str, Any]],
    Field(min_length=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["role", "content"],
                        "properties": {
                            "role": {"enum": ["user", "assistant", "system", "developer"]},
                            "content": {"type": "string"},
                        },
                    },
                },
            ]
        }
    ),
]


class TextFormat(RequestBody):
    """The form that the text of an answer must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(RequestBody):
    """The form that an answer must have: plain, a JSON object, or one of a schema."""

    format: TextFormat | None = None


class Reasoning(RequestBody):
    """How much a model reasons."""

    effort: Text | None = None


class ResponsesRequest(ModelBody):
    """The body of ``/v1/responses``."""

    input: Input
    instructions: Text | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, lt=2**63)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    store: bool | None = True
    previous_response_id: Text | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Tools = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    metadata: dict[str, Any] | None = None
    background: bool | None = False

    @field_validator("input", "tools", "metadata")
    @classmethod
    def _check_values(cls, value: Any) -> Any:
        check_json_text(value)
        if isinstance(value, list) and len(value) > MAX_MESSAGES:
            raise ValueError(f"expected at most {MAX_MESSAGES} items")
        return value


class ResponseStore:
    """Conversations by the id of their last response, up to a number of bytes.

    Args:
        max_bytes: of all conversations as JSON; the least recently used are dropped.
    """

    def __init__(self, max_bytes: int = STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._found: OrderedDict[str, bytes] = OrderedDict()

    def keep(self, id: str, messages: Sequence[Json]) -> None:
        """Keep a conversation, unless it alone is too large."""
        content = dump_json(messages)
        if len(content) > self._max_bytes:
            return
        self._found[id] = content
        self._bytes += len(content)
        while self._bytes > self._max_bytes:
            _, dropped = self._found.popitem(last=False)
            self._bytes -= len(dropped)

    def messages(self, id: str) -> list[Json]:
        """Return the messages of a conversation.

        Raises:
            ApiError: there is none, or it was dropped.
        """
        content = self._found.get(id)
        if content is None:
            raise bad_request(
                f"Previous response with id '{id:.200}' not found.", "previous_response_id"
            )
        self._found.move_to_end(id)
        found: list[Json] = json.loads(content)
        return found

    async def prepare(
        self, body: ResponsesRequest, model: ServedModel, _request_id: str
    ) -> ResponsesFormat:
        """Render and encode the conversation of a request and check all its fields.

        Raises:
            ApiError: it cannot be served.
        """
        if body.background:
            raise bad_request("background is not supported.", "background")
        previous = body.previous_response_id
        messages = [] if previous is None else self.messages(previous)
        messages += _messages_of(body.input)
        own = [] if body.instructions is None else [_system(body.instructions)]
        chat = chat_of(
            messages=_with_one_system_message([*own, *messages]),
            tools=[_tool_of(tool) for tool in body.tools or ()] or None,
            tool_choice=body.tool_choice,
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            response_format=_response_format(body.text),
            reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        )
        request = await chat_request(chat, model, cuts_max_tokens=True)
        return ResponsesFormat(body, model, request, messages, self)


def _system(text: str) -> Json:
    return {"role": "system", "content": text}


def _messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the messages of an input; calls of one answer are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Json] = []
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message" and isinstance(item.get("role"), str):
            content = _content_of(item.get("content"), f"input.{number}.content")
            messages.append({"role": item["role"], "content": content})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            content = _content_of(item.get("output"), f"input.{number}.output")
            found = {"role": "tool", "tool_call_id": item.get("call_id")}
            messages.append({**found, "content": content})
        elif kind != "reasoning":
            raise bad_request(
                f"input.{number}: expected a message, a function_call, a function_call_output or "
                "a reasoning.",
                f"input.{number}",
            )
    if not messages:
        raise bad_request("input: found no message.", "input")
    return messages


def _content_of(content: object, place: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{place}: expected a text or a list.", place)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        name = "refusal" if kind == "refusal" else "text"
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(part.get(name), str):
            raise bad_request(f"{place}: the model takes parts with text only.", place)
        parts.append({"type": "text", "text": part[name]})
    return parts


def _with_one_system_message(messages: Sequence[Json]) -> list[Json]:
    """Join the system messages at the beginning: templates take one."""
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        count += 1
    if count < 2:
        return list(messages)
    parts: list[Json] = []
    for message in messages[:count]:
        content = message["content"]
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{"role": "system", "content": parts}, *messages[count:]]


def _tool_of(tool: Mapping[str, Any]) -> Json:
    if tool.get("type") != "function":
        raise bad_request("tools: expected tools of type function.", "tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _response_format(text: TextOptions | None) -> Json | None:
    found = None if text is None else text.format
    if found is None or found.type == "text":
        return None
    if found.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"schema": found.schema_}}


class ResponsesFormat:
    """An answer of ``/v1/responses``.

    Args:
        body: of the request.
        model: that answers.
        request: what is answered.
        messages: of the conversation, without instructions.
        store: keeps the conversation with the answer, unless the body says otherwise.
    """

    list_field = "output"
    end_of_stream = b""

    def __init__(
        self,
        body: ResponsesRequest,
        model: ServedModel,
        request: PreparedRequest,
        messages: Sequence[Json],
        store: ResponseStore,
    ) -> None:
        self.request = request
        self._body = body
        self._model = model
        self._messages = messages
        self._store = store
        name = uuid.uuid4().hex  # random: the id is all that it takes to go on with a conversation
        self._id, self._item_id = f"resp_{name}", f"msg_{name}"
        self._created_s = int(time.time())
        self._number = 0
        self._text: list[str] = []
        self._finish_reason: str | None = None

    def items(self, delta: ChoiceDelta) -> list[Json]:
        """Return the message of a whole answer."""
        self._take(delta)
        return [self._item("".join(self._text))]

    def whole(self, usage: TokenUsage) -> Json:
        """Return the response around its items, and keep the conversation."""
        self._keep()
        return self._response(self._status, usage)

    def opening(self) -> list[Json]:
        """Return the beginning of the response, of its message and of the text."""
        response = self._response("in_progress", None)
        item = {**self._item(""), "status": "in_progress", "content": []}
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **place, part=_part("")),
        ]

    def events(self, delta: ChoiceDelta) -> list[Json]:
        """Return the new text, if there is any."""
        self._take(delta)
        if not delta.text:
            return []
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [self._event("response.output_text.delta", **place, delta=delta.text, logprobs=[])]

    def closing(self, usage: TokenUsage) -> list[Json]:
        """Return the end of the text, of the message and of the response."""
        if self._finish_reason in ("abort", "error"):
            return self.failure(ApiError(500, "The engine ended the request."))
        self._keep()
        text = "".join(self._text)
        item, status = self._item(text), self._status
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        response = {**self._response(status, usage), "output": [item]}
        return [
            self._event("response.output_text.done", **place, text=text, logprobs=[]),
            self._event("response.content_part.done", **place, part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=response),
        ]

    def failure(self, error: ApiError) -> list[Json]:
        """Return the end of a response that failed."""
        response = self._response("failed", None)
        response["error"] = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=response)]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _take(self, delta: ChoiceDelta) -> None:
        self._text.append(delta.text)
        self._finish_reason = delta.finish_reason

    def _keep(self) -> None:
        if self._body.store is not False:
            answer = {"role": "assistant", "content": "".join(self._text)}
            self._store.keep(self._id, [*self._messages, answer])

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _item(self, text: str) -> Json:
        return {
            "id": self._item_id,
            "type": "message",
            "status": self._status,
            "role": "assistant",
            "content": [_part(text)],
        }

    def _response(self, status: str, usage: TokenUsage | None) -> Json:
        body, sampling = self._body, self.request.sampling
        is_cut = status == "incomplete"
        form = None if body.text is None else body.text.format
        shown = {"type": "text"} if form is None else form.model_dump(by_alias=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": shown},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage_json(usage),
            "metadata": body.metadata or {},
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage_json(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.new_tokens,
    }
