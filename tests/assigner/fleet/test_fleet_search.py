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
from llmpq.assigner.constraints.resolve import Deadline, Overrides
from llmpq.assigner.fleet import plan_fleet
from llmpq.assigner.fleet.partition import MAX_PARTS, DevicePools
from llmpq.assigner.fleet.planner import default_budget
from llmpq.assigner.fleet.search import ReplicaEvaluator, batches
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import Cluster, Device, DeviceGroup, LinkSpec, Node
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
    return default_budget(make_plan(request).estimate.quality)


def have_own_cores(cluster: Cluster, parts: Sequence[Sequence[Device]]) -> bool:
    """Whether no two parts share the cores of a host: each is priced as if it had these alone."""
    for node in cluster.nodes:
        own = [sum(d.threads or 0 for d in part if d.node == node.name) for part in parts]
        if node.cores is not None and sum(map(bool, own)) > 1 and sum(own) > node.cores:
            return False
    return True


def best_by_brute_force(request: PlanRequest, number: int | None) -> float:
    plan = plans_of(request)

    def rate(devices: Sequence[Device], batch: int) -> float:
        found = plan(devices, batch)
        return 0.0 if found is None else batch / found.estimate.latency_s

    best = 0.0
    for found in partitions(request.cluster.devices):
        if number is not None and len(found) != number:
            continue
        if not have_own_cores(request.cluster, found):
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
    "block", [pytest.param(b, marks=[] if b < 1 else pytest.mark.slow) for b in range(40)]
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


def test_without_a_budget_no_replica_loses_much_more_than_one_pipeline():
    request = two_types()
    budget = default_budget(make_plan(request).estimate.quality)
    found = plan_fleet(request)
    assert found.quality_budget == budget
    assert all(replica.plan.estimate.quality <= budget + 1e-12 for replica in found.replicas)


ALL_AT_8_BITS = (15 / 255) ** 2
"""What all layers at 8 bits lose by default: 0.00346."""


@pytest.mark.parametrize("quality", [0.0, 0.00303, 0.0034, ALL_AT_8_BITS, 0.009])
def test_the_default_budget_does_not_turn_on_a_fourth_decimal(quality):
    """One pipeline lost 0.00303, so that no replica might have all layers at 8 bits."""
    assert default_budget(quality) == 0.01


@pytest.mark.parametrize(
    ("quality", "budget"), [(0.0095, 0.011), (0.1, 0.11), (0.303, 0.34), (0.96, 1.1), (4.59, 5.1)]
)
def test_the_default_budget_is_a_tenth_more_rounded_up(quality, budget):
    assert default_budget(quality) == budget


def test_the_default_budget_is_never_less_than_one_pipeline_loses():
    values = np.geomspace(1e-6, 10, 1000)
    budgets = [default_budget(float(value)) for value in values]
    assert budgets == sorted(budgets)
    assert all(
        value * 1.1 <= budget * (1 + 1e-9) for value, budget in zip(values, budgets, strict=True)
    )


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
    pools = DevicePools.of(cluster_of(("T4-16G", 2, 100), ("T4-16G", 2, 100)))
    assert pools.key((1, 0)) == pools.key((0, 1))
    assert pools.key((2, 0)) != pools.key((1, 1))
    slow = LinkSpec(between=("node0", "node1"), bytes_per_s=1e8, latency_s=1e-4)
    linked = DevicePools.of(cluster_of(("T4-16G", 2, 100), ("T4-16G", 2, 90), links=(slow,)))
    assert linked.key((1, 0)) != linked.key((0, 1))


def on_cores(threads: int, cores: int | None = 4, **options) -> PlanRequest:
    """A request on one host with three workers of so many threads, which share its cores."""
    group = DeviceGroup(type="cpu", count=3, threads=threads, memory_bytes=6 * 10**8)
    cluster = Cluster(name="host", nodes=(Node(name="host", devices=(group,), cores=cores),))
    values = {
        "model": model_spec(layers=4),
        "cluster": cluster,
        "workload": Workload(batch=4, prompt_tokens=64, new_tokens=16),
        "quality_budget": 1.0,
        "theta_s": 0.0,
    }
    return plan_request(**(values | options))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_fleets_on_shared_cores_equal_brute_force(threads):
    """With fewer workers beside it, a worker is faster, so a smaller part may make more."""
    request = on_cores(threads)
    want = best_by_brute_force(request, None)
    assert want > 0
    found = plan_fleet(request)
    assert found.status == "optimal"
    assert found.requests_per_s == pytest.approx(want, rel=TOLERANCE)


def test_replicas_do_not_share_the_cores_of_a_host():
    """Three replicas of 2 threads on 4 cores would each be priced as if it had 4."""
    own, shared = (plan_fleet(on_cores(2, cores)) for cores in (None, 4))
    assert len(own.replicas) == 3
    assert len(shared.replicas) == 2
    assert shared.requests_per_s < own.requests_per_s
    each = next(cut for cut in shared.others if cut.name == "one replica a device")
    assert each.replicas == 2
    at_rate = plan_fleet(on_cores(2), rate=0.1 * shared.requests_per_s)
    assert len(at_rate.replicas) <= 2
    for rate in (None, 0.1 * shared.requests_per_s):
        with pytest.raises(InfeasibleError, match="host has 4 cores for 6 threads of workers"):
            plan_fleet(on_cores(2), 3, rate=rate)


def test_a_part_has_the_plan_of_an_equal_part_that_was_searched():
    """Equal parts list their pools in other orders, as the cluster file does."""
    cluster = cluster_of(("T4-16G", 2, 90), ("V100-32G", 1, 120), ("T4-16G", 2, 90))
    request = plan_request(cluster=cluster, quality_budget=1.0, theta_s=0.0)
    pools = DevicePools.of(cluster)
    pricer = ReplicaEvaluator(request, pools)
    one, other = (2, 1, 0), (0, 1, 2)
    assert pools.key(one) == pools.key(other)
    assert pools.in_order(one) != pools.in_order(other)
    price = pricer.price(one, 4)
    plan = pricer.plan(other, 4, command="")
    assert pricer.searches == 1
    assert 4 / plan.estimate.latency_s == pytest.approx(price.requests_per_s, rel=1e-12)
    certify_plan(replace(request, cluster=pools.cluster_of(other)), plan)


def test_a_part_has_the_plan_of_a_larger_one_that_leaves_devices_out():
    slow = LinkSpec(between=("node0", "node1"), bytes_per_s=1e5, latency_s=0.1)
    cluster = cluster_of(("A100-40G", 1, 900), ("P100-12G", 2, 900), links=(slow,))
    request = plan_request(cluster=cluster, quality_budget=1.0, theta_s=0.0)
    pricer = ReplicaEvaluator(request, DevicePools.of(cluster))
    price = pricer.price((1, 2), 4)
    assert price.used == (1, 0)
    plan = pricer.plan((1, 0), 4, command="")
    assert pricer.searches == 1
    assert 4 / plan.estimate.latency_s == pytest.approx(price.requests_per_s, rel=1e-12)
    assert len(plan.cluster.devices) == 1


def test_a_search_that_was_ended_bounds_the_part_and_is_made_again():
    request = hurried(replace(two_types(quality_budget=1.0), theta_s=0.0), 1e6)
    pools = DevicePools.of(request.cluster)
    pricer = ReplicaEvaluator(request, pools)
    first = pricer.price(pools.counts, 8, share=1e-6)
    assert not first.is_final
    assert pricer.price(pools.counts, 8, share=1e-6) == replace(first, used=pools.counts)
    exact = pricer.price(pools.counts, 8, share=0.5)
    assert exact.proven
    assert first.requests_per_s <= exact.requests_per_s <= first.bound * (1 + TOLERANCE)


def test_parts_of_large_clusters_are_whole_pools_first():
    counts = (16, 16, 16)
    parts, is_complete = DevicePools.of(
        cluster_of(*((name, 16, 200) for name in ("A100-40G", "T4-16G", "L4")))
    ).parts()
    assert not is_complete
    assert len(parts) == len(set(parts)) <= MAX_PARTS
    wanted = {(a, b, c) for a in (0, 8, 16) for b in (0, 8, 16) for c in (0, 8, 16)} - {(0, 0, 0)}
    assert wanted <= set(parts)
    assert all(
        all(0 <= own <= most for own, most in zip(part, counts, strict=True)) for part in parts
    )


def hurried(request: PlanRequest, seconds: float) -> PlanRequest:
    """Return a request whose time limit is so many readings of the clock."""
    return replace(request, time_limit_s=seconds, deadline=Deadline(seconds, CountingClock()))


def lab(*, t4s: int, **options) -> PlanRequest:
    """A request on two A100s, and two nodes of so many T4s."""
    nodes = [("A100-40G", 2, 300), ("T4-16G", t4s, 120), ("T4-16G", t4s, 120)]
    values = {
        "model": model_spec(layers=8),
        "cluster": cluster_of(*(node for node in nodes if node[1])),
        "workload": Workload(batch=32, prompt_tokens=64, new_tokens=16),
        "quality_budget": 1.0,
    }
    return plan_request(**(values | options))


def test_the_obvious_cuts_are_planned_when_time_is_short():
    found = plan_fleet(hurried(lab(t4s=4), 400.0))
    assert all(other.requests_per_s is not None for other in found.others)
    assert all(
        other.requests_per_s <= found.requests_per_s * (1 + TOLERANCE) for other in found.others
    )


@pytest.mark.parametrize("seconds", [1.0, 30.0, 100.0, 200.0, 250.0, 400.0, 550.0, 800.0, 1200.0])
def test_more_devices_never_make_less(seconds):
    few, many = (plan_fleet(hurried(lab(t4s=n), seconds)) for n in (0, 6))
    assert many.requests_per_s >= few.requests_per_s * (1 - TOLERANCE)


TYPES = ("V100-32G", "T4-16G", "P100-12G", "A100-40G", "L4")


def request_of_types(seed: int) -> PlanRequest:
    """A random request on two or three types of devices, each on one or two nodes."""
    rng = np.random.default_rng(seed)
    model = model_spec(layers=int(rng.integers(4, 13)), kinds=int(rng.integers(1, 3)))
    types = rng.choice(TYPES, size=int(rng.integers(2, 4)), replace=False)
    groups = [
        (str(name), int(rng.integers(1, 3)), int(rng.integers(60, 500)))
        for name in types
        for _ in range(int(rng.integers(1, 3)))
    ]
    return plan_request(
        model=model,
        cluster=cluster_of(*(groups[place] for place in rng.permutation(len(groups)))),
        workload=Workload(
            batch=int(rng.choice([4, 8, 16])),
            prompt_tokens=int(rng.integers(8, 200)),
            new_tokens=int(rng.integers(1, 40)),
        ),
        sensitivity=sensitivity(model, seed) if rng.random() < 0.5 else None,
        quality_budget=float(rng.choice([0.0, 0.05, 0.5, 2.0])),
    )


def check_without_each_type(seed: int, seconds: float) -> None:
    """Compare a fleet with those of its cluster without a type, in the same time."""

    def rate(cluster: Cluster) -> float:
        try:
            found = plan_fleet(hurried(replace(request, cluster=cluster), seconds))
        except InfeasibleError:
            return 0.0
        return found.requests_per_s

    request = request_of_types(seed)
    found = rate(request.cluster)
    for name in {device.type for device in request.cluster.devices}:
        nodes = tuple(node for node in request.cluster.nodes if node.devices[0].type != name)
        assert found >= rate(Cluster(name="rest", nodes=nodes)) * (1 - TOLERANCE), name


@pytest.mark.parametrize("seed", range(12))
def test_without_time_a_fleet_makes_no_less_than_without_a_type(seed):
    """What is planned whatever the time limit is enough, for each type left out."""
    check_without_each_type(seed, 1.0)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 4 else pytest.mark.slow) for n in range(40)]
)
def test_in_some_time_a_fleet_makes_no_less_than_without_a_type(seed):
    seconds = 10 ** np.random.default_rng(seed).uniform(2.0, 3.0)
    check_without_each_type(seed, float(round(seconds)))


@pytest.mark.parametrize("seconds", [20.0, 60.0, 120.0, 237.0])
def test_a_search_that_was_ended_never_bounds_a_part_below_its_plan(seconds):
    """A bound below 0 s became one below 0 requests a second, which ruled out every part in it."""
    request = hurried(replace(request_of_types(28), theta_s=0.0), seconds)
    pools = DevicePools.of(request.cluster)
    pricer = ReplicaEvaluator(request, pools)
    for part, batch in (((1, 0, 1), 16), ((0, 0, 1), 16), ((1, 0, 1), 8)):
        for share in (0.05, 0.25):
            found = pricer.price(part, batch, share=share)
            assert found.bound >= found.requests_per_s > 0


def test_rough_prices_are_of_plans_within_the_limits():
    request = replace(two_types(quality_budget=0.5), theta_s=0.0)
    pricer = ReplicaEvaluator(request, DevicePools.of(request.cluster))
    for part in ((2, 0), (2, 2), (1, 0)):
        rough = pricer.price_roughly(part, 8)
        plan = pricer.plan(part, 8, command="")
        assert rough.requests_per_s == pytest.approx(8 / plan.estimate.latency_s, rel=1e-12)
        certify_plan(replace(request, cluster=plan.cluster, workload=plan.workload), plan)
        exact = pricer.price(part, 8)
        assert rough.requests_per_s <= exact.requests_per_s * (1 + TOLERANCE)


@pytest.mark.parametrize("seconds", [200.0, 400.0, 800.0])
def test_a_larger_budget_never_makes_less(seconds):
    rates = [
        plan_fleet(hurried(lab(t4s=4, quality_budget=budget), seconds)).requests_per_s
        for budget in (0.0, 0.0035, 1.0, 5.0)
    ]
    assert rates == sorted(rates)


def test_a_budget_that_binds_is_named_with_what_would_lift_it():
    found = plan_fleet(two_types(quality_budget=0.0))
    assert (found.limits.budget, found.limits.bits) == (0.0035, 8)
    assert found.limits.time_limit_s is None
    lifted = plan_fleet(two_types(quality_budget=0.0035))
    assert lifted.requests_per_s >= found.requests_per_s
    assert lifted.quality_budget >= ALL_AT_8_BITS
    most = plan_fleet(two_types(quality_budget=5.0))
    assert (most.limits.budget, most.limits.bits) == (None, None)


def test_a_time_limit_that_ends_the_search_is_named():
    found = plan_fleet(hurried(lab(t4s=6), 150.0))
    assert found.status == "feasible"
    assert found.limits.time_limit_s == 150.0
    assert found.limits.planned < found.limits.candidates
    assert plan_fleet(two_types(quality_budget=1.0)).limits.time_limit_s is None


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
