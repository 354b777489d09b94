"""Answering a generation request, whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmpq.dist.io.generation import EngineClient
from llmpq.errors import LlmpqError, SpecError
from llmpq.logging import get_logger
from llmpq.server.admission import Admission
from llmpq.server.choices import ChoiceRun, Piece
from llmpq.server.errors import ApiError, as_api_error, bad_request, dump_json, json_parts
from llmpq.server.metrics import ServerMetrics
from llmpq.server.protocol import ChatCompletionRequest, CompletionRequest, StreamOptions
from llmpq.server.responses import (
    AnswerFormat,
    Answers,
    ChatFormat,
    CompletionFormat,
    Json,
)
from llmpq.server.translate import ServedModel, Work, work_of_chat, work_of_completion

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
    admission: Admission
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

    async def body(self) -> bytes:
        """Return the whole answer as JSON; raises what ``result`` does."""
        # In parts: hundreds of choices with log probabilities take seconds.
        choices = [await dump_in_parts(choice) async for choice in self._choices()]
        return _around(
            self._answers.frame([], is_chunk=False, usage=self._answers.usage()), choices
        )

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
            piece = self._without_tokens(whole.pop(index))
            self._answers.note(index, piece)
            yield self._form.choice(index, piece, is_chunk=False)
            await asyncio.sleep(0)

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
        whole = await dump_in_parts(choice)  # long: in parts
        return b"data: " + _around(frame | {"choices": []}, [whole]) + b"\n\n"

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


async def dump_in_parts(value: Json) -> bytes:
    """Return JSON, and let others run between its parts."""
    parts = []
    for part in json_parts(value):
        parts.append(part)
        if len(part) > SHORT_PART:
            await asyncio.sleep(0)
    return b"".join(parts)


def _around(frame: Json, choices: Sequence[bytes]) -> bytes:
    """Return the JSON of a frame without choices, with these."""
    head, key, tail = dump_json(frame).partition(_NO_CHOICES)  # quotes in texts are escaped
    return b"".join((head, key[:-1], b",".join(choices), key[-1:], tail))


def _event_of(value: dict[str, Any]) -> bytes:
    return b"data: " + dump_json(value) + b"\n\n"
