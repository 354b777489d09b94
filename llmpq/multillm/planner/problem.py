"""The search for stages: what there is to choose, and a plan of an application as its stages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from llmpq.assigner.fleet.partition import Counts
from llmpq.multillm.candidates import Candidate
from llmpq.multillm.estimate import Progress, Simulator, Stage, StageRun


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """An application on a cluster.

    Attributes:
        simulator: of its stages.
        candidates: plans of each model.
        counts: devices of each pool.
        preemption: whether a model that runs may be stopped or get another plan.
    """

    simulator: Simulator
    candidates: tuple[tuple[Candidate, ...], ...]
    counts: Counts
    preemption: bool = True

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        return sum(self.counts)

    def fits(self, candidates: Iterable[Candidate]) -> bool:
        """Whether all plans have devices at once."""
        left = list(self.counts)
        for candidate in candidates:
            for pool, need in enumerate(candidate.demand):
                left[pool] -= need
        return min(left) >= 0

    def fixed(self, progress: Progress) -> dict[int, Candidate]:
        """Return the models that have to run on."""
        if self.preemption:
            return {}
        return {model: process.candidate for model, process in progress.processes.items()}

    def ready(self, progress: Progress, beside: Iterable[int]) -> list[int]:
        """Return the unfinished models whose producers are finished or run beside them.

        Where models read each other's answers in a circle, none may be; then each one is tried.
        """
        simulator, chosen = self.simulator, set(beside)
        left = simulator.unfinished(progress)
        found = [
            model for model in left if not simulator.producers(model) & set(left) - chosen - {model}
        ]
        return found or left


Choose = Callable[[Progress], Mapping[int, Candidate]]
"""Returns the next stage."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Stages of an application, in order.

    Attributes:
        stages: simulated stages.
        before: the application before each of them, and after the last.
    """

    stages: tuple[StageRun, ...]
    before: tuple[Progress, ...]

    @property
    def makespan_s(self) -> float:
        """When all requests are answered."""
        return self.before[-1].time_s


def complete(
    problem: Problem,
    choose: Choose,
    *,
    start: Solution | None = None,
    limit_s: float = math.inf,
    until_s: float = math.inf,
) -> Solution | None:
    """Choose stages until all requests are answered.

    Args:
        problem: the application.
        choose: returns the next stage; it must run some model that gets a request.
        start: stages so far.
        limit_s: give up at this time of the application.
        until_s: give up at this time of ``time.monotonic``.

    Returns:
        The whole plan, or ``None`` where a limit was reached.
    """
    simulator = problem.simulator
    stages = [] if start is None else list(start.stages)
    before = [simulator.begin()] if start is None else list(start.before)
    while simulator.unfinished(before[-1]):
        if before[-1].time_s >= limit_s or time.monotonic() >= until_s:
            return None
        stage = choose(before[-1])
        run = simulator.run(before[-1], stage)
        assert run is not None, "a chosen stage gets no request"
        stages.append(run)
        before.append(simulator.after(before[-1], run))
    return Solution(tuple(stages), tuple(before))


def stage_of(run: StageRun) -> Stage:
    """Return the models and plans of a simulated stage."""
    return {model: process.candidate for model, process in run.processes.items()}
