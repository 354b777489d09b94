"""Bitwidth transfer: exchanges, their objectives, and the quality of the plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.builders import cluster_of, model_spec, plan_request, sensitivity, tiny_problems
from helpers.small_clusters import optimum_s, small_request, tiny_request
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmpq.assigner.constraints.resolve import Deadline
from llmpq.assigner.heuristics import transfer
from llmpq.assigner.heuristics.baselines import find_adabits
from llmpq.assigner.heuristics.transfer import Exchange, Layout, Stages, changes, find_transfer
from llmpq.assigner.objective import evaluate, is_feasible, within_budget
from llmpq.assigner.planner import solve_task
from llmpq.assigner.request import PlanningTask, build_task, silent
from llmpq.errors import InfeasibleError
from llmpq.spec.workload import Workload

seeds = st.integers(min_value=0, max_value=10**6)


def random_layout(problem, seed: int) -> Layout:
    """Random counts of every position, whether they fit or not."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((problem.num_positions, len(problem.bits)), dtype=np.int64)
    for _ in range(problem.num_layers):
        counts[rng.integers(problem.num_positions), rng.integers(len(problem.bits))] += 1
    return Layout(Stages(problem), counts)


def random_exchange(problem, seed: int) -> Exchange:
    rng = np.random.default_rng(seed)
    places = rng.permutation(problem.num_positions).tolist()
    cut = int(rng.integers(1, len(places) + 1))
    givers, takers = tuple(places[:cut]), tuple(places[cut : cut + 1])
    if not takers:
        return Exchange(givers, (), 0, 0)
    given = int(rng.integers(0, 3))
    return Exchange(givers, takers, given, given * len(givers))


@settings(max_examples=80, deadline=None)
@given(tiny_problems, seeds)
def test_a_layout_has_the_objective_of_its_assignment(problem, seed: int) -> None:
    layout = random_layout(problem, seed)
    found = evaluate(problem, layout.stages.assignment(layout.counts))
    within = problem.quality_budget is None or found.quality <= problem.quality_budget
    assume(within)
    assert layout.objective_s == pytest.approx(found.objective_s, rel=1e-9)


@settings(max_examples=120, deadline=None)
@given(tiny_problems, seeds)
def test_an_exchange_moves_exactly_what_it_says_and_fits(problem, seed: int) -> None:
    layout, exchange = random_layout(problem, seed), random_exchange(problem, seed)
    before = layout.stages.assignment(layout.counts)
    found = layout.best_of(exchange)
    assume(found is not None)
    value_s, counts = found
    moved = counts.sum(axis=1) - layout.counts.sum(axis=1)
    expected = np.zeros_like(moved)
    expected[list(exchange.givers)] = -exchange.given
    expected[list(exchange.takers)] = exchange.taken
    assert moved.tolist() == expected.tolist()
    assert counts.min() >= 0
    after = layout.stages.assignment(counts)
    assert len(after.positions) == len(before.positions) == problem.num_layers
    priced = evaluate(problem, after)
    if np.isfinite(value_s):
        assert value_s == pytest.approx(priced.objective_s, rel=1e-9)
    touched = {*exchange.givers, *exchange.takers}
    for stage in priced.stages:
        if stage.position in touched:
            size = stage.weight_bytes + stage.kv_bytes
            assert size <= max(0, problem.capacity_bytes(stage.position))


@settings(max_examples=60, deadline=None)
@given(tiny_problems, seeds)
def test_the_best_option_of_an_exchange_is_the_best_of_all(problem, seed: int) -> None:
    """Try every change of both sides one by one, with the one pricing function."""
    layout, exchange = random_layout(problem, seed), random_exchange(problem, seed)
    values = []
    for giving in changes(len(problem.bits), -exchange.given, alone=not exchange.takers):
        for taking in changes(len(problem.bits), exchange.taken) if exchange.takers else [0]:
            counts = layout.counts.copy()
            counts[list(exchange.givers)] += giving
            counts[list(exchange.takers)] += taking
            if counts.min() >= 0 and fits_where_changed(problem, layout, counts, exchange):
                found = evaluate(problem, layout.stages.assignment(counts))
                if within_budget(problem, found.quality):
                    values.append(found.objective_s)
    best = layout.best_of(exchange)
    value_s = np.inf if best is None else best[0]
    assert value_s == pytest.approx(min(values, default=np.inf), rel=1e-9)


def fits_where_changed(problem, layout: Layout, counts, exchange: Exchange) -> bool:
    """Tell whether positions that change or shift fit; the rest may be too full from the start."""
    starts = [np.cumsum(table.sum(axis=1)) - table.sum(axis=1) for table in (layout.counts, counts)]
    touched = {*exchange.givers, *exchange.takers}
    touched |= set(np.flatnonzero(starts[0] != starts[1]).tolist())
    stages = evaluate(problem, layout.stages.assignment(counts)).stages
    return all(
        stage.weight_bytes + stage.kv_bytes <= max(0, problem.capacity_bytes(stage.position))
        for stage in stages
        if stage.position in touched
    )


@pytest.mark.parametrize(
    ("straggler", "other", "count"),
    [(4, 8, 2), (4, 16, 4), (8, 16, 2), (3, 8, 2), (3, 8, 3), (3, 16, 5), (3, 4, 1), (16, 4, 1)],
)
def test_the_rules_of_the_paper_are_among_the_exchanges(straggler, other, count) -> None:
    bits = (16, 8, 4, 3)
    for sign in (1, -1):  # the straggler, then the other stage
        rule = np.zeros(4, dtype=np.int64)
        rule[bits.index(straggler)] -= sign * count
        rule[bits.index(other)] += sign
        options = changes(4, int(rule.sum())).tolist()
        assert rule.tolist() in options


def test_the_most_sensitive_layers_keep_the_widest_bits() -> None:
    model = model_spec(layers=5)
    task = build_task(plan_request(model=model, sensitivity=sensitivity(model, 3), bits=(16, 4)))
    stages = Stages(task.problem(task.pairs[0], (0, 1)))
    assignment = stages.assignment(np.array([[2, 3], [0, 0]]))
    wide = {layer for layer, width in enumerate(assignment.widths) if width == 0}
    assert wide == set(np.argsort(-task.omega[:, 1])[:2].tolist())


# Whole searches.


def test_transfer_is_close_to_the_optimum_on_tiny_clusters() -> None:
    gaps = []
    for seed in range(500, 512):
        task = build_task(tiny_request(seed))
        best_s = optimum_s(task)
        try:
            found = solve_task(task, "heuristic")
        except InfeasibleError:
            continue
        gaps.append(found.evaluation.objective_s / best_s - 1)
    assert len(gaps) > 5
    assert np.mean(gaps) < 0.005
    assert max(gaps) < 0.1


def test_transfer_is_never_worse_than_its_start() -> None:
    made = 0
    for seed in range(600, 606):
        task = build_task(small_request(seed))
        try:
            start = solve_task(task, "adabits")
        except InfeasibleError:
            continue
        found = find_transfer(task, silent)
        assert is_feasible(found.problem, found.evaluation)
        assert found.evaluation.objective_s <= start.evaluation.objective_s * (1 + 1e-12)
        made += 1
    assert made > 2


def unlike_task(**overrides) -> PlanningTask:
    """A fast device with little memory before two slow ones with much: adabits is far off."""
    model = model_spec(layers=12, hidden=1024)
    values = {
        "model": model,
        "cluster": cluster_of(("A100-40G", 1, 160), ("P100-12G", 2, 250)),
        "workload": Workload(batch=8, prompt_tokens=512, new_tokens=16),
        "sensitivity": sensitivity(model),
        "theta_s": 0.001,
    }
    return build_task(plan_request(**(values | overrides)))


def test_transfer_relieves_the_slowest_stage() -> None:
    task = unlike_task()
    start, found = find_adabits(task, silent), find_transfer(task, silent)
    assert found.evaluation.objective_s < 0.9 * start.evaluation.objective_s
    slowest = [
        max(stage.prefill_s for stage in item.evaluation.stages)
        / item.problem.costs.micro_batching.prefill
        for item in (start, found)
    ]
    assert slowest[1] < 0.9 * slowest[0]


def test_transfer_is_deterministic() -> None:
    first, second = (find_transfer(unlike_task(), silent) for _ in range(2))
    assert first.assignment == second.assignment
    assert first.problem.order == second.problem.order
    assert first.evaluation == second.evaluation


def test_at_the_time_limit_the_best_plan_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    task, now_s = unlike_task(), [0.0]

    def started(*arguments: object) -> object:
        found = best_adabits(*arguments)
        now_s[0] = 100.0  # the time is up with the start, before any exchange
        return found

    best_adabits = transfer.best_adabits
    monkeypatch.setattr(transfer, "best_adabits", started)
    monkeypatch.setattr(transfer.Layout, "best_of", None)
    start = find_adabits(task, silent)
    late = replace(task.request, deadline=Deadline(50.0, lambda: now_s[0]))
    hurried = find_transfer(replace(task, request=late), silent)
    assert is_feasible(hurried.problem, hurried.evaluation)
    assert hurried.evaluation.objective_s <= start.evaluation.objective_s


def test_a_single_device_still_gets_its_bits_exchanged() -> None:
    """With degradation all but free, adabits' wide layers are traded for fast ones."""
    model = model_spec(layers=6)
    task = build_task(
        plan_request(
            model=model,
            cluster=cluster_of(("V100-32G", 1, 900)),
            sensitivity=sensitivity(model),
            theta_s=0.0,
        )
    )
    found = find_transfer(task, silent)
    assert found.evaluation.objective_s == pytest.approx(optimum_of_one(task), rel=1e-9)


def optimum_of_one(task: PlanningTask) -> float:
    """Without a price of degradation every layer takes the fastest width of its pair."""
    best = np.inf
    for pair in task.pairs:
        batches = pair.prefill_batches, (pair.new_tokens - 1) * pair.decode_batches
        layer = batches[0] * pair.prefill_s[0, 0] + batches[1] * pair.decode_s[0, 0]
        master = batches[0] * pair.master_prefill_s[0] + batches[1] * pair.master_decode_s[0]
        best = min(best, float(layer.min()) * len(task.kinds) + float(master))
    return best
