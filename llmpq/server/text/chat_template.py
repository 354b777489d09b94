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
SYSTEM_ROLES = ("system", DEVELOPER)
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
        self._places: dict[str, tuple[bool, bool]] = {}  # where it takes system messages

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
        chat = self._with_system_messages(source, chat)
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
            text, parts = ([_user(content)] for content in (_PROBE, [_part(_PROBE)]))
            self._parts[source] = not self._shows(source, text) and self._shows(source, parts)
        return self._parts[source]

    def _with_system_messages(
        self, source: str, chat: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return a conversation whose system messages are where a template takes them.

        Agents send them in any place. Many templates take one at the beginning or none: those that
        follow each other are joined, and others go with the message before them, as the beginning
        of the prompt must not change for a prefix cache.
        """
        if not any(message.get("role") in SYSTEM_ROLES for message in chat):
            return chat
        takes_first, takes_later = self._system_places(source)
        if takes_later:
            return chat
        found: list[dict[str, Any]] = []
        waiting: list[str] = []  # texts that go with the next message
        for message in chat:
            role, content = message.get("role"), message.get("content")
            if role not in SYSTEM_ROLES:
                if waiting and role in ("user", "tool"):
                    texts = [*waiting, content_text(content)]
                    found.append({**message, "content": "\n\n".join(texts)})
                    waiting = []
                else:
                    found.append(message)
                continue
            text = content_text(content)
            if not found and takes_first:
                found.append({**message, "content": text})
            elif found and found[-1]["role"] in (*SYSTEM_ROLES, "user", "tool"):
                texts = [content_text(found[-1].get("content")), text]
                found[-1] = {**found[-1], "content": "\n\n".join(filter(None, texts))}
            else:
                waiting.append(text)
        return [*found, _user("\n\n".join(waiting))] if waiting else found

    def _system_places(self, source: str) -> tuple[bool, bool]:
        """Return whether a template shows a system message at the beginning, and a later one.

        One that shows no message at all, as it needs tools or variables, says nothing of places.
        """
        if source not in self._places:
            probes = (
                [_user(_PROBE)],
                [_system(_PROBE), _user("a")],
                [_system("a"), _user("b"), _system(_PROBE)],
            )
            takes_parts = self._takes_parts(source)
            any_place, first, later = (
                self._shows(source, [*map(_with_parts, probe)] if takes_parts else probe)
                for probe in probes
            )
            self._places[source] = (first, later) if any_place else (True, True)
        return self._places[source]

    def _shows(self, source: str, messages: Sequence[Message]) -> bool:
        """Return whether the prompt of a conversation has the text of the probe."""
        try:
            text = _compile(source).render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (*_REJECTIONS, *_FAILURES):
            return False
        return _PROBE in text


def content_text(content: object, *, is_result: bool = False) -> str:
    """Return the text of a message's content: a text, or a list of parts of type ``text``.

    Args:
        content: of the message.
        is_result: whether it is what a tool returned: the model reads that there are other parts,
            as the conversation, which holds them from then on, could not go on otherwise.

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
        elif is_result and isinstance(kind, str):
            texts.append(f"[{kind.removeprefix('input_'):.40}: this model reads text only]")
        else:
            raise bad_request("messages: the model takes parts of type text only.", "messages")
    return "\n".join(texts)


def _user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose role, if it is OpenAI's later name of ``system``, is the old one."""
    return {**message, "role": "system"} if message.get("role") == DEVELOPER else message


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [_part(content)] if content else []}


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
