"""Fronts: no dominated plan, the right ends, and the plans between them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from helpers.brute_force import all_assignments
from helpers.builders import cluster_of, model_spec, plan_request, sensitivity

from llmpq.assigner import make_plan
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.explain.compare import pareto_plans
from llmpq.assigner.objective import evaluate, is_feasible
from llmpq.assigner.request import build_task
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.workload import Workload


def request_of(**overrides):
    model = model_spec(layers=3)
    values = {
        "model": model,
        "cluster": cluster_of(("V100-32G", 1, 60), ("T4-16G", 1, 50)),
        "workload": Workload(batch=2, prompt_tokens=64, new_tokens=12),
        "bits": (16, 8, 4),
        "sensitivity": sensitivity(model),
    }
    return plan_request(**(values | overrides))


def everything(request) -> list[tuple[float, float]]:
    """Quality and latency of every plan there is."""
    task = build_task(replace(request, theta_s=0.0))
    found = []
    for pair, order in product(task.pairs, task.orders()[1]):
        problem = task.problem(pair, order)
        for assignment in all_assignments(problem):
            priced = evaluate(problem, assignment)
            if is_feasible(problem, priced):
                found.append((priced.quality, priced.latency_s))
    return found


@pytest.mark.parametrize("budget", [None, 0.5])
def test_every_plan_of_a_front_is_undominated_among_all_plans(budget) -> None:
    request = request_of(quality_budget=budget)
    plans = pareto_plans(request, 6)
    points = [(plan.estimate.quality, plan.estimate.latency_s) for plan in plans]
    assert len(points) >= 3
    others = everything(request)
    for quality, latency_s in points:
        assert not any(
            lost <= quality * (1 + 1e-9) and taken_s < latency_s * (1 - 1e-6)
            for lost, taken_s in others
        )
    assert points[0][0] == pytest.approx(min(lost for lost, _ in others), rel=1e-6)
    # The last one may take a little longer where that saves quality, by the low price.
    assert points[-1][1] <= min(taken_s for _, taken_s in others) * 1.01
    assert budget is None or points[-1][0] <= budget * (1 + 1e-8)


def test_more_points_never_lose_an_end() -> None:
    few, many = (pareto_plans(request_of(), count) for count in (2, 7))
    assert len(few) == 2 < len(many) <= 7
    for end in (0, -1):
        assert few[end].estimate.latency_s == pytest.approx(many[end].estimate.latency_s)


def test_one_plan_is_the_whole_front_where_quantizing_does_not_pay() -> None:
    roomy = cluster_of(("V100-32G", 1, 4000))
    plans = pareto_plans(request_of(cluster=roomy, bits=(16,)), 5)
    assert len(plans) == 1
    assert set(plans[0].bits) == {16}


def test_a_front_is_as_good_as_single_plans_at_any_price() -> None:
    plans = pareto_plans(request_of(), 8)
    for theta_s in (1e-4, 1e-3, 1e-2):
        single = make_plan(request_of(theta_s=theta_s)).estimate
        assert not any(
            plan.estimate.quality > single.quality * (1 + 1e-6) + 1e-12
            and plan.estimate.latency_s > single.latency_s * (1 + 1e-6)
            for plan in plans
        )


def test_every_point_obeys_manual_decisions() -> None:
    request = request_of(overrides=Overrides(layer_bits=((0, 1, 4),)))
    plans = pareto_plans(request, 4)
    assert len(plans) > 1
    assert {plan.bits[0] for plan in plans} == {4}


@pytest.mark.parametrize(
    ("overrides", "count", "error", "message"),
    [
        ({}, 1, SpecError, "--pareto: found 1"),
        ({"theta_s": 1.0}, 3, SpecError, "--theta"),
        ({"cluster": cluster_of(("T4-16G", 1, 30))}, 3, InfeasibleError, "of 3 layers fit"),
        ({"overrides": Overrides(exclude=("node0",), layer_bits=((0, 3, 16),))}, 3,
         InfeasibleError, "--fix_bits 0:3=16"),
    ],
)  # fmt: skip
def test_a_missing_front_is_explained(overrides: dict, count: int, error, message: str) -> None:
    with pytest.raises(error, match=message):
        pareto_plans(request_of(**overrides), count)
