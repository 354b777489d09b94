"""Scheduler: which request waits, which owns a slot, what is on its way. One book, two readers.

The runtime's engine and the simulator both keep their requests here and do with tensors or with
seconds what the book says; so a policy that sees equal arrivals, clocks and ends decides the same
in both. The book knows neither tokens nor seconds: whoever lands a micro-batch tells which of its
answers are complete.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.batching.base import (
    BatchingPolicy,
    Decision,
    Decode,
    InFlightBatch,
    Prefill,
    ReadySequence,
    SchedulerView,
    Wait,
    WaitingRequest,
    check_decision,
)
from llmpq.batching.workload_shift import DriftWatch
from llmpq.errors import CapacityError, LlmpqError
from llmpq.spec.precision import Phase

BOTH_PHASES = (Phase.PREFILL, Phase.DECODE)


class SlotAllocator:
    """Which slots are free; every slot has at most one owner.

    The lowest free slot is given out first, so that live sequences stay together at the front of
    the cache: the compaction that early ends call for (ExeGPT, Sec. 3) without moving a byte.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise CapacityError(f"slot pool: found {num_slots} slots, expected at least 1")
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._owned: set[int] = set()

    @property
    def in_use(self) -> int:
        """Slots that have an owner."""
        return len(self._owned)

    def acquire(self) -> int:
        """Return a free slot, now owned.

        Raises:
            CapacityError: every slot has an owner.
        """
        if not self._free:
            raise CapacityError(f"slot pool: all {self.num_slots} slots are in use")
        slot = heapq.heappop(self._free)
        self._owned.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Free an owned slot.

        Raises:
            LlmpqError: nobody owns it.
        """
        if slot not in self._owned:
            raise LlmpqError(f"slot pool: slot {slot} is released although nobody owns it")
        self._owned.remove(slot)
        heapq.heappush(self._free, slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A decision that was carried out in the book.

    Attributes:
        flight: the micro-batch it sent off.
        sequences: its members as they were before, in the order of the flight; for a prefill with
            an empty answer.
    """

    flight: InFlightBatch
    sequences: tuple[ReadySequence, ...]


class Scheduler:
    """All requests of a run.

    Args:
        policy: decides.
        num_slots: sequences that may hold a slot at once.
        watch: is told of every answer that begins and ends, ``None`` for nobody.
        first_number: number of the first micro-batch.

    Attributes:
        next_number: number of the next micro-batch.
    """

    def __init__(
        self,
        *,
        policy: BatchingPolicy,
        num_slots: int,
        watch: DriftWatch | None = None,
        first_number: int = 0,
    ) -> None:
        self._policy = policy
        self._watch = watch
        self._slots = SlotAllocator(num_slots)
        self._waiting: deque[WaitingRequest] = deque()
        self._ready: dict[int, ReadySequence] = {}  # by slot, in the order they became ready
        self._flying: dict[int, ReadySequence] = {}  # by slot
        self._flights: dict[int, InFlightBatch] = {}  # by number, in order
        self.next_number = first_number
        self._unfinished = 0  # sequences that hold a slot and whose answer is incomplete
        self._is_closed = False

    @property
    def is_done(self) -> bool:
        """Whether every request has been answered and none will come."""
        return self._is_closed and not (self._waiting or self._ready or self._flights)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._flights

    def arrive(self, request: WaitingRequest) -> None:
        """Put a request at the end of the queue."""
        if self._is_closed:
            raise LlmpqError(f"request {request.request} arrives after the last one")
        self._waiting.append(request)

    def close(self) -> None:
        """Say that no further request will arrive."""
        self._is_closed = True

    def drain(self) -> tuple[int, ...]:
        """Let go of the requests that still wait, for whoever holds a slot to finish alone.

        Returns:
            the requests let go, in the order of the queue.
        """
        dropped = tuple(item.request for item in self._waiting)
        self._waiting.clear()
        self._is_closed = True
        return dropped

    def num_flights(self, phase: Phase | None = None) -> int:
        """Return how many micro-batches are on their way, in one phase or in both."""
        if phase is None:
            return len(self._flights)
        return sum(flight.phase is phase for flight in self._flights.values())

    def view(self, now_s: float, open_phases: tuple[Phase, ...] = BOTH_PHASES) -> SchedulerView:
        """Return what a policy may see."""
        return SchedulerView(
            waiting=self._waiting,
            ready=tuple(self._ready.values()),
            free_slots=self._slots.num_slots - self._slots.in_use,
            flights=tuple(self._flights.values()),
            open_phases=open_phases,
            is_closed=self._is_closed,
            now_s=now_s,
        )

    def decide(
        self, now_s: float, open_phases: tuple[Phase, ...] = BOTH_PHASES
    ) -> tuple[Decision, Step | None]:
        """Ask the policy, check its answer and carry it out.

        Returns:
            the decision, and what it sent off (``None`` when it waits).

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
            sequences = self._take_ready(decision)
        phase = Phase.PREFILL if isinstance(decision, Prefill) else Phase.DECODE
        flight = InFlightBatch(
            number=self.next_number,
            phase=phase,
            requests=tuple(sequence.request for sequence in sequences),
            slots=tuple(sequence.slot for sequence in sequences),
        )
        self.next_number += 1
        self._flights[flight.number] = flight
        self._flying.update((sequence.slot, sequence) for sequence in sequences)
        return decision, Step(flight=flight, sequences=tuple(sequences))

    def land(self, number: int, is_complete: Sequence[bool]) -> tuple[int, ...]:
        """Take in a micro-batch: one new token for each of its sequences.

        Args:
            number: of the flight.
            is_complete: for each of its sequences, whether that token was its last. Ignored for
                those that were finished before.

        Returns:
            the requests that are finished by it.

        Raises:
            LlmpqError: no such micro-batch is on its way.
        """
        if number not in self._flights:
            raise LlmpqError(f"micro-batch {number} lands but is not on its way")
        flight = self._flights.pop(number)
        finished = []
        for slot, complete in zip(flight.slots, is_complete, strict=True):
            before = self._flying.pop(slot)
            after = before if before.is_finished else _with_one_more_token(before, complete)
            if complete and not before.is_finished:
                finished.append(before.request)
                self._unfinished -= 1
                if self._watch is not None:
                    self._watch.ends(before.request, after.new_tokens)
            if after.is_finished and not self._policy.holds_finished:
                self._slots.release(slot)
            else:
                self._ready[slot] = after
        if self._policy.holds_finished and self._unfinished == 0:
            self._release_batch()
        return tuple(finished)

    def _release_batch(self) -> None:
        """Free the slots of a batch whose last answer is complete.

        Members still on their way are finished too; they are freed when they land.
        """
        for slot in self._ready:
            self._slots.release(slot)
        self._ready.clear()

    def _admit(self, requests: Sequence[int]) -> list[ReadySequence]:
        """Take requests from the queue without walking past the last of them; give them slots."""
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
        if self._watch is not None:
            self._watch.begin(requests)
        return [
            ReadySequence(
                request=request,
                slot=self._slots.acquire(),
                context_tokens=found[request].prompt_tokens,
                new_tokens=0,
            )
            for request in requests
        ]

    def _take_ready(self, decision: Decode) -> list[ReadySequence]:
        return [self._ready.pop(slot) for slot in decision.slots]


def _with_one_more_token(sequence: ReadySequence, is_last: bool) -> ReadySequence:
    return ReadySequence(
        request=sequence.request,
        slot=sequence.slot,
        context_tokens=sequence.context_tokens + 1,
        new_tokens=sequence.new_tokens + 1,
        is_finished=is_last,
    )
