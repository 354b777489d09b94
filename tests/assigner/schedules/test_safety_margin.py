"""A latency bound is kept with the requested confidence, by the uncertainty of the tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.builders import model_spec

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import costs_of
from llmpq.assigner.schedules.plan import (
    ScheduleRequest,
    best_of_policies,
    safety_factor,
    simulated,
    with_schedule,
)
from llmpq.batching import percentile
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable, write_latency_table
from llmpq.spec.workload import Workload, truncated_normal

Z95 = 1.6449
LAW = ScheduleRequest(
    prompt_tokens=truncated_normal(20, 8, 32),
    new_tokens=truncated_normal(20, 8, 40),
    sla="queries",
)


def seconds(phase, batch, tokens):
    """Return what one layer takes: exactly the paper's features."""
    rows = batch * tokens if phase is Phase.PREFILL else batch
    return 1e-3 + 2e-5 * rows + 1e-7 * batch * tokens


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """A plan on two processors with a table, and its costs."""
    file = tmp_path_factory.mktemp("tables") / "cpu.csv"
    samples = [
        LatencySample(
            phase=phase, bits=16, batch=batch, tokens=tokens, seconds=seconds(phase, batch, tokens)
        )
        for phase in Phase
        for batch in (1, 2, 4, 8, 16)
        for tokens in (8, 16, 32, 72)
    ]
    write_latency_table(
        file,
        LatencyTable(samples=tuple(samples), provenance=(("device", "cpu"),)),
    )
    group = DeviceGroup(type="cpu", count=2, threads=1, profile=str(file))
    request = PlanRequest(
        model=model_spec(layers=6, hidden=512),
        cluster=Cluster(name="c", nodes=(Node(name="n", devices=(group,)),)),
        workload=Workload(batch=32, prompt_tokens=32, new_tokens=40),
        dtype="float32",
        kv_bits=32,
        bits=(16,),
    )
    plan = make_plan(request, "uniform", command="test")
    return plan, costs_of(request, plan.cluster)


def played_p99_s(plan, costs):
    report = simulated(plan, costs, LAW)
    return percentile([record.service_s for record in report.requests], 99)


def test_the_safety_factor_grows_with_the_deviation_of_the_shapes(problem):
    plan, costs = problem
    assert safety_factor(plan, costs, 0.5) == 1.0
    assert safety_factor(plan, costs, 0.95) > safety_factor(plan, costs, 0.7) >= 1.0
    wider = replace(plan, micro_batching=replace(plan.micro_batching, decode=32))
    assert plan.micro_batching.decode <= 16 < 32  # 32 is outside the measured batches
    assert safety_factor(wider, costs, 0.95) > 1.01 * safety_factor(plan, costs, 0.95)


def test_a_roofline_gives_no_margin(problem):
    plan, costs = problem
    guess = replace(costs, latency=(costs.latency[0].analytic,))
    assert safety_factor(plan, guess, 0.95) == 1.0


@pytest.mark.parametrize("confidence", [0.4, 1.0])
def test_a_confidence_out_of_range_raises(problem, confidence):
    with pytest.raises(SpecError, match=r"expected 0\.5 to less than 1"):
        safety_factor(*problem, confidence)


@pytest.mark.parametrize("policy", ["rra", "waa"])
def test_a_schedule_keeps_its_bound_with_the_safety_margin(problem, policy):
    plan, costs = problem
    free_s = played_p99_s(with_schedule(plan, costs, LAW, policy), costs)
    asked = replace(LAW, latency_bound_s=0.95 * free_s, confidence=0.95)
    made = with_schedule(plan, costs, asked, policy)
    assert played_p99_s(made, costs) * safety_factor(made, costs, 0.95) <= asked.latency_bound_s
    assert made.schedule.estimate.latency_bound_s == pytest.approx(asked.latency_bound_s)
    bold = with_schedule(plan, costs, replace(asked, confidence=0.5), policy)
    rates = [simulated(one, costs, LAW).throughput_requests_per_s for one in (made, bold)]
    assert rates[0] < rates[1]  # certainty has its price


@pytest.mark.slow  # each policy alone is in the gate
def test_the_best_policy_keeps_its_bound_with_the_safety_margin(problem):
    plan, costs = problem
    free_s = played_p99_s(best_of_policies(plan, costs, LAW), costs)
    asked = replace(LAW, latency_bound_s=0.95 * free_s, confidence=0.95)
    made = best_of_policies(plan, costs, asked)
    assert played_p99_s(made, costs) * safety_factor(made, costs, 0.95) <= asked.latency_bound_s


def test_a_bound_below_the_safety_margin_raises(problem):
    plan, costs = problem
    asked = replace(LAW, latency_bound_s=1e-3, confidence=0.95)
    with pytest.raises(InfeasibleError, match="RRA"):
        with_schedule(plan, costs, asked)
