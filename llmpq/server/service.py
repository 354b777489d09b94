"""Answering a generation request, whole or as a stream.

A task for each answer reads the engine and adds what is new to a buffer. A client that reads slowly
finds several steps merged into one piece; the engine never waits for it. The buffer is bounded by
the length of the answers. Bodies are those of completions and chat completions, whole and as chunks
of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from llmpq.dist.io.detokenizer import Detokenizer, IncrementalDecoder
from llmpq.dist.io.generation import EngineClient, GenerationRequest, TokenOutput
from llmpq.dist.io.sampling_params import MIN_LOGPROB, SamplingParams, TokenLogprobs
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.logging import get_logger
from llmpq.server.admission import RequestAdmission
from llmpq.server.errors import ApiError, as_api_error, bad_request
from llmpq.server.json_output import SharedItems, SharedList, dump_json, json_parts
from llmpq.server.metrics import ServerMetrics
from llmpq.server.protocol import ChatCompletionRequest, CompletionRequest, StreamOptions
from llmpq.server.text.tokenizer import ServerTokenizer
from llmpq.server.text.translate import (
    EncodedPrompt,
    ServedModel,
    Work,
    work_of_chat,
    work_of_completion,
)
from llmpq.server.tools import AnswerParts, Event, TextDelta, chat_delta

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
            else self._tokenizer.decoder(
                skip_special_tokens=work.skip_special_tokens, kept_tokens=work.kept_tokens
            )
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
        self._echoed: tuple[int, dict[str, SharedItems]] = (-1, {})  # of the last prompt

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
                own = {name: SharedList(echoed[name], values) for name, values in own.items()}
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

    def _logprobs_of(
        self, number: int, prompt: EncodedPrompt, piece: Piece
    ) -> dict[str, SharedItems]:
        """Return the log probabilities of a prompt, which are made once for all its answers."""
        if self._echoed[0] != number:
            found = self._logprobs(
                prompt.token_ids, piece.prompt_logprobs or (), self._offsets_of(prompt)
            )
            self._echoed = number, {name: SharedItems(items) for name, items in found.items()}
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
        tools, text = answers.work.tools, answers.work.prompt_text
        self._parsers = [] if tools is None else [tools.parser(text) for _ in answers.states]
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
        events: Sequence[Event] = [TextDelta(piece.text)]
        if self._parsers:
            events = self._parsers[index].feed(piece.text)
            if piece.finish_reason is not None:
                events = [*events, *self._parsers[index].finish()]
            if piece.finish_reason == "stop" and self._parsers[index].num_calls:
                choice["finish_reason"] = "tool_calls"
        if is_chunk:
            choice["delta"] = chat_delta(events)
        else:
            parts = AnswerParts(text=state.prompt.echo or "")
            parts.add(events)
            choice["message"] = {"role": self._role, "refusal": None, **parts.message()}
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


logger = get_logger(__name__)
DONE = b"data: [DONE]\n\n"
SHORT_PART = 1024
"""Bytes of JSON that are made without letting others run."""


@dataclass(slots=True)
class Service:
    """What all requests share.

    Attributes:
        engine: makes the tokens.
        model: of the engine.
        admission: limits and counts.
        metrics: of the server.
        runs: requests that are being answered.
    """

    engine: EngineClient
    model: ServedModel
    admission: RequestAdmission
    metrics: ServerMetrics
    runs: set[ChoiceRun] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        """Whether new requests are served."""
        return self.engine.is_alive and not self.admission.is_draining

    def load(self) -> Json:
        """Return the load under vLLM's name, and what ``llmpq-route`` reads."""
        stats, limits, totals = self.engine.stats, self.admission.limits, self.metrics.totals
        kv_tokens, budget = stats.num_blocks * stats.block_size, stats.token_budget
        rate = limits.prefill_tokens_per_s
        return {
            "server_load": self.admission.num_choices,
            "is_ready": self.is_ready and budget > 0,
            "running": stats.running,
            "waiting": stats.waiting,
            "queued_tokens": self.admission.queued_tokens,
            "waiting_tokens": max(0, self.admission.queued_tokens - stats.started_tokens),
            "free_kv_tokens": round(kv_tokens * (1.0 - stats.kv_cache_usage)),
            "kv_tokens": kv_tokens,
            "token_budget": budget,
            "prefill_step_s": budget / rate if rate else 1.0,
            "decode_step_s": limits.decode_step_s or 1.0,
            **totals._asdict(),
        }

    def begin_drain(self) -> None:
        """Admit no new requests."""
        self.admission.is_draining = True

    def abort_all(self) -> None:
        """End all requests with an error, because the server ends."""
        for run in self.runs:
            run.fail(ApiError(503, "The server is shutting down."))

    def close(self) -> None:
        """End the child processes of the tokenizer; the engine ends by itself."""
        if self.model.tokenizer is not None:
            self.model.tokenizer.close()

    def check_open(self) -> None:
        """Check what needs no look at a request.

        Raises:
            ApiError: the engine has ended for good, or the server drains or is full.
        """
        if self.engine.error is not None:
            raise ApiError(503, "The engine has ended.")
        self.admission.check_open()

    async def prepare(
        self, body: CompletionRequest | ChatCompletionRequest, request_id: str
    ) -> Generation:
        """Check a request; what it returns has not begun.

        Raises:
            ApiError: it cannot be served, now or ever.
        """
        self.model.check_name(body.model)
        self.check_open()
        if isinstance(body, ChatCompletionRequest):
            work = await work_of_chat(body, self.model)
            await self._check_form(work)
            answers = Answers(f"chatcmpl-{request_id}", self.model, work, "chat.completion")
            return Generation(self, body, answers, ChatFormat(body, answers))
        work = await work_of_completion(body, self.model)
        await self._check_form(work)
        answers = Answers(f"cmpl-{request_id}", self.model, work, "text_completion")
        return Generation(self, body, answers, CompletionFormat(body, answers))

    async def _check_form(self, work: Work) -> None:
        """Check the form of the answers, so that a bad one is refused at once."""
        form = work.prompts[0].sampling.structured_outputs
        if form is not None:
            try:
                await self.engine.check_form(form)
            except SpecError as error:
                raise bad_request(str(error), "structured_outputs") from None


_NO_CHOICES = dump_json({"choices": []})[1:-1]


class Generation:
    """One checked request."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest | ChatCompletionRequest,
        answers: Answers,
        form: AnswerFormat,
    ) -> None:
        self._service = service
        self._own_run: ChoiceRun | None = None
        self._body = body
        self._answers = answers
        self._form = form
        self._work: Work = answers.work

    async def result(self) -> Json:
        """Return the whole answer.

        Raises:
            ApiError: the server is full, or the engine failed.
        """
        choices = [choice async for choice in self._choices()]
        return self._answers.frame(choices, is_chunk=False, usage=self._answers.usage())

    async def body(self) -> list[bytes]:
        """Return the whole answer as JSON, in parts; raises what ``result`` does."""
        # In parts: hundreds of choices with log probabilities take seconds.
        choices: list[bytes] = []
        async for choice in self._choices():
            if choices:
                choices.append(b",")
            choices += await dump_in_parts(choice, self._pause)
        frame = self._answers.frame([], is_chunk=False, usage=self._answers.usage())
        return _around(frame, choices)

    async def _choices(self) -> AsyncIterator[Json]:
        """Yield the choices when all are whole, and let others run after each."""
        whole: dict[int, Piece] = {}
        try:
            async with self._run() as run:
                async for pieces in run.pieces():
                    for index, piece in pieces.items():
                        if index in whole:
                            whole[index].extend(piece)
                        else:
                            whole[index] = piece
        except LlmpqError as error:
            raise as_api_error(error) from error
        if any(piece.finish_reason in ("abort", "error") for piece in whole.values()):
            raise ApiError(500, "The engine ended the request.")
        for index in sorted(whole):
            start_s = time.monotonic()
            piece = self._without_tokens(whole.pop(index))
            self._answers.note(index, piece)
            choice = self._form.choice(index, piece, is_chunk=False)
            await self._pause(time.monotonic() - start_s)
            yield choice

    async def _pause(self, spent_s: float) -> None:
        """Leave other requests as much of the event loop as a part of this answer took."""
        has_others = any(run is not self._own_run for run in self._service.runs)
        await asyncio.sleep(spent_s if has_others else 0)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; an error of the engine is the last event but one.

        The first item is empty: the request is admitted.

        Raises:
            ApiError: the server is full; before the first event only.
        """
        options = self._body.stream_options or StreamOptions()
        async with self._run() as run:
            yield b""
            for index in range(self._work.num_choices):
                opening = self._form.opening(index)
                if opening is not None:
                    yield _event_of(self._chunk(opening, index, options))
            try:
                async with contextlib.aclosing(run.pieces()) as batches:
                    async for pieces in batches:
                        events: list[bytes] = []
                        for index, piece in pieces.items():
                            events.append(await self._event(index, piece, options))
                        yield b"".join(events)
            except LlmpqError as error:
                logger.error("a request failed: %s", type(error).__name__)
                yield _event_of(as_api_error(error).to_json())
            else:
                if options.include_usage:
                    usage = self._answers.usage()
                    yield _event_of(self._answers.frame([], is_chunk=True, usage=usage))
        yield DONE

    @contextlib.asynccontextmanager
    async def _run(self) -> AsyncIterator[ChoiceRun]:
        """Admit the request and start its answers."""
        service = self._service
        tokens = self._work.prompt_tokens * self._work.n
        with service.admission.admit(self._work.num_choices, tokens) as ticket:
            service.metrics.observe_request(self._work)
            observers = service.metrics.observers(self._work, ticket)
            tokenizer = service.model.tokenizer
            engine_id = uuid.uuid4().hex
            async with ChoiceRun(
                service.engine, self._work, tokenizer, engine_id, observers
            ) as run:
                self._own_run = run
                service.runs.add(run)
                try:
                    yield run
                finally:
                    service.runs.discard(run)

    async def _event(self, index: int, piece: Piece, options: StreamOptions) -> bytes:
        piece = self._without_tokens(piece)
        self._answers.note(index, piece)
        choice = self._form.choice(index, piece, is_chunk=True)
        frame = self._chunk(choice, index, options)
        if piece.prompt_logprobs is None:
            return _event_of(frame)
        whole = await dump_in_parts(choice, self._pause)  # long: in parts
        return b"".join((b"data: ", *_around(frame | {"choices": []}, whole), b"\n\n"))

    def _chunk(self, choice: Json, index: int, options: StreamOptions) -> Json:
        frame = self._answers.frame([choice], is_chunk=True)
        if options.continuous_usage_stats:
            frame["usage"] = self._answers.usage([index])
        elif options.include_usage:
            frame["usage"] = None
        return frame

    def _without_tokens(self, piece: Piece) -> Piece:
        """Return the piece of an answer that is the prompt alone, where ``max_tokens`` is 0."""
        if self._work.generates:
            return piece
        return Piece(prompt_logprobs=piece.prompt_logprobs, finish_reason="length")


async def dump_in_parts(value: Json, pause: Callable[[float], Awaitable[None]]) -> list[bytes]:
    """Return JSON in parts; call ``pause`` after each long one with the seconds that it took."""
    parts = []
    start_s = time.monotonic()
    for part in json_parts(value):
        parts.append(part)
        if len(part) > SHORT_PART:
            await pause(time.monotonic() - start_s)
            start_s = time.monotonic()
    return parts


def _around(frame: Json, choices: Sequence[bytes]) -> list[bytes]:
    """Return the JSON of a frame without choices, with the parts of these."""
    head, key, tail = dump_json(frame).partition(_NO_CHOICES)  # quotes in texts are escaped
    return [head, key[:-1], *choices, key[-1:], tail]


def _event_of(value: dict[str, Any]) -> bytes:
    return b"data: " + dump_json(value) + b"\n\n"
