"""OpenAI's Responses API: items to conversations, and deltas to items and typed events."""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator

from llmpq.server.apis.answer_events import AnswerSplitter
from llmpq.server.apis.openai import chat_of, chat_request
from llmpq.server.errors import ApiError, bad_request
from llmpq.server.json_output import PING, dump_json
from llmpq.server.protocol import (
    MAX_MESSAGES,
    JsonField,
    ModelBody,
    RequestBody,
    Text,
    Tools,
)
from llmpq.server.service import ChoiceDelta, Json, PreparedRequest, ServedModel, TokenUsage
from llmpq.server.tools import AnswerPart, AnswerParts, PartStep

STORED_BYTES = 64 << 20
"""Conversations that ``previous_response_id`` finds, together; the oldest are dropped."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc", "custom": "ctc"}
_EVENTS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}
_HOSTED = (
    "apply_patch", "code_interpreter", "computer", "file_search", "image_generation", "local_shell",
    "mcp", "shell", "tool_search", "web_search",
)  # fmt: skip
"""Beginnings of the types of tools that OpenAI's service has; agents offer them to every server."""
_TOOLS_EXPECTED = "tools: expected tools of type function, custom or namespace."
_PLAIN_NAMESPACE = "functions"
"""Whose tools have no longer name."""

Input = Annotated[
    str | list[dict[str, Any]],
    Field(min_length=1),
    JsonField,
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
    metadata: Annotated[dict[str, Any] | None, JsonField] = None
    background: bool | None = False

    @field_validator("input")
    @classmethod
    def _check_length(cls, value: Any) -> Any:
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
        tools = _tools_of(body.tools or ())
        if body.tools and not tools:
            raise bad_request(_TOOLS_EXPECTED, "tools")
        chat = chat_of(
            messages=_with_one_system_message([*own, *messages]),
            tools=[tool for _, tool in tools] or None,
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls,
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            response_format=_response_format(body.text),
            reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        )
        request = await chat_request(chat, model, cuts_max_tokens=True)
        places = {_name_of(tool): namespace for namespace, tool in tools if namespace}
        return ResponsesFormat(body, model, request, messages, self, places)


def _system(text: str) -> Json:
    return {"role": "system", "content": text}


def _messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the messages of an input; reasoning, text and calls of one answer are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Json] = []
    for number, item in enumerate(items):
        _add_item(messages, item, f"input.{number}")
    if not messages:
        raise bad_request("input: found no message.", "input")
    return messages


def _add_item(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "message" and isinstance(role, str):
        content = _content_of(item.get("content"), f"{place}.content")
        if role == "assistant" and messages and _is_thought(messages[-1]):
            messages[-1]["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind in ("function_call", "custom_tool_call"):
        kind, field = ("function", "arguments") if kind == "function_call" else ("custom", "input")
        name = _qualified(item.get("namespace"), item.get("name"))
        called = {"name": name, field: item.get(field)}
        call = {"id": item.get("call_id"), "type": kind, kind: called}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = _content_of(item.get("output"), f"{place}.output", is_result=True)
        found = {"role": "tool", "tool_call_id": item.get("call_id")}
        messages.append({**found, "content": content})
    elif kind == "reasoning":
        thought = _thought_of(item.get("content"))
        if thought:
            message = {"role": "assistant", "content": "", "reasoning_content": thought}
            messages.append(message)
    else:
        raise bad_request(
            f"{place}: expected a message, a reasoning, a function_call, a custom_tool_call or the "
            "output of one.",
            place,
        )


def _is_thought(message: Json) -> bool:
    """Return whether a message is reasoning whose answer follows."""
    has_more = message["content"] or message.get("tool_calls")
    return "reasoning_content" in message and not has_more


def _thought_of(content: object) -> str:
    """Return the text of a reasoning item, which clients send back as they got it, or empty."""
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


def _content_of(content: object, place: str, *, is_result: bool = False) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{place}: expected a text or a list.", place)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        name = "refusal" if kind == "refusal" else "text"
        if is_result and kind is not None and kind not in _TEXT_PARTS:
            parts.append({"type": str(kind)})  # said to the model, which asked for it
            continue
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


def _tools_of(tools: Iterable[Any], namespace: str = "") -> list[tuple[str, Json]]:
    """Return the tools that a model can be offered, in chat's form, each with its namespace."""
    found: list[tuple[str, Json]] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind in ("function", "custom"):
            own = {name: value for name, value in tool.items() if name != "type"}
            own["name"] = _qualified(namespace, own.get("name"))
            found.append((namespace, {"type": kind, kind: own}))
        elif kind == "namespace" and not namespace and isinstance(tool.get("tools"), list):
            if not isinstance(tool.get("name"), str) or not tool["name"]:
                raise bad_request("tools: expected a namespace with a name.", "tools")
            found += _tools_of(tool["tools"], tool["name"])
        elif not _is_hosted(tool):
            raise bad_request(_TOOLS_EXPECTED, "tools")
    return found


def _is_hosted(tool: object) -> bool:
    """Return whether a tool is one that OpenAI's service has; these are not offered."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind.startswith(_HOSTED)


def _name_of(tool: Json) -> str:
    """Return the name by which a model calls a tool."""
    return str(tool[tool["type"]].get("name"))


def _qualified(namespace: object, name: object) -> object:
    """Return the name by which a model calls a tool of a namespace."""
    if not isinstance(namespace, str) or namespace in ("", _PLAIN_NAMESPACE):
        return name
    return f"{namespace.removesuffix('__')}__{name}"


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
        namespaces: of tools that are in one, by the name by which the model calls them.
    """

    list_field = "output"
    ping = PING
    end_of_stream = b""

    def __init__(
        self,
        body: ResponsesRequest,
        model: ServedModel,
        request: PreparedRequest,
        messages: Sequence[Json],
        store: ResponseStore,
        namespaces: Mapping[str, str],
    ) -> None:
        self.request = request
        self._body = body
        self._model = model
        self._messages = messages
        self._store = store
        self._namespaces = namespaces
        name = uuid.uuid4().hex  # random: the id is all that it takes to go on with a conversation
        self._id, self._name = f"resp_{name}", name
        self._created_s = int(time.time())
        self._number = 0
        self._splitter, self._parts = AnswerSplitter(request), AnswerParts()
        self._finish_reason: str | None = None

    def items(self, delta: ChoiceDelta) -> list[Json]:
        """Return the items of a whole answer."""
        self._take(delta)
        self._parts.finish()
        return self._items()

    def whole(self, usage: TokenUsage) -> Json:
        """Return the response around its items, and keep the conversation."""
        self._keep()
        return self._response(self._status, usage)

    def opening(self) -> list[Json]:
        """Return the beginning of the response; its items begin with their content."""
        response = self._response("in_progress", None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def events(self, delta: ChoiceDelta) -> list[Json]:
        """Return what the delta changes in the items."""
        return [event for step in self._take(delta) for event in self._events(step)]

    def closing(self, usage: TokenUsage) -> list[Json]:
        """Return the end of the items and of the response."""
        if self._finish_reason in ("abort", "error"):
            return self.failure(ApiError(500, "The engine ended the request."))
        events = [event for step in self._parts.finish() for event in self._events(step)]
        self._keep()
        response = {**self._response(self._status, usage), "output": self._items()}
        return [*events, self._event(f"response.{self._status}", response=response)]

    def failure(self, error: ApiError) -> list[Json]:
        """Return the end of a response that failed."""
        response = self._response("failed", None)
        response["error"] = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=response)]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _take(self, delta: ChoiceDelta) -> list[PartStep]:
        self._finish_reason = delta.finish_reason
        return self._parts.add(self._splitter.events(delta))

    def _keep(self) -> None:
        if self._body.store is not False:
            answer = {"role": "assistant", **self._parts.message()}
            self._store.keep(self._id, [*self._messages, answer])

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _events(self, step: PartStep) -> list[Json]:
        """Return the events of a step: of the item, and of what it holds."""
        part, kind = step.part, step.part.kind
        head = {"output_index": step.place}
        place = {"item_id": self._item_id(step.place, part), **head}
        logprobs: Json = {"logprobs": []} if kind == "text" else {}
        is_call = kind == "call"
        events = _EVENTS["custom" if part.is_custom else kind]
        if not is_call:
            place["content_index"] = 0
        if step.kind == "delta":
            return [self._event(f"{events}.delta", **place, delta=step.text, **logprobs)]
        item = self._item(step.place, part)
        content = [] if is_call else [_content(part)]
        if step.kind == "begin":
            item |= {"status": "in_progress", **({} if is_call else {"content": []})}
            added = self._event("response.output_item.added", **head, item=item)
            parts = (
                self._event("response.content_part.added", **place, part=one) for one in content
            )
            return [added, *parts]
        field = "input" if part.is_custom else "arguments" if is_call else "text"
        text = {field: part.text}
        return [
            self._event(f"{events}.done", **place, **text, **logprobs),
            *(self._event("response.content_part.done", **place, part=one) for one in content),
            self._event("response.output_item.done", **head, item=item),
        ]

    def _items(self) -> list[Json]:
        return [self._item(place, part) for place, part in enumerate(self._parts.parts)]

    def _item(self, place: int, part: AnswerPart) -> Json:
        status = "completed" if part.is_complete else self._status
        head = {"id": self._item_id(place, part), "status": status}
        if part.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": [_content(part)]}
        if part.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": [_content(part)]}
        call: Json = {"call_id": part.id, "name": part.name}
        namespace = self._namespaces.get(part.name)
        if namespace is not None:
            own = part.name.removeprefix(str(_qualified(namespace, "")))
            call |= {"namespace": namespace, "name": own}
        if part.is_custom:
            return {**head, "type": "custom_tool_call", **call, "input": part.text}
        return {**head, "type": "function_call", **call, "arguments": part.text}

    def _item_id(self, place: int, part: AnswerPart) -> str:
        return f"{_PREFIXES['custom' if part.is_custom else part.kind]}_{self._name}_{place}"

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
            "tools": [tool for tool in body.tools or () if not _is_hosted(tool)],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
            "metadata": body.metadata or {},
        }

    def _usage(self, usage: TokenUsage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.new_tokens,
            "output_tokens_details": {"reasoning_tokens": self._splitter.reasoning_tokens()},
            "total_tokens": usage.prompt_tokens + usage.new_tokens,
        }


def _content(part: AnswerPart) -> Json:
    """Return the content of an item of text or reasoning."""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
