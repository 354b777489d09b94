"""The tokenizer of a server: text and messages to tokens, tokens to text. Needs no torch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from llmpq.dist.io.detokenizer import INCOMPLETE, Decode, read_tokenizer
from llmpq.errors import SpecError
from llmpq.server.errors import ApiError, bad_request
from llmpq.server.text.chat_template import ChatTemplate
from llmpq.server.text.text_process import TextProcesses, load_tokenizer
from llmpq.server.tools import TemplateFormat, read_template, template_messages
from llmpq.spec.model_files.tokenizer import missing_tokenizer

CACHED_TOKENS = 1 << 16
INLINE_CHARACTERS = 2048
"""Texts up to this length together are encoded at once: a thread would take longer to wake up."""
THREAD_CHARACTERS = 1 << 17
"""Longer texts are encoded in a child process with limits of time and memory."""
PART_CHARACTERS = 1 << 20
"""Texts of a request that are encoded at once, unless a single one is longer."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""The name of a byte in tokenizers that fall back to bytes."""


class ServerTokenizer:
    """Encodes and decodes as transformers does with the same files.

    Args:
        exported: what ``model_files.export_tokenizer`` returns.

    Attributes:
        has_chat_template: whether it can make a prompt of a conversation.
    """

    def __init__(self, exported: Mapping[str, Any]) -> None:
        self.has_chat_template = exported["chat_template"] is not None
        self._tokenizer = load_tokenizer(exported["tokenizer"])
        self._processes = TextProcesses(exported)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self._longest_token = max((len(token) for token in vocab), default=1)
        self.token_text = lru_cache(maxsize=CACHED_TOKENS)(self._token_text)
        self._text_alone = lru_cache(maxsize=CACHED_TOKENS)(self._decode_alone)
        self.special_tokens: Mapping[str, int] = {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._chat_template: str | Mapping[str, str] = exported["chat_template"] or ""
        self._template: TemplateFormat | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    async def encode_async(
        self, texts: Sequence[str], *, max_tokens: int, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Encode texts, elsewhere if they are long; other requests go on meanwhile.

        Raises:
            ApiError: a text certainly has more than ``max_tokens`` tokens, or takes more time or
                memory than the limits.
        """
        longest = max(map(len, texts), default=0)
        if longest > max_tokens * self._longest_token:
            raise bad_request(
                f"The text has {longest} characters and certainly more than the model's "
                f"{max_tokens} tokens.",
                "prompt",
            )
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        if sum(map(len, texts)) <= THREAD_CHARACTERS:
            # encode_batch lets other threads run, which encode does not.
            found = await asyncio.to_thread(
                self._tokenizer.encode_batch, list(texts), add_special_tokens=add_special_tokens
            )
            return [each.ids for each in found]
        ids = []
        for part in _parts(texts):
            ids += await self._processes.encode(part, add_special_tokens=add_special_tokens)
        return ids

    async def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Return the prompt of a conversation, rendered in a child process.

        Args:
            messages: of the conversation.
            arguments: the other ones of ``ChatTemplate.render``.

        Raises:
            ApiError: there is no template, it rejects the messages, or it takes more than a limit.
        """
        return await self._processes.render({"messages": list(messages), **arguments})

    async def template(self) -> TemplateFormat:
        """Return what the chat template says about answers; it is read on first use."""
        if self._template is None:
            loop = asyncio.get_running_loop()

            def render(messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
                made = self.render(messages, **arguments)
                return asyncio.run_coroutine_threadsafe(made, loop).result()

            self._template = await asyncio.to_thread(read_template, render, self._chat_template)
        return self._template

    def warm(self) -> None:
        """Start the child process of the first conversation."""
        self._processes.warm()

    def close(self) -> None:
        """End the child processes."""
        self._processes.close()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    async def decode_async(self, token_ids: Sequence[int]) -> str:
        """Return the text of any number of tokens, special ones included; others go on."""
        # decode_batch lets other threads run, which decode does not.
        found: list[str] = await asyncio.to_thread(
            self._tokenizer.decode_batch, [list(token_ids)], skip_special_tokens=False
        )
        return found[0]

    def decoder(self, *, skip_special_tokens: bool, kept_tokens: Collection[str] = ()) -> Decode:
        """Return the decode function of one answer.

        An incremental decoder decodes every token alone once: those texts are kept.

        Args:
            skip_special_tokens: whether special tokens have no text.
            kept_tokens: special tokens that have their text in any case.
        """
        skipped: set[int] = set()
        if kept_tokens and skip_special_tokens:
            skipped = {id for text, id in self.special_tokens.items() if text not in kept_tokens}
        is_skipping = skip_special_tokens and not kept_tokens

        def decode(token_ids: Sequence[int]) -> str:
            if skipped:
                token_ids = [token for token in token_ids if token not in skipped]
            if len(token_ids) == 1:
                return self._text_alone(token_ids[0], is_skipping)
            return self.decode(token_ids, skip_special_tokens=is_skipping)

        return decode

    def token_name(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it."""
        return self._tokenizer.id_to_token(token_id) or ""

    def special_token(self, text: str) -> int | None:
        """Return the special token that is written so; ``None`` if there is none."""
        return self.special_tokens.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        text = self.token_text(token_id)
        if INCOMPLETE not in text:
            return text.encode()
        name = self.token_name(token_id)
        fallback = _BYTE.fullmatch(name)
        if fallback is not None:
            return bytes([int(fallback[1], 16)])
        byte_of = _byte_of_letter()
        if not all(letter in byte_of for letter in name):
            return text.encode()
        return bytes(byte_of[letter] for letter in name)

    def _token_text(self, token_id: int) -> str:
        """Return the text of a token inside a text, with the space before it."""
        alone = self._text_alone(token_id, False)
        if INCOMPLETE in alone:
            return alone
        # Some decoders drop the space before the first token of a text, not before the second.
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(alone) :] if twice.startswith(alone) else alone

    def _decode_alone(self, token_id: int, skip_special_tokens: bool) -> str:
        return self.decode([token_id], skip_special_tokens=skip_special_tokens)


class ChatEncoder:
    """Turns the messages of a conversation into the tokens that the server makes of them.

    The template runs in this process, without limits of time and memory.

    Args:
        model_dir: directory with the tokenizer and the chat template.

    Raises:
        SpecError: there is no tokenizer or no template, or they cannot be read.
    """

    def __init__(self, model_dir: Path) -> None:
        exported = read_tokenizer(model_dir)
        if exported is None:
            raise SpecError(f"{model_dir}: {missing_tokenizer(model_dir)}: a conversation needs it")
        if exported["chat_template"] is None:
            raise SpecError(
                f"{model_dir}: found no chat template, expected one in tokenizer_config.json or "
                "chat_template.jinja; models without one complete texts (generate)"
            )
        self._template = ChatTemplate(exported["chat_template"], exported["special_tokens"])
        self._format = read_template(self._template.render, exported["chat_template"])
        self._tokenizer = load_tokenizer(exported["tokenizer"])

    def encode(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation, up to where its answer begins.

        Args:
            messages: each with a ``role`` and a ``content``.
            variables: further ones of the template.

        Raises:
            SpecError: the template rejects the messages.
        """
        try:
            fitted = template_messages(messages, self._format)
            text = self._template.render(fitted, variables=variables)
        except ApiError as error:
            raise SpecError(error.message) from None
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


@cache
def _byte_of_letter() -> Mapping[str, int]:
    """Return the byte of each letter that byte-level tokenizers write for one (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of limited length, so that requests take turns."""
    part: list[str] = []
    length = 0
    for text in texts:
        if part and length + len(text) > PART_CHARACTERS:
            yield part
            part, length = [], 0
        part.append(text)
        length += len(text)
    yield part


def load_server_tokenizer(model_dir: Path) -> ServerTokenizer | None:
    """Return the tokenizer of a model directory, ``None`` if it has none.

    Raises:
        SpecError: it cannot be read.
    """
    exported = read_tokenizer(model_dir)
    return None if exported is None else ServerTokenizer(exported)
