"""Fleets for the least time to first token, compared with brute force over all partitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers.builders import cluster_of, model_spec, plan_request, uniform
from helpers.clocks import CountingClock
from helpers.fleets import partitions, plans_of

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.constraints.resolve import Deadline
from llmpq.assigner.fleet import plan_fleet
from llmpq.assigner.fleet.rate_search import (
    ReplicaSpeed,
    mean_ttft_s,
    split_arrivals,
)
from llmpq.assigner.fleet.search import batches
from llmpq.assigner.request import costs_of
from llmpq.batching import uniform_depth
from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.queue_order import queue_order
from llmpq.errors import InfeasibleError, SpecError
from llmpq.routing import load_balancer
from llmpq.sim.costs import PlanCosts, PlanEngineCosts
from llmpq.sim.fleet import FleetReplica, simulate_fleet
from llmpq.spec.precision import Phase
from llmpq.spec.workload import Workload, draw_trace


def random_speeds(rng: np.random.Generator) -> list[ReplicaSpeed]:
    return [
        ReplicaSpeed(
            way_s=float(rng.uniform(0.1, 2.0)),
            prefill_s=float(rng.uniform(0.05, 0.5)),
            decode_s=float(rng.choice([0.0, rng.uniform(0.0, 1.0)])),
        )
        for _ in range(rng.integers(1, 5))
    ]


def test_the_wait_is_that_of_a_simulated_queue():
    rng = np.random.default_rng(0)
    speed = ReplicaSpeed(way_s=1.5, prefill_s=1.0, decode_s=0.0)
    for use in (0.3, 0.7):
        gaps = rng.exponential(1.0 / use, 60_000)
        wait_s, waits = 0.0, []
        for gap in gaps:
            wait_s = max(0.0, wait_s + 1.0 - gap)
            waits.append(wait_s)
        assert speed.ttft_s(use) == pytest.approx(1.5 + np.mean(waits), rel=0.04)


@pytest.mark.parametrize("seed", range(20))
def test_the_marginal_time_is_the_derivative(seed):
    for speed in random_speeds(np.random.default_rng(seed)):
        for use in (0.0, 0.2, 0.5, 0.9):
            rate, step = use * speed.most_requests_per_s, 1e-6
            high, low = rate + step, max(0.0, rate - step)
            slope = (high * speed.ttft_s(high) - low * speed.ttft_s(low)) / (high - low)
            assert speed.marginal_s(rate) == pytest.approx(slope, rel=1e-4)
            assert speed.rate_at(speed.marginal_s(rate)) == pytest.approx(rate, abs=1e-7)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_shares_have_a_smaller_mean(seed):
    rng = np.random.default_rng(seed)
    speeds = random_speeds(rng)
    most = np.array([speed.most_requests_per_s for speed in speeds])
    rate = float(most.sum() * rng.uniform(0.05, 1.0))
    found = split_arrivals(speeds, rate)
    assert sum(found) == pytest.approx(rate)
    assert (np.array(found) <= most * (1 + 1e-9)).all()
    best = mean_ttft_s(speeds, found)
    for _ in range(200):
        shares = rng.dirichlet(np.full(len(speeds), rng.choice([0.2, 1.0, 5.0]))) * rate
        near = np.array(found) + rng.uniform(0, 1) * (shares - found)
        if (near <= most).all():
            assert best <= mean_ttft_s(speeds, near.tolist()) * (1 + 1e-9)


def test_more_arrivals_than_all_replicas_take_are_an_error():
    speed = ReplicaSpeed(way_s=1.0, prefill_s=0.5, decode_s=0.5)
    with pytest.raises(InfeasibleError, match=r"answer 1\.98 requests/s, expected at least 2"):
        split_arrivals([speed, speed], 2.0)


def random_request(seed: int) -> PlanRequest:
    rng = np.random.default_rng(seed)
    types = rng.choice(["V100-32G", "T4-16G", "P100-12G", "A100-40G"], size=2)
    counts = ((1, 1), (2, 1), (1, 2), (2, 2))[seed % 4]
    return plan_request(
        model=model_spec(layers=int(rng.integers(1, 6))),
        cluster=cluster_of(
            *((str(name), count, int(rng.integers(60, 400)))
              for name, count in zip(types, counts, strict=True))
        ),
        workload=Workload(
            batch=int(rng.integers(1, 7)),
            prompt_tokens=int(rng.integers(8, 200)),
            new_tokens=int(rng.integers(1, 40)),
        ),
        quality_budget=float(rng.choice([0.05, 0.5, 2.0])),
        theta_s=0.0,
    )  # fmt: skip


def best_by_brute_force(request: PlanRequest, rate: float, number: int | None) -> float:
    plan, best = plans_of(request), float("inf")
    for found in partitions(request.cluster.devices):
        if not found or (number is not None and len(found) != number):
            continue
        for sizes in product(batches(request.workload.batch), repeat=len(found)):
            if sum(sizes) > request.workload.batch:
                continue
            plans = [plan(part, size) for part, size in zip(found, sizes, strict=True)]
            speeds = [ReplicaSpeed.of(one) for one in plans if one is not None]
            if len(speeds) < len(plans):
                continue
            if sum(speed.most_requests_per_s for speed in speeds) >= rate:
                best = min(best, mean_ttft_s(speeds, split_arrivals(speeds, rate)))
    return best


def check_against_brute_force(seed: int) -> bool:
    request = random_request(seed)
    number = int(np.random.default_rng(seed).integers(1, 4)) if seed % 5 == 0 else None
    if number is not None:
        number = min(number, len(request.cluster.devices))
    try:
        most = plan_fleet(request).requests_per_s
    except InfeasibleError:
        return False
    rate = most * float(np.random.default_rng(seed).choice([0.05, 0.3, 0.6, 0.9, 1.3]))
    want = best_by_brute_force(request, rate, number)
    if want == float("inf"):
        with pytest.raises(InfeasibleError, match=r"requests/s: .* at most|do not fit"):
            plan_fleet(request, number, rate=rate)
        return False
    found = plan_fleet(request, number, rate=rate)
    assert found.status == "optimal"
    assert found.ttft_s == pytest.approx(want, rel=1e-5)
    assert found.ttft_bound_s == pytest.approx(want, rel=1e-5)
    rates = [replica.arrivals_per_s for replica in found.replicas]
    assert sum(rates) == pytest.approx(rate)
    speeds = [ReplicaSpeed.of(replica.plan) for replica in found.replicas]
    assert mean_ttft_s(speeds, rates) == pytest.approx(found.ttft_s)
    assert number is None or len(found.replicas) == number
    taken = [device for replica in found.replicas for device in replica.devices]
    assert sorted([*taken, *found.idle]) == list(range(len(request.cluster.devices)))
    if number is None:
        others = [other.ttft_s for other in found.others if other.ttft_s is not None]
        assert all(other >= found.ttft_s * (1 - 1e-6) for other in others)
    return len(found.replicas) > 1


@pytest.mark.parametrize(
    "block", [pytest.param(b, marks=[] if b < 1 else pytest.mark.slow) for b in range(40)]
)
def test_fleets_at_a_rate_equal_brute_force_over_all_partitions(block):
    for seed in range(5 * block, 5 * block + 5):
        check_against_brute_force(seed)


def two_types(**options) -> PlanRequest:
    return plan_request(
        model=model_spec(layers=6),
        cluster=cluster_of(("A100-40G", 2, 300), ("T4-16G", 2, 120)),
        workload=Workload(batch=8, prompt_tokens=64, new_tokens=16),
        quality_budget=1.0,
        **options,
    )


def test_more_arrivals_never_have_a_smaller_ttft():
    low, high = (plan_fleet(two_types(), rate=rate) for rate in (1.0, 50.0))
    assert low.ttft_s < high.ttft_s


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(SpecError, match="rate: found"):
        plan_fleet(two_types(), rate=rate)


def test_a_large_cluster_gets_a_valid_bound():
    request = plan_request(
        model=model_spec(layers=6),
        cluster=cluster_of(*((name, 16, 200) for name in ("A100-40G", "T4-16G", "L4"))),
        workload=Workload(batch=64, prompt_tokens=64, new_tokens=16),
        quality_budget=1.0,
        deadline=Deadline(1000.0, CountingClock()),
        time_limit_s=1000.0,
    )
    found = plan_fleet(request, rate=5.0)
    assert found.status == "feasible"
    assert 0 < found.ttft_bound_s <= found.ttft_s
    fastest = make_plan(replace(request, workload=replace(request.workload, batch=1)))
    assert ReplicaSpeed.of(fastest).way_s >= found.ttft_bound_s


@pytest.mark.parametrize(
    ("devices", "use", "most"), [(1, 0.2, 1.25), (1, 0.6, 1.25), (2, 0.2, 1.25), (2, 0.6, 1.7)]
)
def test_the_forecast_is_near_the_simulated_engine(devices, use, most):
    """A busy pipeline decodes faster than the forecast: its steps have fewer rows than planned."""
    request = plan_request(
        model=model_spec(layers=24, hidden=4096),
        cluster=cluster_of(("A100-40G", devices, 40_000)),
        workload=Workload(batch=16, prompt_tokens=512, new_tokens=64),
        bits=(16,),
    )
    plan = make_plan(request)
    speed = ReplicaSpeed.of(plan)
    rate = use * speed.most_requests_per_s
    trace = draw_trace(400, uniform(512, 512), uniform(64, 64), requests_per_s=rate)
    engine = FleetReplica(
        costs=PlanEngineCosts(PlanCosts(plan, costs_of(request, plan.cluster))),
        limits=EngineLimits(
            token_budget=1024,
            max_sequences=256,
            num_blocks=16 * 36,
            block_size=16,
            prefix_caching=False,
            steps_in_flight=uniform_depth(len(plan.stages)).max_in_flight(Phase.DECODE),
        ),
        order=queue_order("fcfs"),
    )
    report = simulate_fleet([engine], load_balancer("round_robin"), trace).total.engine_json()
    assert 0.8 <= speed.ttft_s(rate) / report["time_to_first_token_s"]["mean"] <= most
