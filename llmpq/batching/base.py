"""What a batching policy sees and what it may answer.

A policy is asked whenever the pipeline can take one more micro-batch, and answers with one
``Decision``. The runtime and the simulator own the state and drive the same policies: equal views
get equal answers. It refuses to know tensors, clocks and results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmpq.errors import LlmpqError


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request that holds no slot yet.

    Attributes:
        request: its number, unique in the run.
        prompt_tokens: length of its prompt.
    """

    request: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySequence:
    """A sequence that holds a slot and whose last token is known: it can be decoded.

    Attributes:
        request: the number of its request.
        slot: the KV slot it owns.
        context_tokens: tokens of prompt and answer so far.
        new_tokens: tokens of the answer so far; 1 right after prefill.
    """

    request: int
    slot: int
    context_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerView:
    """The read-only state a decision rests on.

    Attributes:
        waiting: requests without a slot, in order of arrival.
        ready: sequences that can be decoded, the one ready longest first.
        free_slots: slots without an owner.
        prefills_in_flight: sizes of the prefill micro-batches on their way through the stages.
        decodes_in_flight: sizes of the decode micro-batches likewise.
    """

    waiting: Sequence[WaitingRequest]
    ready: Sequence[ReadySequence]
    free_slots: int
    prefills_in_flight: tuple[int, ...] = ()
    decodes_in_flight: tuple[int, ...] = ()

    @property
    def num_in_flight(self) -> int:
        """Micro-batches on their way."""
        return len(self.prefills_in_flight) + len(self.decodes_in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Give each of these requests a slot and run their prompts as one micro-batch."""

    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Make the next token of the sequences in these slots, as one micro-batch."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing until a micro-batch comes back."""


Decision = Prefill | Decode | Wait


class BatchingPolicy(Protocol):
    """Decides what enters the pipeline next."""

    def decide(self, view: SchedulerView) -> Decision:
        """Return the next step; never ``Wait`` when nothing is in flight and something could be."""
        ...


def check_decision(view: SchedulerView, decision: Decision) -> None:
    """Refuse a decision the view does not allow; a policy's bug must not corrupt a run.

    Raises:
        LlmpqError: it names a request that does not wait or a slot that is not ready, one of them
            twice, none at all, more than there are slots, or waits for nothing.
    """
    if isinstance(decision, Wait):
        if view.num_in_flight == 0:
            raise LlmpqError("batching policy: waits although nothing is in flight")
        return
    if isinstance(decision, Prefill):
        _check_members(decision.requests, (item.request for item in view.waiting), "request")
        if len(decision.requests) > view.free_slots:
            raise LlmpqError(
                f"batching policy: found {len(decision.requests)} requests to prefill, "
                f"expected at most the {view.free_slots} free slots"
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
