"""WAA: some stages encode while others decode (ExeGPT, Sec. 4.1).

While a batch of ``B_E`` requests is encoded, the decoding batch runs one iteration; encoded
requests join it, with ``B_D = B_E`` times the mean answer. The plan assigns the devices (WAA-C by
time, WAA-M by memory).
"""

from __future__ import annotations

from itertools import islice

from llmpq.batching.policies.rra import Admission
from llmpq.batching.policy_scheduler import Decision, Decode, Prefill, SchedulerView, Wait
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


class WaaPolicy:
    """Dispatches encoding and decoding batches.

    Args:
        admission: batch sizes and their tolerance.
        micro_batching: maximum sequences of a micro-batch; in decode ``B_m``.
    """

    def __init__(self, *, admission: Admission, micro_batching: MicroBatching) -> None:
        self._admission = admission
        self._sizes = micro_batching

    @property
    def holds_finished(self) -> bool:
        """False: a finished sequence releases its slot at once."""
        return False

    def decide(self, view: SchedulerView) -> Decision:
        """Encode whenever the encoding stages are free, else decode the ready sequences.

        Encoding comes first: its dispatch is short, and a master that computes decode alone would
        otherwise starve it.
        """
        if view.can(Phase.PREFILL) and self._has_room(view):
            chosen_requests = self._admission.choose(view, self._sizes.prefill)
            if chosen_requests:
                return Prefill(requests=chosen_requests)
        if view.can(Phase.DECODE) and view.ready and self._is_time_to_decode(view):
            chosen = islice(view.ready, self._sizes.decode)
            return Decode(slots=tuple(sequence.slot for sequence in chosen))
        return Wait()

    def _has_room(self, view: SchedulerView) -> bool:
        """Whether a full batch of ``B_E`` fits, or no running sequence will make room for it."""
        room = min(self._admission.decode_batch - view.alive, view.free_slots)
        return room >= min(self._admission.encode_batch, len(view.waiting)) or not view.alive

    def _is_time_to_decode(self, view: SchedulerView) -> bool:
        """Whether a full micro-batch is ready, or a smaller one that cannot become full."""
        if len(view.ready) >= self._sizes.decode:
            return True
        alive = len(view.ready) + view.sequences_in_flight(Phase.DECODE)
        return view.num_in_flight(Phase.DECODE) < -(-alive // self._sizes.decode)
