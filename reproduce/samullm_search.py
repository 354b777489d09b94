"""The search of SamuLLM's public code, beside the Algorithm 1 that the paper prints.

``benchmarks/search_exec_plans.py`` of github.com/puddingfjz/vllm (Apache-2.0), with the settings of
its ``run_end2end_exp.sh``: of each model the fastest plan for every number of devices; of all
stages that leave no device idle while models wait, those with the most operations a second, one
for each set of models, 20 at most; depth first over sequences of stages, until 2 or 21 are
complete. Algorithm 1 instead grows one stage by the plan with the largest gain a device, and never
looks at another.

Models that wait for no other are chosen exactly here: a stage ends with one of its plans, so for
each end the rest is a knapsack. Models that read the answers of others in the stage are added by
Algorithm 1 to the best choice for every number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llmpq.multillm.candidates import Candidate
from llmpq.multillm.estimate import INSTANT_S, Progress, StageRun
from llmpq.multillm.planner.search import (
    AppProblem,
    AppSolution,
    greedy_stage,
    throughput,
)

TOP = 20
"""Stages that are tried after the same beginning."""


@dataclass(frozen=True, slots=True)
class _Option:
    """A plan of a model, alone from now on: when it ends, and its operations until then."""

    model: int
    candidate: Candidate
    run: StageRun

    def work(self, progress: Progress, end_s: float) -> float:
        start_s, run = self.run.processes[self.model].start_s, self.run.runs[self.model]
        return run.until(end_s - start_s)[0] - run.until(progress.time_s - start_s)[0]


def search(problem: AppProblem, sequences: int) -> AppSolution:
    """Return the best of the first ``sequences`` complete sequences of stages, and one more."""
    found: list[AppSolution] = []
    seen: dict[bytes, float] = {}
    simulator = problem.simulator

    def extend(so_far: AppSolution) -> None:
        progress = so_far.before[-1]
        if len(found) > sequences:
            return
        if not simulator.unfinished(progress):
            found.append(so_far)
            return
        if found and progress.time_s >= min(one.makespan_s for one in found):
            return
        state = np.isfinite(progress.finish_s).tobytes() + progress.made.tobytes()
        if seen.get(state, np.inf) < progress.time_s:
            return
        seen[state] = progress.time_s
        for run in best_stages(problem, progress)[:TOP]:
            after = simulator.after(progress, run)
            extend(AppSolution((*so_far.stages, run), (*so_far.before, after)))

    extend(AppSolution((), (simulator.begin(),)))
    return min(found, key=lambda one: one.makespan_s)


def best_stages(problem: AppProblem, progress: Progress) -> list[StageRun]:
    """Return stages by falling operations a second, one for each set of models."""
    options = _options(problem, progress)
    waiting = set(problem.simulator.unfinished(progress)) - options.keys()
    best: dict[frozenset[int], StageRun] = {}
    for chosen, devices in _choices(problem, progress, options):
        if devices < problem.devices and (waiting or len(chosen) < len(options)):
            if not waiting:
                continue  # a device would be idle
            stage = greedy_stage(problem, progress, start=chosen)
        else:
            stage = chosen
        run = problem.simulator.run(progress, stage)
        key = frozenset(stage)
        if run is not None and (
            key not in best or throughput(run, None) > throughput(best[key], None)
        ):
            best[key] = run
    if not best:
        run = problem.simulator.run(progress, greedy_stage(problem, progress))
        assert run is not None
        return [run]
    return sorted(best.values(), key=lambda run: -throughput(run, None))


def _options(problem: AppProblem, progress: Progress) -> dict[int, dict[int, _Option]]:
    """Return the fastest plan of every ready model for each number of devices."""
    found: dict[int, dict[int, _Option]] = {}
    for model in problem.ready(progress, ()):
        own: dict[int, _Option] = {}
        for candidate in problem.candidates[model]:
            run = problem.simulator.run(progress, {model: candidate})
            if run is None or candidate.devices > problem.devices:
                continue
            known = own.get(candidate.devices)
            if known is None or run.ends[model] < known.run.ends[model]:
                own[candidate.devices] = _Option(model, candidate, run)
        if own:
            found[model] = own
    return found


def _choices(
    problem: AppProblem, progress: Progress, options: Mapping[int, Mapping[int, _Option]]
) -> Iterator[tuple[dict[int, Candidate], int]]:
    """Yield for every set of models the plans with most operations a second, and their devices.

    A set that leaves devices idle is there with the most devices that it can take, and in any case
    once for every number of devices with its best set.
    """
    models = sorted(options)
    all_options = [one for own in options.values() for one in own.values()]
    shape = 1 << len(models), problem.devices + 1
    top = np.full(shape, -np.inf)
    plans: dict[tuple[int, int], dict[int, Candidate]] = {}
    for end_s in sorted({one.run.end_s for one in all_options}):
        seconds = end_s - progress.time_s
        rate, taken = _knapsack(problem, progress, options, end_s)
        better = rate / seconds > top + 1e-9
        for mask, devices in zip(*np.nonzero(better), strict=True):
            key = int(mask), int(devices)
            top[key] = rate[key] / seconds
            plans[key] = _plans(models, taken, options, key)
    every = (1 << len(models)) - 1
    for (mask, devices), chosen in plans.items():
        is_best = top[mask, devices] >= top[:, devices].max()
        if devices == problem.devices or mask == every or is_best:
            yield chosen, devices


def _knapsack(
    problem: AppProblem,
    progress: Progress,
    options: Mapping[int, Mapping[int, _Option]],
    end_s: float,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the most operations until ``end_s`` by set of models and devices, and the choices.

    Only plans that do not end before count, and one of them must end then.
    """
    models = sorted(options)
    size = 1 << len(models), problem.devices + 1
    # Two layers: without, and with a plan that ends then.
    work = np.full((2, *size), -np.inf)
    work[0, 0, 0] = 0.0
    taken = []
    masks = np.arange(size[0])
    for place, model in enumerate(models):
        new, choice = work.copy(), np.zeros((2, *size), np.int64)
        free = masks[masks & (1 << place) == 0]
        for devices, option in options[model].items():
            ends = option.run.ends[model]
            if ends < end_s - INSTANT_S:
                continue
            own = option.work(progress, end_s)
            is_end = ends <= end_s + INSTANT_S
            for layer in (0, 1):
                target = 1 if is_end else layer
                moved = work[layer][free, : size[1] - devices] + own
                at = free | (1 << place)
                block = new[target][at, devices:]
                wins = moved > block
                new[target][at, devices:] = np.where(wins, moved, block)
                code = 10 * devices + layer + 1
                kept = choice[target][at, devices:]
                choice[target][at, devices:] = np.where(wins, code, kept)
        work = new
        taken.append(choice)
    return work[1], taken


def _plans(
    models: list[int],
    taken: list[np.ndarray],
    options: Mapping[int, Mapping[int, _Option]],
    key: tuple[int, int],
) -> dict[int, Candidate]:
    """Return the plans that a state of the knapsack stands for."""
    (mask, left), layer, chosen = key, 1, {}
    for place in reversed(range(len(models))):
        if not mask & (1 << place):
            continue
        code = int(taken[place][layer, mask, left])
        devices, layer = code // 10, code % 10 - 1
        chosen[models[place]] = options[models[place]][devices].candidate
        mask, left = mask & ~(1 << place), left - devices
    return chosen
