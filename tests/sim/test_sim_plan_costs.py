"""The simulator's questions, answered from a plan."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import costs_of
from llmpq.batching.engine_step import ScheduledChunk
from llmpq.sim import BatchShape
from llmpq.sim.costs import PlanCosts, StageLaw, batch_shape, step_size
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster
from llmpq.spec.fields import Fields, from_json
from llmpq.spec.precision import Phase
from llmpq.spec.workload import Workload

RAGGED = BatchShape(phase=Phase.DECODE, rows=4, longest=160, total=4 * 64)
EVEN = BatchShape(phase=Phase.DECODE, rows=4, longest=64, total=4 * 64)


def _plan(device):
    group = {"type": device, "count": 1, **({"threads": 1} if device == "cpu" else {})}
    cluster = {
        "schema": 1,
        "name": "one",
        "nodes": [{"name": "n", "devices": [group]}],
        "links": [],
    }
    request = PlanRequest(
        model=catalog.model("facebook/opt-125m"),
        cluster=from_json(Cluster, Fields(cluster, "cluster")),
        workload=Workload(batch=8, prompt_tokens=64, new_tokens=128),
        dtype="float16",
        kv_bits=16,
        bits=(16,),
        theta_s=0.0,
        latency="roofline",
    )
    plan = make_plan(request)
    return plan, costs_of(request, plan.cluster)


@pytest.fixture(scope="module")
def on_cpu():
    return _plan("cpu")


def test_cpu_decode_costs_the_mean_context(on_cpu):
    costs = PlanCosts(*on_cpu)
    assert costs.stage_s(0, RAGGED) == costs.stage_s(0, EVEN)


def test_decode_of_a_gpu_that_reads_blocks_costs_the_mean_context():
    costs = PlanCosts(*_plan("A100-80G"))
    assert costs.stage_s(0, RAGGED) == costs.stage_s(0, EVEN)


def test_decode_of_an_older_gpu_costs_the_longest_context():
    costs = PlanCosts(*_plan("V100-32G"))
    assert costs.stage_s(0, RAGGED) == costs.stage_s(0, replace(RAGGED, total=4 * 160))
    assert costs.stage_s(0, RAGGED) > costs.stage_s(0, EVEN)


def test_ragged_prompts_cost_their_tokens_and_the_squares_of_their_lengths(on_cpu):
    costs = PlanCosts(*on_cpu)
    even = batch_shape(Phase.PREFILL, [64] * 4)
    ragged = batch_shape(Phase.PREFILL, [16, 16, 64, 160])
    padded = batch_shape(Phase.PREFILL, [160] * 4)
    assert (even.spread, ragged.total) == (1.0, even.total)
    assert costs.stage_s(0, even) == costs.layers_s(0, Phase.PREFILL, 4, 64)
    assert costs.stage_s(0, even) < costs.stage_s(0, ragged) < costs.stage_s(0, padded)
    packed = StageLaw(
        partial(costs.micro_batch_s, 0, Phase.PREFILL),
        partial(costs.micro_batch_s, 0, Phase.DECODE),
    )
    chunks = [ScheduledChunk(0, 0, count, (), True) for count in (16, 16, 64, 160)]
    assert costs.stage_s(0, ragged) == pytest.approx(packed(step_size(chunks)), rel=1e-6)


def test_an_engine_that_pads_prompts_pays_for_the_longest(on_cpu):
    costs = PlanCosts(*on_cpu, pads_prompts=True)
    ragged = batch_shape(Phase.PREFILL, [16, 16, 64, 160])
    padded = batch_shape(Phase.PREFILL, [160] * 4)
    assert (
        costs.stage_s(0, ragged)
        == costs.stage_s(0, padded)
        == costs.layers_s(0, Phase.PREFILL, 4, 160)
    )
    assert costs.project_s(ragged) == costs.project_s(padded)
    packed = PlanCosts(*on_cpu)
    assert packed.project_s(ragged) < costs.project_s(ragged)
    assert costs.stage_s(0, EVEN) == packed.stage_s(0, EVEN)


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6))
def test_two_micro_batches_never_cost_less_than_both_in_one(on_cpu, lengths):
    """Packing only saves what a micro-batch costs without tokens."""
    costs = PlanCosts(*on_cpu)
    together = costs.stage_s(0, batch_shape(Phase.PREFILL, lengths))
    alone = [costs.stage_s(0, batch_shape(Phase.PREFILL, [count])) for count in lengths]
    assert max(alone) * (1 - 1e-6) <= together <= sum(alone) * (1 + 1e-6)


@dataclass(frozen=True)
class Wire:
    """Links that take ``way_s`` and a microsecond a byte, and ``work_s`` of either end."""

    way_s: float
    work_s: float | None

    def send_s(self, _, __, size_bytes):
        return self.way_s + 1e-6 * size_bytes

    def end_s(self, _, __):
        return self.work_s


def _two(nodes, wire, device):
    group = {"type": device, "count": 2 // nodes, **({"threads": 1} if device == "cpu" else {})}
    cluster = {
        "schema": 1,
        "name": "two",
        "nodes": [{"name": f"n{number}", "devices": [group]} for number in range(nodes)],
        "links": [],
    }
    request = PlanRequest(
        model=catalog.model("facebook/opt-125m"),
        cluster=from_json(Cluster, Fields(cluster, "cluster")),
        workload=Workload(batch=8, prompt_tokens=64, new_tokens=128),
        dtype="float16",
        kv_bits=16,
        bits=(16,),
        theta_s=0.0,
        latency="roofline",
    )
    plan = make_plan(request)
    assert len(plan.stages) == 2
    return plan, replace(costs_of(request, plan.cluster), comm=wire)


def _hop(nodes, wire, device="cpu"):
    return PlanCosts(*_two(nodes, wire, device)).hop(0, EVEN)


COPY_S = 4 * 768 * 2 * 1e-6


def test_local_ends_work_for_the_measured_time_and_the_copy():
    end_s, delay_s = _hop(1, Wire(way_s=2e-4, work_s=1.5e-4))
    assert end_s == pytest.approx(1.5e-4 + COPY_S / 2)
    assert delay_s == 0.0
    end_s, delay_s = _hop(1, Wire(way_s=5e-4, work_s=1e-4))
    assert 2 * end_s + delay_s == pytest.approx(5e-4 + COPY_S)


def test_remote_ends_work_for_the_measured_time_and_the_rest_is_delay():
    end_s, delay_s = _hop(2, Wire(way_s=1e-3, work_s=1e-4))
    assert end_s == pytest.approx(1e-4)
    assert delay_s == pytest.approx(8e-4 + COPY_S)


def test_without_measured_ends_half_of_a_local_send_is_work():
    assert _hop(1, Wire(way_s=1e-3, work_s=None)).end_s == pytest.approx((1e-3 + COPY_S) / 2)
    assert _hop(2, Wire(way_s=1e-3, work_s=None)).end_s == 0.0


def test_message_between_gpus_is_delay_only():
    assert _hop(1, Wire(way_s=1e-3, work_s=1e-4), "T4-16G").end_s == 0.0
