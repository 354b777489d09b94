"""SamuLLM's rivals: all devices for one model, or as many models as possible side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice, product

from llmpq.multillm.candidates import Candidate
from llmpq.multillm.estimate import Progress
from llmpq.multillm.planner.greedy import throughput
from llmpq.multillm.planner.problem import Problem

MAX_PARTITIONS = 2000
"""Even partitions of one stage that the Min-heuristic compares."""


def max_stage(problem: Problem, progress: Progress) -> dict[int, Candidate]:
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


def min_stage(problem: Problem, progress: Progress) -> dict[int, Candidate]:
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


def _together(problem: Problem, progress: Progress) -> list[int]:
    """Return the models that may run side by side, consumers with their producers."""
    chosen: list[int] = []
    while True:
        more = [model for model in problem.ready(progress, chosen) if model not in chosen]
        if not more:
            return sorted(chosen)
        chosen += more


def _even(
    problem: Problem, fixed: dict[int, Candidate], chosen: Sequence[int]
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
    problem: Problem, fixed: dict[int, Candidate], chosen: Sequence[int], counts: Sequence[int]
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
    problem: Problem, progress: Progress, stages: Iterator[dict[int, Candidate]]
) -> dict[int, Candidate]:
    best, rate = dict[int, Candidate](), -1.0
    for stage in stages:
        run = problem.simulator.run(progress, stage)
        if run is not None and throughput(run, None) > rate:
            best, rate = stage, throughput(run, None)
    return best
