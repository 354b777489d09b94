"""The interface of batching policies: their input, a ``SchedulerView``, and their ``Decision``.

A ``PolicyScheduler`` calls the policy whenever the pipeline can take another micro-batch, in the
runtime and in the simulator. Equal views give equal decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from llmpq.errors import LlmpqError
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request that holds no slot yet.

    Attributes:
        request: number, unique in the run.
        prompt_tokens: length of the prompt.
        arrival_s: arrival time on the run's clock.
        slots: that it needs: several for a sequence longer than a slot.
    """

    request: int
    prompt_tokens: int
    arrival_s: float = 0.0
    slots: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySequence:
    """A sequence that holds a slot and can be decoded.

    Attributes:
        request: number of its request.
        slot: its KV slot.
        context_tokens: tokens of prompt and answer so far.
        new_tokens: tokens of the answer so far; 1 right after prefill.
        is_finished: its answer is complete but it keeps its slot, and its new tokens are
            discarded; only under a policy that ``holds_finished``.
    """

    request: int
    slot: int
    context_tokens: int
    new_tokens: int
    is_finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightBatch:
    """A micro-batch that was dispatched into the pipeline and has not come back.

    Attributes:
        number: counted from 0 in the order of dispatch.
        phase: prefill or decode.
        sequences: its members as they were at dispatch; for a prefill with an empty answer.
    """

    number: int
    phase: Phase
    sequences: tuple[ReadySequence, ...]

    @property
    def requests(self) -> tuple[int, ...]:
        """The number of each sequence's request."""
        return tuple(sequence.request for sequence in self.sequences)

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot of each sequence."""
        return tuple(sequence.slot for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerView:
    """The read-only state for a decision.

    Attributes:
        waiting: requests without a slot, in order of arrival.
        ready: sequences that can be decoded, the one ready longest first.
        free_slots: slots without an owner.
        in_flight: micro-batches in the pipeline, the oldest first.
        open_phases: phases of which the pipeline can take a micro-batch now.
        is_closed: whether no further request will arrive.
        now_s: time on the run's clock.
    """

    waiting: Sequence[WaitingRequest]
    ready: Sequence[ReadySequence]
    free_slots: int
    in_flight: tuple[InFlightBatch, ...] = ()
    open_phases: tuple[Phase, ...] = (Phase.PREFILL, Phase.DECODE)
    is_closed: bool = True
    now_s: float = 0.0

    def sequences_in_flight(self, phase: Phase) -> int:
        """Return the number of sequences in flight in a phase."""
        return sum(len(batch.sequences) for batch in self.in_flight if batch.phase is phase)

    def num_in_flight(self, phase: Phase) -> int:
        """Return the number of micro-batches in flight in a phase."""
        return sum(batch.phase is phase for batch in self.in_flight)

    def can(self, phase: Phase) -> bool:
        """Whether the pipeline can take a micro-batch of the phase now."""
        return phase in self.open_phases

    def fitting(self, most: int) -> list[WaitingRequest]:
        """Return the first waiting requests, at most so many, that the free slots hold."""
        found: list[WaitingRequest] = []
        free = self.free_slots
        for item in islice(self.waiting, max(0, min(most, free))):
            free -= item.slots
            if free < 0:
                break
            found.append(item)
        return found

    @property
    def alive(self) -> int:
        """Sequences that hold a slot and are not finished."""
        ready = sum(not sequence.is_finished for sequence in self.ready)
        return ready + sum(len(batch.sequences) for batch in self.in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Assign slots to these requests and prefill them as one micro-batch."""

    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Decode the sequences in these slots as one micro-batch."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing until a micro-batch comes back or a request arrives.

    Attributes:
        until_s: or until this time.
    """

    until_s: float | None = None


Decision = Prefill | Decode | Wait


class BatchingPolicy(Protocol):
    """Decides which micro-batch to dispatch next.

    A policy may have state; its decisions depend on the sequence of views alone.
    """

    @property
    def holds_finished(self) -> bool:
        """Whether finished sequences stay in their batch until its last one is finished."""
        ...

    def decide(self, view: SchedulerView) -> Decision:
        """Return the next step; not ``Wait`` if nothing is in flight and no request will arrive."""
        ...


def check_decision(view: SchedulerView, decision: Decision) -> None:
    """Check that the view allows a decision.

    Raises:
        LlmpqError: the decision is empty or names a request that is not waiting, a slot that is not
            ready, a member twice, too many requests or a full phase, or waits without a reason.
    """
    if isinstance(decision, Wait):
        is_for_nothing = not view.in_flight and view.is_closed and decision.until_s is None
        if is_for_nothing and (view.waiting or view.ready):
            raise LlmpqError("batching policy: waits although nothing is in flight")
        return
    phase = Phase.PREFILL if isinstance(decision, Prefill) else Phase.DECODE
    if not view.can(phase):
        raise LlmpqError(f"batching policy: found a {phase} step, but those stages are full")
    if isinstance(decision, Prefill):
        _check_members(decision.requests, (item.request for item in view.waiting), "request")
        chosen = set(decision.requests)
        needed = len(chosen)  # at least
        if needed <= view.free_slots:
            needed = sum(item.slots for item in view.waiting if item.request in chosen)
        if needed > view.free_slots:
            raise LlmpqError(
                f"batching policy: found {len(chosen)} requests to prefill that need {needed} "
                f"slots, expected at most the {view.free_slots} free slots"
            )
    else:
        _check_members(decision.slots, (item.slot for item in view.ready), "slot")


def _check_members(chosen: tuple[int, ...], available: Iterable[int], noun: str) -> None:
    missing = set(chosen)
    is_once = len(missing) == len(chosen) > 0
    for number in available:
        if not missing:
            break  # the queue may be long, and policies mostly take its head
        missing.discard(number)
    if missing or not is_once:
        raise LlmpqError(
            f"batching policy: found {noun}s {list(chosen)}, "
            f"expected at least one {noun} that can be taken, each once"
        )
