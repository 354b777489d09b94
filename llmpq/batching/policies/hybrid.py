"""Hybrid micro-batches: one size for prefill and another for decode (LLM-PQ, Sec. 4.2).

``prefill`` prompts are prefilled at a time, then all sequences are decoded in micro-batches of
``decode``. Waiting requests take the slots of finished sequences between steps.
"""

from __future__ import annotations

from itertools import islice

from llmpq.batching.base import Decision, Decode, Prefill, SchedulerView, Wait
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


class HybridPolicy:
    """The policy of a plan's ``micro_batching``.

    Args:
        micro_batching: sequences of a micro-batch in each phase.
        num_slots: number of KV slots ``B``.
        num_stages: stages of the pipeline.
    """

    def __init__(self, *, micro_batching: MicroBatching, num_slots: int, num_stages: int) -> None:
        self._sizes = micro_batching
        self._num_stages = num_stages
        # Empty slots waste decode work; a prefill of one prompt reads all weights for it alone.
        # Refilling a quarter of the slots at a time limits both.
        self._refill = max(1, min(micro_batching.prefill, num_slots // 4))

    @property
    def holds_finished(self) -> bool:
        """False: a finished sequence releases its slot at once."""
        return False

    def decide(self, view: SchedulerView) -> Decision:
        """Prefill first, so that decode micro-batches are full afterwards."""
        room = min(self._sizes.prefill, view.free_slots, len(view.waiting))
        if room > 0 and self._is_time_to_prefill(view, room):
            return Prefill(requests=tuple(item.request for item in islice(view.waiting, room)))
        if view.ready and self._is_time_to_decode(view):
            chosen = islice(view.ready, self._sizes.decode)
            return Decode(slots=tuple(item.slot for item in chosen))
        return Wait()

    def _is_time_to_prefill(self, view: SchedulerView, room: int) -> bool:
        is_decoding = view.num_in_flight(Phase.DECODE) > 0 or any(
            sequence.new_tokens > 1 for sequence in view.ready
        )
        return not is_decoding or room >= min(self._refill, len(view.waiting))

    def _is_time_to_decode(self, view: SchedulerView) -> bool:
        ready = len(view.ready)
        if ready < self._sizes.decode and view.num_in_flight(Phase.PREFILL):
            # New sequences wait for a full micro-batch; sequences already decoding do not.
            return any(sequence.new_tokens > 1 for sequence in view.ready)
        # With fewer micro-batches than stages a small one costs nothing, as stages would idle.
        # Otherwise sequences wait to be merged, so that micro-batches do not shrink over time.
        alive = ready + view.sequences_in_flight(Phase.DECODE)
        wanted = max(self._num_stages, -(-alive // self._sizes.decode))
        return view.num_in_flight(Phase.DECODE) < wanted
