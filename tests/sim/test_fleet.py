"""Simulated fleets: one replica is one engine; balancers and statistics over time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.queue_order import queue_order
from llmpq.routing import BALANCERS, WorkloadMeans, load_balancer
from llmpq.sim.costs import Hop, linear_layout
from llmpq.sim.engine import SimulatedEngine, simulate_engine
from llmpq.sim.fleet import FleetReplica, engine_stats, replica_capacity, simulate_fleet
from llmpq.spec.workload import TraceRequest, draw_arrivals
from reproduce.worker_costs import WorkerCosts

LIMITS = EngineLimits(token_budget=128, max_sequences=32, num_blocks=200, block_size=16)
FCFS = queue_order("fcfs")
COSTS = WorkerCosts(lambda shape: 0.01 + 0.0001 * shape.tokens)


def replica(speed=1.0, **limits):
    costs = WorkerCosts(lambda shape: COSTS.stage_s(0, shape) / speed)
    return FleetReplica(costs=costs, limits=replace(LIMITS, **limits), order=FCFS)


def trace_of(count, rate, seed=0):
    times = draw_arrivals("poisson", count, rate, seed=seed)
    return [
        TraceRequest(
            arrival_s=at, prompt_tokens=16 + 61 * number % 400, new_tokens=4 + 37 * number % 60
        )
        for number, at in enumerate(times)
    ]


@pytest.mark.parametrize("balancer", BALANCERS)
def test_one_replica_is_one_engine(balancer):
    trace = trace_of(60, 8.0)
    fleet = simulate_fleet([replica()], load_balancer(balancer), trace)
    assert fleet.total == simulate_engine(COSTS, LIMITS, FCFS, trace)


@pytest.mark.parametrize("balancer", BALANCERS)
def test_every_request_ends_once_on_the_replica_that_it_was_routed_to(balancer):
    trace = trace_of(80, 20.0)
    fleet = simulate_fleet([replica(), replica(2.0), replica()], load_balancer(balancer), trace)
    assert [record.request for record in fleet.total.requests] == list(range(80))
    for index, report in enumerate(fleet.replicas):
        routed = {number for number, chosen in enumerate(fleet.routed) if chosen == index}
        assert {record.request for record in report.requests} == routed
    assert fleet.total.steps == sum(report.steps for report in fleet.replicas)


def test_statistics_count_the_blocks_of_a_running_prompt_once():
    engine = SimulatedEngine(COSTS, LIMITS, FCFS)
    for number, tokens in enumerate((1600, 2000)):  # of 3200; the second waits for memory
        engine.add(number, TraceRequest(arrival_s=0.0, prompt_tokens=tokens, new_tokens=4))
    engine.advance(0.01)
    stats = engine_stats(engine, LIMITS)
    assert (stats.running, stats.waiting, stats.free_tokens) == (1, 1, 1600)
    assert stats.waiting_tokens == 2000
    assert stats.queued_tokens == 1600 - 128 - 1 + 2000


def test_round_robin_gives_each_replica_every_third_request():
    fleet = simulate_fleet([replica()] * 3, load_balancer("round_robin"), trace_of(30, 5.0))
    assert fleet.routed == (0, 1, 2) * 10


def test_sal_in_seconds_gives_a_faster_replica_more_work_and_is_faster():
    trace = trace_of(300, 24.0)
    fleet = [replica(1.0), replica(4.0)]
    steps = simulate_fleet(fleet, load_balancer("sal"), trace)
    seconds = simulate_fleet(fleet, load_balancer("sal_seconds"), trace)
    assert seconds.routed.count(1) > steps.routed.count(1)

    def mean(report):
        return report.total.engine_json()["time_to_first_token_s"]["mean"]

    assert mean(seconds) < mean(steps)


def test_old_statistics_are_worse_than_new_ones():
    """Requests are known to the router at once; what the engines did since is not."""
    trace = trace_of(400, 30.0)
    mean_s = {}
    for poll_s in (0.1, 2.0):
        fleet = [replica(), replica(), replica(4.0)]
        found = simulate_fleet(fleet, load_balancer("sal_seconds"), trace, poll_s=poll_s)
        mean_s[poll_s] = found.total.engine_json()["time_to_first_token_s"]["mean"]
    assert mean_s[0.1] < 0.8 * mean_s[2.0]


def test_capacity_of_one_stage_is_its_step():
    means = WorkloadMeans(prompt_tokens=150.0, new_tokens=100.0)
    found = replica_capacity(COSTS, LIMITS, means)
    assert (found.kv_tokens, found.token_budget) == (3200, 128)
    assert found.prefill_step_s == pytest.approx(0.01 + 0.0128)
    assert found.decode_step_s == pytest.approx(0.01 + 0.0016)  # 3200 / 200 sequences


class TwoStages:
    """The first stage takes 10 ms, the second 30 ms, the master 5 ms, a message 1 + 2 + 1 ms."""

    layout = linear_layout(2)

    def stage_s(self, stage, _):
        return (0.01, 0.03)[stage]

    def project_s(self, _):
        return 0.005

    def hop(self, _, __):
        return Hop(0.001, 0.002)


def test_capacity_of_a_pipeline_is_its_slowest_stage_or_its_length():
    means = WorkloadMeans()
    two = replica_capacity(TwoStages(), replace(LIMITS, steps_in_flight=2), means)
    assert two.prefill_step_s == pytest.approx(0.031)
    assert two.decode_step_s == pytest.approx(2 * 0.031)
    one = replica_capacity(TwoStages(), LIMITS, means)
    assert one.prefill_step_s == one.decode_step_s == pytest.approx(0.045 + 2 * 0.004)
