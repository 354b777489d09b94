"""Hybrid micro-batches: one size for prefill and another for decode (LLM-PQ, Sec. 4.2).

Prompts are prefilled ``prefill`` at a time, then all sequences circulate in micro-batches of
``decode``. Sequences that finish leave their slot, and waiting requests take it over between steps,
so that a file may hold more prompts than the plan has slots.
"""

from __future__ import annotations

from itertools import islice

from llmpq.batching.base import Decision, Decode, Prefill, SchedulerView, Wait
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


class HybridPolicy:
    """The policy of a plan's ``micro_batching``.

    Args:
        micro_batching: sequences that travel together in either phase.
        num_slots: sequences that may hold a slot at once ``B``.
        num_stages: stages of the pipeline.
    """

    def __init__(self, *, micro_batching: MicroBatching, num_slots: int, num_stages: int) -> None:
        self._sizes = micro_batching
        self._num_stages = num_stages
        # A slot left empty wastes decode work, a prefill of one prompt reads all weights for it
        # alone. Refilling a quarter of the slots at once keeps both wastes small.
        self._refill = max(1, min(micro_batching.prefill, num_slots // 4))

    @property
    def holds_finished(self) -> bool:
        """A finished sequence leaves its slot at once."""
        return False

    def decide(self, view: SchedulerView) -> Decision:
        """Prefill first, so that decode micro-batches are regrouped at full size afterwards."""
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
            # Fresh sequences wait for the others of their phase and then leave as a full
            # micro-batch; sequences already decoding do not wait for them.
            return any(sequence.new_tokens > 1 for sequence in view.ready)
        # Up to as many micro-batches as stages, a smaller one costs nothing: the stages would
        # idle. Beyond that, sequences wait to be merged, so that early ends do not leave the
        # pipeline with ever smaller micro-batches.
        alive = ready + view.sequences_in_flight(Phase.DECODE)
        wanted = max(self._num_stages, -(-alive // self._sizes.decode))
        return view.num_in_flight(Phase.DECODE) < wanted
