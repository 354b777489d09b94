"""WAA: some stages encode, others decode, at the same time (ExeGPT, Sec. 4.1).

While one batch of ``B_E`` requests is encoded, those encoded before are decoded one iteration;
what comes out of encoding is merged into the decoding batch, ``B_D = B_E`` times the mean answer.
Which devices do which (WAA-C by time, WAA-M by memory) is the plan's; this decides the batches.
"""

from __future__ import annotations

from itertools import islice

from llmpq.batching.admission import Admission
from llmpq.batching.base import Decision, Decode, Prefill, SchedulerView, Wait
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


class WaaPolicy:
    """Keeps the stages of either phase busy.

    Args:
        admission: batch sizes and how they are kept even.
        micro_batching: most sequences of a micro-batch; in decode that is ``B_m``.
    """

    def __init__(self, *, admission: Admission, micro_batching: MicroBatching) -> None:
        self._admission = admission
        self._sizes = micro_batching

    @property
    def holds_finished(self) -> bool:
        """A finished sequence leaves its slot at once."""
        return False

    def decide(self, view: SchedulerView) -> Decision:
        """Encode whenever the encoding stages are free, and decode whatever is ready.

        Encoding goes first: sending it off costs the master next to nothing, and a master that
        decodes alone would never find the time for it.
        """
        if view.can(Phase.PREFILL) and self._has_room(view):
            chosen_requests = self._admission.choose(view)[: self._sizes.prefill]
            if chosen_requests:
                return Prefill(requests=chosen_requests)
        if view.can(Phase.DECODE) and view.ready and self._is_time_to_decode(view):
            chosen = islice(view.ready, self._sizes.decode)
            return Decode(slots=tuple(sequence.slot for sequence in chosen))
        return Wait()

    def _has_room(self, view: SchedulerView) -> bool:
        """Whether a whole batch of ``B_E`` can begin, or there is nothing whose end makes room."""
        room = min(self._admission.decode_batch - view.alive, view.free_slots)
        return room >= min(self._admission.encode_batch, len(view.waiting)) or not view.alive

    def _is_time_to_decode(self, view: SchedulerView) -> bool:
        """Send full micro-batches, and a smaller one only when no other could fill it."""
        if len(view.ready) >= self._sizes.decode:
            return True
        alive = len(view.ready) + view.sequences_in_flight(Phase.DECODE)
        return view.num_in_flight(Phase.DECODE) < -(-alive // self._sizes.decode)
