"""RRA: encode once, decode ``N_D`` iterations, and again (ExeGPT, Sec. 4.1).

A cycle encodes as many requests as finished in the previous cycle, then decodes ``N_D`` tokens of
every sequence.

In a pipeline the next cycle starts when the first micro-batch of the last iteration completes: its
free slots are filled with prompts at once, so that stages do not idle between cycles. Prompts that
do not fit are encoded in the next cycle.
"""

from __future__ import annotations

from llmpq.batching.admission import Admission
from llmpq.batching.base import Decision, Decode, Prefill, SchedulerView, Wait
from llmpq.errors import SpecError
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


class RraPolicy:
    """Round-robin allocation of encoding and decoding.

    Args:
        admission: batch sizes and their tolerance.
        decode_iterations: decode iterations between two encodings ``N_D``.
        micro_batching: maximum sequences of a micro-batch in each phase.
    """

    def __init__(
        self, *, admission: Admission, decode_iterations: int, micro_batching: MicroBatching
    ) -> None:
        self._admission = admission
        self.adjust(decode_iterations)
        self._sizes = micro_batching
        self._to_encode = 0  # remaining requests of this cycle
        self._made: dict[
            int, int
        ] = {}  # request -> tokens of this cycle, including those in flight

    @property
    def holds_finished(self) -> bool:
        """False: a finished sequence releases its slot at once."""
        return False

    def adjust(self, decode_iterations: int) -> None:
        """Change ``N_D`` from the next decision on.

        Raises:
            SpecError: ``decode_iterations`` is less than 1.
        """
        if decode_iterations < 1:
            raise SpecError(f"RRA: found {decode_iterations} decode iterations, expected 1 or more")
        self._decode_iterations = decode_iterations

    def decide(self, view: SchedulerView) -> Decision:
        """Continue the cycle, or start the next one."""
        if not self._to_encode and self._is_cycle_over(view):
            self._to_encode = self._admission.wanted(view.alive)
            self._made.clear()
        if self._to_encode:
            decision = self._encode(view)
            if decision is not None:
                return decision
            self._to_encode = 0
        return self._decode(view)

    def _is_cycle_over(self, view: SchedulerView) -> bool:
        """Whether all tokens of the cycle are computed or in flight."""
        if view.num_in_flight(Phase.PREFILL):
            return False
        numbers = [sequence.request for sequence in view.ready]
        numbers += [request for batch in view.in_flight for request in batch.requests]
        return all(self._made.get(number, 0) >= self._decode_iterations for number in numbers)

    def _encode(self, view: SchedulerView) -> Decision | None:
        """Encode a micro-batch; ``None`` if this cycle has no room for more."""
        chosen = self._admission.take(view, min(self._sizes.prefill, self._to_encode))
        if not chosen:
            return None
        self._to_encode -= len(chosen)
        return Prefill(requests=chosen)

    def _decode(self, view: SchedulerView) -> Decision:
        due = [
            sequence
            for sequence in view.ready
            if self._made.get(sequence.request, 0) < self._decode_iterations
        ]
        # Micro-batches are merged as sequences finish; new sequences wait for a full one.
        if len(due) < self._sizes.decode and self._is_worth_waiting(view):
            return Wait()
        chosen = due[: self._sizes.decode]
        if not chosen:
            return Wait()
        for sequence in chosen:
            self._made[sequence.request] = self._made.get(sequence.request, 0) + 1
        return Decode(slots=tuple(sequence.slot for sequence in chosen))

    def _is_worth_waiting(self, view: SchedulerView) -> bool:
        num_batches = view.num_in_flight(Phase.DECODE)
        alive = len(view.ready) + view.sequences_in_flight(Phase.DECODE)
        return view.num_in_flight(Phase.PREFILL) > 0 or num_batches >= -(
            -alive // self._sizes.decode
        )
