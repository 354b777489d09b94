"""The way of a request: checked, answered by the engine, whole or as a stream.

Each API of ``llmpq.server.apis`` makes a :class:`PreparedRequest` of its body, and JSON of every
:class:`ChoiceDelta`. A task for each answer reads the engine and adds what is new to a buffer. A
client that reads slowly finds several steps merged into one delta; the engine never waits for it.
The buffer is bounded by the length of the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from llmpq.dist.io.detokenizer import Detokenizer
from llmpq.dist.io.generation import EngineClient, GenerationRequest, TokenOutput
from llmpq.dist.io.sampling_params import SamplingParams, TokenLogprobs
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.logging import get_logger
from llmpq.options.run import Pooling
from llmpq.server.admission import RequestAdmission
from llmpq.server.errors import ApiError, as_api_error, bad_request
from llmpq.server.json_output import dump_json, event_of, json_parts
from llmpq.server.metrics import ServerMetrics
from llmpq.server.protocol import ModelBody
from llmpq.server.text.tokenizer import ServerTokenizer
from llmpq.server.tools import PreparedTools
from llmpq.spec.fields import read_json
from llmpq.spec.model_files.tokenizer import GENERATION_FILE, missing_tokenizer
from llmpq.spec.model_files.weight_headers import find_gguf
from llmpq.spec.runtime_constants import MAX_CHOICES

MAX_SEED = 2**63 - 1
DEFAULT_SAMPLING: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Where neither the request nor the model's generation_config.json has a value."""
SHORT_PART = 1024
"""Bytes of JSON that are made without letting others run."""

Json = dict[str, Any]
PromptLogprobs = Sequence[TokenLogprobs | None]
logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings:
    """How the embeddings of a model are made.

    Attributes:
        pooling: of the final hidden states.
        dimensions: lengths to which an embedding may be cut; none for a model that was not trained
            for it (Matryoshka).
    """

    pooling: Pooling = "last"
    dimensions: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are checked against: the model's name, its limits, its tokenizer.

    Attributes:
        names: by which requests name it; answers use the first.
        root: its directory.
        tokenizer: ``None`` for a model without one, which takes and gives tokens only.
        max_model_len: most tokens of prompt and answer together.
        vocab_size: tokens are below this number.
        created_s: when it was loaded, by the clock of the host.
        default_sampling: values for fields that a request leaves out.
        max_choices: most answers of a request.
        embeddings: how they are made.
    """

    names: tuple[str, ...]
    root: str
    tokenizer: ServerTokenizer | None
    max_model_len: int
    vocab_size: int
    created_s: int = 0
    default_sampling: Mapping[str, float] = field(default_factory=lambda: DEFAULT_SAMPLING)
    max_choices: int = MAX_CHOICES
    embeddings: EmbeddingSettings = EmbeddingSettings()

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Check the model that a request names.

        Raises:
            ApiError: it is another one.
        """
        if name and name not in self.names:
            raise ApiError(404, f"The model `{name:.200}` does not exist.", param="model")

    def need_tokenizer(self, purpose: str) -> ServerTokenizer:
        """Return the tokenizer.

        Raises:
            ApiError: there is none.
        """
        if self.tokenizer is None:
            reason = missing_tokenizer(Path(self.root))
            raise bad_request(f"{reason[0].upper()}{reason[1:]}: {purpose}.")
        return self.tokenizer


def default_sampling_of(model_dir: Path) -> Mapping[str, float]:
    """Return the default sampling of a model: ``generation_config.json``, as vLLM reads it.

    Raises:
        SpecError: the file cannot be read, or a value in it is not a number.
    """
    gguf = find_gguf(model_dir)
    path = (model_dir if gguf is None else gguf.parent) / GENERATION_FILE
    found = read_json(path) if path.is_file() else {}
    values = dict(DEFAULT_SAMPLING)
    if not isinstance(found, dict) or found.get("do_sample") is False:
        return values
    for name in values:
        value = found.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{path}: field '{name}': found {value!r}, expected a number")
        values[name] = value
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A checked request, whichever API it came by.

    Attributes:
        prompts: tokens of each prompt, at least one; each prompt gets ``n`` answers.
        sampling: of all answers, without a seed.
        n: answers to each prompt.
        seed: of the first answer; the others use the numbers that follow. ``None`` for any.
        echoes: text that stands before the answers to each prompt; none where it is empty.
        is_continued: whether the text of an answer goes on where that of its prompt ends.
        stop: stop strings.
        include_stop: whether the text of an answer ends with its stop string or stop token.
        skip_special_tokens: whether special tokens are left out of texts.
        generates: false when an answer is the prompt alone (``max_tokens`` of 0).
        priority: of the queue.
        cache_salt: of the prefix cache.
        tools: how the answers are split; ``None`` where they are text only.
        prompt_text: of a conversation.
        kept_tokens: special tokens that stay in the text of answers.
        pooling: of the prompts, whose embeddings are the answers; ``None`` where texts are.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    n: int = 1
    seed: int | None = None
    echoes: tuple[str, ...] = ()
    is_continued: bool = True
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    generates: bool = True
    priority: int = 0
    cache_salt: str = ""
    tools: PreparedTools | None = None
    prompt_text: str = ""
    kept_tokens: frozenset[str] = frozenset()
    pooling: Pooling | None = None

    @property
    def num_choices(self) -> int:
        """Answers in all."""
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum(map(len, self.prompts))

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """Return the prompt of an answer."""
        return self.prompts[index // self.n]

    def echo_of(self, index: int) -> str | None:
        """Return the text before an answer, ``None`` for none."""
        return self.echoes[index // self.n] if self.echoes else None


@dataclass(slots=True, kw_only=True)
class ChoiceDelta:
    """What one or more steps add to one answer of a request.

    Attributes:
        index: of the answer.
        text: the new text.
        token_ids: the new tokens.
        offsets: where the text of each of them begins in the text of the answer.
        logprobs: of the new tokens, empty unless asked for.
        prompt_logprobs: of the prompt, in the first delta.
        finish_reason: in the last delta.
        stop_reason: the stop string or token.
        is_first: whether nothing of the answer came before.
        num_tokens: of the answer so far.
        num_cached_tokens: prompt tokens found in the prefix cache.
        embedding: of the prompt, as in ``TokenOutput``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_first: bool = False
    num_tokens: int = 0
    num_cached_tokens: int = 0
    embedding: bytes | None = None

    def extend(self, other: ChoiceDelta) -> None:
        """Add the delta that follows."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.offsets += other.offsets
        self.logprobs += other.logprobs
        self.finish_reason = other.finish_reason
        self.stop_reason = other.stop_reason
        self.num_tokens = other.num_tokens
        self.num_cached_tokens = other.num_cached_tokens
        if self.prompt_logprobs is None:
            self.prompt_logprobs = other.prompt_logprobs


class TokenUsage(NamedTuple):
    """Numbers of tokens: of prompts, of those found in the prefix cache, and of answers."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int


class ChoiceObserver(Protocol):
    """Receives the events of one answer, for limits and metrics."""

    def tokens(self, count: int) -> None:
        """Count new tokens."""
        ...

    def finished(self, reason: str) -> None:
        """Count the end of the answer."""
        ...


class ChoiceStream:
    """The answers of one request while they are made; leaving the context aborts them.

    Args:
        engine: makes the tokens.
        request: what to answer.
        tokenizer: ``None`` for answers without text.
        id: of the request; the engine's requests have it as a prefix.
        observers: one for each answer.
    """

    def __init__(
        self,
        engine: EngineClient,
        request: PreparedRequest,
        tokenizer: ServerTokenizer | None,
        id: str,
        observers: Sequence[ChoiceObserver],
    ) -> None:
        self._engine = engine
        self._request = request
        self._tokenizer = tokenizer
        self._id = id
        self._observers = observers
        self._num_tokens = [0] * request.num_choices
        self._num_cached = [0] * request.num_choices
        self._deltas: dict[int, ChoiceDelta] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._unfinished = request.num_choices
        self._error: LlmpqError | None = None
        self._of_prompts: list[asyncio.Future[PromptLogprobs | None]] = []

    async def __aenter__(self) -> ChoiceStream:
        """Start the answers."""
        loop, request = asyncio.get_running_loop(), self._request
        self._of_prompts = [loop.create_future() for _ in request.prompts]
        first = request.seed
        seed = secrets.randbits(62) if first is None else first
        for index in range(request.num_choices):
            number = index if first is None else index % request.n
            sampling = request.sampling.with_seed(_seed_after(seed, number))
            self._tasks.append(asyncio.create_task(self._read(index, sampling)))
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

    def usage(self) -> TokenUsage:
        """Return the numbers of tokens so far; prompts count once whatever ``n`` is."""
        cached = sum(self._num_cached[:: self._request.n])
        return TokenUsage(self._request.prompt_tokens, cached, sum(self._num_tokens))

    async def deltas(
        self, silence_s: float | None = None
    ) -> AsyncGenerator[dict[int, ChoiceDelta], None]:
        """Yield what is new of all answers that have any, until all answers are finished.

        Args:
            silence_s: seconds after which nothing is yielded as well, ``None`` for never.

        Raises:
            LlmpqError: the engine failed.
        """
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    await self._changed.wait()
            except TimeoutError:
                yield {}
                continue
            self._changed.clear()
            deltas, self._deltas = self._deltas, {}
            if deltas:
                yield deltas
            if self._error is not None:
                raise self._error
            if self._unfinished == 0 and not self._deltas:
                return

    async def _read(self, index: int, sampling: SamplingParams) -> None:
        reason = "abort"
        observer = self._observers[index]
        try:
            async for delta in self._answer(index, sampling):
                if index in self._deltas:
                    self._deltas[index].extend(delta)
                else:
                    self._deltas[index] = delta
                if delta.finish_reason is not None:
                    reason = delta.finish_reason
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

    async def _answer(self, index: int, sampling: SamplingParams) -> AsyncIterator[ChoiceDelta]:
        """Yield the deltas of one answer.

        The log probabilities of a prompt are computed once, with its first answer. The others start
        afterwards, so that they find the prompt in the prefix cache.
        """
        work = self._request
        of_prompt: PromptLogprobs | None = None
        if sampling.prompt_logprobs is not None and index % work.n:
            of_prompt = await self._of_prompts[index // work.n]
            if of_prompt is None:
                raise StageError("the first answer to the prompt ended too early")
            sampling = replace(sampling, prompt_logprobs=None)
        request = GenerationRequest(
            id=f"{self._id}-{index}",
            prompt_token_ids=work.prompt_of(index),
            sampling=sampling,
            priority=work.priority,
            cache_salt=work.cache_salt,
            group=self._id if work.num_choices > 1 else None,
            pooling=work.pooling,
        )
        text = self._detokenizer(request)
        observer, is_first = self._observers[index], True
        async with contextlib.aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                delta = _delta_of(output, text, index, include_stop=work.include_stop)
                observer.tokens(len(delta.token_ids))
                if of_prompt is not None:
                    delta.prompt_logprobs, of_prompt = of_prompt, None
                if delta.prompt_logprobs is not None:
                    self._share(index, delta.prompt_logprobs)
                delta.is_first, is_first = is_first, False
                yield self._counted(delta)
                if delta.finish_reason is not None:
                    return
        raise StageError("the engine ended an answer without a reason")

    def _counted(self, delta: ChoiceDelta) -> ChoiceDelta:
        """Return a delta with the numbers of tokens so far.

        The token of an answer that is the prompt alone, where ``max_tokens`` is 0, is left out.
        """
        index = delta.index
        if not self._request.generates:
            ended = delta.finish_reason in ("stop", "length")
            delta = ChoiceDelta(
                index=index,
                prompt_logprobs=delta.prompt_logprobs,
                finish_reason="length" if ended else delta.finish_reason,
                is_first=delta.is_first,
            )
        self._num_tokens[index] += len(delta.token_ids)
        self._num_cached[index] = max(self._num_cached[index], delta.num_cached_tokens)
        delta.num_tokens = self._num_tokens[index]
        delta.num_cached_tokens = self._num_cached[index]
        return delta

    def _share(self, index: int, of_prompt: PromptLogprobs | None) -> None:
        """Give the other answers to a prompt what the first one found, or ``None`` at its end."""
        shared = self._of_prompts[index // self._request.n]
        if index % self._request.n == 0 and not shared.done():
            shared.set_result(of_prompt)

    def _detokenizer(self, request: GenerationRequest) -> Detokenizer:
        work = self._request
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
            min_tokens=request.sampling.min_tokens,
            context=request.prompt_token_ids if work.is_continued else (),
        )


def _delta_of(
    output: TokenOutput, text: Detokenizer, index: int, *, include_stop: bool
) -> ChoiceDelta:
    """Return the delta of an output, up to a stop string if there is one."""
    delta = ChoiceDelta(
        index=index,
        prompt_logprobs=output.prompt_logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        embedding=output.embedding,
    )
    count = len(output.token_ids)
    has_stop_token = output.finish_reason == "stop" and not output.is_form_complete
    hidden = count - 1 if has_stop_token and not include_stop else count
    for place, token in enumerate(output.token_ids):
        delta.token_ids.append(token)
        delta.offsets.append(text.num_characters)
        if place != hidden:
            delta.text += text.add(token)
        if text.stop_reason is not None:
            delta.finish_reason, delta.stop_reason = "stop", text.stop_reason
            break
    if output.logprobs is not None:
        delta.logprobs.extend(output.logprobs[: len(delta.token_ids)])
    if delta.finish_reason is not None:
        delta.text += text.finish()
    if text.stop_reason is not None:
        delta.finish_reason, delta.stop_reason = "stop", text.stop_reason
    return delta


def _seed_after(seed: int, number: int) -> int:
    """Return the seed of a further answer, in the range of seeds."""
    return seed + number if seed + number <= MAX_SEED else seed - 2**63 + number


class AnswerFormat(Protocol):
    """The answers to one request in the form of an API.

    Attributes:
        request: what is answered.
        list_field: the field of a whole answer, or of a chunk, that lists its items.
        ping: bytes that say that a stream goes on; clients pass them over.
        end_of_stream: bytes after the last event of a stream.
    """

    request: PreparedRequest
    list_field: str
    ping: bytes
    end_of_stream: bytes

    def items(self, delta: ChoiceDelta) -> list[Json]:
        """Return the items of a whole answer, whose delta is all of it."""
        ...

    def whole(self, usage: TokenUsage) -> Json:
        """Return the object around the items, whose list is empty; called after ``items``."""
        ...

    def opening(self) -> list[Json]:
        """Return the events before the first delta."""
        ...

    def events(self, delta: ChoiceDelta) -> list[Json]:
        """Return the events of a delta."""
        ...

    def closing(self, usage: TokenUsage) -> list[Json]:
        """Return the events after the last delta."""
        ...

    def failure(self, error: ApiError) -> list[Json]:
        """Return the events of an answer that cannot go on."""
        ...


Body = TypeVar("Body", bound=ModelBody)
Translate = Callable[[Body, ServedModel, str], Awaitable[AnswerFormat]]
"""Checks a body and makes its prompts; the text is the id of the request."""


@dataclass(slots=True)
class Service:
    """What all requests share.

    Attributes:
        engine: makes the tokens.
        model: of the engine.
        admission: limits and counts.
        metrics: of the server.
        streams: answers that are being made.
        ping_s: seconds without an event after which a stream has a ping: clients and proxies end
            one that is silent while a long prompt is computed, and ask again.
    """

    engine: EngineClient
    model: ServedModel
    admission: RequestAdmission
    metrics: ServerMetrics
    streams: set[ChoiceStream] = field(default_factory=set)
    ping_s: float = 15.0

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
        for stream in self.streams:
            stream.fail(ApiError(503, "The server is shutting down."))

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
        self, translate: Translate[Body], body: Body, request_id: str
    ) -> RequestHandler:
        """Check a request; what it returns has not begun.

        Raises:
            ApiError: it cannot be served, now or ever.
        """
        self.model.check_name(body.model)
        self.check_open()
        form = await translate(body, self.model, request_id)
        outputs = form.request.sampling.structured_outputs
        if outputs is not None:
            try:
                await self.engine.check_form(outputs)
            except SpecError as error:
                raise bad_request(str(error), "structured_outputs") from None
        return RequestHandler(self, form)


class RequestHandler:
    """Answers one checked request, whole or as a stream.

    Args:
        service: of the engine.
        form: of the answers.
    """

    def __init__(self, service: Service, form: AnswerFormat) -> None:
        self._service = service
        self._form = form
        self._stream: ChoiceStream | None = None

    async def result(self) -> Json:
        """Return the whole answer.

        Raises:
            ApiError: the server is full, or the engine failed.
        """
        items = [item async for item in self._items()]
        return {**self._whole(), self._form.list_field: items}

    async def body(self) -> list[bytes]:
        """Return the whole answer as JSON, in parts; raises what ``result`` does."""
        # In parts: hundreds of choices with log probabilities take seconds.
        items = [await dump_in_parts(item, self._pause) async for item in self._items()]
        return _around(self._whole(), self._form.list_field, items)

    def _whole(self) -> Json:
        assert self._stream is not None
        return self._form.whole(self._stream.usage())

    async def _items(self) -> AsyncIterator[Json]:
        """Yield the items when all answers are whole, and let others run after each."""
        whole: dict[int, ChoiceDelta] = {}
        try:
            async with self._run() as stream:
                async for deltas in stream.deltas():
                    for index, delta in deltas.items():
                        if index in whole:
                            whole[index].extend(delta)
                        else:
                            whole[index] = delta
        except LlmpqError as error:
            raise as_api_error(error) from error
        if any(delta.finish_reason in ("abort", "error") for delta in whole.values()):
            raise ApiError(500, "The engine ended the request.")
        for index in sorted(whole):
            start_s = time.monotonic()
            items = self._form.items(whole.pop(index))
            await self._pause(time.monotonic() - start_s)
            for item in items:
                yield item

    async def _pause(self, spent_s: float) -> None:
        """Leave other requests as much of the event loop as a part of this answer took."""
        has_others = any(stream is not self._stream for stream in self._service.streams)
        await asyncio.sleep(spent_s if has_others else 0)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; an error of the engine ends them.

        The first item is empty: the request is admitted.

        Raises:
            ApiError: the server is full; before the first event only.
        """
        form, ping_s = self._form, self._service.ping_s
        async with self._run() as stream:
            yield b""
            yield b"".join(map(event_of, form.opening()))
            last_s = time.monotonic()
            try:
                async with contextlib.aclosing(stream.deltas(ping_s)) as batches:
                    async for deltas in batches:
                        made: list[bytes] = []
                        for delta in deltas.values():
                            events = form.events(delta)
                            if delta.prompt_logprobs is None:
                                made += map(event_of, events)
                            else:
                                made += await self._in_parts(events)
                        now_s = time.monotonic()
                        if not made and (not deltas or now_s - last_s >= ping_s):
                            made.append(form.ping)
                        if made:
                            last_s = now_s
                        yield b"".join(made)
            except LlmpqError as error:
                logger.error("a request failed: %s", type(error).__name__)
                yield b"".join(map(event_of, form.failure(as_api_error(error))))
            else:
                yield b"".join(map(event_of, form.closing(stream.usage())))
        yield form.end_of_stream

    @contextlib.asynccontextmanager
    async def _run(self) -> AsyncIterator[ChoiceStream]:
        """Admit the request and start its answers."""
        service, request = self._service, self._form.request
        tokens = request.prompt_tokens * request.n
        with service.admission.admit(request.num_choices, tokens) as ticket:
            max_tokens = request.sampling.max_tokens or 0
            service.metrics.observe_request(request.n, [max_tokens] * len(request.prompts))
            lengths = [len(request.prompt_of(index)) for index in range(request.num_choices)]
            observers = service.metrics.observers(lengths, ticket)
            tokenizer, engine_id = service.model.tokenizer, uuid.uuid4().hex
            async with ChoiceStream(
                service.engine, request, tokenizer, engine_id, observers
            ) as stream:
                self._stream = stream
                service.streams.add(stream)
                try:
                    yield stream
                finally:
                    service.streams.discard(stream)

    async def _in_parts(self, events: Sequence[Json]) -> list[bytes]:
        """Return events that are long, and let others run between their parts."""
        found, field = [], self._form.list_field
        for event in events:
            items = [await dump_in_parts(item, self._pause) for item in event[field]]
            found += [b"data: ", *_around({**event, field: []}, field, items), b"\n\n"]
        return found


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


def _around(frame: Json, field: str, items: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Return the JSON of a frame whose list is empty, with the parts of its items."""
    empty = dump_json({field: []})[1:-1]
    head, key, tail = dump_json(frame).partition(empty)  # quotes in texts are escaped
    parts = [part for item in items for part in (b",", *item)]
    return [head, key[:-1], *parts[1:], key[-1:], tail]
