"""Iteration-level batching, first come, first served (ORCA; vLLM's scheduler without chunks).

A request starts as soon as a slot is free, and a finished one leaves at once. One iteration
prefills new requests and then decodes one token of all sequences.
"""

from __future__ import annotations

from itertools import islice

from llmpq.batching.policy_scheduler import Decision, Decode, Prefill, SchedulerView, Wait
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


class IterationPolicy:
    """Adds requests to the running batch at every iteration.

    Args:
        micro_batching: maximum sequences of a micro-batch in each phase.
    """

    def __init__(self, *, micro_batching: MicroBatching) -> None:
        self._sizes = micro_batching
        self._has_prefilled = False

    @property
    def holds_finished(self) -> bool:
        """False: a finished sequence releases its slot at once."""
        return False

    def decide(self, view: SchedulerView) -> Decision:
        """Alternate between prefill of new requests and decode."""
        new_requests = self._new_requests(view)
        if new_requests and not (self._has_prefilled and view.ready):
            self._has_prefilled = True
            return Prefill(requests=new_requests)
        if view.ready and view.can(Phase.DECODE):
            self._has_prefilled = False
            chosen = islice(view.ready, self._sizes.decode)
            return Decode(slots=tuple(sequence.slot for sequence in chosen))
        return Wait()

    def _new_requests(self, view: SchedulerView) -> tuple[int, ...]:
        room = self._sizes.prefill if view.can(Phase.PREFILL) else 0
        return tuple(item.request for item in view.fitting(room))
