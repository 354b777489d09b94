"""Fleets, compared with brute force over all partitions of a cluster's devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from helpers.builders import cluster_of, model_spec, plan_request, sensitivity
from helpers.certificate import certify_plan
from helpers.clocks import CountingClock
from helpers.fleets import partitions, plans_of

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.constraints.deadline import Deadline
from llmpq.assigner.constraints.overrides import Overrides
from llmpq.assigner.fleet import plan_fleet
from llmpq.assigner.fleet.partition import Pools
from llmpq.assigner.fleet.pricing import batches
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import Device, LinkSpec
from llmpq.spec.workload import Workload

TOLERANCE = 1e-9


def random_request(seed: int) -> PlanRequest:
    rng = np.random.default_rng(seed)
    model = model_spec(layers=int(rng.integers(1, 7)), kinds=int(rng.integers(1, 3)))
    count = int(rng.integers(1, 4))
    types = rng.choice(["V100-32G", "T4-16G", "P100-12G", "A100-40G"], size=count)
    left, groups = 6, []
    for place, name in enumerate(types):
        size = int(rng.integers(1, max(2, left - (count - place - 1))))
        left -= size
        groups.append((str(name), size, int(rng.integers(60, 400))))
    slow = LinkSpec(between=("node0", "node1"), bytes_per_s=1e8, latency_s=1e-4)
    return plan_request(
        model=model,
        cluster=cluster_of(*groups, links=(slow,) if count > 1 and rng.random() < 0.5 else ()),
        workload=Workload(
            batch=int(rng.integers(1, 9)),
            prompt_tokens=int(rng.integers(8, 200)),
            new_tokens=int(rng.integers(1, 40)),
        ),
        sensitivity=sensitivity(model, seed) if rng.random() < 0.5 else None,
        quality_budget=float(rng.choice([0.05, 0.5, 2.0])) if rng.random() < 0.7 else None,
    )


def budget_of(request: PlanRequest) -> float:
    if request.quality_budget is not None:
        return request.quality_budget
    return make_plan(request).estimate.quality


def best_by_brute_force(request: PlanRequest, number: int | None) -> float:
    plan = plans_of(request)

    def rate(devices: Sequence[Device], batch: int) -> float:
        found = plan(devices, batch)
        return 0.0 if found is None else batch / found.estimate.latency_s

    best = 0.0
    for found in partitions(request.cluster.devices):
        if number is not None and len(found) != number:
            continue
        # The most requests a second by the sum of the batches, over parts that all run.
        sums = {0: 0.0}
        for part in found:
            sums = {
                total + batch: max(
                    value + rate(part, size)
                    for size in batches(request.workload.batch)
                    for before, value in sums.items()
                    if before + size == total + batch and rate(part, size)
                )
                for total in sums
                for batch in batches(request.workload.batch)
                if total + batch <= request.workload.batch and rate(part, batch)
            }
        best = max([best, *sums.values()])
    return best


def check_against_brute_force(seed: int) -> bool:
    request = random_request(seed)
    number = int(np.random.default_rng(seed).integers(1, 4)) if seed % 4 == 0 else None
    if number is not None:
        number = min(number, len(request.cluster.devices))
    try:
        budget = budget_of(request)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            plan_fleet(request, number)
        return False
    priced = replace(request, quality_budget=budget, theta_s=0.0)
    want = best_by_brute_force(priced, number)
    if not want:
        with pytest.raises(InfeasibleError):
            plan_fleet(request, number)
        return False
    found = plan_fleet(request, number)
    assert found.status == "optimal"
    assert found.requests_per_s == pytest.approx(want, rel=TOLERANCE)
    assert found.bound == pytest.approx(want, rel=TOLERANCE)
    assert number is None or len(found.replicas) == number
    taken = [device for replica in found.replicas for device in replica.devices]
    assert sorted([*taken, *found.idle]) == list(range(len(request.cluster.devices)))
    for replica in found.replicas:
        plan = replica.plan
        own = [request.cluster.devices[device] for device in replica.devices]
        assert [(d.node, d.type) for d in own] == [(d.node, d.type) for d in plan.cluster.devices]
        assert plan.estimate.quality <= budget * (1 + 1e-9) + 1e-15
        assert plan.workload.batch / plan.estimate.latency_s == replica.requests_per_s
        certify_plan(replace(priced, cluster=plan.cluster, workload=plan.workload), plan)
    if number is None:
        assert all(
            other.requests_per_s <= found.requests_per_s * (1 + TOLERANCE) for other in found.others
        )
    return len(found.replicas) > 1


@pytest.mark.parametrize(
    "block", [pytest.param(b, marks=[] if b < 3 else pytest.mark.slow) for b in range(40)]
)
def test_fleets_equal_brute_force_over_all_partitions(block):
    split = [check_against_brute_force(seed) for seed in range(5 * block, 5 * block + 5)]
    assert len(split) == 5


def two_types(**options) -> PlanRequest:
    return plan_request(
        model=model_spec(layers=6),
        cluster=cluster_of(("A100-40G", 2, 300), ("T4-16G", 2, 120)),
        workload=Workload(batch=8, prompt_tokens=64, new_tokens=16),
        **options,
    )


def test_replicas_with_the_same_bits_have_them_in_every_layer():
    found = plan_fleet(two_types(quality_budget=1.0), same_bits=True)
    assert len(found.replicas) > 1
    assert len({replica.plan.bits for replica in found.replicas}) == 1
    assert found.requests_per_s <= plan_fleet(two_types(quality_budget=1.0)).requests_per_s * (
        1 + TOLERANCE
    )


def test_without_a_budget_no_replica_loses_more_than_one_pipeline():
    request = two_types()
    quality = make_plan(request).estimate.quality
    found = plan_fleet(request)
    assert found.quality_budget == quality
    assert all(replica.plan.estimate.quality <= quality + 1e-12 for replica in found.replicas)


def test_a_larger_fleet_than_fits_is_infeasible():
    request = two_types(quality_budget=0.0)
    with pytest.raises(InfeasibleError, match="4 replicas of small do not fit"):
        plan_fleet(request, 4)


@pytest.mark.parametrize(
    ("options", "number", "message"),
    [
        ({}, 5, "replicas: found 5, expected 1 to 4"),
        ({"formula": "paper"}, None, "found formula 'paper', expected 'steady'"),
        ({"overrides": Overrides(exclude=("node0",))}, None, "found with --exclude node0"),
    ],
)
def test_requests_that_no_fleet_is_for_are_refused(options, number, message):
    with pytest.raises(SpecError, match=message):
        plan_fleet(two_types(**options), number)


def test_parts_on_equal_nodes_are_priced_once():
    pools = Pools.of(cluster_of(("T4-16G", 2, 100), ("T4-16G", 2, 100)))
    assert pools.key((1, 0)) == pools.key((0, 1))
    assert pools.key((2, 0)) != pools.key((1, 1))
    slow = LinkSpec(between=("node0", "node1"), bytes_per_s=1e8, latency_s=1e-4)
    linked = Pools.of(cluster_of(("T4-16G", 2, 100), ("T4-16G", 2, 90), links=(slow,)))
    assert linked.key((1, 0)) != linked.key((0, 1))


def test_large_clusters_end_in_time_with_a_valid_bound():
    request = plan_request(
        model=model_spec(layers=6),
        cluster=cluster_of(*((name, 16, 200) for name in ("A100-40G", "T4-16G", "L4"))),
        workload=Workload(batch=64, prompt_tokens=64, new_tokens=16),
        quality_budget=1.0,
        deadline=Deadline(1000.0, CountingClock()),
        time_limit_s=1000.0,
    )
    found = plan_fleet(request)
    assert 0 <= found.gap < 1
    assert found.requests_per_s <= found.bound
    assert all(
        (other.requests_per_s or 0.0) <= found.requests_per_s * (1 + TOLERANCE)
        for other in found.others
    )
