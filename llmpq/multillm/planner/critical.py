"""A rule for long chains of requests: the model that finishes last is placed before all others.

Algorithm 1 prefers the plans with most operations a second, and a chain whose requests wait for
each other does few: it gets its devices late, and then sets the makespan. Here the model that takes
longest on its fastest plan comes first. It gets the plan with which neither itself nor the work of
all other models, spread over the other devices, takes long; Algorithm 1 fills these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from llmpq.multillm.candidates import Candidate
from llmpq.multillm.estimate import Progress
from llmpq.multillm.planner.bound import device_seconds
from llmpq.multillm.planner.greedy import greedy_stage
from llmpq.multillm.planner.problem import Problem


def critical_stage(
    problem: Problem, progress: Progress, weights: Sequence[float]
) -> dict[int, Candidate]:
    """Return the next stage.

    Args:
        problem: the application.
        progress: where it is.
        weights: worth of an operation of each model, for the other models.
    """
    return greedy_stage(problem, progress, weights, _critical(problem, progress))


def _critical(problem: Problem, progress: Progress) -> dict[int, Candidate]:
    """Return the model that finishes last with its plan; nothing if it has to run on anyway."""
    fixed = problem.fixed(progress)
    ends: dict[int, list[tuple[float, Candidate]]] = {}
    for model in problem.ready(progress, ()):
        for candidate in problem.candidates[model]:
            if model in fixed or not problem.fits((*fixed.values(), candidate)):
                continue
            run = problem.simulator.run(progress, {model: candidate})
            if run is not None:
                seconds = run.ends[model] - progress.time_s
                ends.setdefault(model, []).append((seconds, candidate))
    if not ends:
        return {}
    last = max(ends, key=lambda model: min(seconds for seconds, _ in ends[model]))
    work = problem.simulator.workload
    others = work.where(np.isinf(progress.finish_s) & (work.model != last))
    rest_s = sum(device_seconds(others, problem.candidates))

    def makespan_s(plan: tuple[float, Candidate]) -> float:
        seconds, candidate = plan
        devices = problem.devices - candidate.devices
        return max(seconds, rest_s / devices if devices else math.inf if rest_s else 0.0)

    return {last: min(ends[last], key=makespan_s)[1]}
