"""PipelineDepth: how many micro-batches of each phase may be in flight."""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.batching.scheduler import BOTH_PHASES, Scheduler
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDepth:
    """Limits of the micro-batches in flight, from the number of stages.

    Attributes:
        prefill_stages, decode_stages: stages of each phase, the master's included.
        is_split: whether each phase has stages of its own; otherwise both numbers are equal, and
            micro-batches of both phases follow each other through the same stages.
    """

    prefill_stages: int
    decode_stages: int
    is_split: bool = False

    def max_in_flight(self, phase: Phase) -> int:
        """Return how many micro-batches of a phase may be in flight: one a stage and one more.

        More would only wait in queues; a master without other stages computes one at a time.
        """
        stages = self.prefill_stages if phase is Phase.PREFILL else self.decode_stages
        return 1 if stages == 1 else stages + 1

    def is_local(self, phase: Phase) -> bool:
        """Whether the master alone computes a phase."""
        return self.max_in_flight(phase) == 1

    def open_phases(self, scheduler: Scheduler) -> tuple[Phase, ...]:
        """Return the phases of which the pipeline can take a micro-batch now."""
        if not self.is_split:
            has_room = scheduler.num_in_flight() < self.max_in_flight(Phase.DECODE)
            return BOTH_PHASES if has_room else ()
        return tuple(
            phase for phase in Phase if scheduler.num_in_flight(phase) < self.max_in_flight(phase)
        )


def uniform_depth(num_stages: int) -> PipelineDepth:
    """Return the limits of stages that compute both phases."""
    return PipelineDepth(prefill_stages=num_stages, decode_stages=num_stages)
