"""Exact search over all sequences of stages, for small applications.

Depth first over every set of models and plans that fits, cut by a lower bound of what is left. A
stage ends when its first model finishes, as SamuLLM defines it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from llmpq.multillm.candidates import Candidate
from llmpq.multillm.estimate import Progress
from llmpq.multillm.planner.bound import device_seconds
from llmpq.multillm.planner.problem import Problem, Solution


class ExactSearch:
    """Branch and bound.

    Args:
        problem: the application.
        best: a plan to improve.
        limit_s: seconds after which the best plan so far is returned.

    Attributes:
        best: best plan so far.
        is_complete: whether every other plan was tried or cut.
    """

    def __init__(self, problem: Problem, best: Solution, limit_s: float) -> None:
        self._problem = problem
        self._until_s = time.monotonic() + limit_s
        self.best = best
        self.is_complete = True

    def run(self) -> Solution:
        """Search and return the best plan."""
        start = self._problem.simulator.begin()
        self._extend(Solution((), (start,)))
        return self.best

    def _extend(self, so_far: Solution) -> None:
        simulator, progress = self._problem.simulator, so_far.before[-1]
        if not simulator.unfinished(progress):
            if so_far.makespan_s < self.best.makespan_s:
                self.best = so_far
            return
        if progress.time_s + self._left_s(progress) >= self.best.makespan_s:
            return
        runs = []
        for stage in self._stages(progress):
            if time.monotonic() >= self._until_s:
                self.is_complete = False
                return
            run = simulator.run(progress, stage)
            if run is not None:
                runs.append(run)
        # The stages that do most come first: a good plan early cuts more.
        runs.sort(key=lambda run: -sum(run.work.values()) / run.seconds)
        for run in runs:
            after = simulator.after(progress, run)
            self._extend(Solution((*so_far.stages, run), (*so_far.before, after)))
            if time.monotonic() >= self._until_s:
                self.is_complete = False
                return

    def _left_s(self, progress: Progress) -> float:
        """Return a lower bound of the seconds to come: work of the requests that have not begun.

        A model that runs may need no loading; requests that have tokens count nothing.
        """
        simulator = self._problem.simulator
        work = simulator.workload
        running = np.isin(work.model, list(progress.processes))
        left = np.isinf(progress.finish_s) & (progress.made == 0) & ~running
        if not left.any():
            return 0.0
        total = sum(device_seconds(work.where(left), self._problem.candidates))
        return total / self._problem.devices

    def _stages(self, progress: Progress) -> Iterator[dict[int, Candidate]]:
        """Yield every set of models with plans that has devices."""
        simulator = self._problem.simulator
        fixed = self._problem.fixed(progress)
        models = [model for model in simulator.unfinished(progress) if model not in fixed]

        def widen(stage: dict[int, Candidate], left: list[int]) -> Iterator[dict[int, Candidate]]:
            if not left:
                if stage and self._is_allowed(progress, stage):
                    yield stage
                return
            yield from widen(stage, left[1:])
            for candidate in self._problem.candidates[left[0]]:
                wider = {**stage, left[0]: candidate}
                if self._problem.fits(wider.values()):
                    yield from widen(wider, left[1:])

        yield from widen(dict(fixed), models)

    def _is_allowed(self, progress: Progress, stage: dict[int, Candidate]) -> bool:
        return set(stage) <= set(self._problem.ready(progress, stage))
