"""Bodies of answers: completions and chat completions, whole and as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmpq.dist.io.detokenizer import IncrementalDecoder
from llmpq.dist.io.sampling_params import TokenLogprobs
from llmpq.server.choices import Piece
from llmpq.server.protocol import ChatCompletionRequest, CompletionRequest
from llmpq.server.tokenizer import ServerTokenizer
from llmpq.server.translate import EncodedPrompt, ServedModel, Work

MIN_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not have."""

Json = dict[str, Any]


class TokenText:
    """How tokens are named in log-probabilities.

    Args:
        tokenizer: ``None`` names tokens by number.
        as_ids: whether to name them by number anyway.
    """

    def __init__(self, tokenizer: ServerTokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer

    def __call__(self, token_id: int) -> str:
        """Return the name of a token."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """Return the bytes of a token, which may be a part of a character."""
        if self._tokenizer is None:
            return list(self(token_id).encode())
        return list(self._tokenizer.token_bytes(token_id))


@dataclass(slots=True, kw_only=True)
class ChoiceState:
    """What an answer has so far.

    Attributes:
        prompt: what it answers.
        num_tokens: of the answer.
        num_cached_tokens: prompt tokens found in the prefix cache.
        has_begun: whether its first chunk was made.
    """

    prompt: EncodedPrompt
    num_tokens: int = 0
    num_cached_tokens: int = 0
    has_begun: bool = False


class AnswerFormat(Protocol):
    """Makes the JSON objects of one request's answers."""

    def opening(self, index: int, /) -> Json | None:
        """Return the choice of a chunk that stands before the first piece, if there is one."""
        ...

    def choice(self, index: int, piece: Piece, *, is_chunk: bool) -> Json:
        """Return a choice of a chunk, or of the whole answer when the piece is all of it."""
        ...


@dataclass(slots=True)
class Answers:
    """The state and the form of one request's answers.

    Attributes:
        id: of the request.
        model: for its name.
        work: the request.
        states: one for each answer.
        created_s: of the answer, by the clock of the host.
    """

    id: str
    model: ServedModel
    work: Work
    kind: str
    created_s: int = field(default_factory=lambda: int(time.time()))
    states: list[ChoiceState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = [
            ChoiceState(prompt=prompt) for prompt in self.work.prompts for _ in range(self.work.n)
        ]

    def note(self, index: int, piece: Piece) -> None:
        """Add a piece to the state of an answer."""
        state = self.states[index]
        state.num_tokens += len(piece.token_ids)
        state.num_cached_tokens = max(state.num_cached_tokens, piece.num_cached_tokens)

    def frame(self, choices: list[Json], *, is_chunk: bool, usage: Json | None = None) -> Json:
        """Return the object around choices."""
        kind = f"{self.kind}.chunk" if is_chunk and self.kind.startswith("chat") else self.kind
        body = {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model.name,
            "choices": choices,
        }
        if usage is not None or not is_chunk:
            body["usage"] = usage
        return body

    def usage(self, indices: Sequence[int] | None = None) -> Json:
        """Return the numbers of tokens; prompts count once whatever ``n`` is."""
        states = self.states if indices is None else [self.states[index] for index in indices]
        if indices is None:
            prompt_tokens = self.work.prompt_tokens
            cached = sum(state.num_cached_tokens for state in states[:: self.work.n])
        else:
            prompt_tokens = sum(len(state.prompt.token_ids) for state in states)
            cached = sum(state.num_cached_tokens for state in states)
        new = sum(state.num_tokens for state in states)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + new,
            "completion_tokens": new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class CompletionFormat:
    """Choices of ``/v1/completions``."""

    def __init__(self, body: CompletionRequest, answers: Answers) -> None:
        self._body = body
        self._answers = answers
        tokenizer = answers.model.tokenizer
        as_ids = bool(body.return_tokens_as_token_ids)
        self._name = TokenText(tokenizer, as_ids=as_ids)
        self._echoed: tuple[int, Json] = (-1, {})  # of the last prompt, for all its answers

    def opening(self, _index: int, /) -> Json | None:
        """Return nothing: the first piece opens a completion."""
        return None

    def choice(self, index: int, piece: Piece, *, is_chunk: bool) -> Json:
        """Return a choice; its first one begins with the echo of the prompt."""
        state = self._answers.states[index]
        echo = state.prompt.echo or ""
        is_first = not state.has_begun
        state.has_begun = True
        is_echoed = is_first and state.prompt.echo is not None
        choice: Json = {
            "index": index,
            "text": echo * is_echoed + piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._body.logprobs is not None:
            offsets = [len(echo) + offset for offset in piece.offsets]
            own = self._logprobs(piece.token_ids, piece.logprobs, offsets)
            if is_echoed:
                echoed = self._logprobs_of(index // self._answers.work.n, state.prompt, piece)
                own = {name: [*echoed[name], *values] for name, values in own.items()}
            choice["logprobs"] = own
        if is_first and not is_chunk and self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(piece.prompt_logprobs, self._name)
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if is_first:
                choice["prompt_token_ids"] = list(state.prompt.token_ids)
        return choice

    def _logprobs(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
    ) -> Json:
        values, names, tops = [], [], []
        for token_id, found in zip(token_ids, logprobs, strict=True):
            names.append(self._name(token_id))
            values.append(None if found is None else max(found.logprob, MIN_LOGPROB))
            tops.append(None if found is None else self._tops(found))
        return {
            "text_offset": list(offsets),
            "token_logprobs": values,
            "tokens": names,
            "top_logprobs": tops,
        }

    def _logprobs_of(self, number: int, prompt: EncodedPrompt, piece: Piece) -> Json:
        """Return the log probabilities of a prompt, which are made once for all its answers."""
        if self._echoed[0] != number:
            found = self._logprobs(
                prompt.token_ids, piece.prompt_logprobs or (), self._offsets_of(prompt)
            )
            self._echoed = number, found
        return self._echoed[1]

    def _offsets_of(self, prompt: EncodedPrompt) -> list[int]:
        """Return where the text of each token begins in the echo of a prompt."""
        tokenizer = self._answers.model.tokenizer
        decode = None if tokenizer is None else tokenizer.decoder(skip_special_tokens=True)
        decoder, echo = IncrementalDecoder(decode), prompt.echo or ""
        offsets, pieces = [], []
        for token in prompt.token_ids:
            offsets.append(decoder.num_characters)
            pieces.append(decoder.add(token))
        text = "".join([*pieces, decoder.finish()])
        # Some decoders drop the space before the first token.
        dropped = len(echo) - len(text) if echo.endswith(text) else 0
        return [dropped + offset for offset in offsets]

    def _tops(self, found: TokenLogprobs) -> dict[str, float]:
        """Return the best tokens and the chosen one, which may be one of them."""
        wanted = found.top[: self._body.logprobs]
        pairs = [(found.token_id, found.logprob), *wanted]
        tops: dict[str, float] = {}
        for token_id, value in pairs:
            tops.setdefault(self._name(token_id), max(value, MIN_LOGPROB))
        return tops


class ChatFormat:
    """Choices of ``/v1/chat/completions``."""

    def __init__(self, body: ChatCompletionRequest, answers: Answers) -> None:
        self._body = body
        self._answers = answers
        tokenizer = answers.model.tokenizer
        as_ids = bool(body.return_tokens_as_token_ids)
        self._name = TokenText(tokenizer, as_ids=as_ids)
        generates = not body.continue_final_message and body.add_generation_prompt is not False
        self._role = "assistant" if generates else str(body.messages[-1]["role"])

    def opening(self, index: int, /) -> Json | None:
        """Return the chunk with the role."""
        echo = self._answers.states[index].prompt.echo or ""
        return {
            "index": index,
            "delta": {"role": self._role, "content": echo},
            "logprobs": None,
            "finish_reason": None,
        }

    def choice(self, index: int, piece: Piece, *, is_chunk: bool) -> Json:
        """Return a choice."""
        state = self._answers.states[index]
        is_first = not state.has_begun
        state.has_begun = True
        choice: Json = {
            "index": index,
            "logprobs": self._logprobs(piece) if self._body.logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if is_chunk:
            choice["delta"] = {"content": piece.text}
        else:
            text = (state.prompt.echo or "") + piece.text
            choice["message"] = {"role": self._role, "content": text, "refusal": None}
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        if is_first and not is_chunk and self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(piece.prompt_logprobs, self._name)
        return choice

    def _logprobs(self, piece: Piece) -> Json:
        content = []
        for found in piece.logprobs:
            tops = found.top[: self._body.top_logprobs or 0]
            entry = self._entry(found.token_id, found.logprob)
            entry["top_logprobs"] = [self._entry(token, value) for token, value in tops]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._name(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": self._name.bytes_of(token_id),
        }


def prompt_logprobs_json(
    found: Sequence[TokenLogprobs | None] | None, name: TokenText
) -> list[Json | None]:
    """Return vLLM's ``prompt_logprobs``: for each position the tokens with rank and text."""
    return [None if item is None else _position_json(item, name) for item in found or ()]


def _position_json(item: TokenLogprobs, name: TokenText) -> Json:
    ranks = {token: rank for rank, (token, _) in enumerate(item.top, start=1)}
    pairs = {item.token_id: item.logprob, **dict(item.top)}
    return {
        str(token): {
            "logprob": max(value, MIN_LOGPROB),
            "rank": ranks.get(token),
            "decoded_token": name(token),
        }
        for token, value in pairs.items()
    }
