"""Iteration-level batching, first come, first served (ORCA; vLLM's scheduler without chunks).

A request starts as soon as a slot is free, and a finished one leaves at once. One iteration
prefills new requests and then decodes one token of all sequences.
"""

from __future__ import annotations

from itertools import islice

from llmpq.batching.base import Decision, Decode, Prefill, SchedulerView, Wait
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


class IterationPolicy:
    """Adds requests to the running batch at every iteration.

    Args:
        micro_batching: maximum sequences of a micro-batch in each phase.
        max_prefill_tokens: maximum prompt tokens of a prefill micro-batch with several requests.
    """

    def __init__(
        self, *, micro_batching: MicroBatching, max_prefill_tokens: int | None = None
    ) -> None:
        self._sizes = micro_batching
        self._max_prefill_tokens = max_prefill_tokens
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
        if not view.can(Phase.PREFILL):
            return ()
        chosen: list[int] = []
        tokens = 0
        for item in islice(view.waiting, min(self._sizes.prefill, view.free_slots)):
            tokens += item.prompt_tokens
            limit = self._max_prefill_tokens
            if chosen and limit is not None and tokens > limit:
                break
            chosen.append(item.request)
        return tuple(chosen)
