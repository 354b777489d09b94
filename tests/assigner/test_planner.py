"""Whole plans, compared with brute force, and checked by the certificate."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.brute_force import brute_force
from helpers.builders import cluster_of, model_spec, plan_request, sensitivity
from helpers.certificate import certify_plan

from llmpq.assigner import METHODS, make_plan
from llmpq.assigner.enumeration import device_orders
from llmpq.assigner.request import PlanRequest, build_task
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import LinkSpec
from llmpq.spec.precision import BITS
from llmpq.spec.workload import Workload


def random_request(seed: int) -> PlanRequest:
    rng = np.random.default_rng(seed)
    model = model_spec(layers=int(rng.integers(1, 9)), kinds=int(rng.integers(1, 3)))
    types = rng.choice(["V100-32G", "T4-16G", "P100-12G", "A100-40G"], size=2, replace=False)
    # Eight layers of 25 to 40 MB at 16 bits, 5 to 7 at 3 bits: from far too little to plenty.
    groups = [(str(name), int(rng.integers(1, 3)), int(rng.integers(40, 260))) for name in types]
    slow = LinkSpec(
        between=("node0", "node1"), bytes_per_s=float(rng.choice([1e8, 1e10])), latency_s=1e-4
    )
    return plan_request(
        model=model,
        cluster=cluster_of(*groups, links=(slow,)),
        workload=Workload(
            batch=int(rng.integers(1, 9)),
            prompt_tokens=int(rng.integers(8, 200)),
            new_tokens=int(rng.integers(1, 40)),
        ),
        sensitivity=sensitivity(model, seed) if rng.random() < 0.5 else None,
        theta_s=float(rng.choice([0.0, 0.01, 1.0])) if rng.random() < 0.7 else None,
        quality_budget=float(rng.choice([0.05, 0.5, 2.0])) if rng.random() < 0.3 else None,
        formula=str(rng.choice(["steady", "paper"])),
        orders=str(rng.choice(["types", "all"])),
        gap=float(rng.choice([0.0, 1e-3])),
        layer_group=int(rng.choice([1, 1, 2, 3])),
    )


@pytest.mark.parametrize(
    "block", [*range(3), *(pytest.param(block, marks=pytest.mark.slow) for block in range(3, 5))]
)
def test_every_plan_has_its_certificate_and_llmpq_is_never_worse(block: int) -> None:
    made = 0
    for seed in range(8 * block, 8 * block + 8):
        request = random_request(seed)
        values = {}
        for method in METHODS:
            try:
                plan = make_plan(request, method)
            except InfeasibleError:
                continue
            certify_plan(request, plan)
            values[method] = plan.estimate.objective_s
            made += 1
        if "llmpq" in values and request.layer_group == 1:
            assert values["llmpq"] <= min(values.values()) * (1 + request.gap) + 1e-9
        if "llmpq" not in values:
            assert not values
    assert made > 3


@pytest.mark.parametrize("formula", ["steady", "paper"])
@pytest.mark.parametrize("budget", [None, 0.4])
def test_search_equals_brute_force_over_orders_and_pairs(formula: str, budget) -> None:
    model = model_spec(layers=4)
    request = plan_request(
        model=model,
        cluster=cluster_of(("V100-32G", 1, 75), ("T4-16G", 2, 45)),
        workload=Workload(batch=3, prompt_tokens=64, new_tokens=12),
        bits=(16, 8, 4),
        sensitivity=sensitivity(model),
        theta_s=0.05,
        quality_budget=budget,
        formula=formula,
        orders="all",
    )
    task = build_task(request)
    oracles = [
        brute_force(task.problem(pair, order))
        for pair in task.pairs
        for order in device_orders(task.group_counts.tolist(), "all")
    ]
    best = min(oracle[1].objective_s for oracle in oracles if oracle is not None)
    plan = make_plan(request)
    assert plan.estimate.objective_s == pytest.approx(best, rel=1e-7)
    assert plan.search.status == "optimal"
    assert plan.search.orders == 3


def test_a_useless_device_is_left_out() -> None:
    link = LinkSpec(between=("node0", "node1"), bytes_per_s=1e6, latency_s=0.05)
    request = plan_request(
        cluster=cluster_of(("A100-40G", 1, 2000), ("P100-12G", 1, 2000), links=(link,))
    )
    plan = make_plan(request)
    assert plan.dropped_devices == (1,)
    assert [stage.device for stage in plan.stages] == [0]


def test_plans_are_deterministic_except_for_planning_seconds() -> None:
    first, second = (make_plan(random_request(1)) for _ in range(2))
    assert first.stages == second.stages
    assert first.estimate == second.estimate


def test_quality_budget_of_zero_keeps_everything_unquantized() -> None:
    request = plan_request(
        quality_budget=0.0, cluster=cluster_of(("V100-32G", 1, 400), ("T4-16G", 1, 400))
    )
    assert set(make_plan(request).bits) == {16}


def test_default_theta_is_about_the_latency() -> None:
    plan = make_plan(plan_request())
    assert 0.3 < plan.search.theta_s / plan.estimate.latency_s <= 1.05  # two digits


def test_grouped_layers_share_their_bits() -> None:
    model = model_spec(layers=7)
    request = plan_request(model=model, layer_group=3, sensitivity=sensitivity(model))
    plan = make_plan(request)
    starts = {stage.first_layer for stage in plan.stages}
    for first in (0, 3):
        assert len(set(plan.bits[first : first + 3])) == 1
    assert starts <= {0, 3, 6}
    certify_plan(request, plan)


def test_bound_and_gap_hold_at_a_loose_gap() -> None:
    exact = make_plan(random_request(12)).estimate.objective_s
    loose = make_plan(plan_request_like(random_request(12), gap=0.2))
    assert loose.search.bound_s <= exact * (1 + 1e-6)
    assert loose.estimate.objective_s <= exact / (1 - 0.2) * (1 + 1e-6)


def plan_request_like(request: PlanRequest, **overrides) -> PlanRequest:
    names = PlanRequest.__dataclass_fields__
    return PlanRequest(**({name: getattr(request, name) for name in names} | overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"theta_s": -1.0}, "theta_s: found -1, expected at least 0"),
        ({"quality_budget": float("nan")}, "quality_budget"),
        ({"gap": 1.0}, "gap: found 1.0"),
        ({"bits": (5,)}, "bits: found 5, expected one of 3, 4, 8, 16"),
        ({"layer_group": 0}, "layer_group: found 0"),
        ({"workload": Workload(batch=1, prompt_tokens=2000, new_tokens=100)}, "2048"),
        ({"sensitivity": sensitivity(model_spec(layers=3))}, "found 3 layers"),
    ],
)
def test_invalid_requests_raise(overrides: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_plan(plan_request(**overrides))


def test_unknown_method_raises() -> None:
    with pytest.raises(SpecError, match="expected one of llmpq, uniform"):
        make_plan(plan_request(), "magic")


def test_uniform_splits_evenly_at_one_width() -> None:
    plan = make_plan(
        plan_request(cluster=cluster_of(("V100-32G", 1, 300), ("T4-16G", 3, 300))), "uniform"
    )
    assert [stage.num_layers for stage in plan.stages] == [1, 1, 2, 2]
    assert len(set(plan.bits)) == 1
    assert plan.search.bound_s is None


def test_uniform_lowers_the_width_until_it_fits() -> None:
    widths = []
    for megabytes in (250, 130, 95, 80):
        plan = make_plan(plan_request(cluster=cluster_of(("V100-32G", 1, megabytes))), "uniform")
        widths.append(plan.bits[0])
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 16
    assert set(widths) <= set(BITS)
    assert len(set(widths)) >= 3
