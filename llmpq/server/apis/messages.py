"""Anthropic's Messages API: bodies to conversations, and deltas to content blocks and events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from llmpq.server.apis.answer_events import AnswerSplitter
from llmpq.server.apis.openai import chat_of, chat_request, encode_chat
from llmpq.server.errors import ApiError, anthropic_error, bad_request
from llmpq.server.json_output import event_of
from llmpq.server.protocol import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    JsonField,
    ModelBody,
    RequestBody,
    Stop,
    Text,
    Tools,
)
from llmpq.server.service import ChoiceDelta, Json, PreparedRequest, ServedModel, TokenUsage
from llmpq.server.tools import AnswerPart, AnswerParts, PartStep

_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
_ROLES = ("user", "assistant", "system")
_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_CHANGING_SYSTEM = "x-anthropic-"
"""How a block of ``system`` begins that Claude Code changes in every request, for its own service.

A model has no use of it, and no prefix of a prompt would be found again behind it.
"""
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of the delta of each kind of part, and the field of its text."""
Content = Annotated[str | list[dict[str, Any]], JsonField, WithJsonSchema(_CONTENT)]
Turns = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=MAX_MESSAGES),
    JsonField,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"enum": list(_ROLES)}, "content": _CONTENT},
            },
        }
    ),
]


class ToolChoice(RequestBody):
    """Whether tools may or must be called."""

    type: Literal["auto", "none", "any", "tool"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = False


class OutputFormat(RequestBody):
    """The form that the text of an answer must have."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestBody):
    """How an answer is made."""

    effort: Text | None = None
    format: OutputFormat | None = None


class CountTokensRequest(ModelBody):
    """The body of ``/v1/messages/count_tokens``: a conversation."""

    messages: Turns
    system: Content | None = None
    tools: Tools = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """The body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**63)]
    stop_sequences: Annotated[list[Text] | None, Stop] = None
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, lt=2**31)] = None


async def prepare_messages(
    body: MessagesRequest, model: ServedModel, request_id: str
) -> MessagesFormat:
    """Render and encode the messages of a request and check all its fields.

    Raises:
        ApiError: it cannot be served.
    """
    chat = _chat_of(
        body,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )
    request = await chat_request(chat, model, cuts_max_tokens=True)
    is_cut = (request.sampling.max_tokens or 0) < body.max_tokens
    return MessagesFormat(model, request, f"msg_{request_id}", is_cut=is_cut)


async def count_tokens(body: CountTokensRequest, model: ServedModel) -> int:
    """Return the tokens of the prompt of a conversation.

    Raises:
        ApiError: it cannot be made.
    """
    model.check_name(body.model)
    return len(await encode_chat(_chat_of(body), model, add_special_tokens=False))


def _chat_of(body: CountTokensRequest, **sampling: Any) -> ChatCompletionRequest:
    """Return a conversation as OpenAI's clients send it; a last answer is continued."""
    system = body.system
    if isinstance(system, list):
        system = [block for block in system if not _is_changing(block)]
    messages = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(body.messages):
        messages += _messages_of(turn, f"messages.{number}")
    choice, config = body.tool_choice, body.output_config or OutputConfig()
    form = config.format
    return chat_of(
        messages=messages,
        tools=[_tool_of(tool) for tool in body.tools or ()] or None,
        tool_choice=None if choice is None else _tool_choice_of(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        reasoning_effort=config.effort,
        response_format=form and {"type": form.type, "json_schema": {"schema": form.schema_}},
        continue_final_message=body.messages[-1]["role"] == "assistant",
        **sampling,
    )


def _is_changing(block: Mapping[str, Any]) -> bool:
    text = block.get("text")
    return isinstance(text, str) and text.startswith(_CHANGING_SYSTEM)


def _messages_of(turn: Mapping[str, Any], place: str) -> list[Json]:
    """Return the messages of one turn: results of tools first, as they follow their calls."""
    role, content = turn.get("role"), turn.get("content")
    if role not in _ROLES:
        raise bad_request(f"{place}.role: expected {', '.join(_ROLES)}.", f"{place}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad_request(f"{place}.content: expected a text or a list.", f"{place}.content")
    blocks: dict[str, list[Json]] = {kind: [] for kind in _BLOCKS}
    for block in content:
        kind = str(block.get("type")) if isinstance(block, dict) else ""
        if kind not in blocks:
            raise bad_request(
                f"{place}.content: the model takes blocks of type {', '.join(_BLOCKS)} only.",
                f"{place}.content",
            )
        blocks[kind].append(block)
    results = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
        for block in blocks["tool_result"]
    ]
    message: Json = {"role": role, "content": blocks["text"]}
    if blocks["tool_use"]:
        message["tool_calls"] = [_call_of(block) for block in blocks["tool_use"]]
    if blocks["thinking"]:
        thoughts = (str(block.get("thinking", "")) for block in blocks["thinking"])
        message["reasoning_content"] = "\n".join(thoughts)
    return results if results and not blocks["text"] else [*results, message]


def _call_of(block: Mapping[str, Any]) -> Json:
    function = {"name": block.get("name"), "arguments": block.get("input") or {}}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool_of(tool: Mapping[str, Any]) -> Json:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise bad_request("tools: expected tools with a name and an input_schema.", "tools")
    names = {"input_schema": "parameters"}
    fields = ("name", "description", "input_schema", "strict")
    function = {names.get(field, field): tool[field] for field in fields if field in tool}
    return {"type": "function", "function": function}


def _tool_choice_of(choice: ToolChoice) -> str | Json:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


class MessagesFormat:
    """An answer of ``/v1/messages``.

    Args:
        model: that answers.
        request: what is answered.
        id: of the answer.
        is_cut: whether its longest answer is what fits into the model's context.
    """

    list_field = "content"
    ping = event_of({"type": "ping"})
    end_of_stream = b""

    def __init__(
        self, model: ServedModel, request: PreparedRequest, id: str, *, is_cut: bool
    ) -> None:
        self.request = request
        self._model = model
        self._id = id
        self._length = "model_context_window_exceeded" if is_cut else "max_tokens"
        self._end: Json = {"stop_reason": None, "stop_sequence": None}
        self._splitter, self._parts = AnswerSplitter(request), AnswerParts()

    def items(self, delta: ChoiceDelta) -> list[Json]:
        """Return the content of a whole answer."""
        self._parts.add(self._splitter.events(delta))
        self._parts.finish()
        self._end = self._end_of(delta)
        return [_block(part) for part in self._parts.parts]

    def whole(self, usage: TokenUsage) -> Json:
        """Return the object around the content."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": [],
            **self._end,
            "usage": _usage_json(usage),
        }

    def opening(self) -> list[Json]:
        """Return the beginning of the message; its blocks begin with their content."""
        message = self.whole(TokenUsage(self.request.prompt_tokens, 0, 0))
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def events(self, delta: ChoiceDelta) -> list[Json]:
        """Return what the delta changes in the content."""
        steps = self._parts.add(self._splitter.events(delta))
        if delta.finish_reason is not None:
            self._end = self._end_of(delta)
        return [_event(step) for step in steps]

    def closing(self, usage: TokenUsage) -> list[Json]:
        """Return the end of the content and of the message."""
        if self._end["stop_reason"] is None:
            return self.failure(ApiError(500, "The engine ended the request."))
        return [
            *map(_event, self._parts.finish()),
            {"type": "message_delta", "delta": self._end, "usage": _usage_json(usage)},
            {"type": "message_stop"},
        ]

    def failure(self, error: ApiError) -> list[Json]:
        """Return the error."""
        return [anthropic_error(error)]

    def _end_of(self, delta: ChoiceDelta) -> Json:
        reason, sequence = delta.finish_reason, self._stop_string(delta.stop_reason)
        ended = "end_turn" if sequence is None else "stop_sequence"
        if sequence is None and self._splitter.ends_in_calls(delta):
            ended = "tool_use"
        names = {"length": self._length, "stop": ended}
        return {"stop_reason": names.get(reason or ""), "stop_sequence": sequence}

    def _stop_string(self, reason: int | str | None) -> str | None:
        """Return the stop sequence that ended the answer; special tokens end it by their number."""
        tokenizer = self._model.tokenizer
        if isinstance(reason, int) and tokenizer is not None:
            texts = (text for text in self.request.stop if tokenizer.special_token(text) == reason)
            return next(texts, None)
        return reason if isinstance(reason, str) else None


def _event(step: PartStep) -> Json:
    """Return the event of a step."""
    place = {"index": step.place}
    if step.kind == "end":
        return {"type": "content_block_stop", **place}
    if step.kind == "begin":
        return {"type": "content_block_start", **place, "content_block": _block(step.part)}
    kind, field = _DELTAS[step.part.kind]
    return {"type": "content_block_delta", **place, "delta": {"type": kind, field: step.text}}


def _block(part: AnswerPart) -> Json:
    """Return the block of a part."""
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.text)}


def _input(arguments: str) -> Json:
    """Return the arguments of a call; those that the end of the answer cut stay a text."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _usage_json(usage: TokenUsage) -> Json:
    """Return the numbers of tokens; those found in the prefix cache are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.new_tokens,
    }
