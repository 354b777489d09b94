"""Methods of planning: SamuLLM's, its rivals', and ours, the best of these improved.

Small applications get an exact search over all sequences of stages: depth first over every set of
models and plans that fits, cut by a lower bound of what is left. A stage ends when its first model
finishes, as SamuLLM defines it.

The search for stages: what there is to choose, and a plan of an application as its stages.

``lower_bound`` of the makespan: device-seconds that the work takes at least, and longest chains.

A decode iteration of ``B`` sequences takes ``w0 + w1 S + w2 B s``, which is at least the sum of
``w0 / B + (w1 + w2) l`` over their lengths ``l``: a token of a sequence of length ``l`` costs at
least the least such line of any batch of any plan, times the devices of a replica. Prompts
likewise. Mixed steps cost at least their tokens at the best rate, and at least their decode tokens
as above. These, with one loading of each model, spread over all devices, are one bound. The other
is the longest path of requests that wait for each other, each alone on its fastest plan.

Rules that choose the next stage of an application.

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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from math import prod
from typing import Literal, get_args

import numpy as np

from llmpq.assigner.fleet.partition import DeviceCounts
from llmpq.errors import SpecError
from llmpq.multillm.candidates import Candidate
from llmpq.multillm.engine.law import Array, EngineModel, Ints
from llmpq.multillm.estimate import Progress, Simulator, Stage, StageRun
from llmpq.multillm.workload import AppWorkload
from llmpq.options.plan import ApplicationSearch


@dataclass(frozen=True, slots=True, eq=False)
class AppProblem:
    """An application on a cluster.

    Attributes:
        simulator: of its stages.
        candidates: plans of each model.
        counts: devices of each pool.
        preemption: whether a model that runs may be stopped or get another plan.
    """

    simulator: Simulator
    candidates: tuple[tuple[Candidate, ...], ...]
    counts: DeviceCounts
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
class AppSolution:
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
    problem: AppProblem,
    choose: Choose,
    *,
    start: AppSolution | None = None,
    limit_s: float = math.inf,
    until_s: float = math.inf,
) -> AppSolution | None:
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
    return AppSolution(tuple(stages), tuple(before))


def stage_of(run: StageRun) -> Stage:
    """Return the models and plans of a simulated stage."""
    return {model: process.candidate for model, process in run.processes.items()}


LENGTHS = 64
"""Lengths at which the least lines are evaluated. They are concave, so between two lengths they
are above the straight line."""


@dataclass(frozen=True, slots=True)
class _Lines:
    """The least of lines in the length, at some lengths."""

    lengths: Array
    seconds: Array

    def at(self, lengths: Array) -> Array:
        """Return a lower bound at these lengths."""
        found: Array = np.interp(lengths, self.lengths, self.seconds)
        return found

    def over(self, first: Array, count: Array) -> Array:
        """Return a lower bound of the sum over ``count`` lengths from ``first`` on."""
        found: Array = count * (self.at(first) + self.at(first + np.maximum(count - 1, 0))) / 2.0
        return found


def lower_bound(
    workload: AppWorkload, candidates: Sequence[Sequence[Candidate]], devices: int
) -> float:
    """Return seconds that no schedule of these plans undercuts.

    Args:
        workload: requests of the application.
        candidates: plans of each model.
        devices: of the cluster.
    """
    return max(
        float(sum(device_seconds(workload, candidates))) / devices,
        _longest_path(workload, candidates),
    )


def device_seconds(workload: AppWorkload, candidates: Sequence[Sequence[Candidate]]) -> list[float]:
    """Return the device-seconds that each model takes at least, with one loading."""
    found = []
    for model, own in enumerate(candidates):
        requests = np.flatnonzero(workload.model == model)
        if not requests.size:
            found.append(0.0)
            continue
        load = min(one.load_s * one.devices for one in own)
        prompt, answer = workload.prompt[requests], workload.answer[requests]
        found.append(load + float(_work(own, prompt, answer).sum()))
    return found


def _work(own: Sequence[Candidate], prompt: Ints, answer: Ints) -> Array:
    """Return the device-seconds of each request at least [n]."""
    engines = {(id(one.law), sum(one.counts)): one for one in own}
    pairs = [(one.law, float(sum(one.counts))) for one in engines.values()]
    long = float((prompt + answer).max())
    decode = _least([_decode_lines(law, scale) for law, scale in pairs], long)
    length, made = prompt.astype(np.float64), answer.astype(np.float64)
    decoded = decode.over(length + 1.0, made - 1.0)
    if not own[0].law.mixed:
        prefill = _least([_prefill_lines(law, scale) for law, scale in pairs], long)
        separate: Array = prefill.at(length) + decoded
        return separate
    rate = min(scale * _best_rate(law) for law, scale in pairs)
    linear: Array = rate * (length + made - 1.0)
    return linear if linear.sum() > decoded.sum() else decoded


def _best_rate(law: EngineModel) -> float:
    """Return the least seconds of a token in a mixed step, with or without chunks of prompts."""
    tokens = np.arange(1, len(law.packed))
    rows = np.arange(1, law.max_sequences + 1)
    thin = law.decode[1:, 0] + law.decode[1:, 1] * rows + law.decode[1:, 2] * rows
    return float(min((law.packed[1:] / tokens).min(), (thin / rows).min()))


def _decode_lines(law: EngineModel, scale: float) -> Array:
    """Return constants and slopes of the lines of all batches [2, B]."""
    rows = np.arange(1, law.max_sequences + 1)
    weights = law.decode[1:]
    return scale * np.stack([weights[:, 0] / rows, weights[:, 1] + weights[:, 2]])


def _prefill_lines(law: EngineModel, scale: float) -> Array:
    rows = np.arange(1, law.max_sequences + 1)
    return scale * np.stack([law.prefill[1:, 0] / rows, law.prefill[1:, 1]])


def _least(lines: Sequence[Array], longest: float) -> _Lines:
    constants, slopes = np.concatenate(lines, axis=1)
    lengths = np.unique(np.geomspace(1.0, max(2.0, longest), LENGTHS))
    return _Lines(lengths, (constants + slopes * lengths[:, None]).min(1))


def _longest_path(workload: AppWorkload, candidates: Sequence[Sequence[Candidate]]) -> float:
    """Return the longest chain of requests that wait for each other, with one loading."""
    alone = np.zeros(len(workload))
    for model, own in enumerate(candidates):
        requests = np.flatnonzero(workload.model == model)
        if requests.size:
            alone[requests] = _alone(own, workload.prompt[requests], workload.answer[requests])
    loads = [min(one.load_s for one in own) for own in candidates]
    if not workload.parents.size and (workload.before < 0).all():
        return float((alone + np.array(loads)[workload.model]).max(initial=0.0))
    ends = np.zeros(len(workload))
    first, parents = workload.first.tolist(), workload.parents
    model, before = workload.model.tolist(), workload.before.tolist()
    for request, seconds in enumerate(alone.tolist()):
        begin = loads[model[request]]
        if before[request] >= 0:
            begin = max(begin, ends[before[request]])
        if first[request + 1] > first[request]:
            begin = max(begin, ends[parents[first[request] : first[request + 1]]].max())
        ends[request] = begin + seconds
    return float(ends.max(initial=0.0))


def _alone(own: Sequence[Candidate], prompt: Ints, answer: Ints) -> Array:
    """Return the seconds of each request at least, on its fastest plan [n]."""
    laws = list({id(one.law): one.law for one in own}.values())
    long = float((prompt + answer).max())
    length, made = prompt.astype(np.float64), answer.astype(np.float64)
    # An iteration is at least as long as the least of any batch with this sequence in it.
    decode = _least([_whole_lines(law.decode, 1, 3) for law in laws], long)
    found = decode.over(length + 1.0, made - 1.0)
    if not own[0].law.mixed:
        found = found + _least([_whole_lines(law.prefill, 1, 2) for law in laws], long).at(length)
    return found


def _whole_lines(weights: Array, begin: int, end: int) -> Array:
    """Return the lines of whole iterations in the length of one of their sequences [2, B]."""
    return np.stack([weights[1:, 0], weights[1:, begin:end].sum(1)])


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
