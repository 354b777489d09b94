"""The search of the authors' code: its stages are those of all combinations."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from helpers.random_apps import problem

from llmpq.multillm.planner.search import complete, greedy_stage, throughput
from reproduce.samullm_search import _options, best_stages, search


def every_stage(own, progress):
    """Yield runs of all sets of ready models on plans that leave no device idle."""
    options = _options(own, progress)
    for size in range(1, len(options) + 1):
        for models in combinations(options, size):
            for plans in product(*(options[model].values() for model in models)):
                devices = sum(one.candidate.devices for one in plans)
                if devices > own.devices:
                    continue
                if devices == own.devices or size == len(options):
                    stage = {one.model: one.candidate for one in plans}
                    run = own.simulator.run(progress, stage)
                    if run is not None:
                        yield run


def independent(own):
    """Whether no model reads answers of another."""
    return all(own.simulator.producers(model) <= {model} for model in range(own.simulator.models))


SEEDS = [seed for seed in range(60) if independent(problem(seed))][:8]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_stage_does_most_operations_a_second_of_all_that_leave_no_device_idle(seed):
    own = problem(seed)
    progress = own.simulator.begin()
    best = max(throughput(run, None) for run in every_stage(own, progress))
    found = best_stages(own, progress)
    assert throughput(found[0], None) == pytest.approx(best)
    rates = [throughput(run, None) for run in found]
    assert rates == sorted(rates, reverse=True)
    assert len({frozenset(run.processes) for run in found}) == len(found)


@pytest.mark.parametrize("seed", range(12))
def test_more_sequences_are_never_worse_and_all_requests_are_answered(seed):
    own = problem(seed)
    few, many = search(own, 1), search(own, 20)
    assert many.makespan_s <= few.makespan_s
    for found in (few, many):
        assert not own.simulator.unfinished(found.before[-1])
    assert complete(own, lambda progress: greedy_stage(own, progress)) is not None
