from __future__ import annotations

from itertools import pairwise

import pytest
from helpers.builders import cluster_of, plan_request

from llmpq.assigner import make_plan
from llmpq.assigner.schedules.steady_state import timeline
from llmpq.spec.precision import Phase
from llmpq.spec.workload import Workload


@pytest.fixture(scope="module")
def plan():
    return make_plan(
        plan_request(
            cluster=cluster_of(("V100-32G", 1, 90), ("T4-16G", 2, 60)),
            workload=Workload(batch=8, prompt_tokens=64, new_tokens=30),
        )
    )


def test_the_timeline_takes_as_long_as_the_steady_formula(plan) -> None:
    stages, rounds = plan.estimate.stages, plan.workload.new_tokens - 1
    assert len(stages) > 1
    assert max(stage.send_decode_s for stage in stages) < min(stage.decode_s for stage in stages)
    blocks = timeline(plan, rounds)
    back_s = blocks[-1].end_s + stages[-1].send_decode_s
    # The last round has no successor to overlap with: the formula may miss one pass, no more.
    one_pass = sum(stage.decode_s + stage.send_decode_s for stage in stages)
    assert plan.estimate.latency_s <= back_s + 1e-12
    assert back_s <= plan.estimate.latency_s + one_pass


def test_prefill_is_a_flow_shop(plan) -> None:
    stages = plan.estimate.stages
    blocks = [item for item in timeline(plan, 0) if item.phase is Phase.PREFILL]
    batches = -(-plan.workload.batch // plan.micro_batching.prefill)
    expected = (batches - 1) * max(stage.prefill_s for stage in stages)
    expected += sum(stage.prefill_s for stage in stages)
    expected += sum(stage.send_prefill_s for stage in stages[:-1])
    assert max(item.end_s for item in blocks) == pytest.approx(expected)


def test_no_stage_does_two_things_at_once(plan) -> None:
    blocks = timeline(plan, 4)
    for rank in range(len(plan.stages)):
        spans = sorted((item.start_s, item.end_s) for item in blocks if item.rank == rank)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
