"""Rules that choose the next stage of an application.

``greedy_stage`` is SamuLLM's Algorithm 1: a stage grows by the plan with the largest gain in
throughput a device. ``max_stage`` and ``min_stage`` are its rivals: all devices for one model, or
as many models as possible side by side.

``critical_stage`` is for long chains of requests: the model that finishes last is placed before all
others. Algorithm 1 prefers the plans with most operations a second, and a chain whose requests wait
for each other does few: it gets its devices late, and then sets the makespan. Here the model that
takes longest on its fastest plan comes first. It gets the plan with which neither itself nor the
work of all other models, spread over the other devices, takes long; Algorithm 1 fills these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice, product

import numpy as np

from llmpq.multillm.candidates import Candidate
from llmpq.multillm.estimate import Progress, StageRun
from llmpq.multillm.planner.problem import AppProblem, device_seconds


def greedy_stage(
    problem: AppProblem,
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
    problem: AppProblem,
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


def critical_stage(
    problem: AppProblem, progress: Progress, weights: Sequence[float]
) -> dict[int, Candidate]:
    """Return the next stage.

    Args:
        problem: the application.
        progress: where it is.
        weights: worth of an operation of each model, for the other models.
    """
    return greedy_stage(problem, progress, weights, _critical(problem, progress))


def _critical(problem: AppProblem, progress: Progress) -> dict[int, Candidate]:
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


MAX_PARTITIONS = 2000
"""Even partitions of one stage that the Min-heuristic compares."""


def max_stage(problem: AppProblem, progress: Progress) -> dict[int, Candidate]:
    """Return the next stage by the Max-heuristic: the first ready model on all devices.

    Of the plans on most devices it takes the one with the highest throughput.
    """
    fixed = problem.fixed(progress)
    if fixed:
        return fixed
    for model in problem.ready(progress, ()):
        own = problem.candidates[model]
        most = max(candidate.devices for candidate in own)
        found = _fastest(
            problem,
            progress,
            ({model: candidate} for candidate in own if candidate.devices == most),
        )
        if found:
            return found
    raise AssertionError("no unfinished model gets a request")


def min_stage(problem: AppProblem, progress: Progress) -> dict[int, Candidate]:
    """Return the next stage by the Min-heuristic.

    As many ready models as have room run at once, on devices split as evenly as possible. Of all
    such partitions it takes the one with the highest throughput.
    """
    fixed = problem.fixed(progress)
    models = _together(problem, progress)
    free = [model for model in models if model not in fixed]
    for size in range(len(free), -1, -1):
        stages = (
            stage for chosen in combinations(free, size) for stage in _even(problem, fixed, chosen)
        )
        found = _fastest(problem, progress, islice(stages, MAX_PARTITIONS))
        if found:
            return found
    raise AssertionError("no unfinished model gets a request")


def _together(problem: AppProblem, progress: Progress) -> list[int]:
    """Return the models that may run side by side, consumers with their producers."""
    chosen: list[int] = []
    while True:
        more = [model for model in problem.ready(progress, chosen) if model not in chosen]
        if not more:
            return sorted(chosen)
        chosen += more


def _even(
    problem: AppProblem, fixed: dict[int, Candidate], chosen: Sequence[int]
) -> Iterator[dict[int, Candidate]]:
    """Yield stages of these models on even numbers of devices."""
    left = problem.devices - sum(candidate.devices for candidate in fixed.values())
    if not chosen:
        if fixed:
            yield fixed
        return
    sizes = [
        sorted({candidate.devices for candidate in problem.candidates[model]}) for model in chosen
    ]
    base = left // len(chosen)
    least = [max([one for one in own if one <= base], default=own[0]) for own in sizes]
    spare = left - sum(least)
    if spare < 0:  # large models take more than their share: the others get their least
        least = [own[0] for own in sizes]
        spare = left - sum(least)
    if spare < 0:
        return
    following = [
        next((one - now for one in own if one > now), 0)
        for own, now in zip(sizes, least, strict=True)
    ]
    for number in range(len(chosen), -1, -1):
        found = False
        for wider in combinations(range(len(chosen)), number):
            if any(not following[place] for place in wider):
                continue
            if sum(following[place] for place in wider) > spare:
                continue
            found = True
            counts = [
                now + (following[place] if place in wider else 0) for place, now in enumerate(least)
            ]
            yield from _plans(problem, fixed, chosen, counts)
        if found:
            return


def _plans(
    problem: AppProblem, fixed: dict[int, Candidate], chosen: Sequence[int], counts: Sequence[int]
) -> Iterator[dict[int, Candidate]]:
    own = [
        [candidate for candidate in problem.candidates[model] if candidate.devices == count]
        for model, count in zip(chosen, counts, strict=True)
    ]
    for plans in product(*own):
        stage = {**fixed, **dict(zip(chosen, plans, strict=True))}
        if problem.fits(stage.values()):
            yield stage


def _fastest(
    problem: AppProblem, progress: Progress, stages: Iterator[dict[int, Candidate]]
) -> dict[int, Candidate]:
    best, rate = dict[int, Candidate](), -1.0
    for stage in stages:
        run = problem.simulator.run(progress, stage)
        if run is not None and throughput(run, None) > rate:
            best, rate = stage, throughput(run, None)
    return best
