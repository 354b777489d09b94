"""Plans that leave experts to hosts: the search and the integer programs against all plans."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from exact_cases import Shape, best_value, random_space, with_hosts
from helpers.builders import cluster_of, layer_spec, model_spec, plan_request, sensitivity
from helpers.small_clusters import optimum_s

from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.enumeration import device_orders, lower_bounds, most_layers
from llmpq.assigner.exact.search import solve_exact
from llmpq.assigner.forecast import evaluate_plan
from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp
from llmpq.assigner.objective import SearchSpace
from llmpq.assigner.planner import best_plan, make_plan
from llmpq.assigner.request import PlanRequest, build_task, costs_of, omega_of
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import DeviceHost, LinkSpec
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.plan import MicroBatching, Plan
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


def without_hosts(request: PlanRequest) -> PlanRequest:
    """The request on the same devices without hosts."""
    nodes = tuple(
        replace(node, devices=(replace(node.devices[0], host=None),))
        for node in request.cluster.nodes
    )
    return replace(request, cluster=replace(request.cluster, nodes=nodes))


@pytest.mark.parametrize("block", range(2))
def test_the_best_plan_of_two_clusters_equals_trying_everything_on_both(block: int) -> None:
    """Also that the second search, below the plan of the first, loses nothing."""
    better = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        request = replace(random_request(seed), gives_reasons=False)
        plain = without_hosts(request)
        wants = [optimum_s(build_task(one)) for one in (plain, request)]
        for clusters in ((plain.cluster, request.cluster), (request.cluster, plain.cluster)):
            try:
                found = best_plan(request, clusters).estimate.objective_s
            except InfeasibleError:
                found = math.inf
            assert found == pytest.approx(min(wants), rel=1e-9), seed
        better += wants[1] < wants[0] * (1 - 1e-9)
    assert better >= 2


def test_plans_that_are_not_below_a_value_do_not_count() -> None:
    settled = 0
    for seed in range(BLOCK):
        request = random_request(seed)
        plan = planned(request)
        if plan is None:
            continue
        value_s = plan.estimate.objective_s
        found = make_plan(replace(request, below_s=value_s * (1 + 1e-6)))
        assert found.estimate.objective_s == pytest.approx(value_s, rel=1e-9)
        with pytest.raises(InfeasibleError):
            make_plan(replace(request, below_s=value_s * (1 - 1e-6)))
        settled += 1
    assert settled >= BLOCK // 2


def test_a_budget_below_the_least_loss_has_no_plan_and_one_at_it_the_fastest() -> None:
    several = 0
    for seed in range(BLOCK):
        request = replace(random_request(seed), theta_s=1e9, quality_budget=None)
        least = planned(request)
        if least is None or least.estimate.quality < 1e-9:
            continue
        loss = least.estimate.quality
        at = make_plan(replace(request, theta_s=0.0, quality_budget=loss * (1 + 1e-9)))
        assert at.estimate.quality == pytest.approx(loss, rel=1e-8)
        assert at.estimate.latency_s == pytest.approx(least.estimate.latency_s, rel=1e-6)
        with pytest.raises(InfeasibleError, match=r"cannot be met|does not fit"):
            make_plan(replace(request, theta_s=0.0, quality_budget=loss * (1 - 1e-6)))
        several += len(build_task(request).pairs) > 1
    assert several >= 2


SPACES = 20


def random_shape(rng: np.random.Generator) -> Shape:
    counts = [(1,), (2,), (1, 1), (1,), (2,), (1, 1), (1, 1, 1)]
    chosen = counts[rng.integers(len(counts))]
    return Shape(
        counts=chosen,
        layers=int(rng.integers(3, 8 - sum(chosen))),
        widths=2,
        kinds=int(rng.integers(1, 3)),
        pairs=int(rng.integers(1, 3)),
        formula=["steady", "paper"][rng.integers(2)],
        memory=float(rng.choice([0.3, 0.5, 0.7, 0.9, 1.2])),
        link=float(rng.choice([0, 0.3, 3])),
        theta=float(rng.choice([0, 0.1, 1, 10])),
        budget=[None, None, 0.3, 0.1][rng.integers(4)],
    )


def exact(space: SearchSpace):
    try:
        return solve_exact(space, orders="types")
    except InfeasibleError:
        return None


def host_shares(space: SearchSpace, found) -> list[float]:
    """The share of its host's memory that each stage with any takes."""
    return [
        stage.host_bytes / found.problem.host_capacity_bytes(stage.position)
        for stage in found.evaluation.stages
        if stage.host_bytes
    ]


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=[] if b < 4 else pytest.mark.slow) for b in range(15)],
)
def test_the_memory_of_hosts_is_a_second_limit(block: int) -> None:
    """Searches, bounds and programs against every choice of layers, widths and places."""
    rng = np.random.default_rng(9000 + block)
    used, pressed = 0, 0
    for _ in range(SPACES):
        shape = random_shape(rng)
        whole = random_space(rng, shape)
        space = with_hosts(rng, whole)
        want, found = best_value(space, "types"), exact(space)
        held = [
            most_layers(pair, np.array(space.group_counts), space.kinds.tolist())
            for pair in space.pairs
        ]
        assert max(held) == space.num_layers or math.isinf(want), shape
        programs = [
            solve_ilp(space.problem(pair, order), IlpOptions(solver="highs")).evaluation
            for pair in space.pairs
            for order in device_orders(space.group_counts, "types")
        ]
        by_programs = min((one.objective_s for one in programs if one), default=math.inf)
        assert by_programs == pytest.approx(want, rel=1e-6), shape
        if found is None:
            assert math.isinf(want), shape
            continue
        assert found.gap <= 1e-6
        assert found.value_s == pytest.approx(want, rel=1e-9), shape
        alone = exact(whole)
        assert alone is None or found.value_s <= alone.value_s * (1 + 1e-9)
        assert lower_bounds(space).min() <= want * (1 + 1e-9)
        for proof in found.proofs:
            assert proof.bound_s <= want * (1 + 1e-9) or proof.bound_s > found.value_s * (1 - 1e-9)
        shares = host_shares(space, found)
        used += bool(shares)
        pressed += any(share > 0.6 for share in shares)
    assert used >= SPACES // 4
    assert pressed >= SPACES // 20


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
        "whole_experts": True,
    }
    return plan_request(**(values | overrides))


def test_as_many_layers_as_needed_have_experts_apart():
    request = gpu_request(10**9)
    plan = make_plan(request)
    (stage,), (estimate,) = plan.stages, plan.estimate.stages
    assert 0 < stage.num_apart < 6
    assert stage.experts.threads == 4
    buffers = buffers_of(request, plan, (16,))
    assert estimate.memory.host == stage.num_apart * 8 * 3 * 512 * 512 * 2 + buffers
    assert plan.schema == 2
    with pytest.raises(InfeasibleError):
        make_plan(replace(request, whole_layers=True))


@pytest.mark.parametrize("less", [30, 40, 45])
def test_a_share_of_experts_is_never_worse_than_all_or_none(less: int) -> None:
    def at(**options) -> PlanRequest:
        request = gpu_request(10**9, bits=(16, 4), theta_s=0.1, **options)
        node = request.cluster.nodes[0]
        device = node.devices[0]
        device = replace(device, memory_bytes=device.memory_bytes - less * 10**6)
        nodes = (replace(node, devices=(device,)),)
        return replace(request, cluster=replace(request.cluster, nodes=nodes))

    whole, shared = make_plan(at()), make_plan(at(whole_experts=False))
    apart = whole.stages[0].experts
    assert apart is None or {one.resident for one in apart.layers} == {()}
    assert shared.estimate.objective_s <= whole.estimate.objective_s * (1 + 1e-9)
    assert build_task(at(whole_experts=False)).apart[2:]


def test_a_share_fills_the_memory_of_the_device():
    plan = make_plan(gpu_request(10**9, whole_experts=False))
    (stage,), (estimate,) = plan.stages, plan.estimate.stages
    resident = {len(one.resident) for one in stage.experts.layers}
    assert max(resident) > 0
    free = estimate.capacity_bytes - estimate.memory.total
    assert 0 <= free < 2 * EXPERTS  # of one layer


EXPERTS = 8 * 3 * 512 * 512
"""Experts of a layer: at 16 bits twice as many bytes."""


def buffers_of(request: PlanRequest, plan: Plan, bits: tuple[int, ...]) -> int:
    """Bytes beside experts of these bits in the memory of the host, at the plan's batch sizes."""
    (device,), sizes = request.cluster.devices, plan.micro_batching
    experts = [(0, width) for width in bits]
    return costs_of(request).host_buffer_bytes(device, request.workload, sizes, experts)


ONE_BATCH = Overrides(micro_batching=MicroBatching(prefill=1, decode=1))


def test_a_host_holds_the_experts_of_as_many_layers_as_it_has_room_for():
    request = gpu_request(10**9, overrides=ONE_BATCH)
    plan = make_plan(request)
    most = num_apart(plan) * 2 * EXPERTS + buffers_of(request, plan, (16,))
    assert plan.estimate.stages[0].memory.host == most
    assert num_apart(make_plan(gpu_request(most, overrides=ONE_BATCH))) == num_apart(plan)
    with pytest.raises(InfeasibleError):
        make_plan(gpu_request(most - 1, overrides=ONE_BATCH))


def test_a_small_host_takes_fewer_bits_of_some_layers_only():
    """A device with room for dense parts alone; a host for four layers at 16 bits, and 8 at 8."""
    request = gpu_request(10**9, bits=(16, 8), theta_s=1e3, overrides=ONE_BATCH)
    node = request.cluster.nodes[0]
    plan = make_plan(replace(request, bits=(16,)))
    needed = plan.estimate.stages[0].memory
    host = replace(
        node.devices[0].host,
        memory_bytes=8 * EXPERTS + 5 * 8 * 512 * 8 + buffers_of(request, plan, (16, 8)),
    )
    dense = needed.weights - (6 - num_apart(plan)) * 2 * EXPERTS
    device = replace(node.devices[0], memory_bytes=needed.total - needed.weights + dense, host=host)
    cluster = replace(request.cluster, nodes=(replace(node, devices=(device,)),))
    found = make_plan(replace(request, cluster=cluster))
    assert num_apart(found) == 6
    assert sorted(found.bits) == [8, 8, 8, 8, 16, 16]
    assert found.estimate.stages[0].memory.host <= host.memory_bytes


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


@pytest.mark.parametrize("budget", [None, 0.01])
def test_a_host_that_is_too_small_is_named_at_once(budget: int | None) -> None:
    """Devices alone would hold all layers with all experts apart, and the host none of these."""
    small = gpu_request(10**9, whole_experts=False, bits=(16, 8))
    node = small.cluster.nodes[0]
    device = replace(node.devices[0], memory_bytes=node.devices[0].memory_bytes - 50 * 10**6)
    host = replace(device.host, memory_bytes=4 * EXPERTS + 10**6)
    nodes = (replace(node, devices=(replace(device, host=host),)),)
    request = replace(small, cluster=replace(small.cluster, nodes=nodes), quality_budget=budget)
    with pytest.raises(InfeasibleError, match=r"[2-5] of 6 layers fit at 8 bits") as error:
        make_plan(request)
    assert re.search(r"for experts their host 25\.\d MiB", str(error.value))


def test_a_budget_that_the_host_forbids_is_explained():
    plan = make_plan(gpu_request(10**9, bits=(16, 8), overrides=ONE_BATCH))
    request = gpu_request(10**9, bits=(16, 8), overrides=ONE_BATCH, quality_budget=0.0)
    assert set(make_plan(request).bits) == {16}
    room = 3 * 2 * EXPERTS + buffers_of(request, plan, (16, 8))
    small = gpu_request(room, bits=(16, 8), overrides=ONE_BATCH, quality_budget=0.0)
    node = small.cluster.nodes[0]
    device = replace(node.devices[0], memory_bytes=node.devices[0].memory_bytes - 45 * 10**6)
    cluster = replace(small.cluster, nodes=(replace(node, devices=(device,)),))
    with pytest.raises(InfeasibleError, match=r"quality budget 0 cannot be met: .*memory forces"):
        make_plan(replace(small, cluster=cluster))


def test_bits_that_are_fixed_stay_with_experts_apart():
    overrides = Overrides(layer_bits=((0, 3, 8),))
    plan = make_plan(gpu_request(10**9, bits=(16, 8), theta_s=1e3, overrides=overrides))
    assert plan.bits[:3] == (8, 8, 8)
    assert num_apart(plan) > 0


def test_out_of_time_the_plan_is_no_worse_than_bitwidth_transfer():
    request = gpu_request(10**9, bits=(16, 8, 4), theta_s=1e3, whole_experts=False)
    plan = make_plan(replace(request, time_limit_s=1e-9))
    transfer = make_plan(request, "heuristic")
    assert num_apart(transfer) > 0
    assert plan.estimate.objective_s <= transfer.estimate.objective_s * (1 + 1e-9)
