"""MasterEngine: requests in, policy decisions, tokens out. It owns all state of requests.

The master embeds, runs the first stage's layers, sends the hidden states round the ring, projects
what comes back and samples. It keeps a few micro-batches in flight so that every stage has work,
and takes in what has arrived before it sends more: nothing can pile up, so nothing can deadlock.
What it does beside the model no stage computes in: answers that are complete are handed over once
the next micro-batch is on its way.
Where prefill and decode have stages of their own (WAA), its layers only decode, and micro-batches
come back over two rings, each in order.
Stages know nothing of requests; slots and lengths in a frame are all they need.

Shapes: R rows, T tokens a row, H hidden size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmpq.batching import (
    BatchingPolicy,
    RequestRecord,
    Scheduler,
    Step,
    Wait,
    WaitingRequest,
    straight_ways,
)
from llmpq.batching.workload_shift import DriftWatch
from llmpq.dist.engine.in_flight import DispatchedStep, PhaseSplit, RunningRequest, record_of
from llmpq.dist.engine.policy import in_order
from llmpq.dist.engine.sampler import Sampler
from llmpq.dist.engine.stage import PHASES, StageRunner
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.results import FinishReason
from llmpq.dist.metrics.stats import StageClock, synchronize, tokens_read
from llmpq.dist.transport.communicator import Communicator
from llmpq.dist.transport.control_messages import error_from_frame
from llmpq.dist.transport.frames import Frame, FrameKind, Row
from llmpq.errors import StageError
from llmpq.models import Master
from llmpq.spec.precision import Phase

OnFinish = Callable[[Request, tuple[int, ...], FinishReason], None]
OnTokens = Callable[[Sequence[tuple[Request, int]]], None]
"""Called after each step with its new tokens by request; with none when the engine goes idle."""
Ids = NDArray[np.int64]
ShouldDrain = Callable[[], bool]
"""Returns True once the engine should drain: finish running requests and admit no new ones."""
ShouldAbort = Callable[[], bool]
"""Returns True once the engine should end running requests after their next token."""

MAX_IDLE_WAIT_S = 0.5
"""Longest wait for something to do: whoever watches the master sees it alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What a run made.

    Attributes:
        requests: finished ones.
        generated_tokens: new tokens of all of them.
        elapsed_s: from the first micro-batch sent off to the last token.
        prefill_s: of these, until the last prompt's first token.
        records: when each request came, began and ended, by number.
        adjusted: decode iterations that the policy was given in the run, one after the other.
    """

    requests: int
    generated_tokens: int
    elapsed_s: float
    prefill_s: float
    records: tuple[RequestRecord, ...]
    adjusted: tuple[int, ...] = ()


class MasterEngine:
    """Runs requests to their end over a pipeline.

    Args:
        master: the two ends of the model.
        runner: the first stage's own layers.
        communicator: the ring, or both; ``None`` when there is only one stage.
        policy: decides what is sent off next.
        sampler: chooses tokens.
        clock: collects the master's busy times.
        num_slots: KV slots of every stage.
        split: for prefill and decode stages of their own; ``None`` where they do both.
        watch: compares answers with the policy's schedule; ``None`` for nobody.
        first_number: number of the first micro-batch; an engine that follows another one on the
            same ranks goes on with that one's ``next_number``.
    """

    def __init__(  # noqa: PLR0913  the parts a pipeline's head is made of
        self,
        *,
        master: Master,
        runner: StageRunner,
        communicator: Communicator | None,
        policy: BatchingPolicy,
        sampler: Sampler,
        clock: StageClock,
        num_slots: int,
        split: PhaseSplit | None = None,
        watch: DriftWatch | None = None,
        first_number: int = 0,
    ) -> None:
        self._master = master
        self._runners = dict.fromkeys(Phase, runner)
        self._device = runner.device
        self._communicator = communicator
        self._sampler = sampler
        self._clock = clock
        self._scheduler = Scheduler(
            policy=policy, num_slots=num_slots, watch=watch, first_number=first_number
        )
        self._watch = watch
        self._holds_finished = policy.holds_finished
        self._ways = straight_ways(1 if communicator is None else len(communicator.names))
        way: deque[DispatchedStep] = deque()
        self._sent = dict.fromkeys(Phase, way)  # by phase, in order; one way unless they differ
        if split is not None:
            self._ways = split.ways
            self._runners[Phase.PREFILL] = split.prefill_runner
            self._sent[Phase.PREFILL] = deque()
        self._requests: Sequence[Request] = ()
        self._arrived = 0
        self._answers: dict[int, RunningRequest] = {}  # of requests that hold a slot, by number
        self._landed: deque[Tensor] = deque()  # answers of a way that is this process alone
        self._finished: deque[RunningRequest] = deque()  # complete, and not handed over yet
        self._records: list[RequestRecord] = []
        self._wake_s = math.inf  # when the policy would decide otherwise than to wait
        self._tokens = 0
        self._start_s = 0.0
        self._prefill_s = 0.0

    @property
    def next_number(self) -> int:
        """Number of the next micro-batch."""
        return self._scheduler.next_number

    def run(
        self,
        requests: Sequence[Request],
        on_finish: OnFinish,
        on_tokens: OnTokens | None = None,
        should_drain: ShouldDrain | None = None,
        should_abort: ShouldAbort | None = None,
    ) -> EngineStats:
        """Answer every request.

        Args:
            requests: each enters the queue at its arrival time.
            on_finish: called once for each request, when its last token is known.
            on_tokens: called after each step with its new tokens.
            should_drain: called before each step; once true, only running requests are answered.
            should_abort: called before each step; once true, running requests end after their next
                token, without ``on_finish``.

        Raises:
            StageError: a stage failed, hangs, or answers something else than it was asked.
        """
        self._requests = in_order(requests)
        self._start_s = self._clock.now()
        self._take_arrivals()
        try:
            self._serve(on_finish, on_tokens, should_drain, should_abort)
        finally:
            self._hand_over(on_finish)  # what is complete is kept, whatever ends the run
        return EngineStats(
            requests=len(self._records),
            generated_tokens=self._tokens,
            elapsed_s=self._now_s(),
            prefill_s=self._prefill_s,
            records=tuple(sorted(self._records, key=lambda record: record.request)),
            adjusted=() if self._watch is None else self._watch.adjusted,
        )

    def _serve(
        self,
        on_finish: OnFinish,
        on_tokens: OnTokens | None,
        should_drain: ShouldDrain | None,
        should_abort: ShouldAbort | None,
    ) -> None:
        while not self._is_over(should_drain, should_abort):
            open_phases = self._ways.open_phases(self._scheduler)
            if self._must_complete(open_phases):
                self._land(on_tokens)
            elif self._launch_next(open_phases):
                self._hand_over(on_finish)
            else:
                self._hand_over(on_finish)
                self._await_change(on_tokens)
            self._take_arrivals()

    def _hand_over(self, on_finish: OnFinish) -> None:
        while self._finished:
            answer = self._finished.popleft()
            if answer.finish_reason is None:
                continue  # aborted
            on_finish(answer.request, tuple(answer.token_ids), answer.finish_reason)

    def _now_s(self) -> float:
        return self._clock.now() - self._start_s

    def _is_over(self, should_drain: ShouldDrain | None, should_abort: ShouldAbort | None) -> bool:
        aborts = should_abort is not None and should_abort()
        if aborts or (should_drain is not None and should_drain()):
            self._arrived = len(self._requests)
            self._scheduler.drain()
        if aborts:
            for answer in self._answers.values():
                answer.is_aborted = True
        return self._scheduler.is_done

    def _take_arrivals(self) -> None:
        """Put requests into the book whose time has come."""
        if self._arrived == len(self._requests) > 0:
            return
        now_s = self._now_s()
        for number in range(self._arrived, len(self._requests)):
            request = self._requests[number]
            if request.arrival_s > now_s:
                return
            self._scheduler.arrive(
                WaitingRequest(
                    request=number,
                    prompt_tokens=len(request.prompt_token_ids),
                    arrival_s=request.arrival_s,
                )
            )
            self._arrived += 1
        self._scheduler.close()

    def _await_change(self, on_tokens: OnTokens | None) -> None:
        """Take in an answer, or sleep until one is there, a request arrives or the policy wakes."""
        wake_s = min(self._wake_s, self._next_arrival_s())
        if not self._scheduler.is_idle and wake_s == math.inf:
            self._land(on_tokens)
            return
        nap_s = min(max(wake_s - self._now_s(), 0.0), MAX_IDLE_WAIT_S)
        if self._scheduler.is_idle:
            if on_tokens is not None:
                on_tokens(())
            self._clock.sleep(nap_s)
        else:
            assert self._communicator is not None  # else the answer were here
            self._communicator.await_frame(nap_s)

    def _next_arrival_s(self) -> float:
        if self._arrived == len(self._requests):
            return math.inf
        return self._requests[self._arrived].arrival_s

    def _must_complete(self, open_phases: tuple[Phase, ...]) -> bool:
        """Whether to take in an answer before asking the policy."""
        if self._scheduler.is_idle:
            return False
        if self._landed or not open_phases:
            return True
        return self._communicator is not None and self._communicator.has_frame()

    def _launch_next(self, open_phases: tuple[Phase, ...]) -> bool:
        """Send off what the policy decides; tell whether that was anything."""
        decision, step = self._scheduler.decide(self._now_s(), open_phases)
        if step is None:
            until_s = decision.until_s if isinstance(decision, Wait) else None
            self._wake_s = math.inf if until_s is None else until_s
            return False
        self._wake_s = math.inf
        if step.flight.phase is Phase.PREFILL:
            self._launch_prefill(step)
        else:
            self._launch_decode(step)
        return True

    def _launch_prefill(self, step: Step) -> None:
        start_s = self._now_s()
        for number in step.flight.requests:
            self._answers[number] = RunningRequest(
                request=self._requests[number], start_s=start_s, origin=step.flight.number
            )
        prompts = [self._requests[number].prompt_token_ids for number in step.flight.requests]
        width = max(len(prompt) for prompt in prompts)
        # Padding holds token 0, a valid one; no row ever attends to it.
        padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        rows = [
            Row(slot=slot, first=0, length=len(prompt), origin=step.flight.number)
            for slot, prompt in zip(step.flight.slots, prompts, strict=True)
        ]
        self._launch(step, FrameKind.PREFILL, rows, np.array(padded))

    def _launch_decode(self, step: Step) -> None:
        # The newest token is not in the cache yet: its position is one less than the context.
        rows = [
            Row(
                slot=item.slot,
                first=item.context_tokens - 1,
                length=item.context_tokens,
                origin=self._answers[item.request].origin,
            )
            for item in step.sequences
        ]
        newest = [[self._answers[item.request].token_ids[-1]] for item in step.sequences]
        self._launch(step, FrameKind.DECODE, rows, np.array(newest))

    def _launch(self, step: Step, kind: FrameKind, rows: list[Row], token_ids: Ids) -> None:
        phase = step.flight.phase
        runner = self._runners[phase]
        waiting_s = self._clock.now()
        here = runner.acquire(rows)
        start = self._clock.now()
        self._clock.wait_s += start - waiting_s
        # NumPy's calls cost a third of torch's, and less yet with a model's weights in the caches.
        positions = np.array([[row.first] for row in rows])  # [R, 1]
        if token_ids.shape[1] > 1:
            positions = positions + np.arange(token_ids.shape[1])  # [R, T]
        ids = torch.from_numpy(token_ids).to(self._device)
        hidden = self._master.embed(ids, torch.from_numpy(positions))
        embed_s = self._clock.now() - start
        hidden = runner.run(hidden, here)  # [R, T, H]
        synchronize(self._device)
        runner.release(rows)
        sent = DispatchedStep(
            step=step,
            kind=kind,
            rows=tuple(rows),
            spent_s=self._clock.now() - start,
            embed_s=embed_s,
        )
        if self._ways.is_local(phase):
            self._landed.append(hidden)
        else:
            assert self._communicator is not None
            self._communicator.send(
                Frame(kind=kind, micro_batch=step.flight.number, rows=sent.rows, hidden=hidden)
            )
        self._sent[phase].append(sent)

    def _land(self, on_tokens: OnTokens | None) -> None:
        """Take in a micro-batch, the oldest of its way: one new token for each of its sequences."""
        sent, hidden = self._next_answer()
        start = self._clock.now()
        logits = self._master.logits(hidden[:, 0].to(self._device))  # [R, V]
        answers = [self._answers[number] for number in sent.step.flight.requests]
        keys = [(str(answer.request.id), len(answer.token_ids)) for answer in answers]
        tokens = self._sampler.sample(logits, keys)
        spent_s = self._clock.now() - start
        phase = sent.step.flight.phase
        tokens_each = tokens_read(phase, sent.rows, self._device)
        self._clock.record(
            phase, len(sent.rows), sent.spent_s + spent_s, tokens_each, sent.embed_s + spent_s
        )
        now_s = self._now_s()
        if phase is Phase.PREFILL:
            self._prefill_s = now_s
            for answer in answers:
                answer.first_token_s = now_s
        # A finished sequence that its batch holds is computed like any other and thrown away.
        going_on = [not item.is_finished for item in sent.step.sequences]
        made: list[tuple[Request, int]] = []
        for answer, token, is_new in zip(answers, tokens, going_on, strict=True):
            if is_new:
                answer.token_ids.append(token)
                made.append((answer.request, token))
        self._tokens += len(made)
        is_complete = [answer.is_complete for answer in answers]
        for number in self._scheduler.land(sent.step.flight.number, is_complete):
            answer = self._answers[number]
            self._records.append(record_of(number, answer, now_s))
            self._finished.append(answer)
            if not self._holds_finished:
                del self._answers[number]
        if on_tokens is not None:
            on_tokens(made)

    def _next_answer(self) -> tuple[DispatchedStep, Tensor]:
        """Return what has come back, waiting for it; what this process alone has done is first."""
        if self._landed:
            phase = next(phase for phase in Phase if self._ways.is_local(phase))
            return self._sent[phase].popleft(), self._landed.popleft()
        assert self._communicator is not None
        frame = self._communicator.recv()
        if frame.kind is FrameKind.ERROR:
            raise error_from_frame(frame)
        ways = [PHASES.get(frame.kind, Phase.DECODE), *Phase]
        # What nobody waits for is refused against the oldest that somebody does wait for.
        way = next(self._sent[phase] for phase in ways if self._sent[phase])
        sent = way[0]
        hidden = self._checked(frame, sent)
        way.popleft()
        return sent, hidden

    def _checked(self, frame: Frame, sent: DispatchedStep) -> Tensor:
        """Return the hidden states of a frame that answers what was sent."""
        slots = tuple(row.slot for row in frame.rows)
        expected = (sent.kind, sent.step.flight.number, sent.step.flight.slots)
        if (frame.kind, frame.micro_batch, slots) != expected or frame.hidden is None:
            assert self._communicator is not None
            name = self._communicator.names[self._communicator.ranks[-1]]
            raise StageError(
                f"{name}: found micro-batch {frame.micro_batch} "
                f"({frame.kind.name}), expected {sent.step.flight.number} ({sent.kind.name})"
            )
        return frame.hidden
