"""Scheduler: which request waits, which owns a slot, what is in flight.

The runtime's engine and the simulator both use it, so that a policy that sees equal arrivals,
clocks and completions decides the same in both. It handles neither tensors nor durations: the
caller that completes a micro-batch says which of its answers are finished.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.batching.base import (
    BatchingPolicy,
    Decision,
    InFlightBatch,
    Prefill,
    ReadySequence,
    SchedulerView,
    Wait,
    WaitingRequest,
    check_decision,
)
from llmpq.batching.workload_shift import LengthMonitor
from llmpq.errors import CapacityError, LlmpqError
from llmpq.spec.precision import Phase

BOTH_PHASES = (Phase.PREFILL, Phase.DECODE)


class Scheduler:
    """The requests of a run: queue, slots and micro-batches in flight.

    A slot has at most one owner. The lowest free slot is taken first, which keeps live sequences at
    the front of the cache without copies (compaction in ExeGPT, Sec. 3).

    Args:
        policy: decides what to dispatch next.
        num_slots: number of KV slots.
        monitor: receives started requests and finished answers.
        first_number: number of the first micro-batch.

    Attributes:
        next_number: number of the next micro-batch.

    Raises:
        CapacityError: there is no slot.
    """

    def __init__(
        self,
        *,
        policy: BatchingPolicy,
        num_slots: int,
        monitor: LengthMonitor | None = None,
        first_number: int = 0,
    ) -> None:
        if num_slots < 1:
            raise CapacityError(f"scheduler: found {num_slots} slots, expected at least 1")
        self._policy = policy
        self._monitor = monitor
        self._free_slots = list(range(num_slots))  # a heap
        self._waiting: deque[WaitingRequest] = deque()
        self._ready: dict[int, ReadySequence] = {}  # by slot, in the order they became ready
        self._in_flight: dict[int, InFlightBatch] = {}  # by number, in order
        self.next_number = first_number
        self._unfinished = 0  # sequences that hold a slot and whose answer is incomplete
        self._is_closed = False

    @property
    def is_done(self) -> bool:
        """Whether every request has been answered and none will come."""
        return self._is_closed and not (self._waiting or self._ready or self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._in_flight

    def arrive(self, request: WaitingRequest) -> None:
        """Put a request at the end of the queue."""
        if self._is_closed:
            raise LlmpqError(f"request {request.request} arrives after the last one")
        self._waiting.append(request)

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
        self._is_closed = True
        return dropped

    def num_in_flight(self, phase: Phase | None = None) -> int:
        """Return how many micro-batches are in flight, in one phase or in both."""
        if phase is None:
            return len(self._in_flight)
        return sum(batch.phase is phase for batch in self._in_flight.values())

    def oldest_in_flight(self, phase: Phase | None = None) -> InFlightBatch | None:
        """Return the micro-batch dispatched first of those in flight, in one phase or in both."""
        batches = self._in_flight.values()
        return next((batch for batch in batches if phase in (None, batch.phase)), None)

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

    def decide(
        self, now_s: float, open_phases: tuple[Phase, ...] = BOTH_PHASES
    ) -> tuple[Decision, InFlightBatch | None]:
        """Ask the policy, check its decision and carry it out.

        Returns:
            the decision, and the micro-batch it dispatched (``None`` when it waits).

        Raises:
            LlmpqError: the decision is not allowed.
        """
        view = self.view(now_s, open_phases)
        decision = self._policy.decide(view)
        check_decision(view, decision)
        if isinstance(decision, Wait):
            return decision, None
        if isinstance(decision, Prefill):
            sequences = self._admit(decision.requests)
        else:
            sequences = [self._ready.pop(slot) for slot in decision.slots]
        phase = Phase.PREFILL if isinstance(decision, Prefill) else Phase.DECODE
        batch = InFlightBatch(number=self.next_number, phase=phase, sequences=tuple(sequences))
        self.next_number += 1
        self._in_flight[batch.number] = batch
        return decision, batch

    def complete(
        self, number: int, is_complete: Sequence[bool], new_tokens: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Take a micro-batch out of the pipeline, with new tokens for each of its sequences.

        Args:
            number: number of the micro-batch.
            is_complete: for each of its sequences, whether its answer is complete. Ignored for
                those that were finished before.
            new_tokens: of each of its sequences, accepted draft tokens included; one by default.
                Ignored for those that were finished before.

        Returns:
            the requests that are finished by it.

        Raises:
            LlmpqError: no such micro-batch is in flight.
        """
        if number not in self._in_flight:
            raise LlmpqError(f"micro-batch {number} completes but is not in flight")
        finished = []
        sequences = self._in_flight.pop(number).sequences
        counts = new_tokens or (1,) * len(sequences)
        for before, complete, count in zip(sequences, is_complete, counts, strict=True):
            after = before if before.is_finished else _with_more_tokens(before, count, complete)
            if complete and not before.is_finished:
                finished.append(before.request)
                self._unfinished -= 1
                if self._monitor is not None:
                    self._monitor.finished(before.request, after.new_tokens)
            if after.is_finished and not self._policy.holds_finished:
                heapq.heappush(self._free_slots, before.slot)
            else:
                self._ready[before.slot] = after
        if self._policy.holds_finished and self._unfinished == 0:
            self._release_batch()
        return tuple(finished)

    def _release_batch(self) -> None:
        """Free the slots of a finished batch; members in flight are freed when they complete."""
        for slot in self._ready:
            heapq.heappush(self._free_slots, slot)
        self._ready.clear()

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


def _with_more_tokens(sequence: ReadySequence, count: int, is_finished: bool) -> ReadySequence:
    return ReadySequence(
        request=sequence.request,
        slot=sequence.slot,
        context_tokens=sequence.context_tokens + count,
        new_tokens=sequence.new_tokens + count,
        is_finished=is_finished,
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

    def open_phases(self, scheduler: Scheduler) -> tuple[Phase, ...]:
        """Return the phases of which the pipeline can take a micro-batch now."""
        if not self.is_split:
            has_room = scheduler.num_in_flight() < self.max_in_flight(Phase.DECODE)
            return BOTH_PHASES if has_room else ()
        return tuple(
            phase for phase in Phase if scheduler.num_in_flight(phase) < self.max_in_flight(phase)
        )


def uniform_depth(num_stages: int) -> PipelineDepth:
    """Return the limits of stages that compute both phases."""
    return PipelineDepth(prefill_stages=num_stages, decode_stages=num_stages)
