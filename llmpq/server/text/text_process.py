"""Chat templates and long texts in child processes with limits of time and memory.

A template of a model directory is a program: it may loop, or make a text of gigabytes. A text of
megabytes takes seconds and a gigabyte to encode, which only the end of a process gives back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from llmpq.dist.limited.limited_process import (
    Handle,
    JobLimitError,
    JobLimits,
    LimitedProcesses,
    serve_jobs,
)
from llmpq.server.errors import ApiError, bad_request
from llmpq.server.text.chat_template import ChatTemplate

TEMPLATE_LIMITS = JobLimits(cpu_s=5.0)
ENCODE_LIMITS = JobLimits(cpu_s=10.0, memory_bytes=2 << 30)
MAX_RENDERED_CHARACTERS = 1 << 25
_MODULE = "llmpq.server.text.text_process"


class TextProcesses:
    """Child processes that render the chat template of a model, and those that encode long texts.

    Args:
        exported: what ``model_files.export_tokenizer`` returns.
    """

    def __init__(self, exported: Mapping[str, Any]) -> None:
        template = {name: exported[name] for name in ("chat_template", "special_tokens")}
        self._has_template = exported["chat_template"] is not None
        self._renderers = LimitedProcesses(_MODULE, template, TEMPLATE_LIMITS)
        self._encoders = LimitedProcesses(
            _MODULE, {"tokenizer": exported["tokenizer"]}, ENCODE_LIMITS
        )

    async def render(self, arguments: Mapping[str, Any]) -> str:
        """Return the prompt of a conversation.

        Args:
            arguments: of ``ChatTemplate.render``.

        Raises:
            ApiError: the template rejects the messages, or takes more than a limit.
        """
        try:
            found = await self._renderers.run(arguments)
        except JobLimitError as error:
            raise bad_request(
                f"messages: found a conversation whose chat template takes {error}, expected less.",
                "messages",
            ) from None
        if "refused" in found:
            raise bad_request(*found["refused"])
        return str(found["text"])

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the tokens of texts.

        Raises:
            ApiError: they take more than a limit.
        """
        try:
            found: list[list[int]] = await self._encoders.run([texts, add_special_tokens])
        except JobLimitError as error:
            count = sum(map(len, texts))
            raise bad_request(
                f"prompt: found {count} characters, whose tokens take {error}, expected fewer.",
                "prompt",
            ) from None
        return found

    def warm(self) -> None:
        """Start the child process of the first conversation, if there is a template."""
        if self._has_template:
            self._renderers.warm()

    def close(self) -> None:
        """End the child processes."""
        self._renderers.close()
        self._encoders.close()


def _load(setup: Mapping[str, Any]) -> Handle:
    return _encoder(setup) if "tokenizer" in setup else _renderer(setup)


def _encoder(setup: Mapping[str, Any]) -> Handle:
    tokenizer = load_tokenizer(setup["tokenizer"])

    def encode(job: tuple[list[str], bool]) -> list[list[int]]:
        texts, special = job
        found = tokenizer.encode_batch(texts, add_special_tokens=special)
        return [each.ids for each in found]

    return encode


def load_tokenizer(content: object) -> Tokenizer:
    """Return the tokenizer of the content of a ``tokenizer.json``, for single texts."""
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _renderer(setup: Mapping[str, Any]) -> Handle:
    template = ChatTemplate(setup["chat_template"], setup["special_tokens"])

    def render(job: dict[str, Any]) -> dict[str, Any]:
        try:
            text = template.render(job.pop("messages"), **job)
        except ApiError as error:
            return {"refused": [error.message, error.param]}
        if len(text) > MAX_RENDERED_CHARACTERS:
            message = (
                f"messages: found a prompt of {len(text)} characters, expected at most "
                f"{MAX_RENDERED_CHARACTERS}."
            )
            return {"refused": [message, "messages"]}
        return {"text": text}

    return render


if __name__ == "__main__":
    serve_jobs(_load)
