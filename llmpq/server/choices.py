"""Running the answers of one HTTP request: tokens from the engine, text for the client.

A task for each answer reads the engine and adds what is new to a buffer. A client that reads slowly
finds several steps merged into one piece; the engine never waits for it. The buffer is bounded by
the length of the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from llmpq.dist.io.detokenizer import Detokenizer
from llmpq.dist.io.generation import EngineClient, GenerationRequest, TokenOutput
from llmpq.dist.io.sampling_params import SamplingParams, TokenLogprobs
from llmpq.errors import LlmpqError, StageError
from llmpq.server.tokenizer import ServerTokenizer
from llmpq.server.translate import EncodedPrompt, Work

MAX_SEED = 2**63 - 1
PromptLogprobs = Sequence[TokenLogprobs | None]


@dataclass(slots=True, kw_only=True)
class Piece:
    """New tokens and text of one answer.

    Attributes:
        text: the new text.
        token_ids: the new tokens.
        offsets: where the text of each of them begins in the text of the answer.
        logprobs: of the new tokens, empty unless asked for.
        prompt_logprobs: of the prompt, in the first piece.
        finish_reason: in the last piece.
        stop_reason: the stop string or token.
        num_cached_tokens: prompt tokens found in the prefix cache.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0

    def extend(self, other: Piece) -> None:
        """Add the piece that follows."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.offsets += other.offsets
        self.logprobs += other.logprobs
        self.finish_reason = other.finish_reason
        self.stop_reason = other.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, other.num_cached_tokens)
        if self.prompt_logprobs is None:
            self.prompt_logprobs = other.prompt_logprobs


class ChoiceObserver(Protocol):
    """Receives the events of one answer, for limits and metrics."""

    def tokens(self, count: int) -> None:
        """Count new tokens."""
        ...

    def finished(self, reason: str) -> None:
        """Count the end of the answer."""
        ...


class ChoiceRun:
    """The answers of one request while they are made; leaving the context aborts them.

    Args:
        engine: makes the tokens.
        work: what to answer.
        tokenizer: ``None`` for answers without text.
        id: of the request; the engine's requests have it as a prefix.
        observers: one for each answer.
    """

    def __init__(
        self,
        engine: EngineClient,
        work: Work,
        tokenizer: ServerTokenizer | None,
        id: str,
        observers: Sequence[ChoiceObserver],
    ) -> None:
        self._engine = engine
        self._work = work
        self._tokenizer = tokenizer
        self._id = id
        self._observers = observers
        self._pieces: dict[int, Piece] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._unfinished = work.num_choices
        self._error: LlmpqError | None = None
        self._of_prompts: list[asyncio.Future[PromptLogprobs | None]] = []

    async def __aenter__(self) -> ChoiceRun:
        """Start the answers."""
        loop = asyncio.get_running_loop()
        self._of_prompts = [loop.create_future() for _ in self._work.prompts]
        first = self._work.seed
        seed = secrets.randbits(62) if first is None else first
        for index in range(self._work.num_choices):
            prompt = self._work.prompts[index // self._work.n]
            number = index if first is None else index % self._work.n
            sampling = prompt.sampling.with_seed(_seed_after(seed, number))
            self._tasks.append(asyncio.create_task(self._read(index, prompt, sampling)))
        return self

    async def __aexit__(self, *error: object) -> None:
        """Abort what is not finished."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fail(self, error: LlmpqError) -> None:
        """End all answers with an error."""
        self._error = error
        self._changed.set()

    async def pieces(self) -> AsyncGenerator[dict[int, Piece], None]:
        """Yield the new pieces of all answers that have any, until all answers are finished.

        Raises:
            LlmpqError: the engine failed.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            pieces, self._pieces = self._pieces, {}
            if pieces:
                yield pieces
            if self._error is not None:
                raise self._error
            if self._unfinished == 0 and not self._pieces:
                return

    async def _read(self, index: int, prompt: EncodedPrompt, sampling: SamplingParams) -> None:
        reason = "abort"
        observer = self._observers[index]
        try:
            async for piece in self._answer(index, prompt, sampling):
                if index in self._pieces:
                    self._pieces[index].extend(piece)
                else:
                    self._pieces[index] = piece
                if piece.finish_reason is not None:
                    reason = piece.finish_reason
                    self._unfinished -= 1
                self._changed.set()
        except LlmpqError as error:
            reason = "error"
            self.fail(error)
        except Exception as error:
            reason = "error"
            self.fail(StageError(type(error).__name__))
            raise
        finally:
            observer.finished(reason)
            self._share(index, None)

    async def _answer(
        self, index: int, prompt: EncodedPrompt, sampling: SamplingParams
    ) -> AsyncIterator[Piece]:
        """Yield the pieces of one answer.

        The log probabilities of a prompt are computed once, with its first answer. The others start
        afterwards, so that they find the prompt in the prefix cache.
        """
        of_prompt: PromptLogprobs | None = None
        if sampling.prompt_logprobs is not None and index % self._work.n:
            of_prompt = await self._of_prompts[index // self._work.n]
            if of_prompt is None:
                raise StageError("the first answer to the prompt ended too early")
            sampling = replace(sampling, prompt_logprobs=None)
        request = GenerationRequest(
            id=f"{self._id}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            priority=self._work.priority,
            cache_salt=self._work.cache_salt,
            group=self._id if self._work.num_choices > 1 else None,
        )
        text = self._detokenizer(prompt)
        observer = self._observers[index]
        async with contextlib.aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                piece = _piece_of(output, text, include_stop=self._work.include_stop)
                observer.tokens(len(piece.token_ids))
                if of_prompt is not None:
                    piece.prompt_logprobs, of_prompt = of_prompt, None
                if piece.prompt_logprobs is not None:
                    self._share(index, piece.prompt_logprobs)
                yield piece
                if piece.finish_reason is not None:
                    return
        raise StageError("the engine ended an answer without a reason")

    def _share(self, index: int, of_prompt: PromptLogprobs | None) -> None:
        """Give the other answers to a prompt what the first one found, or ``None`` at its end."""
        shared = self._of_prompts[index // self._work.n]
        if index % self._work.n == 0 and not shared.done():
            shared.set_result(of_prompt)

    def _detokenizer(self, prompt: EncodedPrompt) -> Detokenizer:
        work = self._work
        decode = (
            None
            if self._tokenizer is None
            else self._tokenizer.decoder(skip_special_tokens=work.skip_special_tokens)
        )
        return Detokenizer(
            decode,
            work.stop,
            include_stop=work.include_stop,
            min_tokens=prompt.sampling.min_tokens,
            context=prompt.token_ids if prompt.is_continued else (),
        )


def _piece_of(output: TokenOutput, text: Detokenizer, *, include_stop: bool) -> Piece:
    """Return the piece of an output, up to a stop string if there is one."""
    piece = Piece(
        prompt_logprobs=output.prompt_logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
    )
    count = len(output.token_ids)
    has_stop_token = output.finish_reason == "stop" and not output.is_form_complete
    hidden = count - 1 if has_stop_token and not include_stop else count
    for place, token in enumerate(output.token_ids):
        piece.token_ids.append(token)
        piece.offsets.append(text.num_characters)
        if place != hidden:
            piece.text += text.add(token)
        if text.stop_reason is not None:
            piece.finish_reason, piece.stop_reason = "stop", text.stop_reason
            break
    if output.logprobs is not None:
        piece.logprobs.extend(output.logprobs[: len(piece.token_ids)])
    if piece.finish_reason is not None:
        piece.text += text.finish()
    if text.stop_reason is not None:
        piece.finish_reason, piece.stop_reason = "stop", text.stop_reason
    return piece


def _seed_after(seed: int, number: int) -> int:
    """Return the seed of a further answer, in the range of seeds."""
    return seed + number if seed + number <= MAX_SEED else seed - 2**63 + number
