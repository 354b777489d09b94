"""RRA: encode once, decode ``N_D`` iterations, and again (ExeGPT, Sec. 4.1).

Encoding rarely keeps decoding batches full without a bubble at every step. A cycle encodes as many
requests as ended in the one before, then every sequence makes ``N_D`` tokens.

In a pipeline the last micro-batches of a cycle are still on their way when the first is back. What
ended in that one has made room: as many prompts as it holds follow at once, behind the last decode
steps of the old cycle, and no stage waits between two cycles. Nor does a cycle wait for room that
the others may make: what does not fit is encoded after the next iterations.
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
        admission: batch sizes and how they are kept even.
        decode_iterations: tokens every sequence makes between two encodings ``N_D``.
        micro_batching: how either batch is split into micro-batches.
    """

    def __init__(
        self, *, admission: Admission, decode_iterations: int, micro_batching: MicroBatching
    ) -> None:
        self._admission = admission
        self.adjust(decode_iterations)
        self._sizes = micro_batching
        self._to_encode = 0  # requests that this cycle may still encode
        self._made: dict[int, int] = {}  # request -> tokens this cycle, in flight counted

    @property
    def holds_finished(self) -> bool:
        """A finished sequence leaves its slot at once."""
        return False

    def adjust(self, decode_iterations: int) -> None:
        """Encode more often, or more rarely, from the next decision on.

        Raises:
            SpecError: less than one iteration.
        """
        if decode_iterations < 1:
            raise SpecError(f"RRA: found {decode_iterations} decode iterations, expected 1 or more")
        self._decode_iterations = decode_iterations

    def decide(self, view: SchedulerView) -> Decision:
        """Go on with the cycle, or begin the next one."""
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
        """Whether everyone has made the cycle's tokens; the last of them may be on their way."""
        if view.num_in_flight(Phase.PREFILL):
            return False
        numbers = [sequence.request for sequence in view.ready]
        numbers += [request for flight in view.in_flight for request in flight.requests]
        return all(self._made.get(number, 0) >= self._decode_iterations for number in numbers)

    def _encode(self, view: SchedulerView) -> Decision | None:
        """Encode a micro-batch; ``None`` when this cycle has encoded all that there is room for."""
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
        # Micro-batches are merged again as sequences end; fresh ones wait for a full one.
        if len(due) < self._sizes.decode and self._is_worth_waiting(view):
            return Wait()
        chosen = due[: self._sizes.decode]
        if not chosen:
            return Wait()
        for sequence in chosen:
            self._made[sequence.request] = self._made.get(sequence.request, 0) + 1
        return Decode(slots=tuple(sequence.slot for sequence in chosen))

    def _is_worth_waiting(self, view: SchedulerView) -> bool:
        flights = view.num_in_flight(Phase.DECODE)
        alive = len(view.ready) + view.sequences_in_flight(Phase.DECODE)
        return view.num_in_flight(Phase.PREFILL) > 0 or flights >= -(-alive // self._sizes.decode)
