"""Methods of planning: SamuLLM's, its rivals', and ours, the best of these improved.

Small applications get an exact search over all sequences of stages: depth first over every set of
models and plans that fits, cut by a lower bound of what is left. A stage ends when its first model
finishes, as SamuLLM defines it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

import numpy as np

from llmpq.errors import SpecError
from llmpq.multillm.candidates import Candidate
from llmpq.multillm.estimate import Progress
from llmpq.multillm.planner.problem import (
    AppProblem,
    AppSolution,
    Choose,
    complete,
    device_seconds,
    lower_bound,
    stage_of,
)
from llmpq.multillm.planner.rules import critical_stage, greedy_stage, max_stage, min_stage
from llmpq.options.plan import ApplicationSearch


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

    def __init__(self, problem: AppProblem, best: AppSolution, limit_s: float) -> None:
        self._problem = problem
        self._until_s = time.monotonic() + limit_s
        self.best = best
        self.is_complete = True

    def run(self) -> AppSolution:
        """Search and return the best plan."""
        start = self._problem.simulator.begin()
        self._extend(AppSolution((), (start,)))
        return self.best

    def _extend(self, so_far: AppSolution) -> None:
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
            self._extend(AppSolution((*so_far.stages, run), (*so_far.before, after)))
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


Method = Literal["greedy", "samullm", "max", "min", "exact"]
METHODS: tuple[Method, ...] = get_args(Method)
IMPROVING = ("balanced", "staying")
"""Rules that complete a plan of which one stage was changed, beside the one that found it."""
TIME_LIMIT_S = ApplicationSearch().limit_s
"""Seconds for improving a plan and for the exact search, half for each."""
SMALL_STAGES = 500
"""Combinations of plans up to which all schedules are tried in any case."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchResult:
    """A plan of an application and what is known about it.

    Attributes:
        solution: its stages.
        bound_s: no plan is shorter.
        is_optimal: whether no plan of these candidates is shorter.
        search_s: seconds of the search.
        others: makespans of the other methods that were tried.
    """

    solution: AppSolution
    bound_s: float
    is_optimal: bool
    search_s: float
    others: dict[str, float]


def find(
    problem: AppProblem, method: Method = "greedy", limit_s: float = TIME_LIMIT_S
) -> SearchResult:
    """Plan an application.

    Args:
        problem: the application.
        method: ``samullm``: Algorithm 1; ``max`` and ``min``: its rivals; ``greedy``: ours;
            ``exact``: ours, then the search over all schedules, which small applications get in
            any case.
        limit_s: seconds for improving and for the exact search.

    Raises:
        SpecError: an unknown method.
    """
    if method not in METHODS:
        raise SpecError(f"method: found '{method}', expected one of {', '.join(METHODS)}")
    begun = time.monotonic()
    rules = _rules(problem)
    chosen = rules if method in ("greedy", "exact") else {method: rules[method]}
    found = {name: complete(problem, choose) for name, choose in chosen.items()}
    whole = {name: one for name, one in found.items() if one is not None}
    winner = min(whole, key=lambda name: whole[name].makespan_s)
    best, is_optimal = whole[winner], False
    if method in ("greedy", "exact"):
        completing = tuple(dict.fromkeys((*IMPROVING, winner)))
        best = _improve(problem, best, completing, time.monotonic() + limit_s / 2)
        stages = prod(1 + len(own) for own in problem.candidates)
        if method == "exact" or stages <= SMALL_STAGES:
            search = ExactSearch(problem, best, limit_s / 2)
            best, is_optimal = search.run(), search.is_complete
    bound = lower_bound(problem.simulator.workload, problem.candidates, problem.devices)
    return SearchResult(
        solution=best,
        bound_s=bound,
        is_optimal=is_optimal,
        search_s=time.monotonic() - begun,
        others={name: one.makespan_s for name, one in whole.items()},
    )


def _rules(problem: AppProblem) -> dict[str, Choose]:
    """Return the rules that choose a next stage, by name.

    ``balanced`` is Algorithm 1 with models weighted by the time that they take, ``staying`` this
    without ever stopping a model, ``critical`` this after the model that finishes last.
    """
    weights, staying = _weights(problem), replace(problem, preemption=False)
    return {
        "samullm": lambda progress: greedy_stage(problem, progress),
        "max": lambda progress: max_stage(problem, progress),
        "min": lambda progress: min_stage(problem, progress),
        "balanced": lambda progress: greedy_stage(problem, progress, weights),
        "staying": lambda progress: greedy_stage(staying, progress, weights),
        "critical": lambda progress: critical_stage(problem, progress, weights),
    }


def _weights(problem: AppProblem) -> list[float]:
    """Return least device-seconds an operation, by model.

    With these a model counts by the time that it takes and not by its operations, of which models
    that use devices well have more.
    """
    work = problem.simulator.workload
    seconds = device_seconds(work, problem.candidates)
    found = []
    for model, (own, needed) in enumerate(zip(problem.candidates, seconds, strict=True)):
        chosen = work.model == model
        law = own[0].law
        tokens = float((work.prompt + work.answer)[chosen].sum())
        keys = float((work.prompt[chosen] ** 2).sum())
        keys += float((work.answer * (work.prompt + work.answer / 2))[chosen].sum())
        operations = law.flops_token * tokens + law.flops_key * keys
        found.append(needed / operations if operations else 0.0)
    return found


def _improve(
    problem: AppProblem, best: AppSolution, completing: Iterable[str], until_s: float
) -> AppSolution:
    """Change one stage at a time, complete the rest by some rules, and keep what is shorter."""
    rules = _rules(problem)
    place = 0
    while place < len(best.stages) and time.monotonic() < until_s:
        found = best
        for stage in _neighbours(problem, best, place):
            if time.monotonic() >= until_s:
                break
            if not set(stage) <= set(problem.ready(best.before[place], stage)):
                continue
            run = problem.simulator.run(best.before[place], stage)
            if run is None or run.end_s >= found.makespan_s:
                continue
            after = problem.simulator.after(best.before[place], run)
            start = AppSolution((*best.stages[:place], run), (*best.before[: place + 1], after))
            for rule in completing:
                whole = complete(
                    problem, rules[rule], start=start, limit_s=found.makespan_s, until_s=until_s
                )
                if whole is not None and whole.makespan_s < found.makespan_s:
                    found = whole
        if found is best:
            place += 1
        best = found
    return best


def _neighbours(
    problem: AppProblem, best: AppSolution, place: int
) -> Iterator[dict[int, Candidate]]:
    """Yield stages that differ from one of a plan in one model, and those of the rivals."""
    progress = best.before[place]
    fixed = problem.fixed(progress)
    own = dict(stage_of(best.stages[place]))
    yield dict(min_stage(problem, progress))
    yield dict(max_stage(problem, progress))
    for model in problem.ready(progress, own):
        if model not in fixed:
            yield from _changes(problem, own, model, fixed)


def _changes(
    problem: AppProblem,
    own: dict[int, Candidate],
    model: int,
    fixed: Mapping[int, Candidate],
) -> Iterator[dict[int, Candidate]]:
    """Yield a stage with another plan of one model, or without it; others may make room."""
    without = {key: value for key, value in own.items() if key != model}
    if without and model in own:
        yield without
    for candidate in problem.candidates[model]:
        if candidate is own.get(model):
            continue
        wider = {**without, model: candidate}
        if problem.fits(wider.values()):
            yield wider
            continue
        for other in without.keys() - fixed.keys():
            for second in problem.candidates[other]:
                both = {**wider, other: second}
                if problem.fits(both.values()):
                    yield both
