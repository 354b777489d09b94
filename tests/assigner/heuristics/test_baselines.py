"""The baselines: certified plans with their defining property, never better than the optimum."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from helpers.brute_force import all_assignments, brute_force
from helpers.builders import cluster_of, model_spec, plan_request, tiny_problems
from helpers.certificate import certify
from helpers.small_clusters import optimum_s, small_request, tiny_request
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.assigner import METHODS, make_plan
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.heuristics import baselines
from llmpq.assigner.milp.search import find_plan
from llmpq.assigner.objective import Assignment, evaluate, within_budget
from llmpq.assigner.planner import plan_of, solve_task
from llmpq.assigner.request import PlanningTask, build_task, silent
from llmpq.errors import InfeasibleError
from llmpq.spec.plan import MicroBatching
from llmpq.spec.workload import Workload

BASELINES = tuple(method for method in METHODS if method != "llmpq")


def solve(task: PlanningTask, method: str):
    """Return a baseline's solution, ``None`` without one."""
    try:
        return solve_task(task, method)
    except InfeasibleError:
        return None


def certified_values(task: PlanningTask) -> dict[str, float]:
    """Return the objective of every baseline that has a plan; each plan passes its certificate."""
    bits, values = task.request.bits, {}
    for method in BASELINES:
        solution = solve(task, method)
        if solution is None:
            continue
        plan = plan_of(task, solution, method=method, command="", planning_s=0.0)
        certify(plan, task.costs, lambda layer, width: float(task.omega[layer, bits.index(width)]))
        values[method] = plan.estimate.objective_s
    return values


BLOCKS = [*range(3), *(pytest.param(number, marks=pytest.mark.slow) for number in range(3, 12))]


@pytest.mark.parametrize("block", BLOCKS)
def test_no_baseline_beats_brute_force(block: int) -> None:
    made = 0
    for seed in range(8 * block, 8 * block + 8):
        task = build_task(tiny_request(seed))
        values, best_s = certified_values(task), optimum_s(task)
        assert all(value >= best_s * (1 - 1e-9) for value in values.values())
        if {"heuristic", "adabits"} <= set(values):
            assert values["heuristic"] <= values["adabits"] * (1 + 1e-12)
        made += len(values)
    assert made > 15


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_llmpq_is_never_worse_than_a_baseline_on_random_clusters(block: int) -> None:
    for seed in range(1000 + 10 * block, 1010 + 10 * block):
        task = build_task(small_request(seed))
        values = certified_values(task)
        if not task.pairs:
            assert not values
            continue
        try:
            best_s = find_plan(task, silent).evaluation.objective_s
        except InfeasibleError:
            assert not values
            continue
        assert all(best_s <= value * (1 + 1e-6) for value in values.values()), (seed, values)


# The defining property of each baseline.


@pytest.mark.parametrize("seed", range(10))
def test_fastest_is_the_best_of_all_single_devices(seed: int) -> None:
    task = build_task(tiny_request(100 + seed))
    solution = solve(task, "fastest")
    alone = [
        found[1].objective_s
        for pair in task.pairs
        for group in range(len(task.groups))
        if (found := brute_force(task.problem(pair, (group,)))) is not None
    ]
    if solution is None:
        assert not alone
        return
    assert solution.assignment.used_positions() == (0,)
    assert solution.evaluation.objective_s == pytest.approx(min(alone), rel=1e-9)


def test_adabits_has_the_least_degradation_memory_allows() -> None:
    checked = 0
    for seed in range(25):
        task = build_task(tiny_request(200 + seed))
        solution = solve(task, "adabits")
        if solution is None:
            continue
        problem = solution.problem
        least = min(
            found.quality
            for assignment in all_assignments(problem)
            if (found := evaluate(problem, assignment)).excess_bytes == 0
        )
        assert solution.evaluation.quality == pytest.approx(least, abs=1e-8)
        checked += 1
    assert checked >= 12


def test_adabits_prefers_less_work_between_equals() -> None:
    """Everything fits at 16 bits on either device: the faster one takes it all."""
    request = plan_request(cluster=cluster_of(("T4-16G", 1, 900), ("A100-40G", 1, 900)))
    solution = solve(build_task(request), "adabits")
    assert solution.evaluation.quality == 0.0
    groups = {solution.problem.order[where] for where in solution.assignment.positions}
    assert groups == {1}


def test_adaptive_even_has_the_best_bits_of_its_even_split() -> None:
    checked = 0
    for seed in range(25):
        task = build_task(tiny_request(300 + seed))
        solution = solve(task, "adaptive_even")
        if solution is None:
            continue
        problem, chosen = solution.problem, solution.assignment
        sizes = np.bincount(chosen.positions, minlength=problem.num_positions)
        assert np.ptp(sizes) <= 1
        least = min(
            found.quality
            for assignment in all_assignments(problem)
            if assignment.positions == chosen.positions
            and (found := evaluate(problem, assignment)).excess_bytes == 0
        )
        assert solution.evaluation.quality == pytest.approx(least, abs=1e-12)
        checked += 1
    assert checked >= 10


@pytest.mark.parametrize("method", ["pipeedge", "memory_proportional", "speed_proportional"])
def test_one_bitwidth_and_none_wider_fits(method: str) -> None:
    widths = set()
    for seed in range(30):
        task = build_task(tiny_request(400 + seed))
        solution = solve(task, method)
        if solution is None:
            continue
        (width,) = set(solution.assignment.widths)
        widths.add(task.request.bits[width])
        if method == "pipeedge" and width:
            assert not any_split_fits(task, width - 1)
    assert len(widths) >= 3


def any_split_fits(task: PlanningTask, width: int) -> bool:
    for order in baselines.block_orders(task):
        for pair in task.pairs:
            problem = task.problem(pair, order)
            for where in combinations_with_replacement(range(len(order)), len(task.kinds)):
                found = evaluate(problem, Assignment(where, (width,) * len(where)))
                if found.excess_bytes == 0 and within_budget(problem, found.quality):
                    return True
    return False


def longest_part_s(problem, assignment: Assignment) -> float:
    stages = evaluate(problem, assignment).stages
    return max(max(stage.prefill_s, stage.send_prefill_s) for stage in stages)


@settings(max_examples=80, deadline=None)
@given(tiny_problems)
def test_pipeedge_keeps_the_slowest_part_of_prefill_shortest(problem) -> None:
    layers = problem.num_layers
    for width in range(len(problem.bits)):
        options = [
            Assignment(where, (width,) * layers)
            for where in combinations_with_replacement(range(problem.num_positions), layers)
        ]
        fitting = [item for item in options if evaluate(problem, item).excess_bytes == 0]
        found = baselines.shortest_pipeline(
            problem, width, baselines.fitting_ranges(problem, width)
        )
        if found is None:
            assert not fitting
            continue
        chosen = Assignment(found, (width,) * layers)
        assert chosen in fitting
        least_s = min(longest_part_s(problem, item) for item in fitting)
        assert longest_part_s(problem, chosen) == pytest.approx(least_s, rel=1e-9)
        # Among equals, the one whose parts are shortest together.
        equals = [i for i in fitting if longest_part_s(problem, i) <= least_s * (1 + 1e-12)]
        assert whole_pass_s(problem, chosen) == pytest.approx(
            min(whole_pass_s(problem, item) for item in equals), rel=1e-9
        )


def whole_pass_s(problem, assignment: Assignment) -> float:
    stages = evaluate(problem, assignment).stages
    return math.fsum(stage.prefill_s + stage.send_prefill_s for stage in stages)


weights = st.lists(st.floats(min_value=0.01, max_value=100), min_size=1, max_size=8)


@given(st.integers(min_value=1, max_value=130), weights)
def test_proportional_shares_stay_within_one_layer_of_their_quota(layers: int, found) -> None:
    positions = baselines.proportional_split(layers, found)
    assert len(positions) == layers
    assert list(positions) == sorted(positions)
    for position, weight in enumerate(found):
        quota = layers * weight / sum(found)
        assert abs(positions.count(position) - quota) < 1 + 1e-9
    by_weight = sorted(range(len(found)), key=found.__getitem__)
    for small, large in pairwise(by_weight):
        if found[small] * (1 + 1e-6) < found[large]:
            assert positions.count(small) <= positions.count(large)


def test_proportional_remainders_go_to_the_largest_fractions() -> None:
    split = baselines.proportional_split
    assert [split(10, (1.0, 2.0, 3.0, 4.0)).count(j) for j in range(4)] == [1, 2, 3, 4]
    assert [split(10, (1.0, 1.0, 1.0)).count(j) for j in range(3)] == [3, 3, 4]
    assert [split(7, (0.5, 0.3, 0.2)).count(j) for j in range(3)] == [4, 2, 1]
    assert [split(4, (0.0, 0.0)).count(j) for j in range(2)] == [2, 2]
    assert [split(5, (0.0, 2.0)).count(j) for j in range(2)] == [0, 5]


def test_memory_and_speed_split_the_same_cluster_differently() -> None:
    """The slow device has three times the memory of the fast one."""
    request = plan_request(
        model=model_spec(layers=8),
        cluster=cluster_of(("T4-16G", 1, 900), ("A100-40G", 1, 300)),
        workload=Workload(batch=4, prompt_tokens=512, new_tokens=16),
    )
    task = build_task(request)
    by_memory = solve(task, "memory_proportional").assignment.positions
    assert (by_memory.count(0), by_memory.count(1)) == (6, 2)
    by_speed = solve(task, "speed_proportional").assignment.positions
    assert by_speed.count(1) > by_speed.count(0)


def test_fastest_without_a_plan_says_that_no_device_is_large_enough() -> None:
    request = plan_request(
        model=model_spec(layers=8), cluster=cluster_of(("V100-32G", 1, 50), ("T4-16G", 2, 50))
    )
    with pytest.raises(InfeasibleError, match="no single device holds the 8 layers"):
        baselines.find_fastest(build_task(request), silent)


@pytest.mark.parametrize("method", BASELINES)
def test_an_impossible_budget_is_named(method: str) -> None:
    task = build_task(plan_request(quality_budget=0.0, bits=(4, 3)))
    with pytest.raises(InfeasibleError, match="quality budget of 0"):
        solve_task(task, method)


@pytest.mark.parametrize("method", BASELINES)
def test_a_model_that_fits_nowhere_is_explained(method: str) -> None:
    request = plan_request(cluster=cluster_of(("T4-16G", 1, 9)))
    with pytest.raises(InfeasibleError, match=r"does not fit on small: .*smallest single fixes"):
        make_plan(request, method)


@pytest.mark.parametrize("method", BASELINES)
def test_baselines_leave_out_excluded_devices(method: str) -> None:
    request = plan_request(
        cluster=cluster_of(("V100-32G", 2, 900), ("T4-16G", 1, 900)),
        overrides=Overrides(
            exclude=("node0/V100-32G#0",), micro_batching=MicroBatching(prefill=2, decode=4)
        ),
    )
    solution = solve(build_task(request), method)
    plan = plan_of(build_task(request), solution, method=method, command="", planning_s=0.0)
    assert 0 in plan.dropped_devices
    assert plan.cluster == request.cluster
    assert plan.micro_batching == MicroBatching(prefill=2, decode=4)
