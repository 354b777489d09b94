"""Ways: how many micro-batches of either phase may be on their way. One rule, two readers.

The runtime's engine and the simulator both ask here what the pipeline can take next.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.batching.scheduler import BOTH_PHASES, Scheduler
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The stages that micro-batches pass, the master's counted with them.

    Attributes:
        prefill_stages, decode_stages: how many there are on either way.
        is_split: whether either phase has stages of its own; else both numbers are equal, and
            micro-batches of both phases follow each other through the same stages.
    """

    prefill_stages: int
    decode_stages: int
    is_split: bool = False

    def most_in_flight(self, phase: Phase) -> int:
        """Return how many micro-batches are kept on a way: one a stage and one more.

        More would only wait in queues; where the master is alone, it does one at a time.
        """
        stages = self.prefill_stages if phase is Phase.PREFILL else self.decode_stages
        return 1 if stages == 1 else stages + 1

    def is_local(self, phase: Phase) -> bool:
        """Whether the master alone computes a phase."""
        return self.most_in_flight(phase) == 1

    def open_phases(self, scheduler: Scheduler) -> tuple[Phase, ...]:
        """Return what the pipeline can take now."""
        if not self.is_split:
            has_room = scheduler.num_flights() < self.most_in_flight(Phase.DECODE)
            return BOTH_PHASES if has_room else ()
        return tuple(
            phase for phase in Phase if scheduler.num_flights(phase) < self.most_in_flight(phase)
        )


def straight_ways(num_stages: int) -> Ways:
    """Return the ways of stages that do both phases."""
    return Ways(prefill_stages=num_stages, decode_stages=num_stages)
