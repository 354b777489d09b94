"""Plans for WAA: balanced cuts, both copies in memory, and stored estimates."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from helpers.builders import model_spec
from hypothesis import given
from hypothesis import strategies as st

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.forecast import evaluate_plan, excess_bytes, stage_memory
from llmpq.assigner.request import costs_of
from llmpq.assigner.schedules.plan import ScheduleRequest, best_of_policies, with_schedule
from llmpq.assigner.schedules.waa import balanced_cuts, split_plans
from llmpq.errors import InfeasibleError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.fields import Fields, from_json
from llmpq.spec.plan import Plan, plan_text
from llmpq.spec.precision import BITS, Phase
from llmpq.spec.workload import Workload, truncated_normal

LAW = ScheduleRequest(
    prompt_tokens=truncated_normal(20, 8, 32), new_tokens=truncated_normal(10, 4, 16)
)


def problem(
    count: int = 3,
    memory_bytes: int = 2_000_000_000,
    bits: tuple[int, ...] = (16, 8),
    hidden: int = 512,
):
    groups = (
        DeviceGroup(type="L4", count=1, memory_bytes=memory_bytes),
        DeviceGroup(type="T4-16G", count=count - 1, memory_bytes=memory_bytes),
    )
    cluster = Cluster(name="c", nodes=(Node(name="n", devices=groups[: min(2, count)]),))
    request = PlanRequest(
        model=model_spec(layers=6, kinds=2, hidden=hidden),
        cluster=cluster,
        workload=Workload(batch=16, prompt_tokens=32, new_tokens=16),
        bits=bits,
        dtype="float16",
        kv_bits=16,
    )
    plan = make_plan(request, "uniform", command="test")
    return plan, costs_of(request, plan.cluster)


@given(
    layers=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    speeds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    room=st.integers(1, 40),
)
def test_no_cut_is_more_even(layers, speeds, room):
    def cost_of(speed):
        def cost(first: int, end: int) -> float:
            return sum(layers[first:end]) / speed if sum(layers[first:end]) <= room else math.inf

        return cost

    costs = [cost_of(speed) for speed in speeds]

    def dearest(cuts) -> float:
        return max(cost(*run) for cost, run in zip(costs, pairwise(cuts), strict=True))

    inner = combinations(range(1, len(layers)), len(speeds) - 1)
    best = min((dearest((0, *cuts, len(layers))) for cuts in inner), default=math.inf)
    found = balanced_cuts(costs, len(layers))
    assert math.isinf(best) if found is None else dearest(found) == best


def test_every_split_holds_both_copies_and_uses_every_device():
    plan, costs = problem()
    found = list(split_plans(plan, costs, prompt=20, context=26))
    assert {len(one.stages_of(Phase.PREFILL)) for one in found} == {1, 2}
    for one in found:
        assert one.bits == plan.bits
        assert sorted(stage.device for stage in one.stages) == [0, 1, 2]
        assert one.dropped_devices == ()


def test_equal_ends_are_tried_once():
    plan, costs = problem()  # an L4, then two alike
    found = [
        ([s.device for s in one.stages], len(one.stages_of(Phase.PREFILL)))
        for one in split_plans(plan, costs, prompt=20, context=26, balances=("time",))
    ]
    assert len(found) == 4  # one or two encode, at either end: the ends differ
    group = DeviceGroup(type="T4-16G", count=3, memory_bytes=2_000_000_000)
    cluster = Cluster(name="c", nodes=(Node(name="n", devices=(group,)),))
    alike = replace(plan, cluster=cluster)
    same = replace(costs, cluster=cluster, specs=costs.specs[1:], latency=costs.latency[1:])
    assert len(list(split_plans(alike, same, prompt=20, context=26, balances=("time",)))) == 2


def test_layers_are_split_by_time_or_memory_and_the_better_is_returned():
    plan, costs = problem()
    (node,) = plan.cluster.nodes
    large = replace(node.devices[0], memory_bytes=20_000_000_000)
    nodes = (replace(node, devices=(large, node.devices[1])),)
    plan = replace(plan, cluster=replace(plan.cluster, nodes=nodes))
    rates = {
        balances: with_schedule(
            plan, costs, replace(LAW, balances=balances), "waa"
        ).schedule.estimate.requests_per_s
        for balances in (("time",), ("memory",), ("time", "memory"))
    }
    assert rates["time", "memory"] == max(rates.values())
    cuts = {
        balance: {
            tuple((stage.first_layer, stage.end_layer) for stage in one.stages)
            for one in split_plans(plan, costs, prompt=20, context=26, balances=(balance,))
        }
        for balance in ("time", "memory")
    }
    assert cuts["time"] != cuts["memory"]  # the first device holds ten times as much


def test_a_waa_plan_evaluates_to_its_stored_estimate():
    plan, costs = problem()
    made = with_schedule(plan, costs, LAW, "waa")
    assert made.is_split
    assert made.schedule is not None
    assert made.schedule.policy == "waa"
    assert made.schedule.estimate is not None
    assert made.schedule.decode_batch <= plan.workload.batch
    assert from_json(Plan, Fields(json.loads(plan_text(made)), "file")) == made
    omega = np.zeros((made.model.num_layers, len(BITS)))
    omega[:, BITS.index(8)] = 0.01
    now, excess = evaluate_plan(made, costs, omega)
    assert excess == 0
    assert now.stages == made.estimate.stages
    assert now.forecast == made.estimate.forecast
    assert now.quality == pytest.approx(0.01 * made.bits.count(8))
    weights = [stage_memory(made, costs, stage).weights for stage in made.stages]
    one = sum(
        costs.layer_weight_bytes(made.cluster.devices[0], kind, bits)
        for kind, bits in zip(costs.model.layer_kinds, made.bits, strict=True)
    )
    assert sum(weights) == 2 * one


def test_a_bound_is_kept_and_an_impossible_one_raises():
    plan, costs = problem()
    free = with_schedule(plan, costs, LAW, "waa").schedule
    assert free is not None
    assert free.estimate is not None
    bound_s = 1.001 * free.estimate.latency_s
    tight = with_schedule(plan, costs, replace(LAW, latency_bound_s=bound_s), "waa").schedule
    assert tight is not None
    assert tight.estimate is not None
    assert tight.estimate.latency_s <= bound_s
    assert tight.estimate.requests_per_s <= free.estimate.requests_per_s
    with pytest.raises(InfeasibleError, match=r"no WAA schedule answers .* allow at least that"):
        with_schedule(plan, costs, replace(LAW, latency_bound_s=1e-6), "waa")


def test_memory_for_one_copy_alone_is_not_enough():
    _, costs = problem()
    runtime = max(costs.runtime_bytes(device) for device in costs.cluster.devices)
    # Three devices for 176 MB of layers: once they fit, twice they do not.
    tight, costs = problem(memory_bytes=runtime + 90_000_000, bits=(16,), hidden=1024)
    with pytest.raises(InfeasibleError, match=r"two copies of the layers take .* fewer bits"):
        with_schedule(tight, costs, LAW, "waa")
    assert best_of_policies(tight, costs, LAW).schedule.policy != "waa"


def test_one_device_cannot_be_split():
    plan, costs = problem(count=1)
    with pytest.raises(InfeasibleError, match="found one device, expected at least two"):
        with_schedule(plan, costs, LAW, "waa")


def test_micro_batches_count_in_memory():
    plan, costs = problem()
    made = with_schedule(plan, costs, LAW, "waa")
    assert excess_bytes(made, costs) == 0
    small = replace(made.micro_batching, prefill=1)
    large = replace(made.micro_batching, prefill=16)
    stage = made.stages[-1]
    held = [
        stage_memory(replace(made, micro_batching=sizes), costs, stage).kv
        for sizes in (small, large)
    ]
    assert held[1] == 16 * held[0] > 0
