"""Forecasts: equal to the formula where that is exact, and the effects only simulation covers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.builders import cluster_of, plan_request
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.assigner import forecast as forecast_module
from llmpq.assigner import make_plan
from llmpq.assigner.forecast import forecast, forecast_run
from llmpq.assigner.request import costs_of
from llmpq.costmodel.tables.profiles import StageOverhead
from llmpq.sim.costs import PlanCosts, PlanEngineCosts, StepSize
from llmpq.spec.cluster import LinkSpec
from llmpq.spec.fields import Fields, from_json, to_json
from llmpq.spec.plan import MicroBatching, Plan, Schedule, StageAssignment
from llmpq.spec.precision import Phase
from llmpq.spec.workload import TraceRequest, Workload

WORK = Workload(batch=8, prompt_tokens=64, new_tokens=30)
CLUSTER = cluster_of(("V100-32G", 1, 90), ("T4-16G", 2, 60))
REQUEST = plan_request(cluster=CLUSTER, workload=WORK)
COSTS = costs_of(REQUEST)
PLAN = make_plan(REQUEST)
LAYERS = PLAN.model.num_layers


def plan_with(cuts, prefill, decode, workload=WORK, bits=8):
    """Return a plan of our own decision; ``cuts`` are the ends of its stages."""
    starts = (0, *cuts[:-1])
    stages = tuple(
        StageAssignment(
            rank=rank, device=rank, first_layer=first, end_layer=end, bits=(bits,) * (end - first)
        )
        for rank, (first, end) in enumerate(zip(starts, cuts, strict=True))
    )
    used = PLAN.estimate.stages[:1] * len(stages)
    return replace(
        PLAN,
        stages=stages,
        workload=workload,
        micro_batching=MicroBatching(prefill=prefill, decode=decode),
        dropped_devices=tuple(range(len(stages), len(CLUSTER.devices))),
        estimate=replace(PLAN.estimate, stages=used, forecast=None),
    )


def test_every_plan_carries_its_forecast_and_keeps_it_in_its_file():
    assert PLAN.estimate.forecast == forecast(PLAN, COSTS)
    named = replace(PLAN, provenance=replace(PLAN.provenance, command="test"))
    again = from_json(Plan, Fields(to_json(named), "plan"))
    assert again.estimate.forecast == PLAN.estimate.forecast
    assert again.estimate.predicted_s == PLAN.estimate.forecast.latency_s


def test_one_stage_takes_the_sum_of_its_steps():
    plan = plan_with((LAYERS,), 8, 8)
    found = forecast(plan, COSTS)
    (stage,) = found.stages
    assert found.prefill_s == pytest.approx(stage.prefill_s)
    assert found.decode_s == pytest.approx(stage.decode_busy_s)
    # Contexts grow evenly, so the mean round is the round at mean context (roofline: linear).
    assert found.decode_s == pytest.approx(29 * stage.decode_s, rel=1e-3)


def test_formula_and_forecast_take_the_time_of_chunks():
    work = Workload(batch=2, prompt_tokens=1800, new_tokens=4)
    request = plan_request(cluster=cluster_of(("V100-32G", 1, 2000)), workload=work)
    plan, costs = make_plan(request), costs_of(request)
    device, sizes = plan.cluster.devices[0], plan.micro_batching
    layers = zip(costs.model.layer_kinds, plan.bits, strict=True)
    steps_s = sum(
        costs.layer_steps_s(device, Phase.PREFILL, bits, sizes.prefill, 1800, kind)
        for kind, bits in layers
    )
    steps_s += costs.master_s(device, Phase.PREFILL, sizes.prefill, 1800)
    found = plan.estimate.forecast.stages[0].prefill_s
    assert found == pytest.approx(plan.estimate.stages[0].prefill_s) == pytest.approx(steps_s)
    assert plan.estimate.forecast.prefill_s == pytest.approx(2 / sizes.prefill * steps_s)


@pytest.mark.parametrize(("stages", "bits"), [(1, 4), (1, 16), (3, 8)])
def test_the_cost_of_a_row_is_what_steps_of_the_engine_take(stages, bits):
    plan = plan_with((2, 4, LAYERS)[-stages:], 8, 8, bits=bits)
    costs = PlanEngineCosts(PlanCosts(plan, COSTS))
    context = WORK.mean_context_tokens

    def step_s(rows: int) -> float:
        shape = StepSize(rows, rows, rows, rows * context, ())
        hops = [costs.hop(stage, shape) for stage in range(stages)]
        seconds = sum(costs.stage_s(stage, shape) for stage in range(stages))
        return seconds + costs.project_s(shape) + sum(2 * hop.end_s + hop.delay_s for hop in hops)

    found = forecast(plan, COSTS).row_cost
    assert step_s(8) == pytest.approx(step_s(1) * (1 + 7 * found), rel=1e-3)
    assert 0 < found < 0.2  # GPUs read the weights for all rows together


def test_a_ragged_last_micro_batch_costs_what_it_holds_and_not_a_full_one():
    whole = forecast(plan_with((LAYERS,), 3, 8), COSTS)
    full = whole.stages[0].prefill_s
    assert 2 * full < whole.prefill_s < 3 * full


def test_one_micro_batch_on_several_stages_waits_for_every_stage_and_link():
    found = forecast(plan_with((2, 4, LAYERS), 8, 8), COSTS)
    assert found.prefill_s > sum(stage.prefill_s for stage in found.stages)
    busy = sum(stage.decode_busy_s for stage in found.stages)
    assert found.decode_s > busy
    assert found.decode_s == pytest.approx(busy, rel=0.2)


def test_two_micro_batches_overlap():
    apart = forecast(plan_with((2, 4, LAYERS), 8, 8), COSTS)
    together = forecast(plan_with((2, 4, LAYERS), 4, 4), COSTS)
    busy = max(stage.decode_busy_s for stage in together.stages)
    assert busy < together.decode_s < 2 * apart.decode_s


def test_workers_on_one_core_share_it():
    plan = plan_with((2, 4, LAYERS), 4, 4)
    own = forecast(plan, COSTS)
    nodes = tuple(
        replace(node, name="all", cores=1, devices=node.devices) for node in CLUSTER.nodes[:1]
    )
    one_node = replace(
        CLUSTER,
        nodes=(replace(nodes[0], devices=tuple(g for n in CLUSTER.nodes for g in n.devices)),),
        links=(),
    )
    shared = replace(COSTS, cluster=one_node)
    found = forecast(replace(plan, cluster=one_node), shared)
    busy = sum(stage.decode_busy_s + stage.prefill_busy_s for stage in found.stages)
    assert found.latency_s >= busy * (1 - 1e-9)
    assert found.latency_s > own.latency_s


def test_stage_overhead_counts_once_a_stage_and_step():
    extra = StageOverhead(prefill=0.0, decode=1e-3)
    costs = replace(COSTS, stage=(extra,) * len(COSTS.specs))
    plan = plan_with((2, 4, LAYERS), 8, 8)
    more = forecast(plan, costs).latency_s - forecast(plan, COSTS).latency_s
    assert more == pytest.approx(29 * 3 * 1e-3)


def test_thinned_rounds_hardly_change_the_forecast(monkeypatch):
    work = replace(WORK, new_tokens=200)
    plan = plan_with((3, LAYERS), 4, 4, workload=work)
    exact = forecast(plan, COSTS)
    monkeypatch.setattr(forecast_module, "MAX_STEPS", 100)
    thinned = forecast(plan, COSTS)
    assert thinned.latency_s == pytest.approx(exact.latency_s, rel=0.02)
    assert thinned.stages[1].decode_busy_s == pytest.approx(exact.stages[1].decode_busy_s, rel=0.02)


@settings(max_examples=40)
@given(
    cut=st.integers(1, LAYERS - 1),
    prefill=st.integers(1, 8),
    decode=st.integers(1, 8),
    new_tokens=st.integers(1, 20),
)
def test_no_run_is_faster_than_its_busiest_stage_or_slower_than_no_overlap(
    cut, prefill, decode, new_tokens
):
    work = replace(WORK, new_tokens=new_tokens)
    plan = plan_with((cut, LAYERS), prefill, decode, workload=work)
    found = forecast(plan, COSTS)
    busy = [stage.prefill_busy_s + stage.decode_busy_s for stage in found.stages]
    assert found.latency_s >= max(busy) * (1 - 1e-9)
    steps = new_tokens * 8
    hop = COSTS.send_s(*(plan.device_of(s) for s in plan.stages), "prefill", prefill, 64)
    assert found.latency_s <= sum(busy) + 2 * steps * hop + 1e-9


@given(factor=st.floats(1.0, 4.0))
@settings(max_examples=20)
def test_every_trip_of_one_micro_batch_takes_every_link_once(factor):
    plan = plan_with((2, LAYERS), 8, 8)
    nodes = [node.name for node in CLUSTER.nodes]
    ends = (nodes[0], nodes[1])

    def latency(latency_s):
        link = LinkSpec(between=ends, bytes_per_s=1e9, latency_s=latency_s)
        comm = replace(COSTS.comm, measured=(link,))
        return forecast(plan, replace(COSTS, comm=comm)).latency_s

    assert latency(1e-3 * factor) == pytest.approx(
        latency(1e-3) + 30 * 2 * 1e-3 * (factor - 1), rel=1e-6
    )


HYBRID = Schedule(policy="hybrid")


def requests(count, prompt_tokens=WORK.prompt_tokens, new_tokens=WORK.new_tokens):
    one = TraceRequest(arrival_s=0.0, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    return [one] * count


def test_the_planned_requests_have_the_plan_s_forecast():
    planned, found = PLAN.estimate.forecast, forecast_run(PLAN, COSTS, requests(8), schedule=HYBRID)
    assert found.latency_s == pytest.approx(planned.latency_s, rel=1e-3)
    assert found.prefill_s == pytest.approx(planned.prefill_s, rel=1e-3)
    for own, other in zip(found.stages, planned.stages, strict=True):
        assert own.prefill_s == pytest.approx(other.prefill_s, rel=1e-3)
        assert own.decode_s == pytest.approx(other.decode_s, rel=1e-2)  # median, not middle round
        assert own.decode_busy_s == pytest.approx(other.decode_busy_s, rel=1e-3)


def test_other_requests_have_a_forecast_of_their_own():
    planned = PLAN.estimate.forecast.latency_s
    more = forecast_run(PLAN, COSTS, requests(40), schedule=HYBRID).latency_s
    assert 4 * planned < more < 5.1 * planned
    short = forecast_run(PLAN, COSTS, requests(8, 4, 3), schedule=HYBRID).latency_s
    assert short < planned / 5


def test_the_plan_s_own_seconds_count_where_its_tables_are_not_here():
    plan = plan_with((LAYERS,), 8, 8)
    stage = replace(PLAN.estimate.stages[0], prefill_s=4.0, decode_s=0.5)
    plan = replace(plan, estimate=replace(plan.estimate, stages=(stage,)))
    found = forecast_run(plan, COSTS, requests(8), schedule=HYBRID)
    assert found.prefill_s == pytest.approx(4.0)
    assert found.latency_s == pytest.approx(4.0 + 29 * 0.5, rel=1e-3)
    assert found.stages[0].prefill_s == pytest.approx(4.0)


def test_a_part_of_a_long_run_stands_for_the_whole(monkeypatch):
    whole = forecast_run(PLAN, COSTS, requests(400), schedule=HYBRID).latency_s
    monkeypatch.setattr(forecast_module, "MAX_RUN_STEPS", 2000)
    part = forecast_run(PLAN, COSTS, requests(400), schedule=HYBRID).latency_s
    assert part == pytest.approx(whole, rel=0.05)
    assert part != whole
    monkeypatch.setattr(forecast_module, "MAX_RUN_STEPS", 100)
    assert forecast_run(PLAN, COSTS, requests(400), schedule=HYBRID) is None


def test_a_plan_without_seconds_has_no_forecast():
    plan = replace(PLAN, estimate=replace(PLAN.estimate, latency_s=0.0))
    assert forecast_run(plan, COSTS, requests(8), schedule=HYBRID) is None
    assert forecast_run(PLAN, COSTS, [], schedule=HYBRID) is None
