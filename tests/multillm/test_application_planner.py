"""Methods of planning: equal to brute force on small applications, never worse than the rivals."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from helpers.clocks import PATIENCE_S
from helpers.random_apps import candidates, problem

from llmpq.errors import SpecError
from llmpq.multillm.estimate import Simulator
from llmpq.multillm.graph import Application, AppModel, AppNode, Edge
from llmpq.multillm.planner.search import (
    AppProblem,
    complete,
    critical_stage,
    find,
    greedy_stage,
    lower_bound,
    max_stage,
    min_stage,
    throughput,
)
from llmpq.multillm.workload import Item, ModelLengths, build_workload


def brute_force(own, progress=None, best=math.inf):
    """Return the least makespan over all sequences of stages, without any bound."""
    simulator = own.simulator
    progress = progress or simulator.begin()
    if not simulator.unfinished(progress):
        return progress.time_s
    for plans in product(*[(None, *plans) for plans in own.candidates]):
        stage = {model: plan for model, plan in enumerate(plans) if plan is not None}
        left = simulator.unfinished(progress)
        if not stage or not set(stage) <= set(left) or not own.fits(stage.values()):
            continue
        if not set(stage) <= set(own.ready(progress, stage)):
            continue
        run = simulator.run(progress, stage)
        if run is not None and run.end_s < best:
            best = min(best, brute_force(own, simulator.after(progress, run), best))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_exact_search_equals_brute_force(seed):
    own = problem(seed, models=2 + seed % 2, devices=2, requests=12)
    found = find(own, "exact", limit_s=PATIENCE_S)
    assert found.is_optimal
    assert found.solution.makespan_s == pytest.approx(brute_force(own))


@pytest.mark.parametrize("seed", range(25))
def test_ours_is_close_to_the_best_and_no_bound_is_above_it(seed):
    own = problem(seed, models=3, devices=2, requests=15)
    best = find(own, "exact", limit_s=PATIENCE_S)
    ours = find(own, "greedy", limit_s=PATIENCE_S)
    assert best.is_optimal
    assert ours.solution.makespan_s <= 1.1 * best.solution.makespan_s
    assert best.bound_s <= best.solution.makespan_s * (1 + 1e-9)


def never_worse(seed):
    own = problem(seed, models=2 + seed % 4, devices=2 + seed % 3, requests=10 + seed % 20)
    found = {
        method: find(own, method, limit_s=0.5).solution.makespan_s
        for method in ("greedy", "samullm", "max", "min")
    }
    assert found["greedy"] <= min(found.values())
    assert lower_bound(own.simulator.workload, own.candidates, own.devices) <= found["greedy"]


@pytest.mark.parametrize("seed", range(25))
def test_ours_is_never_worse_than_the_rivals(seed):
    never_worse(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25, 200))
def test_ours_is_never_worse_than_the_rivals_on_many_applications(seed):
    never_worse(seed)


@pytest.mark.parametrize("method", ["greedy", "min"])
@pytest.mark.parametrize("seed", range(4))
def test_without_preemption_no_model_is_stopped(method, seed):
    own = problem(seed, models=4, devices=3, preemption=False)
    found = find(own, method, limit_s=0.2).solution
    begun = {}
    for run, after in zip(found.stages, found.before[1:], strict=True):
        for model, process in run.processes.items():
            assert begun.setdefault(model, process) is process
        assert set(after.processes) <= set(run.processes)
    for run, later in zip(found.stages, found.stages[1:], strict=False):
        unfinished = {model for model, end_s in run.ends.items() if end_s > run.end_s + 1e-6}
        assert unfinished <= set(later.processes)


def test_algorithm_1_takes_the_largest_gain_a_device():
    own = problem(2, models=2, devices=1, requests=10)
    progress = own.simulator.begin()
    stage = greedy_stage(own, progress)

    def rate(model, plan):
        run = own.simulator.run(progress, {model: plan})
        return sum(run.work.values()) / run.seconds

    ready = own.ready(progress, ())
    best = max((rate(model, plan), model) for model in ready for plan in own.candidates[model])
    assert list(stage) == [best[1]]


@pytest.mark.parametrize("seed", range(12))
def test_the_max_heuristic_gives_all_devices_to_the_first_ready_model(seed):
    own = problem(seed, models=3, devices=4)
    progress = own.simulator.begin()
    ((model, plan),) = max_stage(own, progress).items()
    assert model == own.ready(progress, ())[0]
    most = max(one.devices for one in own.candidates[model])
    rates = {
        one: throughput(own.simulator.run(progress, {model: one}), None)
        for one in own.candidates[model]
        if one.devices == most
    }
    assert rates[plan] == max(rates.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_min_heuristic_runs_as_many_models_as_fit_on_even_shares(seed):
    own = problem(seed, models=4, devices=4)
    progress = own.simulator.begin()
    stage = min_stage(own, progress)
    stages = [
        {model: plan for model, plan in enumerate(plans) if plan is not None}
        for plans in product(*[(None, *plans) for plans in own.candidates])
    ]
    fitting = [
        one
        for one in stages
        if one and own.fits(one.values()) and set(one) <= set(own.ready(progress, one))
        and own.simulator.run(progress, one) is not None
    ]  # fmt: skip
    assert len(stage) == max(map(len, fitting))
    alike = [one for one in fitting if set(one) == set(stage)]
    shares = sorted(plan.devices for plan in stage.values())
    used = [sorted(plan.devices for plan in one.values()) for one in alike]
    # No partition that uses as many devices has a larger smallest share.
    assert shares[0] == max(one[0] for one in used if sum(one) == sum(shares))
    same = [one for one in alike if sorted(plan.devices for plan in one.values()) == shares]
    rates = [throughput(own.simulator.run(progress, one), None) for one in same]
    assert throughput(own.simulator.run(progress, stage), None) == max(rates)


def test_an_unknown_method_is_an_error():
    with pytest.raises(SpecError, match="method: found 'best'"):
        find(problem(0), "best")


def test_the_model_that_finishes_last_gets_devices_before_all_others():
    """Of two devices, a long chain takes one from the begin to the end; the rest shares another."""
    plans = candidates(np.random.default_rng(5), devices=1)
    app = Application(
        name="long chain",
        models=tuple(AppModel(name=name, model="any") for name in ("a", "b", "chain")),
        nodes=(
            *(AppNode(name=name, model=name, requests="r", max_new_tokens=20) for name in "ab"),
            AppNode(name="c", model="chain", requests="d", max_new_tokens=40,
                 templates=("{c} {prompt}",)),
        ),
        edges=(Edge(source="c", target="c"),),
    )  # fmt: skip
    items = {name: [Item(id=n, where="r", prompt_tokens=(9,)) for n in range(20)] for name in "ab"}
    items["c"] = [Item(id="long", where="d", prompt_tokens=(5,) * 60)]
    lengths = {model.name: ModelLengths(context=300) for model in app.models}
    own = AppProblem(
        simulator=Simulator(build_workload(app, items, lengths)),
        candidates=(plans, plans, plans),
        counts=(2,),
    )
    progress = own.simulator.begin()
    ends = [own.simulator.run(progress, {model: plans[0]}).end_s for model in range(3)]
    assert ends[2] > ends[0] + ends[1]
    stage = critical_stage(own, progress, [1.0, 1.0, 1e-9])
    assert 2 in stage
    assert len(stage) == 2
    whole = complete(own, lambda now: critical_stage(own, now, [1.0, 1.0, 1e-9]))
    assert whole.makespan_s == pytest.approx(ends[2])
    assert find(own, "greedy", limit_s=PATIENCE_S).solution.makespan_s == pytest.approx(ends[2])
