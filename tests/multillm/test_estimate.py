"""Stages of an application: what a process keeps, what waits for what, and when a stage ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.random_apps import problem

from llmpq.multillm.engine.law import play
from llmpq.multillm.estimate import Simulator
from llmpq.multillm.planner.search import complete


def chance_of(seed, own):
    """Return a rule that chooses among all plans that fit at random."""
    chance = np.random.default_rng(seed)

    def choose(progress):
        while True:
            stage = {}
            for model in chance.permutation(own.simulator.models).tolist():
                candidate = own.candidates[model][chance.integers(len(own.candidates[model]))]
                if (
                    model in own.ready(progress, stage)
                    and own.fits([*stage.values(), candidate])
                    and chance.random() < 0.8
                ):
                    stage[model] = candidate
            if stage and own.simulator.run(progress, stage) is not None:
                return stage

    return choose


def test_a_model_alone_takes_its_loading_and_its_engine():
    own = problem(1, models=1, devices=1)
    (candidate,), work = own.candidates[0], own.simulator.workload
    run = own.simulator.run(own.simulator.begin(), {0: candidate})
    engine = play(
        candidate.law, ready_s=np.zeros(len(work)), prompt=work.prompt, answer=work.answer,
        following=np.full(len(work), -1), work=np.zeros(len(work)),
    )  # fmt: skip
    assert run.end_s == pytest.approx(candidate.load_s + engine.finish_s.max())


@pytest.mark.parametrize("seed", range(12))
def test_every_request_finishes_once_after_what_it_waits_for(seed):
    own = problem(seed)
    found = complete(own, chance_of(seed, own))
    work, last = own.simulator.workload, found.before[-1].finish_s
    assert np.isfinite(last).all()
    assert last.max() == pytest.approx(found.makespan_s)
    for request in range(len(work)):
        parents = work.parents[work.first[request] : work.first[request + 1]]
        assert (last[parents] < last[request]).all()
        if work.before[request] >= 0:
            assert last[work.before[request]] < last[request]
    for earlier, later in zip(found.before, found.before[1:], strict=False):
        known = np.isfinite(earlier.finish_s)
        assert (later.finish_s[known] == earlier.finish_s[known]).all()
        assert (later.made <= work.answer - 1).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_process_is_as_if_it_had_never_been_looked_at(seed):
    """A model that goes on through several stages finishes as in one: only producers matter."""
    tried = (problem(number, models=2, devices=4) for number in range(100 * seed, 100 * seed + 100))
    own = next(one for one in tried if one.fits(plans[0] for plans in one.candidates))
    first = {model: plans[0] for model, plans in enumerate(own.candidates)}
    found = complete(own, lambda progress: {
        model: plan for model, plan in first.items() if model in own.simulator.unfinished(progress)
    })  # fmt: skip
    whole = own.simulator.run(own.simulator.begin(), first)
    assert found.makespan_s == pytest.approx(max(whole.ends.values()))


def test_a_stopped_model_keeps_its_tokens_and_loads_again():
    own = problem(3, models=1, devices=1)
    (candidate,) = own.candidates[0]
    simulator = own.simulator
    whole = simulator.run(simulator.begin(), {0: candidate})
    # The same plan as another object: the process is stopped for it.
    other = replace(candidate)
    half = replace(whole, end_s=whole.end_s / 2)
    stopped = simulator.after(simulator.begin(), half)
    again = simulator.run(stopped, {0: other})
    rest = again.processes[0].rest
    assert rest.made.sum() > 0
    assert (rest.made < simulator.workload.answer[rest.requests]).all()
    assert again.end_s > whole.end_s + candidate.load_s * 0.5
    assert again.end_s < whole.end_s + candidate.load_s + whole.end_s / 2
    assert simulator.after(stopped, again).finish_s.max() == pytest.approx(again.end_s)


def test_more_replicas_are_no_slower_without_loading():
    own = problem(7, models=1, devices=4)
    times = [
        own.simulator.run(own.simulator.begin(), {0: replace(plan, load_s=0.0)}).end_s
        for plan in own.candidates[0]
        if plan.tensor_parallel == own.candidates[0][0].tensor_parallel
    ]
    assert times == sorted(times, reverse=True)


def test_results_do_not_depend_on_what_was_simulated_before():
    own = problem(5)
    once = complete(own, chance_of(9, own))
    other = replace(own, simulator=Simulator(own.simulator.workload))
    assert complete(other, chance_of(9, other)).makespan_s == once.makespan_s
