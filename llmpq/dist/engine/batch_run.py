"""BatchRun: answers requests that are known from the start, each from its arrival on.

A few micro-batches are in flight, so that every stage has work; what has come back is completed
before more is dispatched, so that queues stay bounded. Finished answers are reported after the next
dispatch, while the other stages compute.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from llmpq.batching import (
    PolicyScheduler,
    RequestRecord,
)
from llmpq.batching.drift import DriftMonitor
from llmpq.batching.engine_step import EngineLimits, EngineRequest
from llmpq.batching.length import LengthPredictor, Prediction, make_predictor
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.engine.drafters import Drafter
from llmpq.dist.engine.engine import (
    MAX_IDLE_WAIT_S,
    Engine,
    NewTokens,
    RunningSequence,
    sampling_state_of,
)
from llmpq.dist.engine.executor import StepExecutor
from llmpq.dist.io.prompts import Request, Tokenizer
from llmpq.dist.io.results import FinishReason, Result
from llmpq.dist.io.sampling_params import TokenLogprobs
from llmpq.dist.io.structured_outputs import GrammarCompiler
from llmpq.dist.metrics.progress import Event, RunProgress, SilentProgress
from llmpq.dist.metrics.stats import StageClock
from llmpq.errors import StageError


class FinishedAnswer(NamedTuple):
    """A finished request: its new tokens, why it ended, and log probabilities that it asked for."""

    request: Request
    token_ids: tuple[int, ...]
    reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


OnFinish = Callable[[FinishedAnswer], None]
"""Called once for each finished request."""
OnTokens = Callable[[Sequence[tuple[Request, int]]], None]
"""Called after each step with its new tokens by request; with none when the run is idle."""
ShouldDrain = Callable[[], bool]
"""Returns True once the run should drain: finish running requests and admit no new ones."""
ShouldAbort = Callable[[], bool]
"""Returns True once the run should end its running requests."""

REPORT_S = 0.05
"""Shortest time between two token events of the master."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """Numbers of requests and tokens of a run, and its seconds.

    Attributes:
        requests: finished ones.
        generated_tokens: new tokens of all of them.
        elapsed_s: from the first dispatch to the last token.
        prefill_s: of these, until the last prompt's first token.
        records: arrival, start and end of each request, by number.
        adjusted: decode iterations that the policy changed to during the run, in order.
        cached_tokens: of prompts, whose keys and values were found.
        draft_tokens: that were verified.
        accepted_tokens: those of them that became tokens of an answer.
        first_token_s: time of the first token, on the clock of the run; ``None`` without one.
    """

    requests: int
    generated_tokens: int
    elapsed_s: float
    prefill_s: float
    records: tuple[RequestRecord, ...]
    adjusted: tuple[int, ...] = ()
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    first_token_s: float | None = None


class TokenCounter:
    """Counts new tokens, and reports them and the expected number at a limited rate.

    Attributes:
        made: tokens so far.
    """

    def __init__(
        self, progress: RunProgress, expected: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress
        self._clock = clock
        self.made = self._reported = 0
        self._expected = expected
        self._report_s = 0.0
        self.report()

    def add(self, count: int) -> None:
        """Count new tokens; report them if the last report is at least ``REPORT_S`` ago.

        A count of 0 means that the engine goes idle: unreported tokens are reported now.
        """
        self.made += count
        if self.made > self._reported and (not count or self._clock() >= self._report_s):
            self.report()

    def expect_fewer(self, count: int) -> None:
        """Reduce the expected tokens, after an answer that ended early."""
        self._expected -= count

    def report(self) -> None:
        """Report the count now."""
        self._report_s, self._reported = self._clock() + REPORT_S, self.made
        event = Event(rank=0, kind="tokens", done=self.made, total=self._expected)
        self._progress.report(event)


@dataclass(slots=True, kw_only=True, eq=False)
class _Progress:
    """When a request was dispatched and had its first token, and its log probabilities."""

    start_s: float
    first_token_s: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class BatchRun:
    """Answers requests with the steps of a policy.

    Args:
        executor: computes the steps.
        scheduler: a new one, which decides them.
        limits: of the scheduler.
        clock: of the run.
        monitor: of the scheduler.
        grammars: compiles the forms of answers; ``None`` where no request has one.
        lookup: finds drafts in the text so far; ``None`` for none.
        draft_model: proposes them where ``limits.draft`` has its size.
        predictor: predicts the lengths of answers; ``None`` for none.
        progress: receives the number of tokens.
    """

    def __init__(  # noqa: PLR0913  the parts of a run
        self,
        *,
        executor: StepExecutor,
        scheduler: PolicyScheduler,
        limits: EngineLimits,
        clock: StageClock,
        monitor: DriftMonitor | None = None,
        grammars: GrammarCompiler | None = None,
        lookup: SpeculativeConfig | None = None,
        draft_model: Drafter | None = None,
        predictor: LengthPredictor | None = None,
        progress: RunProgress | None = None,
    ) -> None:
        self._executor = executor
        self._predictor = predictor
        self._scheduler = scheduler
        self._clock = clock
        self._monitor = monitor
        self._grammars = grammars
        self.engine = Engine(
            executor=executor,
            scheduler=scheduler,
            limits=limits,
            clock=clock.now,
            lookup=lookup,
            draft_model=draft_model,
            on_start=self._begin,
        )
        self._progress = progress or SilentProgress()
        self._requests: Sequence[Request] = ()
        self._arrived = 0
        self._running: dict[int, _Progress] = {}  # of running requests, by number
        self._finished: deque[FinishedAnswer] = deque()
        self._records: list[RequestRecord] = []
        self._first_token_s: float | None = None
        self._prefill_s = 0.0
        drafts = scheduler.drafts  # of earlier runs on the same ranks, too
        self._drafted_before = drafts.num_draft_tokens, drafts.num_accepted_tokens

    def run(
        self,
        requests: Sequence[Request],
        on_finish: OnFinish,
        on_tokens: OnTokens | None = None,
        should_drain: ShouldDrain | None = None,
        should_abort: ShouldAbort | None = None,
    ) -> RunStats:
        """Answer every request.

        Args:
            requests: each enters the queue at its arrival time.
            on_finish: called once for each request, when its last token is known.
            on_tokens: called after each step with its new tokens.
            should_drain: called before each step; once true, only running requests are answered.
            should_abort: called before each step; once true, running requests end without
                ``on_finish``.

        Raises:
            StageError: a stage failed, hangs, or returned another micro-batch than expected.
        """
        self._requests = in_order(requests)
        expected = sum(request.max_new_tokens for request in requests)
        self._tokens = TokenCounter(self._progress, expected)  # says that answering begins
        self._take_arrivals()
        try:
            while not self._is_over(should_drain, should_abort):
                self._step(on_finish, on_tokens)
                self._take_arrivals()
        finally:
            self._report_finished(on_finish)  # finished answers are kept, whatever ends the run
        self._tokens.report()
        drafts, (draft_tokens, accepted_tokens) = self._scheduler.drafts, self._drafted_before
        return RunStats(
            requests=len(self._records),
            generated_tokens=self._tokens.made,
            elapsed_s=self.engine.now_s(),
            prefill_s=self._prefill_s,
            records=tuple(sorted(self._records, key=lambda record: record.request)),
            adjusted=() if self._monitor is None else self._monitor.adjusted,
            cached_tokens=self._scheduler.prefix_cache_hits,
            draft_tokens=drafts.num_draft_tokens - draft_tokens,
            accepted_tokens=drafts.num_accepted_tokens - accepted_tokens,
            first_token_s=self._first_token_s,
        )

    def _step(self, on_finish: OnFinish, on_tokens: OnTokens | None) -> None:
        """Complete a step that is back, or dispatch one, or wait."""
        if self.engine.has_result():
            self._complete(on_tokens)
            return
        step = self.engine.dispatch()
        self._report_finished(on_finish)
        if step is None:
            self._await_change(on_tokens)

    def _begin(self, numbers: Sequence[int]) -> None:
        """Note when the first step of requests is dispatched."""
        start_s = self.engine.now_s()
        for number in numbers:
            self._running[number] = _Progress(start_s=start_s)

    def _report_finished(self, on_finish: OnFinish) -> None:
        while self._finished:
            answer = self._finished.popleft()
            self._tokens.expect_fewer(answer.request.max_new_tokens - len(answer.token_ids))
            on_finish(answer)

    def _is_over(self, should_drain: ShouldDrain | None, should_abort: ShouldAbort | None) -> bool:
        aborts = should_abort is not None and should_abort()
        if aborts or (should_drain is not None and should_drain()):
            self._arrived = len(self._requests)
            for number in self._scheduler.drain():
                self.engine.abort(number)
        if aborts:
            for number in self._running:
                self.engine.abort(number)
            self._running.clear()
        return self._scheduler.is_done

    def _take_arrivals(self) -> None:
        """Queue the requests whose arrival time has come."""
        if self._arrived == len(self._requests) > 0:
            return
        now_s = self.engine.now_s()
        for number in range(self._arrived, len(self._requests)):
            request = self._requests[number]
            if request.arrival_s > now_s:
                return
            self._add(number, request)
            self._arrived += 1
        self._scheduler.close()

    def _add(self, number: int, request: Request) -> None:
        """Queue a request; the form of its answer is compiled before its first step."""
        added = EngineRequest(
            request=number,
            token_ids=tuple(request.prompt_token_ids),
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.max_new_tokens,
            arrival_s=request.arrival_s,
            scores_prompt=request.sampling_params.prompt_logprobs is not None,
        )
        if self._predictor is not None:
            added = replace(added, predicted_tokens=self._predictor(added))
        self.engine.add(
            added,
            lambda: RunningSequence.of(
                added, request.prompt_token_ids, sampling_state_of(request, self._grammars)
            ),
        )

    def _await_change(self, on_tokens: OnTokens | None) -> None:
        """Wait for a step, an arrival or the time at which the policy decides anew."""
        is_arrival_known = self._arrived < len(self._requests)
        arrival_s = self._requests[self._arrived].arrival_s if is_arrival_known else math.inf
        wake_s = min(self._scheduler.wake_s, arrival_s)
        if self.engine.num_in_flight and wake_s == math.inf:
            self._complete(on_tokens)
            return
        wait_s = min(max(wake_s - self.engine.now_s(), 0.0), MAX_IDLE_WAIT_S)
        if self.engine.num_in_flight:
            self._executor.await_result(wait_s)
            return
        self._tokens.add(0)
        if on_tokens is not None:
            on_tokens(())
        self._clock.sleep(wait_s)

    def _complete(self, on_tokens: OnTokens | None) -> None:
        """Complete the next step that is back: new tokens for each sequence."""
        made = self.engine.complete()
        now_s = self.engine.now_s()
        new: list[tuple[Request, int]] = []
        for one in made:
            self._take(one, now_s)
            request = self._requests[one.sequence.number]
            new += [(request, token.token_id) for token in one.tokens]
        if new and self._first_token_s is None:
            self._first_token_s = self._clock.now()
        self._tokens.add(len(new))
        if on_tokens is not None:
            on_tokens(new)

    def _take(self, made: NewTokens, now_s: float) -> None:
        """Take the new tokens of a request; end it where it is complete."""
        sequence, tokens, reason, _ = made
        if tokens[-1].error is not None:
            raise StageError(tokens[-1].error, is_permanent=True)
        number = sequence.number
        request, running = self._requests[number], self._running[number]
        if running.first_token_s is None:
            running.first_token_s = self._prefill_s = now_s
        running.logprobs += [token.logprobs for token in tokens if token.logprobs is not None]
        if reason is None:
            return
        assert reason in ("stop", "length")
        answer = tuple(sequence.state.token_ids)
        logprobs = None if sequence.state.params.logprobs is None else tuple(running.logprobs)
        scores = sequence.prompt_logprobs
        of_prompt = None if scores is None else (None, *scores)
        self._finished.append(FinishedAnswer(request, answer, reason, logprobs, of_prompt))
        self._records.append(
            RequestRecord(
                request=number,
                prompt_tokens=sequence.num_prompt_tokens,
                new_tokens=len(answer),
                arrival_s=request.arrival_s,
                start_s=running.start_s,
                first_token_s=running.first_token_s,
                end_s=now_s,
            )
        )
        del self._running[number]


def in_order(requests: Sequence[Request]) -> list[Request]:
    """Return the requests in order of arrival; their indices are their numbers."""
    return sorted(requests, key=lambda request: request.arrival_s)


def predictor_of(
    prediction: Prediction, requests: Sequence[Request], vocab_size: int
) -> LengthPredictor | None:
    """Return the predictor of the answers to these requests.

    The most tokens that a request asks for are the known length of its answer.
    """
    ordered = in_order(requests)
    return make_predictor(
        prediction,
        [len(request.prompt_token_ids) for request in ordered],
        [request.max_new_tokens for request in ordered],
        vocab_size,
    )


def result_of(answer: FinishedAnswer, tokenizer: Tokenizer | None) -> Result:
    """Return the result of an answer; its text is empty without a tokenizer."""
    return Result(
        id=answer.request.id,
        token_ids=answer.token_ids,
        text="" if tokenizer is None else tokenizer.decode(answer.token_ids),
        finish_reason=answer.reason,
        logprobs=answer.logprobs,
        prompt_logprobs=answer.prompt_logprobs,
    )
