"""Binding constraints compared with the effect of relaxing them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.builders import cluster_of, model_spec, plan_request

from llmpq.assigner import make_plan
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.explain.explanation import forced_use, one_more
from llmpq.assigner.explain.infeasible import allowed_bits, binding_text, plan_binding
from llmpq.assigner.request import costs_of
from llmpq.cli.render import more_record, more_text
from llmpq.spec.cluster import LinkSpec
from llmpq.spec.plan import MicroBatching
from llmpq.spec.workload import Workload


def bound(request):
    plan = make_plan(request)
    return plan, plan_binding(plan, costs_of(request))


def test_memory_binds_when_a_little_more_of_it_buys_quality() -> None:
    request = plan_request(cluster=cluster_of(("V100-32G", 1, 120)), theta_s=10.0)
    plan, found = bound(request)
    (stage,) = found.stages
    assert "memory" in stage.constraints
    assert stage.slack_bytes < stage.step_bytes
    assert "memory (" in binding_text(stage)
    missing = stage.step_bytes - stage.slack_bytes
    assert missing < 15e6
    more = replace(
        request, cluster=cluster_of(("V100-32G", 1, 120 + missing // 10**6 + 1)), theta_s=10.0
    )
    assert make_plan(more).estimate.quality < plan.estimate.quality


def test_memory_does_not_bind_where_everything_is_unquantized() -> None:
    _, found = bound(plan_request(cluster=cluster_of(("V100-32G", 1, 4000)), theta_s=1e4))
    (stage,) = found.stages
    assert stage.step_bytes is None
    assert "memory" not in stage.constraints


def test_the_slowest_stage_binds_and_the_other_does_not() -> None:
    request = plan_request(
        cluster=cluster_of(("V100-32G", 1, 4000), ("P100-12G", 1, 4000)),
        workload=Workload(batch=8, prompt_tokens=256, new_tokens=2),
        overrides=Overrides(
            layers=(("node0/V100-32G#0", 0, 1), ("node1/P100-12G#0", 1, 6)),
            layer_bits=((0, 6, 16),),
            micro_batching=MicroBatching(prefill=2, decode=2),
        ),
    )
    plan, found = bound(request)
    assert found.prefill_by_slowest
    first, second = found.stages
    assert "prefill" in second.constraints
    assert "prefill" not in first.constraints
    assert first.prefill_share < 0.5
    assert "slowest in prefill" in binding_text(second)
    assert binding_text(first).startswith("nothing (")
    assert 0 < first.master_share < 1
    assert second.master_share == 0
    assert plan.estimate.stages[0].prefill_s / plan.estimate.stages[1].prefill_s == pytest.approx(
        first.prefill_share
    )


def test_a_slow_link_binds_by_name() -> None:
    link = LinkSpec(between=("node0", "node1"), bytes_per_s=1e6, latency_s=1e-3)
    request = plan_request(
        cluster=cluster_of(("V100-32G", 1, 4000), ("T4-16G", 1, 4000), links=(link,)),
        workload=Workload(batch=8, prompt_tokens=256, new_tokens=8),
        overrides=Overrides(order=("node0", "node1"), use=("node0", "node1")),
    )
    _, found = bound(request)
    assert "prefill_link" in found.stages[0].constraints
    assert "its link is the slowest in prefill" in binding_text(found.stages[0])


def test_without_decoding_or_with_one_micro_batch_one_pass_sets_the_time() -> None:
    _, found = bound(plan_request(workload=Workload(batch=1, prompt_tokens=64, new_tokens=1)))
    assert not found.prefill_by_slowest
    assert not found.decode_by_slowest


def test_allowed_bits_come_from_the_plan() -> None:
    plan = make_plan(plan_request(bits=(4, 8)))
    assert allowed_bits(plan) == (8, 4)
    bare = replace(plan, provenance=replace(plan.provenance, inputs=()))
    assert set(allowed_bits(bare)) == set(plan.bits)


def test_forced_use_costs_more_and_one_more_device_never_hurts() -> None:
    link = LinkSpec(between=("node0", "node1"), bytes_per_s=1e8, latency_s=1e-3)
    request = plan_request(
        cluster=cluster_of(("A100-40G", 1, 2000), ("P100-12G", 2, 2000), links=(link,))
    )
    plan = make_plan(request)
    (answer,) = forced_use(request, plan)
    assert answer.devices == ("node1/P100-12G#0", "node1/P100-12G#1")
    used = {answer.plan.device_of(stage).label for stage in answer.plan.stages}
    assert answer.devices[0] in used
    assert answer.proven
    assert answer.plan.search.theta_s == plan.search.theta_s
    assert answer.plan.estimate.objective_s > plan.estimate.objective_s
    for other in one_more(request, plan):
        assert other.plan.estimate.latency_s <= plan.estimate.latency_s * (1 + 1e-9)
        assert other.plan.estimate.quality <= plan.estimate.quality * (1 + 1e-8)
        assert len(other.plan.cluster.devices) == 4


def test_equal_nodes_have_one_answer() -> None:
    """Four equal nodes beside a fast one; another of them is no answer in place of one in use."""
    nodes = [("A100-40G", 1, 2000), *[("P100-12G", 1, 2000)] * 3, ("P100-12G", 1, 1500)]
    request = plan_request(cluster=cluster_of(*nodes))
    plan = make_plan(request)
    assert [plan.device_of(stage).node for stage in plan.stages] == ["node0"]
    alike, other = forced_use(request, plan)
    assert alike.devices == tuple(f"node{place}/P100-12G#0" for place in (1, 2, 3))
    assert other.devices == ("node4/P100-12G#0",)
    found = [answer.devices for answer in one_more(request, plan)]
    assert found == [
        ("node0/A100-40G",),
        ("node1/P100-12G", "node2/P100-12G", "node3/P100-12G"),
        ("node4/P100-12G",),
    ]
    text = list(more_text(plan, one_more(request, plan)))
    assert text[1].startswith("one more       node1/P100-12G (or 2 alike): ")
    assert [one["device"] for one in more_record(plan, one_more(request, plan))] == [
        f"node{place}/{kind}" for place, kind in enumerate(["A100-40G", *["P100-12G"] * 4])
    ]


def test_another_device_of_a_kind_in_use_is_used_beside_it() -> None:
    request = plan_request(
        cluster=cluster_of(*[("T4-16G", 1, 400)] * 3),
        workload=Workload(batch=1, prompt_tokens=8, new_tokens=4),
    )
    plan = make_plan(request)
    assert len(plan.stages) == 1
    (answer,) = forced_use(request, plan)
    assert len(answer.devices) == 2
    assert len(answer.plan.stages) == 2
    assert answer.plan.estimate.objective_s > plan.estimate.objective_s


def test_excluded_devices_have_no_alternatives() -> None:
    request = plan_request(
        cluster=cluster_of(("A100-40G", 1, 2000), ("P100-12G", 2, 2000)),
        overrides=Overrides(exclude=("node1",)),
    )
    assert forced_use(request, make_plan(request)) == ()


def test_an_alternative_without_a_plan_has_a_reason() -> None:
    request = plan_request(
        cluster=cluster_of(("A100-40G", 1, 2000), ("P100-12G", 1, 1)), model=model_spec(layers=3)
    )
    (answer,) = forced_use(request, make_plan(request))
    assert answer.plan is None
    assert answer.reason == "there is no such plan"
