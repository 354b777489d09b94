"""Scheduler of steps that a batching policy decides: prompts as a whole, or one token each.

A sequence has a slot, a fixed run of KV blocks, from its prefill until its answer is complete. The
runtime's engine and the simulator both use this scheduler, so that a policy that sees equal
arrivals, clocks and completions decides the same in both.

With speculative decoding, a sequence that decodes may have draft tokens after its next one. The
same step writes their keys and values to the slot; those of rejected tokens are overwritten.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from llmpq.batching.base import (
    BatchingPolicy,
    Decode,
    InFlightBatch,
    Prefill,
    ReadySequence,
    SchedulerView,
    Wait,
    WaitingRequest,
    check_decision,
)
from llmpq.batching.drafts import DraftCandidate, StepDrafts
from llmpq.batching.engine_step import (
    NO_TOKENS,
    EngineLimits,
    EngineRequest,
    EngineStep,
    ScheduledChunk,
)
from llmpq.batching.speculation import MAX_STEP_TOKENS, DraftCredit
from llmpq.batching.workload_shift import LengthMonitor
from llmpq.errors import CapacityError, LlmpqError
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE

BOTH_PHASES = (Phase.PREFILL, Phase.DECODE)


def slot_limits(num_slots: int, max_tokens: int, block_size: int = KV_BLOCK_SIZE) -> EngineLimits:
    """Return the limits of slots for sequences of up to ``max_tokens`` each."""
    return EngineLimits(
        token_budget=num_slots * max_tokens,
        max_sequences=num_slots,
        num_blocks=num_slots * -(-max_tokens // block_size),
        block_size=block_size,
        prefix_caching=False,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _SlotRequest:
    """An unfinished request; ``origin`` is the step that prefilled it."""

    request: EngineRequest
    credit: DraftCredit
    origin: int = 0
    is_aborted: bool = False


class PolicyScheduler:
    """The requests of a run: queue, slots and micro-batches in flight.

    A slot has at most one owner. The lowest free slot is taken first, which keeps live sequences at
    the front of the cache without copies (compaction in ExeGPT, Sec. 3).

    Args:
        policy: decides what to dispatch next.
        limits: of the engine: ``max_sequences`` slots share its blocks evenly.
        depth: how many micro-batches may be in flight.
        drafts: of its sequences; those of another scheduler know what a draft token costs.
        monitor: receives started requests and finished answers.
        first_number: number of the first step.

    Attributes:
        next_number: number of the next step.
        wake_s: when a policy that waits would decide otherwise; infinite for never.
    """

    def __init__(
        self,
        policy: BatchingPolicy,
        limits: EngineLimits,
        depth: PipelineDepth,
        *,
        drafts: StepDrafts | None = None,
        monitor: LengthMonitor | None = None,
        first_number: int = 0,
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._depth = depth
        self._monitor = monitor
        self.drafts = drafts or limits.new_drafts()
        self._slot_blocks = limits.num_blocks // limits.max_sequences
        self._slot_window_blocks = limits.num_window_blocks // limits.max_sequences
        self._free_slots = list(range(limits.max_sequences))  # a heap
        self._requests: dict[int, _SlotRequest] = {}  # unfinished ones
        self._waiting: deque[WaitingRequest] = deque()
        self._ready: dict[int, ReadySequence] = {}  # by slot, in the order they became ready
        self._in_flight: dict[int, InFlightBatch] = {}  # by number, in order
        self._steps: dict[int, tuple[float, EngineStep]] = {}  # with when they began
        self._unfinished = 0  # sequences that hold a slot and whose answer is incomplete
        self._is_closed = False
        self.next_number = first_number
        self.wake_s = math.inf

    @property
    def is_done(self) -> bool:
        """Whether every request has been answered and none will come."""
        return self._is_closed and not (self._waiting or self._ready or self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._in_flight

    def add(self, request: EngineRequest) -> None:
        """Put a request at the end of the queue.

        Raises:
            CapacityError: its prompt and longest answer do not fit into a slot.
            LlmpqError: it comes after the last one.
        """
        if self._is_closed:
            raise LlmpqError(f"request {request.request} arrives after the last one")
        # The last token of an answer is never an input, so its keys and values are not stored.
        tokens = request.prompt_tokens + request.max_tokens - 1
        if self._limits.blocks_for(tokens) > self._slot_blocks:
            raise CapacityError(
                f"request {request.request}: {request.prompt_tokens} prompt and up to "
                f"{request.max_tokens} new tokens need {self._limits.blocks_for(tokens)} KV "
                f"blocks, more than the {self._slot_blocks} of a sequence"
            )
        self._requests[request.request] = _SlotRequest(
            request=request, credit=self.drafts.first_credit()
        )
        self._waiting.append(
            WaitingRequest(
                request=request.request,
                prompt_tokens=request.prompt_tokens,
                arrival_s=request.arrival_s,
            )
        )

    def close(self) -> None:
        """Declare that no further request will arrive."""
        self._is_closed = True

    def drain(self) -> tuple[int, ...]:
        """Remove the waiting requests; those that hold a slot are still finished.

        Returns:
            the removed requests, in the order of the queue.
        """
        dropped = tuple(item.request for item in self._waiting)
        self._waiting.clear()
        for request in dropped:
            del self._requests[request]
        self._is_closed = True
        return dropped

    def abort(self, request: int) -> bool:
        """Remove a request, or end it with its step in flight.

        Returns:
            Whether the request was unfinished.
        """
        found = self._requests.get(request)
        if found is None or found.is_aborted:
            return False
        found.is_aborted = True
        for item in self._waiting:
            if item.request == request:
                self._waiting.remove(item)
                del self._requests[request]
                return True
        for slot, sequence in self._ready.items():
            if sequence.request == request:
                self._leave(replace(sequence, is_finished=True), slot)
                self._release_batch()
                return True
        return True

    def view(self, now_s: float, open_phases: tuple[Phase, ...] = BOTH_PHASES) -> SchedulerView:
        """Return what a policy may see."""
        return SchedulerView(
            waiting=self._waiting,
            ready=tuple(self._ready.values()),
            free_slots=len(self._free_slots),
            in_flight=tuple(self._in_flight.values()),
            open_phases=open_phases,
            is_closed=self._is_closed,
            now_s=now_s,
        )

    def schedule(self, now_s: float) -> EngineStep | None:
        """Return the step that the policy decides, ``None`` when it waits.

        Raises:
            LlmpqError: the decision is not allowed.
        """
        self.wake_s = math.inf
        open_phases = self._depth.open_phases(self._in_flight.values())
        if not open_phases:
            return None
        view = self.view(now_s, open_phases)
        decision = self._policy.decide(view)
        check_decision(view, decision)
        if isinstance(decision, Wait):
            self.wake_s = math.inf if decision.until_s is None else decision.until_s
            return None
        batch = self._take(decision)
        step = self._step(batch)
        self._in_flight[batch.number] = batch
        self._steps[batch.number] = now_s, step
        return step

    def complete_drafts(self, step: EngineStep, now_s: float, *, has_ended: bool = False) -> None:
        """Take the time at which the draft model has computed the drafts of a new step, or ended.

        Later steps have no drafts once it has ended.
        """
        start_s, _ = self._steps[step.number]
        self._steps[step.number] = now_s, step
        self.drafts.measure_works(step.drafts, step.rows, now_s - start_s, has_ended=has_ended)

    def complete(
        self,
        number: int,
        tokens: Mapping[int, int],
        finished: Collection[int] = (),
        accepted: Mapping[int, Sequence[int]] = NO_TOKENS,
        *,
        now_s: float | None = None,
    ) -> None:
        """Take a step out of the pipeline, with new tokens for each of its sequences.

        Args: as in :class:`StepScheduler`; sequences that were finished before make no token.

        Raises:
            LlmpqError: no such step is in flight, or a token is missing.
        """
        batch = self._in_flight.pop(number, None)
        if batch is None:
            raise LlmpqError(f"step {number} completes but is not in flight")
        start_s, step = self._steps.pop(number)
        if now_s is not None and (batch.phase is Phase.DECODE or not self._depth.is_split):
            is_decode = batch.phase is Phase.DECODE
            rows = sum(chunk.count for chunk in step.chunks) if is_decode else None
            self.drafts.measure_step(start_s, now_s, rows)
        for before, chunk in zip(batch.sequences, step.chunks, strict=True):
            after = before
            if not before.is_finished:
                right = accepted.get(before.request, ())
                after = self._extended(before, chunk, tokens, right, before.request in finished)
                if batch.phase is Phase.DECODE and self.drafts.is_on:
                    self.drafts.verify(
                        before.request, self._requests[before.request].credit, len(right),
                        chunk.num_draft_tokens, len(step.chunks),
                    )  # fmt: skip
            if after.is_finished and not before.is_finished:
                self._leave(after, before.slot)
            else:
                self._ready[before.slot] = after
        self._release_batch()

    def _extended(
        self,
        before: ReadySequence,
        chunk: ScheduledChunk,
        tokens: Mapping[int, int],
        accepted: Sequence[int],
        is_finished: bool,
    ) -> ReadySequence:
        """Return a sequence with its new tokens."""
        found = self._requests[before.request]
        count = 1 + len(accepted) if before.request in tokens else 0
        if not (count or is_finished or found.is_aborted):
            raise LlmpqError(f"step: found no token of request {before.request}")
        assert count <= 1 + chunk.num_draft_tokens
        return replace(
            before,
            context_tokens=before.context_tokens + count,
            new_tokens=before.new_tokens + count,
            is_finished=is_finished or found.is_aborted,
        )

    def _leave(self, sequence: ReadySequence, slot: int) -> None:
        """End a sequence; its slot is free once the policy does not hold it."""
        self._unfinished -= 1
        self.drafts.forget(sequence.request)
        del self._requests[sequence.request]
        if self._monitor is not None:
            self._monitor.finished(sequence.request, sequence.new_tokens)
        if self._policy.holds_finished:
            self._ready[slot] = sequence
            return
        self._ready.pop(slot, None)
        heapq.heappush(self._free_slots, slot)

    def _release_batch(self) -> None:
        """Free the slots of a finished batch; members in flight are freed when they complete."""
        if self._unfinished or not self._policy.holds_finished:
            return
        for slot in self._ready:
            heapq.heappush(self._free_slots, slot)
        self._ready.clear()

    def _take(self, decision: Prefill | Decode) -> InFlightBatch:
        if isinstance(decision, Prefill):
            sequences = self._admit(decision.requests)
        else:
            sequences = [self._ready.pop(slot) for slot in decision.slots]
        phase = Phase.PREFILL if isinstance(decision, Prefill) else Phase.DECODE
        batch = InFlightBatch(number=self.next_number, phase=phase, sequences=tuple(sequences))
        self.next_number += 1
        return batch

    def _admit(self, requests: Sequence[int]) -> list[ReadySequence]:
        """Take requests from the queue and give them slots; the queue keeps its order."""
        chosen = set(requests)
        found: dict[int, WaitingRequest] = {}
        passed_over = []
        while chosen:
            item = self._waiting.popleft()
            if item.request in chosen:
                chosen.remove(item.request)
                found[item.request] = item
                self._requests[item.request].origin = self.next_number
            else:
                passed_over.append(item)
        self._waiting.extendleft(reversed(passed_over))
        self._unfinished += len(requests)
        if self._monitor is not None:
            self._monitor.started(requests)
        return [
            ReadySequence(
                request=request,
                slot=heapq.heappop(self._free_slots),
                context_tokens=found[request].prompt_tokens,
                new_tokens=0,
            )
            for request in requests
        ]

    def _step(self, batch: InFlightBatch) -> EngineStep:
        """Return the step of a micro-batch: a whole prompt, or the newest token, of each."""
        drafts: dict[int, int] = {}
        if batch.phase is Phase.DECODE and self.drafts.is_on:
            drafts = self._drafts(batch)
        chunks = tuple(
            self._chunk(sequence, batch.phase, drafts.get(sequence.request, 0))
            for sequence in batch.sequences
        )
        works = self.drafts.take_works()
        return EngineStep(batch.number, chunks, drafts=works, phase=batch.phase)

    def _drafts(self, batch: InFlightBatch) -> dict[int, int]:
        """Return the draft tokens of the sequences of a decode micro-batch."""
        rows = len(batch.sequences)
        candidates = []
        for sequence in batch.sequences:
            if sequence.is_finished or self._switches(sequence):
                continue
            found = self._requests[sequence.request]
            left = found.request.max_tokens - sequence.new_tokens - 1
            left = min(left, self._limits.tokens_before_switch(sequence.context_tokens))
            candidates.append(
                DraftCandidate(sequence.request, sequence.context_tokens, left, found.credit)
            )
        counts: dict[int, int] = {}
        room = MAX_STEP_TOKENS - rows
        longest, cost = self.drafts.longest(candidates, rows, rows)
        for one in candidates:
            most = min(longest[one.request], one.left, room)
            counts[one.request] = self.drafts.draft(one, most, cost)
            room -= counts[one.request]
        return counts

    def _switches(self, sequence: ReadySequence) -> bool:
        """Whether the rotary angles of all keys change with the newest token of a sequence."""
        return sequence.context_tokens - 1 == self._limits.switches_after

    def _chunk(self, sequence: ReadySequence, phase: Phase, drafts: int) -> ScheduledChunk:
        # The newest token is not in the cache yet: its position is one less than the context.
        end, slot = sequence.context_tokens, sequence.slot
        first = 0 if phase is Phase.PREFILL or self._switches(sequence) else end - 1
        num_blocks = self._limits.blocks_for(end + drafts)
        start, width = slot * self._slot_blocks, self._slot_window_blocks
        # In layers with windows, the blocks of a slot are used in turn: the window before a chunk,
        # and the chunk, have one each.
        places = range(num_blocks if width else 0)
        found = self._requests.get(sequence.request)
        return ScheduledChunk(
            sequence.request,
            first,
            end + drafts - first,
            tuple(range(start, start + num_blocks)),
            not sequence.is_finished,
            drafts,
            tuple(slot * width + place % width for place in places),
            0 if found is None else found.origin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDepth:
    """Limits of the micro-batches in flight, from the number of stages.

    Attributes:
        prefill_stages, decode_stages: stages of each phase, the master's included.
        is_split: whether each phase has stages of its own; otherwise both numbers are equal, and
            micro-batches of both phases follow each other through the same stages.
    """

    prefill_stages: int
    decode_stages: int
    is_split: bool = False

    def max_in_flight(self, phase: Phase) -> int:
        """Return how many micro-batches of a phase may be in flight: one a stage and one more.

        More would only wait in queues; a master without other stages computes one at a time.
        """
        stages = self.prefill_stages if phase is Phase.PREFILL else self.decode_stages
        return 1 if stages == 1 else stages + 1

    def is_local(self, phase: Phase) -> bool:
        """Whether the master alone computes a phase."""
        return self.max_in_flight(phase) == 1

    def open_phases(self, in_flight: Collection[InFlightBatch]) -> tuple[Phase, ...]:
        """Return the phases of which the pipeline can take a micro-batch now."""
        if not self.is_split:
            return BOTH_PHASES if len(in_flight) < self.max_in_flight(Phase.DECODE) else ()
        counts = Counter(batch.phase for batch in in_flight)
        return tuple(phase for phase in Phase if counts[phase] < self.max_in_flight(phase))


def uniform_depth(num_stages: int) -> PipelineDepth:
    """Return the limits of stages that compute both phases."""
    return PipelineDepth(prefill_stages=num_stages, decode_stages=num_stages)
