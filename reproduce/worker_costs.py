"""Costs of an engine that are known for whole steps."""

from __future__ import annotations

from collections.abc import Callable

from llmpq.sim.costs import Hop, StepSize, linear_layout


class WorkerCosts:
    """Costs of an engine of one stage that are known for whole steps.

    Args:
        seconds: of a step.
    """

    layout = linear_layout(1)

    def __init__(self, seconds: Callable[[StepSize], float]) -> None:
        self._seconds = seconds

    def stage_s(self, rank: int, shape: StepSize) -> float:  # noqa: ARG002
        """Return the seconds of a step."""
        return self._seconds(shape)

    def project_s(self, shape: StepSize) -> float:  # noqa: ARG002
        """Return 0: ``stage_s`` includes it."""
        return 0.0

    def hop(self, rank: int, shape: StepSize) -> Hop:  # noqa: ARG002
        """Return no cost: there is one stage."""
        return Hop(0.0, 0.0)
