"""Plans that leave experts to hosts: the search and the integer programs against all plans."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.builders import cluster_of, layer_spec, model_spec, plan_request, sensitivity
from helpers.small_clusters import optimum_s

from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.forecast import evaluate_plan
from llmpq.assigner.planner import make_plan
from llmpq.assigner.request import PlanRequest, build_task, omega_of
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import DeviceHost, LinkSpec
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.plan import Plan
from llmpq.spec.precision import BITS
from llmpq.spec.workload import Workload

XEON = DeviceEntry(type="xeon", like="cpu", gather_bytes_per_s=1e10)
BLOCK = 12


def expert_layer(hidden: int = 512, count: int = 8) -> LayerSpec:
    """A layer of ``layer_spec`` whose feed-forward is experts, two of them for a token."""
    dense = layer_spec(hidden)
    options = {"count": count, "active": 2}
    return replace(
        dense,
        linears=(
            *dense.linears[:4],
            LinearSpec(name="mlp.gate", out_features=count, in_features=hidden, quantizable=False),
            LinearSpec(name="mlp.up", out_features=2 * hidden, in_features=hidden, **options),
            LinearSpec(name="mlp.down", out_features=hidden, in_features=hidden, **options),
        ),
    )


def expert_model(layers: int, *, has_dense: bool) -> ModelSpec:
    """A model of layers with experts, the first of them dense if asked for."""
    own = model_spec(layers=layers, hidden=512)
    kinds = (expert_layer(), layer_spec(512))
    return replace(
        own,
        layer_types=kinds[: 1 + has_dense],
        layer_kinds=tuple(int(has_dense and layer == 0) for layer in range(layers)),
    )


def random_request(seed: int) -> PlanRequest:
    """Draw a request that brute force settles: one or two devices, some of them with a host."""
    rng = np.random.default_rng([11, seed])
    layers = int(rng.integers(2, 4))
    model = expert_model(layers, has_dense=bool(rng.random() < 0.4))
    names = rng.choice(("V100-32G", "T4-16G", "cpu"), size=int(rng.integers(1, 3)), replace=False)
    # A layer with experts takes 15 MB at 16 bits, 2 MB of which are not experts.
    room = 15 * layers / len(names)
    links = (LinkSpec(between=("node0", "node1"), bytes_per_s=1e9, latency_s=1e-4),)
    cluster = cluster_of(
        *((str(name), 1, int(rng.uniform(0.1, 1.2) * room + 6)) for name in names),
        links=links[: len(names) - 1],
    )
    nodes = []
    for index, node in enumerate(cluster.nodes):
        host = DeviceHost(
            type="xeon",
            threads=int(rng.integers(1, 9)),
            memory_bytes=int(rng.choice([2, 12, 1000])) * 10**6,
        )
        has_host = index == 0 or rng.random() < 0.5
        group = replace(node.devices[0], host=host if has_host else None)
        nodes.append(replace(node, devices=(group,)))
    return plan_request(
        model=model,
        cluster=replace(cluster, nodes=tuple(nodes), device_types=(XEON,)),
        workload=Workload(
            batch=int(rng.integers(1, 3)),
            prompt_tokens=int(rng.integers(8, 200)),
            new_tokens=int(rng.integers(1, 40)),
        ),
        bits=((16, 4), (8, 3), (16, 8))[int(rng.integers(3))],
        sensitivity=sensitivity(model, seed) if rng.random() < 0.7 else None,
        theta_s=float(rng.choice([0.0, 0.001, 1.0])),
        quality_budget=float(rng.choice([0.05, 0.5])) if rng.random() < 0.2 else None,
        formula=str(rng.choice(["steady", "paper"])),
        orders="all",
    )


def planned(request: PlanRequest) -> Plan | None:
    try:
        return make_plan(request)
    except InfeasibleError:
        return None


def num_apart(plan: Plan) -> int:
    return sum(stage.num_apart for stage in plan.stages)


@pytest.mark.parametrize("block", range(4))
def test_plans_equal_trying_everything(block: int) -> None:
    apart = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        request = random_request(seed)
        task = build_task(request)
        want = optimum_s(task)
        plan = planned(request)
        if plan is None:
            assert math.isinf(want), seed
            continue
        assert plan.estimate.objective_s == pytest.approx(want, rel=1e-9), seed
        # Its price and its bytes are those of the cost models, found without the search.
        omega = np.zeros((request.model.num_layers, len(BITS)))
        omega[:, [BITS.index(width) for width in task.request.bits]] = omega_of(task.request)
        estimate, excess = evaluate_plan(plan, task.costs, omega)
        assert excess == 0
        assert estimate.objective_s == pytest.approx(want, rel=1e-9)
        assert [one.memory for one in estimate.stages] == [
            one.memory for one in plan.estimate.stages
        ]
        whole = planned(replace(request, whole_layers=True))
        assert whole is None or want <= whole.estimate.objective_s * (1 + 1e-9)
        apart += num_apart(plan) > 0
    assert apart >= BLOCK // 4


@pytest.mark.parametrize("block", range(2))
def test_programs_equal_trying_everything(block: int) -> None:
    for seed in range(500 + block * 6, 506 + block * 6):
        request = replace(random_request(seed), solver="highs")
        want = optimum_s(build_task(request))
        plan = planned(request)
        found = math.inf if plan is None else plan.estimate.objective_s
        assert found == pytest.approx(want, rel=1e-6), seed


def gpu_request(memory_bytes: int, **overrides) -> PlanRequest:
    """Six layers with experts, of which a GPU holds some, beside a host with so much memory."""
    cluster = cluster_of(("T4-16G", 1, 75))
    host = DeviceHost(type="xeon", threads=4, memory_bytes=memory_bytes)
    group = replace(cluster.nodes[0].devices[0], host=host)
    node = replace(cluster.nodes[0], devices=(group,))
    values = {
        "model": expert_model(6, has_dense=False),
        "cluster": replace(cluster, nodes=(node,), device_types=(XEON,)),
        "bits": (16,),
    }
    return plan_request(**(values | overrides))


def test_as_many_layers_as_needed_have_experts_apart():
    request = gpu_request(10**9)
    plan = make_plan(request)
    (stage,), (estimate,) = plan.stages, plan.estimate.stages
    assert 0 < stage.num_apart < 6
    assert stage.experts.threads == 4
    assert estimate.memory.host == stage.num_apart * 8 * 3 * 512 * 512 * 2
    assert plan.schema == 2
    with pytest.raises(InfeasibleError):
        make_plan(replace(request, whole_layers=True))


def test_a_host_without_room_for_all_experts_gets_none():
    most = 6 * 8 * 3 * 512 * 512 * 2
    assert num_apart(make_plan(gpu_request(most))) > 0
    with pytest.raises(InfeasibleError):
        make_plan(gpu_request(most - 1))


def test_the_rate_of_scattered_reads_of_a_host_is_needed():
    request = gpu_request(10**9)
    unmeasured = replace(XEON, gather_bytes_per_s=None)
    cluster = replace(request.cluster, device_types=(unmeasured,))
    with pytest.raises(SpecError, match="device type xeon: field 'gather_bytes_per_s': found none"):
        make_plan(replace(request, cluster=cluster))


def test_runs_of_layers_are_decided_together():
    plan = make_plan(gpu_request(10**9, layer_group=2))
    layers = [one.layer for one in plan.stages[0].experts.layers]
    assert layers == [layer for layer in range(6) if layer // 2 * 2 in layers]


def test_an_error_counts_layers_that_fit_with_experts_apart():
    small = gpu_request(10**9)
    node = small.cluster.nodes[0]
    device = replace(node.devices[0], memory_bytes=node.devices[0].memory_bytes - 55 * 10**6)
    cluster = replace(small.cluster, nodes=(replace(node, devices=(device,)),))
    with pytest.raises(InfeasibleError, match=r"[1-5] of 6 layers fit at 16 bits") as apart:
        make_plan(replace(small, cluster=cluster))
    with pytest.raises(InfeasibleError, match=r"0 of 6 layers fit at 16 bits") as whole:
        make_plan(replace(small, cluster=cluster, whole_layers=True))
    for error in (apart, whole):
        assert "weights of 6 layers at 16 bits 84.1 MiB" in str(error.value)


def test_bits_that_are_fixed_stay_with_experts_apart():
    overrides = Overrides(layer_bits=((0, 3, 8),))
    plan = make_plan(gpu_request(10**9, bits=(16, 8), theta_s=1e3, overrides=overrides))
    assert plan.bits[:3] == (8, 8, 8)
    assert num_apart(plan) > 0
