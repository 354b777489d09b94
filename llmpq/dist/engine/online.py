"""OnlineEngine: requests arrive while it runs; every step mixes decode rows and prompt chunks.

One ``EngineScheduler`` decides the steps, here as in the simulator. A ``StepRunner`` computes them,
several at once where the pipeline has several stages. The engine holds the tokens and samples. It
keeps nothing that a restart needs: the client adds its unfinished requests again, with the tokens
that it has.

With speculative decoding, the next token of a sequence and its draft tokens are rows of one token.
The engine chooses the token after each of them in turn, as without a draft, and goes on while the
draft has the token that was chosen. So the answer is the one of an engine without drafts, sampled
or greedy, with the same log-probabilities, masks and ends.

Shapes: R rows with an output, V vocabulary.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from llmpq.batching.engine_scheduler import EngineScheduler
from llmpq.batching.engine_step import EngineLimits, EngineRequest, EngineStep, ScheduledChunk
from llmpq.batching.prompt_lookup import PromptLookup
from llmpq.batching.queue_order import QueueOrder
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.engine.draft_model import Drafter
from llmpq.dist.engine.online_answer import OnlineAnswer
from llmpq.dist.engine.packed_steps import StepRunner
from llmpq.dist.engine.sampler import (
    SampledToken,
    SamplingState,
    ScoredRows,
    TokenMatcher,
    prompt_logprobs,
)
from llmpq.dist.io.control_channel import Message
from llmpq.dist.io.engine_messages import (
    AddedRequest,
    ModelLimits,
    added_from_json,
    new_tokens_of,
    output_to_json,
)
from llmpq.dist.io.generation import GenerationEnd, ServingStats, TokenOutput
from llmpq.dist.io.structured_outputs import GrammarCompiler
from llmpq.dist.transport.frames import Row
from llmpq.errors import CapacityError, SpecError

STATS_PERIOD_S = 0.05
"""How often changed counters are sent at most; less than the 0.1 s that load balancers assume."""
MAX_IDLE_WAIT_S = 0.5
COMPILE_POLL_S = 0.005
COMPILE_THREADS = 2


class EngineChannel(Protocol):
    """The engine's end of a control channel."""

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; ``EOFError`` once the other end is closed."""
        ...

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, ``None`` when none arrives; ``EOFError`` after the last."""
        ...


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """A step in flight; ``scored`` are the chunk of each output and the position of its token."""

    step: EngineStep
    scored: list[tuple[ScheduledChunk, int]]


@dataclass(slots=True, kw_only=True)
class _StepOutputs:
    """What a completed step gives."""

    tokens: dict[int, int] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    accepted: dict[int, list[int]] = field(default_factory=dict)
    items: list[list[object]] = field(default_factory=list)


class OnlineEngine:
    """Serves the requests of a control channel until its other end is closed.

    Args:
        channel: where requests come from and tokens go to.
        runner: computes the steps.
        limits: of the scheduler.
        order: of the waiting queue.
        model: what a request may be.
        grammars: compiles the forms of answers; ``None`` refuses requests that have one.
        speculative: where drafts come from; ``None`` for no speculative decoding.
        draft_model: proposes them where ``limits.draft`` has its size.
        clock: seconds, for arrivals.
    """

    def __init__(  # noqa: PLR0913  the parts of an engine
        self,
        *,
        channel: EngineChannel,
        runner: StepRunner,
        limits: EngineLimits,
        order: QueueOrder,
        model: ModelLimits,
        grammars: GrammarCompiler | None = None,
        speculative: SpeculativeConfig | None = None,
        draft_model: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._runner = runner
        self._limits = limits
        self._model = model
        self._grammars = grammars
        self._clock = clock
        self._start_s = clock()
        self._draft_model = draft_model
        self._lookup = None if draft_model is not None else speculative
        propose = None if self._lookup is None else self._propose
        self.scheduler = EngineScheduler(limits, order, propose)
        self._answers: dict[int, OnlineAnswer] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._in_flight: deque[_Dispatched] = deque()
        self._compiling: dict[str, tuple[AddedRequest, Future[TokenMatcher]]] = {}
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, "llmpq grammar")
        self._stats = ServingStats()
        self._stats_s = -STATS_PERIOD_S

    def run(self, start_s: Mapping[str, float] | None = None) -> None:
        """Serve until the channel is closed; steps in flight are completed.

        Args:
            start_s: seconds of each step of the start, for the other end.

        Raises:
            LlmpqError: a stage failed.
        """
        try:
            with contextlib.suppress(EOFError):
                self._send_stats()  # a router asks for them as soon as the engine is ready
                self._channel.send(
                    "ready",
                    max_model_len=self._model.max_model_len,
                    vocab_size=self._model.vocab_size,
                    start_s=dict(start_s or {}),
                )
                while True:
                    self._step()
                    self._send_stats()
            while self._in_flight:
                self._in_flight.popleft()
                self._runner.collect()
        finally:
            self._compilers.shutdown(cancel_futures=True)

    def _step(self) -> None:
        """Complete a step that is back, or dispatch one, or wait."""
        self._take_messages(0.0)
        self._take_compiled()
        if self._in_flight and self._runner.has_result():
            self._complete()
        elif self._dispatch():
            pass
        elif self._in_flight:
            self._runner.await_result(STATS_PERIOD_S)
        else:
            self._runner.check()
            is_quiet = self._stats == self._current_stats()
            wait_s = MAX_IDLE_WAIT_S if is_quiet else STATS_PERIOD_S
            self._take_messages(COMPILE_POLL_S if self._compiling else wait_s)

    def _take_messages(self, wait_s: float) -> None:
        message = self._channel.receive(wait_s)
        while message is not None:
            if message["kind"] == "add":
                self._receive_request(message)
            elif message["kind"] == "abort":
                self._abort(message["id"])
            message = self._channel.receive(0.0)

    def _receive_request(self, message: Message) -> None:
        try:
            added = added_from_json(message)
            form = added.request.sampling.structured_outputs
            if form is None:
                self._add(added, None)
            elif self._grammars is None:
                raise SpecError("structured_outputs: this engine has no tokenizer")
            elif (matcher := self._grammars.compiled(form)) is not None:
                self._add(added, matcher)
            else:
                future: Future[TokenMatcher] = self._compilers.submit(self._grammars.compile, form)
                self._compiling[added.request.id] = (added, future)
                self._channel.send("started", ids=[added.request.id])
        except (SpecError, CapacityError) as error:
            self._channel.send("refused", id=message["id"], message=str(error))

    def _take_compiled(self) -> None:
        """Add the requests whose forms are compiled."""
        for id, (added, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[id]
            # A failure of the compiler, even a panic, ends its request alone.
            error = future.exception()
            try:
                if error is None:
                    self._add(added, future.result())
            except (SpecError, CapacityError) as found:
                error = found
            if error is not None:
                is_own = isinstance(error, SpecError | CapacityError)
                text = str(error) if is_own else f"structured_outputs: {type(error).__name__}"
                self._channel.send("refused", id=id, message=text)

    def _add(self, added: AddedRequest, matcher: TokenMatcher | None) -> None:
        """Queue a request.

        Raises:
            SpecError: it is not acceptable.
            CapacityError: it does not fit into the KV memory.
        """
        request, params = added.request, added.request.sampling
        if request.id in self._numbers:
            raise SpecError(f"id: found {request.id!r} of an unfinished request, expected another")
        max_tokens = new_tokens_of(added, self._model)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._model.eos_token_ids
        state = SamplingState(
            params,
            # Equal seeds give equal answers, whatever the id.
            request=request.id if params.seed is None else "",
            prompt_token_ids=request.prompt_token_ids,
            stop_token_ids=stops,
            matcher=matcher,
            token_ids=added.token_ids,
        )
        number, self._next_number = self._next_number, self._next_number + 1
        # A step that was computed meanwhile counts as waiting, as does a restart.
        now_s = self._now_s()
        arrival_s = now_s
        if added.arrival_s is not None:
            arrival_s = min(now_s, added.arrival_s - self._start_s)
        tokens = [*request.prompt_token_ids, *added.token_ids]
        self.scheduler.add(
            EngineRequest(
                request=number,
                token_ids=tuple(tokens),
                prompt_tokens=len(tokens),
                max_tokens=max_tokens - len(added.token_ids),
                arrival_s=arrival_s,
                priority=request.priority,
                cache_salt=request.cache_salt,
                group=request.group,
                scores_prompt=added.needs_prompt_logprobs,
            )
        )
        self._numbers[request.id] = number
        self._answers[number] = OnlineAnswer(
            added=added,
            tokens=tokens,
            state=state,
            max_tokens=max_tokens,
            prompt_logprobs=[] if added.needs_prompt_logprobs else None,
            lookup=None if self._lookup is None else PromptLookup(self._lookup),
        )

    def _abort(self, id: str) -> None:
        if (compiling := self._compiling.pop(id, None)) is not None:
            compiling[1].cancel()
            return
        number = self._numbers.pop(id, None)
        if number is not None:
            self.scheduler.abort(number)
            del self._answers[number]

    def _propose(self, number: int, most: int) -> int:
        """Find draft tokens of a sequence; return how many."""
        answer = self._answers[number]
        assert answer.lookup is not None
        answer.draft = answer.lookup.propose(answer.tokens, most)
        return len(answer.draft)

    def _compute_drafts(self, step: EngineStep) -> None:
        """Let the draft model compute the draft tokens of a step."""
        assert self._draft_model is not None
        answers = [self._answers[work.request] for work in step.drafts]
        drafts = self._draft_model.propose(step.drafts, [answer.tokens for answer in answers])
        # The step has rows for drafts although the draft model may have ended: any tokens do.
        found = drafts or [[0] * work.length for work in step.drafts]
        for answer, draft in zip(answers, found, strict=True):
            answer.draft = draft
        self.scheduler.complete_drafts(step, self._now_s(), has_ended=drafts is None)

    def _dispatch(self) -> bool:
        """Dispatch the step that the scheduler decides; return whether there is one."""
        step = self.scheduler.schedule(self._now_s())
        if step is None:
            return False
        if step.drafts:
            self._compute_drafts(step)
        rows: list[Row] = []
        token_ids: list[int] = []
        outputs: list[int] = []
        scored: list[tuple[ScheduledChunk, int]] = []
        started: list[str] = []
        for chunk in step.chunks:
            answer, end = self._answers[chunk.request], chunk.first + chunk.count
            if answer.num_cached_tokens is None:
                answer.num_cached_tokens = chunk.first
                started.append(answer.added.request.id)
            token_ids += answer.tokens[chunk.first : end]
            token_ids += answer.draft[: chunk.num_draft_tokens]
            for row, position in self._rows(chunk, answer):
                if position is not None:
                    outputs.append(len(rows))
                    scored.append((chunk, position))
                rows.append(row)
        if started:
            self._channel.send("started", ids=started)
        self._in_flight.append(_Dispatched(step, scored))
        self._runner.dispatch(np.array(token_ids), rows, outputs)
        return True

    def _rows(self, chunk: ScheduledChunk, answer: OnlineAnswer) -> list[tuple[Row, int | None]]:
        """Return the rows of a chunk, each with the position whose scores are wanted."""
        last = chunk.first + chunk.count - 1
        if chunk.num_draft_tokens:
            places = range(chunk.first, last + 1)
            return [(self._row(chunk, answer, place, place + 1), place) for place in places]
        found = answer.prompt_logprobs
        needed = answer.num_prompt_tokens - 1
        if found is None or len(found) >= needed or chunk.first >= needed:
            row = self._row(chunk, answer, chunk.first, last + 1)
            return [(row, last if chunk.makes_token else None)]
        # A stage returns the last token of a row: every position is a row of its own.
        return [
            (
                self._row(chunk, answer, position, position + 1),
                position if position < needed or chunk.makes_token else None,
            )
            for position in range(chunk.first, last + 1)
        ]

    def _row(self, chunk: ScheduledChunk, answer: OnlineAnswer, first: int, length: int) -> Row:
        limits = self._limits
        width = limits.blocks_for(length)
        return Row(
            blocks=chunk.blocks[:width],
            window_blocks=chunk.window_blocks[:width],
            first=first,
            length=length,
            rope_length=limits.rope_length(
                answer.num_prompt_tokens, max(length, len(answer.tokens))
            ),
        )

    def _complete(self) -> None:
        """Complete the oldest step: the next token of every sequence whose chunk makes one."""
        scores = self._runner.collect()
        dispatched = self._in_flight.popleft()
        # Sequences that were aborted meanwhile have no answer any more.
        alive = [
            (row, chunk, position)
            for row, (chunk, position) in enumerate(dispatched.scored)
            if chunk.request in self._answers
        ]
        found = _StepOutputs()
        if scores is not None:
            self._read_prompt_logprobs(scores, alive)
            self._choose(scores, alive, found)
        self.scheduler.complete(
            dispatched.step.number,
            found.tokens,
            found.finished,
            found.accepted,
            now_s=self._now_s(),
        )
        if found.items:
            self._channel.send("tokens", outputs=found.items)

    def _choose(
        self,
        scores: Tensor,
        alive: Sequence[tuple[int, ScheduledChunk, int]],
        found: _StepOutputs,
    ) -> None:
        """Choose the new tokens of every sequence whose chunk makes one."""
        rows: list[int] = []
        places: dict[int, list[int]] = {}  # of each request in ``rows``
        for row, chunk, position in alive:
            first = chunk.first + chunk.count - 1 - chunk.num_draft_tokens
            if chunk.makes_token and position >= first:
                places.setdefault(chunk.request, []).append(len(rows))
                rows.append(row)
        scored = ScoredRows(scores if len(rows) == len(scores) else scores[rows])
        for number, own in places.items():
            sampled, reason = self._answers[number].sample(scored, own)
            self._extend(number, sampled, reason, found)

    def _extend(
        self,
        number: int,
        sampled: Sequence[SampledToken],
        reason: GenerationEnd | None,
        found: _StepOutputs,
    ) -> None:
        """Report new tokens of an answer, and end the answer where it is complete."""
        answer = self._answers[number]
        tokens = [token for token in sampled if token.error is None]
        ids = [token.token_id for token in tokens]
        if ids:
            *found.accepted[number], found.tokens[number] = ids
        stops = answer.added.request.sampling.stop_token_ids
        prompt = answer.prompt_logprobs
        output = TokenOutput(
            token_ids=tuple(ids),
            logprobs=tuple(token.logprobs for token in tokens if token.logprobs) or None,
            prompt_logprobs=None if prompt is None else (None, *prompt),
            finish_reason=reason,
            stop_reason=ids[-1] if reason == "stop" and ids[-1] in stops else None,
            num_cached_tokens=answer.num_cached_tokens or 0,
            is_form_complete=reason == "stop" and not answer.state.ends_with_stop_token,
        )
        answer.prompt_logprobs = None  # sent once
        found.items.append(output_to_json(answer.added.request.id, output))
        if reason is not None:
            found.finished.append(number)
            del self._answers[number]
            del self._numbers[answer.added.request.id]

    def _read_prompt_logprobs(
        self, scores: Tensor, alive: Sequence[tuple[int, ScheduledChunk, int]]
    ) -> None:
        rows: dict[int, list[int]] = {}  # of each request
        next_tokens: dict[int, list[int]] = {}
        for row, chunk, position in alive:
            answer = self._answers[chunk.request]
            found = answer.prompt_logprobs
            if found is None:
                continue
            own = rows.setdefault(chunk.request, [])
            # A preempted prompt is computed again from its start.
            if position == len(found) + len(own) and position < answer.num_prompt_tokens - 1:
                own.append(row)
                next_tokens.setdefault(chunk.request, []).append(answer.tokens[position + 1])
        for number, own in rows.items():
            answer = self._answers[number]
            found, count = answer.prompt_logprobs, answer.added.request.sampling.prompt_logprobs
            if own and found is not None and count is not None:
                found += prompt_logprobs(scores, own, next_tokens[number], count)

    def _now_s(self) -> float:
        return self._clock() - self._start_s

    def _current_stats(self) -> ServingStats:
        scheduler, limits = self.scheduler, self._limits
        return ServingStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + len(self._compiling),
            queued_tokens=scheduler.queued_tokens,
            started_tokens=scheduler.started_tokens,
            kv_cache_usage=1 - scheduler.free_blocks / limits.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            num_blocks=limits.num_blocks,
            token_budget=limits.token_budget,
            block_size=limits.block_size,
            num_drafts=scheduler.num_drafts,
            num_draft_tokens=scheduler.num_draft_tokens,
            num_accepted_tokens=scheduler.num_accepted_tokens,
        )

    def _send_stats(self) -> None:
        """Send the counters where they changed, at a limited rate."""
        now_s = self._now_s()
        if now_s - self._stats_s < STATS_PERIOD_S:
            return
        self._stats_s = now_s
        stats = self._current_stats()
        if stats != self._stats:
            self._stats = stats
            self._channel.send("stats", stats=asdict(stats))
