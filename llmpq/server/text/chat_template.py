"""Chat templates: messages to one prompt, rendered as transformers does it.

The template runs in jinja2's sandbox and sees plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from llmpq.server.errors import bad_request

Message = Mapping[str, Any]
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
DEVELOPER = "developer"
_REJECTIONS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
_FAILURES = (ArithmeticError, MemoryError, RecursionError)
_PROBE = "the content of a message"
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """Turns the messages of a conversation into a prompt, with the template of a model.

    Args:
        source: the template; several templates by name; ``None`` when the model has none.
        special_tokens: variables such as ``bos_token``.
    """

    def __init__(
        self, source: str | Mapping[str, str] | None, special_tokens: Mapping[str, Any]
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._parts: dict[str, bool] = {}  # by template, whether it takes content in parts only

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation.

        Raises:
            ApiError: there is no template, or it rejects the messages.
        """
        source = self._choose(tools)
        chat = [
            _with_reasoning({key: value for key, value in message.items() if value is not None})
            for message in messages
        ]
        if DEVELOPER not in source:
            chat = [_without_developer(message) for message in chat]
        final = _tag_final_message(chat) if continue_final_message else None
        if self._takes_parts(source):
            chat = [_with_parts(message) for message in chat]
        try:
            text = _compile(source).render(
                messages=chat,
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **(variables or {})},
            )
        except _REJECTIONS as error:
            raise bad_request(
                f"The chat template rejects the messages: {error}", "messages"
            ) from None
        except _FAILURES as error:
            raise bad_request(
                f"The chat template fails on the messages ({type(error).__name__})", "messages"
            ) from None
        return text if final is None else _cut_at_tag(text, final)

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        source = self._source
        if isinstance(source, Mapping):
            names = ["default"] if tools is None else ["tool_use", "default"]
            source = next((source[name] for name in names if name in source), None)
        if source is None:
            raise bad_request(
                "The model has no chat template: found none in tokenizer_config.json or "
                "chat_template.jinja; use /v1/completions."
            )
        return source

    def _takes_parts(self, source: str) -> bool:
        """Return whether a template shows content in parts and none that is a text."""
        if source not in self._parts:
            part = {"type": "text", "text": _PROBE}
            self._parts[source] = not self._shows(source, _PROBE) and self._shows(source, [part])
        return self._parts[source]

    def _shows(self, source: str, content: object) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            text = _compile(source).render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (*_REJECTIONS, *_FAILURES):
            return False
        return _PROBE in text


def content_text(content: object) -> str:
    """Return the text of a message's content: a text, or a list of parts of type ``text``.

    Raises:
        ApiError: a part is of another type.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("messages: expected content to be a text or a list.", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "refusal") and isinstance(part.get(kind), str):
            texts.append(part[kind])
        else:
            raise bad_request("messages: the model takes parts of type text only.", "messages")
    return "\n".join(texts)


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose role, if it is OpenAI's later name of ``system``, is the old one."""
    return {**message, "role": "system"} if message.get("role") == DEVELOPER else message


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Fill the reasoning fields from each other, as templates read different ones."""
    found = [message[name] for name in REASONING_FIELDS if message.get(name) is not None]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def _tag_final_message(chat: list[dict[str, Any]]) -> str:
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str):
        raise bad_request("The last message has no text to continue.", "continue_final_message")
    chat[-1] = {**chat[-1], "content": content + _CONTINUE_TAG}
    return content


def _cut_at_tag(text: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise bad_request(
            "The chat template leaves out the last message, which is to be continued.",
            "continue_final_message",
        )
    place = text.rindex(tag)
    is_whole = text[place : place + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return text[:place] if is_whole else text[:place].rstrip()


class _GenerationBlock(Extension):
    """``{% generation %}``: marks an answer for training; renders its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to ``{% endgeneration %}``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.CallBlock(self.call_method("_content"), [], [], body)
        return call.set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


class _Dict:
    """``dict`` without access to the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dictionary of these keys."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """``namespace`` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name {name!r}")


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that jinja2's own filter adds."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
