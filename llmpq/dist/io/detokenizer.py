"""Tokens to text while an answer is made, and stop strings. Needs no torch.

The tokenizer of a model is read by another process, so that transformers is not imported here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes bytes to that are not a whole character yet."""
MAX_PENDING = 16
"""Tokens without text after which their bytes are taken for invalid, not for incomplete."""
CHARACTER_BYTES = 4
CONTEXT_TOKENS = 4
"""Tokens before an answer that are decoded with it: special ones among them have no text."""
TIMEOUT_S = 120.0

Decode = Callable[[Sequence[int]], str]


class IncrementalDecoder:
    """Text of an answer, token by token.

    Args:
        decode: returns the text of tokens; without it all text is empty.
        context: tokens before the answer, whose text the answer continues. Decoders of
            SentencePiece's tokenizers drop the space before the first token of a text.

    Attributes:
        num_characters: returned so far: where the text of the next token begins.
    """

    def __init__(self, decode: Decode | None, context: Sequence[int] = ()) -> None:
        self.num_characters = 0
        self._decode = decode
        self._token_ids = list(context[-CONTEXT_TOKENS:])  # from the first that is decoded again
        if decode is not None and decode(self._token_ids).endswith(INCOMPLETE):
            self._token_ids = []
        # The tokens whose text was returned, and which give new ones their spaces.
        self._read = len(self._token_ids)

    def add(self, token: int) -> str:
        """Return the text that a token completes; empty inside a character of several tokens."""
        if self._decode is None:
            return ""
        self._token_ids.append(token)
        known = self._decode(self._token_ids[: self._read])
        text = self._decode(self._token_ids)
        if len(text) <= len(known):
            if len(self._token_ids) - self._read > MAX_PENDING:
                self._token_ids.pop()
            return ""
        if text.endswith(INCOMPLETE):
            return self._invalid_text(text, known)
        return self._advance(len(self._token_ids), text, known)

    def finish(self) -> str:
        """Return the text of an incomplete last character, as the tokenizer decodes it."""
        if self._decode is None:
            return ""
        known = self._decode(self._token_ids[: self._read])
        return self._advance(len(self._token_ids), self._decode(self._token_ids), known)

    def _advance(self, end: int, text: str, known: str) -> str:
        self._token_ids = self._token_ids[self._read :]
        self._read = end - self._read
        new = text[len(known) :]
        self.num_characters += len(new)
        return new

    def _invalid_text(self, text: str, known: str) -> str:
        """Return text whose bytes no later token can complete, so that the rest stays short."""
        assert self._decode is not None
        end = len(self._token_ids)
        if end - self._read < MAX_PENDING:
            return ""
        for cut in range(end - CHARACTER_BYTES, self._read, -1):
            first = self._decode(self._token_ids[:cut])
            if len(first) > len(known) and first + self._decode(self._token_ids[cut:]) == text:
                return self._advance(cut, first, known)
        return ""


class Detokenizer:
    """Text of an answer up to its first stop string, whatever tokens the string is spread over.

    Of several stop strings the one that is complete first counts; of those that end at the same
    character the longest. Text that may be the beginning of a stop string is held back.

    Args:
        decode: as for :class:`IncrementalDecoder`.
        stop: stop strings, none of them empty.
        include_stop: whether the stop string is part of the text.
        min_tokens: a stop string that is complete within the first tokens does not count.
        context: as for :class:`IncrementalDecoder`.

    Attributes:
        stop_reason: the stop string that was found.
    """

    def __init__(
        self,
        decode: Decode | None,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        context: Sequence[int] = (),
    ) -> None:
        if "" in stop:
            raise SpecError("stop: found an empty string, expected at least one character")
        self.stop_reason: str | None = None
        self._decoder = IncrementalDecoder(decode, context)
        self._stop = tuple(stop)
        self._longest = max((len(text) for text in stop), default=0)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""

    @property
    def num_characters(self) -> int:
        """Where the text of the next token begins, in characters from the start of the answer."""
        return self._decoder.num_characters

    def add(self, token: int) -> str:
        """Return the text that is certain after one more token.

        Once ``stop_reason`` is set, the answer is over and further tokens add nothing.
        """
        if self.stop_reason is not None:
            return ""
        self._num_tokens += 1
        return self._append(self._decoder.add(token))

    def finish(self) -> str:
        """Return the text that was held back, at the end of an answer."""
        if self.stop_reason is not None:
            return ""
        text = self._append(self._decoder.finish()) + self._held
        self._held = ""
        return text

    def _append(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        found = self._first_stop(text) if self._num_tokens > self._min_tokens else None
        if found is None:
            certain = len(text) - self._length_of_beginning(text)
            self._held = text[certain:]
            return text[:certain]
        self._held = ""
        end, begin, self.stop_reason = found
        return text[: end if self._include_stop else begin]

    def _first_stop(self, text: str) -> tuple[int, int, str] | None:
        """Return end, begin and text of the first stop string that ends in the new text."""
        found = []
        for stop in self._stop:
            begin = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        return min(found, default=None)

    def _length_of_beginning(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) and len(stop) > length for stop in self._stop):
                return length
        return 0


def read_tokenizer(model_dir: Path) -> dict[str, Any] | None:
    """Return what ``model_files.export_tokenizer`` returns of a model.

    Raises:
        SpecError: as ``export_tokenizer``, or it takes too long.
    """
    command = [sys.executable, "-P", "-m", "llmpq.dist.io.model_files", str(model_dir)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SpecError(f"{model_dir}: the tokenizer was not read within {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise SpecError(lines[-1] if lines else f"{model_dir}: the tokenizer cannot be read")
    found: dict[str, Any] | None = json.loads(done.stdout)
    return found
