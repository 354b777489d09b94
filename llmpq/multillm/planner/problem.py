"""The search for stages: what there is to choose, and a plan of an application as its stages.

``lower_bound`` of the makespan: device-seconds that the work takes at least, and longest chains.

A decode iteration of ``B`` sequences takes ``w0 + w1 S + w2 B s``, which is at least the sum of
``w0 / B + (w1 + w2) l`` over their lengths ``l``: a token of a sequence of length ``l`` costs at
least the least such line of any batch of any plan, times the devices of a replica. Prompts
likewise. Mixed steps cost at least their tokens at the best rate, and at least their decode tokens
as above. These, with one loading of each model, spread over all devices, are one bound. The other
is the longest path of requests that wait for each other, each alone on its fastest plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmpq.assigner.fleet.partition import DeviceCounts
from llmpq.multillm.candidates import Candidate
from llmpq.multillm.engine.native import Array, EngineModel, Ints
from llmpq.multillm.estimate import Progress, Simulator, Stage, StageRun
from llmpq.multillm.workload import AppWorkload


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
