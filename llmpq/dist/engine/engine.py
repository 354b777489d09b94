"""MasterEngine: requests in, policy decisions, tokens out. It owns all state of requests.

The master embeds, runs the first stage's layers, sends the hidden states round the ring, projects
what comes back and samples. A few micro-batches are in flight, so that every stage has work; what
has come back is completed before more is dispatched, so that queues stay bounded. Finished answers
are reported after the next dispatch, while the other stages compute. Where prefill and decode have
stages of their own (WAA), the master's layers only decode, and micro-batches come back in order on
each of two rings. Stages see only the blocks and lengths in a frame.

Shapes: R rows (sequences), N tokens of a step, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from llmpq.batching import (
    BatchingPolicy,
    InFlightBatch,
    PipelineDepth,
    RequestRecord,
    Scheduler,
    Wait,
    WaitingRequest,
    uniform_depth,
)
from llmpq.batching.workload_shift import LengthMonitor
from llmpq.dist.engine.handover import received
from llmpq.dist.engine.policy import in_order
from llmpq.dist.engine.running_requests import MicroBatchDrafts, RunningRequest
from llmpq.dist.engine.sampler import Sampler, sampling_state_of
from llmpq.dist.engine.stage import StageRunner, packed_batch_of, slot_row
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.results import FinishReason
from llmpq.dist.io.structured_outputs import GrammarCompiler
from llmpq.dist.metrics.stats import StageClock, synchronize, tokens_read
from llmpq.dist.transport.communicator import Communicator, error_from_frame
from llmpq.dist.transport.frames import Frame, FrameKind, Row
from llmpq.errors import StageError
from llmpq.models import Master
from llmpq.spec.precision import Phase

OnFinish = Callable[[Request, tuple[int, ...], FinishReason], None]
"""Called once for each finished request, with its new tokens."""
OnTokens = Callable[[Sequence[tuple[Request, int]]], None]
"""Called after each step with its new tokens by request; with none when the engine goes idle."""
ShouldDrain = Callable[[], bool]
"""Returns True once the engine should drain: finish running requests and admit no new ones."""
ShouldAbort = Callable[[], bool]
"""Returns True once the engine should end running requests after their next token."""

MAX_IDLE_WAIT_S = 0.5
"""Longest single wait of an idle engine, after which it looks at its callbacks again."""
FRAME_KINDS = {Phase.PREFILL: FrameKind.PREFILL, Phase.DECODE: FrameKind.DECODE}
PHASES = {kind: phase for phase, kind in FRAME_KINDS.items()}


class _Dispatched(NamedTuple):
    """A micro-batch in flight.

    Attributes:
        rows: of its frame.
        start_s: when it was dispatched.
        dispatch_s: seconds to dispatch it.
        embed_s: of these, to embed its tokens.
    """

    rows: Sequence[Row]
    start_s: float
    dispatch_s: float
    embed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Numbers of requests and tokens of a run, and its seconds.

    Attributes:
        requests: finished ones.
        generated_tokens: new tokens of all of them.
        elapsed_s: from the first dispatch to the last token.
        prefill_s: of these, until the last prompt's first token.
        records: arrival, start and end of each request, by number.
        adjusted: decode iterations that the policy changed to during the run, in order.
        draft_tokens: that were verified.
        accepted_tokens: those of them that became tokens of an answer.
    """

    requests: int
    generated_tokens: int
    elapsed_s: float
    prefill_s: float
    records: tuple[RequestRecord, ...]
    adjusted: tuple[int, ...] = ()
    draft_tokens: int = 0
    accepted_tokens: int = 0


class MasterEngine:
    """Answers requests over a pipeline.

    Args:
        master: the two ends of the model.
        runner: the first stage's own layers.
        communicator: the ring, or both; ``None`` when there is only one stage.
        policy: decides what to dispatch next.
        sampler: chooses tokens.
        clock: collects the master's busy times.
        num_slots: sequences that the KV blocks of every stage hold.
        max_tokens: tokens of the longest sequence; a slot is a fixed run of blocks for as many.
        window: largest window of the model, if layers with windows have blocks of their own.
        depth: how many micro-batches may be in flight; by default from the number of ranks.
        prefill_runner: the master's part of a prefill where prefill has stages of its own.
        monitor: compares answers with the policy's schedule; ``None`` without one.
        grammars: compiles the forms of answers; ``None`` where no request has one.
        drafts: proposes draft tokens; ``None`` for no speculative decoding.
        first_number: number of the first micro-batch; an engine that follows another one on the
            same ranks continues from that one's ``next_number``.
        switches_after: as in ``EngineLimits``.
    """

    def __init__(  # noqa: PLR0913  the parts of the master
        self,
        *,
        master: Master,
        runner: StageRunner,
        communicator: Communicator | None,
        policy: BatchingPolicy,
        sampler: Sampler,
        clock: StageClock,
        num_slots: int,
        max_tokens: int,
        depth: PipelineDepth | None = None,
        prefill_runner: StageRunner | None = None,
        monitor: LengthMonitor | None = None,
        grammars: GrammarCompiler | None = None,
        drafts: MicroBatchDrafts | None = None,
        first_number: int = 0,
        switches_after: int | None = None,
        window: int | None = None,
    ) -> None:
        self._master = master
        self._window = window
        self._switches_after = switches_after
        self._runners = {Phase.PREFILL: prefill_runner or runner, Phase.DECODE: runner}
        self._device = runner.device
        self._dtype = runner.dtype
        self._communicator = communicator
        self._sampler = sampler
        self._grammars = grammars
        self._drafts = drafts
        self._clock = clock
        self._scheduler = Scheduler(
            policy=policy, num_slots=num_slots, monitor=monitor, first_number=first_number
        )
        self._max_tokens = max_tokens
        self._monitor = monitor
        self._holds_finished = policy.holds_finished
        self._depth = depth or uniform_depth(1 if communicator is None else len(communicator.names))
        self._dispatched: dict[int, _Dispatched] = {}  # by number
        # The micro-batch that the master alone computed, until its tokens are sampled.
        self._local: tuple[InFlightBatch, Tensor] | None = None
        self._requests: Sequence[Request] = ()
        self._arrived = 0
        self._running: dict[int, RunningRequest] = {}  # by number
        self._finished: deque[RunningRequest] = deque()  # not reported yet
        self._records: list[RequestRecord] = []
        self._wake_s = math.inf  # when a policy that waits would decide otherwise
        self._tokens = self._draft_tokens = self._accepted_tokens = 0
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
            StageError: a stage failed, hangs, or returned another micro-batch than expected.
        """
        self._requests = in_order(requests)
        self._start_s = self._clock.now()
        self._take_arrivals()
        try:
            while not self._is_over(should_drain, should_abort):
                self._step(on_finish, on_tokens)
                self._take_arrivals()
        finally:
            self._report_finished(on_finish)  # finished answers are kept, whatever ends the run
        return EngineStats(
            requests=len(self._records),
            generated_tokens=self._tokens,
            elapsed_s=self._now_s(),
            prefill_s=self._prefill_s,
            records=tuple(sorted(self._records, key=lambda record: record.request)),
            adjusted=() if self._monitor is None else self._monitor.adjusted,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def _step(self, on_finish: OnFinish, on_tokens: OnTokens | None) -> None:
        """Complete a micro-batch that is back, or dispatch one, or wait."""
        open_phases = self._depth.open_phases(self._scheduler)
        if self._must_complete(open_phases):
            self._complete_next(on_tokens)
            return
        is_dispatched = self._dispatch_next(open_phases)
        self._report_finished(on_finish)
        if not is_dispatched:
            self._await_change(on_tokens)

    def _report_finished(self, on_finish: OnFinish) -> None:
        while self._finished:
            running = self._finished.popleft()
            if running.finish_reason is not None:  # else it was aborted
                on_finish(running.request, tuple(running.token_ids), running.finish_reason)

    def _now_s(self) -> float:
        return self._clock.now() - self._start_s

    def _is_over(self, should_drain: ShouldDrain | None, should_abort: ShouldAbort | None) -> bool:
        aborts = should_abort is not None and should_abort()
        if aborts or (should_drain is not None and should_drain()):
            self._arrived = len(self._requests)
            self._scheduler.drain()
        if aborts:
            for running in self._running.values():
                running.is_aborted = True
        return self._scheduler.is_done

    def _take_arrivals(self) -> None:
        """Queue the requests whose arrival time has come."""
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
        """Wait for a micro-batch, an arrival or the time at which the policy decides anew."""
        is_arrival_known = self._arrived < len(self._requests)
        arrival_s = self._requests[self._arrived].arrival_s if is_arrival_known else math.inf
        wake_s = min(self._wake_s, arrival_s)
        if not self._scheduler.is_idle and wake_s == math.inf:
            self._complete_next(on_tokens)
            return
        wait_s = min(max(wake_s - self._now_s(), 0.0), MAX_IDLE_WAIT_S)
        if self._scheduler.is_idle:
            if on_tokens is not None:
                on_tokens(())
            self._clock.sleep(wait_s)
        else:
            assert self._communicator is not None  # without one, every step is back at once
            self._communicator.await_frame(wait_s)

    def _must_complete(self, open_phases: tuple[Phase, ...]) -> bool:
        """Whether to complete a micro-batch before asking the policy."""
        if self._scheduler.is_idle:
            return False
        if not open_phases or self._local is not None:
            return True
        return self._communicator is not None and self._communicator.has_frame()

    def _dispatch_next(self, open_phases: tuple[Phase, ...]) -> bool:
        """Dispatch what the policy decides; return whether that was anything."""
        decision, batch = self._scheduler.decide(self._now_s(), open_phases)
        self._wake_s = math.inf
        if batch is None:
            if isinstance(decision, Wait) and decision.until_s is not None:
                self._wake_s = decision.until_s
            return False
        if batch.phase is Phase.PREFILL:
            self._dispatch_prefill(batch)
        else:
            self._dispatch_decode(batch)
        return True

    def _dispatch_prefill(self, batch: InFlightBatch) -> None:
        start_s = self._now_s()
        for number in batch.requests:
            request = self._requests[number]
            self._running[number] = RunningRequest(
                request=request,
                start_s=start_s,
                origin=batch.number,
                sampling=sampling_state_of(request, self._grammars),
            )
        prompts = [self._requests[number].prompt_token_ids for number in batch.requests]
        rows = [
            self._row(slot, 0, len(prompt), batch.number)
            for slot, prompt in zip(batch.slots, prompts, strict=True)
        ]
        self._dispatch(batch, rows, [token for prompt in prompts for token in prompt])

    def _dispatch_decode(self, batch: InFlightBatch) -> None:
        members = [self._running[number] for number in batch.requests]
        if self._drafts is not None:
            self._drafts.propose(members)
        rows: list[Row] = []
        tokens: list[int] = []
        for item, member in zip(batch.sequences, members, strict=True):
            # The newest token is not in the cache yet: its position is one less than the context.
            length = item.context_tokens
            if length - 1 == self._switches_after:
                # The rotary angles of all keys change with this token: they are computed again.
                rows.append(self._row(item.slot, 0, length, member.origin))
                tokens += [*member.request.prompt_token_ids, *member.token_ids][:length]
            else:
                rows.append(self._row(item.slot, length - 1, length, member.origin))
                tokens.append(member.token_ids[-1])
            for place, token in enumerate(member.draft, length):
                rows.append(self._row(item.slot, place, place + 1, member.origin))
                tokens.append(token)
        self._dispatch(batch, rows, tokens)

    def _row(self, slot: int, first: int, length: int, origin: int) -> Row:
        return slot_row(slot, (first, length), self._max_tokens, window=self._window, origin=origin)

    def _dispatch(self, batch: InFlightBatch, rows: list[Row], token_ids: list[int]) -> None:
        phase = batch.phase
        runner = self._runners[phase]
        waiting_s = self._clock.now()
        own_rows = runner.acquire(rows)
        start = self._clock.now()
        self._clock.wait_s += start - waiting_s
        ids = torch.tensor([token_ids], device=self._device)  # [1, N]
        hidden = self._master.embed(ids, packed_batch_of(rows).positions)
        embed_s = self._clock.now() - start
        hidden = runner.run(hidden, own_rows)  # [1, N, H]
        synchronize(self._device)
        runner.release(rows)
        dispatch_s = self._clock.now() - start
        self._dispatched[batch.number] = _Dispatched(rows, waiting_s, dispatch_s, embed_s)
        if self._depth.is_local(phase):
            self._local = batch, hidden
            return
        assert self._communicator is not None
        kind = FRAME_KINDS[phase]
        self._communicator.send(
            Frame(kind=kind, micro_batch=batch.number, rows=tuple(rows), hidden=hidden)
        )

    def _complete_next(self, on_tokens: OnTokens | None) -> None:
        """Complete the oldest micro-batch that is back: new tokens for each sequence."""
        batch, hidden = self._next_completed()
        start = self._clock.now()
        logits = self._master.logits(received(hidden[0], self._device, self._dtype))  # [R, V]
        members = [self._running[number] for number in batch.requests]
        made = self._choose(logits, batch, members)
        spent_s = self._clock.now() - start
        rows, start_s, dispatch_s, embed_s = self._dispatched.pop(batch.number)
        lengths = [row.length for row in rows]
        self._clock.record(
            batch.phase,
            len(lengths),
            dispatch_s + spent_s,
            tokens_read(batch.phase, lengths, self._device),
            embed_s + spent_s,
        )
        now_s = self._now_s()
        if batch.phase is Phase.PREFILL:
            self._prefill_s = now_s
            for member in members:
                member.first_token_s = now_s
        num_made = [len(tokens) for tokens in made]
        self._tokens += sum(num_made)
        self._take_drafts(batch, start_s, num_made)
        is_complete = [member.is_complete for member in members]
        for number in self._scheduler.complete(batch.number, is_complete, num_made):
            finished = self._running[number]
            self._records.append(finished.record(number, now_s))
            self._finished.append(finished)
            if not self._holds_finished:
                del self._running[number]
        if on_tokens is not None:
            on_tokens(
                [
                    (member.request, token)
                    for member, tokens in zip(members, made, strict=True)
                    for token in tokens
                ]
            )

    def _choose(
        self, logits: Tensor, batch: InFlightBatch, members: Sequence[RunningRequest]
    ) -> list[list[int]]:
        """Choose the tokens of each member while its draft has them, and one more.

        Args:
            logits: ``[R, V]``, of the newest token of each member and of its draft tokens.
            batch: a policy may keep finished sequences in it; they get no tokens.
            members: its requests, which take the tokens.
        """
        first_rows = accumulate((1 + len(one.draft) for one in members[:-1]), initial=0)
        left = dict(enumerate(first_rows))  # next row of each member
        made: list[list[int]] = [[] for _ in members]
        while left:
            rows = list(left.values())
            scores = logits if len(rows) == len(logits) else logits[rows]
            sampled = self._sampler.sample(scores, [members[place].sampling for place in left])
            for place, token in zip(list(left), sampled, strict=True):
                member, proposed = members[place], members[place].draft[len(made[place]) :]
                row = left.pop(place)
                if batch.sequences[place].is_finished:
                    continue
                if token.error is not None:
                    raise StageError(token.error, is_permanent=True)
                member.sampling.accept(token.token_id)
                made[place].append(token.token_id)
                if proposed and proposed[0] == token.token_id and not member.is_complete:
                    left[place] = row + 1
        return made

    def _take_drafts(self, batch: InFlightBatch, start_s: float, num_made: Sequence[int]) -> None:
        """Count the draft tokens of a micro-batch; its time and tokens decide on the next ones."""
        if self._drafts is None:
            return
        end_s = self._clock.now()
        if batch.phase is Phase.DECODE:
            members = [self._running[number] for number in batch.requests]
            self._draft_tokens += sum(len(member.draft) for member in members)
            self._accepted_tokens += sum(max(0, count - 1) for count in num_made)
            self._drafts.take_decode(start_s, end_s, members, num_made)
        elif not self._depth.is_split:
            self._drafts.take_prefill(start_s, end_s)

    def _next_completed(self) -> tuple[InFlightBatch, Tensor]:
        """Return the next micro-batch that is back and its hidden states, waiting for it."""
        if self._local is not None:
            local, self._local = self._local, None
            return local
        assert self._communicator is not None
        frame = self._communicator.recv()
        if frame.kind is FrameKind.ERROR:
            raise error_from_frame(frame)
        # Each phase comes back in order; both do where they share their stages.
        phase = PHASES.get(frame.kind) if self._depth.is_split else None
        batch = self._scheduler.oldest_in_flight(phase) or self._scheduler.oldest_in_flight()
        assert batch is not None
        return batch, self._checked(frame, batch)

    def _checked(self, frame: Frame, batch: InFlightBatch) -> Tensor:
        """Return the hidden states of a frame that belongs to the micro-batch."""
        kind = FRAME_KINDS[batch.phase]
        rows = [(row.blocks, row.length) for row in self._dispatched[batch.number].rows]
        expected = (kind, batch.number, rows)
        found = [(row.blocks, row.length) for row in frame.rows]
        if (frame.kind, frame.micro_batch, found) != expected or frame.hidden is None:
            assert self._communicator is not None
            name = self._communicator.names[self._communicator.ranks[-1]]
            raise StageError(
                f"{name}: found micro-batch {frame.micro_batch} "
                f"({frame.kind.name}), expected {batch.number} ({kind.name})"
            )
        return frame.hidden
