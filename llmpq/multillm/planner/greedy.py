"""SamuLLM's Algorithm 1: a stage grows by the plan with the largest gain in throughput a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmpq.multillm.candidates import Candidate
from llmpq.multillm.estimate import Progress, StageRun
from llmpq.multillm.planner.problem import Problem


def greedy_stage(
    problem: Problem,
    progress: Progress,
    weights: Sequence[float] | None = None,
    start: Mapping[int, Candidate] | None = None,
) -> dict[int, Candidate]:
    """Return the next stage by Algorithm 1.

    Args:
        problem: the application.
        progress: where it is.
        weights: worth of an operation of each model; equal by default, as in the paper.
        start: plans that the stage has in any case, beside those of models that have to run on.
    """
    fixed = {**problem.fixed(progress), **(start or {})}
    stage = dict(fixed)
    run = problem.simulator.run(progress, stage) if stage else None
    rate = throughput(run, weights)
    while True:
        best: tuple[float, dict[int, Candidate], float] | None = None
        for wider, more in _wider(problem, progress, stage, fixed):
            found = problem.simulator.run(progress, wider)
            if found is None:
                continue
            gain = (throughput(found, weights) - rate) / more
            if best is None or gain > best[0]:
                best = gain, wider, throughput(found, weights)
        if best is None or (stage and best[0] < 0):
            return stage
        _, stage, rate = best


def throughput(run: StageRun | None, weights: Sequence[float] | None) -> float:
    """Return the useful operations a second of a stage (``T_E``), weighted by model."""
    if run is None:
        return 0.0
    if weights is None:
        return sum(run.work.values()) / run.seconds
    return sum(weights[model] * work for model, work in run.work.items()) / run.seconds


def _wider(
    problem: Problem,
    progress: Progress,
    stage: dict[int, Candidate],
    fixed: dict[int, Candidate],
) -> Iterator[tuple[dict[int, Candidate], int]]:
    """Yield stages with one plan more, or one plan on more devices, and how many more."""
    for model in problem.ready(progress, stage):
        own = stage.get(model)
        if model in fixed:
            continue
        for candidate in problem.candidates[model]:
            more = candidate.devices - (own.devices if own else 0)
            wider = {**stage, model: candidate}
            if more > 0 and problem.fits(wider.values()):
                yield wider, more
