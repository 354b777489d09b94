"""Why there is no plan, the smallest single changes that give one, and why a device is left out.

Every change that a message names was verified by the memory test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from llmpq.assigner.constraints.resolve import with_counts
from llmpq.assigner.device_orders import MAX_ORDERS, device_orders, leading_orders, num_orders
from llmpq.assigner.enumeration import build_pairs, device_groups, layers_that_fit
from llmpq.assigner.explain.binding import allowed_bits
from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp
from llmpq.assigner.problem import IntArray, PairCosts
from llmpq.assigner.request import PlanningTask, PlanRequest, costs_of
from llmpq.costmodel import ClusterCosts
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import MicroBatching, OrderSet, Plan
from llmpq.spec.precision import BITS, Phase
from llmpq.units import format_bytes, format_seconds

MAX_ADDED_DEVICES = 16
SMALLEST = MicroBatching(prefill=1, decode=1)
"""The pair with the least temporary memory: what does not fit with it fits with none."""


def explain_memory(request: PlanRequest) -> str:
    """Return why a model does not fit, split by cause, and the smallest single changes."""
    held, layers = held_layers(request), request.model.num_layers
    if held >= layers:
        return (
            f"{request.model.name} does not fit when its layers are decided in groups of "
            f"{request.layer_group}; it does with smaller groups"
        )
    pair, costs = _smallest_pair(request)
    if held < 0:
        short = format_bytes(costs.master_bytes())
        why = f"no device holds the embeddings and head ({short}) and its runtime"
    else:
        why = f"{held} of {layers} layers fit at {min(request.bits)} bits"
    kind = int(pair.layer_bytes[0].min(axis=1).argmax())
    kv = int(pair.kv_bytes[kind])
    weights = int(pair.layer_bytes[0, kind].min()) - kv
    work = request.workload
    fixes = _fixes(request)
    advice = " or ".join(fixes) if fixes else "no single change of batch, length or devices helps"
    return (
        f"{request.model.name} does not fit on {request.cluster.name}: {why}; "
        f"a layer takes {format_bytes(weights)} of weights at {min(request.bits)} bits and "
        f"{format_bytes(kv)} of KV cache ({work.batch} sequences of {work.max_context_tokens} "
        f"tokens), the master another {format_bytes(int(pair.master_bytes.min()))}; "
        f"smallest single fixes: {advice}"
    )


def explain_budget(task: PlanningTask) -> str:
    """Return the least degradation that memory allows when the budget cannot be met."""
    request = task.request
    orders = leading_orders(task.group_counts.tolist(), task.twins)
    orders = orders if task.fixed_order is None else (task.fixed_order,)
    # Only memory counts: the pair of least temporary memory, one order for every first group.
    pair = min(task.pairs, key=lambda item: int(item.temporary_bytes.sum()))
    fields = [name for name in PairCosts.__dataclass_fields__ if name.endswith("_s")]
    timeless = replace(pair, **{name: np.zeros_like(getattr(pair, name)) for name in fields})
    found = [
        solve_ilp(
            replace(task.problem(timeless, order), theta_s=1.0, quality_budget=None),
            IlpOptions(solver=request.program_solver),
        ).evaluation
        for order in orders
    ]
    qualities = [evaluation.quality for evaluation in found if evaluation is not None]
    if not qualities:
        return explain_memory(request)
    best = min(qualities)
    return (
        f"quality budget {request.quality_budget:g} cannot be met: {request.model.name} fits on "
        f"{request.cluster.name}, but memory forces a degradation of at least {best:.4g} "
        f"(1 = every layer at 4 bits); raise the budget to {_rounded_up(best)} or add memory"
    )


def held_layers(request: PlanRequest) -> int:
    """Return how many of the model's layers fit at the fewest bits, -1 when the master does not."""
    pair, _ = _smallest_pair(request)
    counts = np.array([len(members) for members in device_groups(request.cluster)])
    if len(request.model.layer_types) > 1:
        modes: tuple[OrderSet, ...] = ("types",) if request.orders == "types" else ("all", "types")
        for mode in modes:  # where there are too many orders, count as if layers had one kind
            if num_orders(counts.tolist(), mode) <= MAX_ORDERS:
                orders = device_orders(counts.tolist(), mode)
                return max(_held_by_order(pair, one, request.model.layer_kinds) for one in orders)
    return int(layers_that_fit(pair, counts).max())


def dropped_reasons(plan: Plan, costs: ClusterCosts) -> dict[int, str]:
    """Return for every device left out of a plan the figure that explains it."""
    devices = plan.cluster.devices
    if not plan.dropped_devices:
        return {}
    tokens, size = plan.workload.mean_context_tokens, plan.micro_batching.decode
    bits = allowed_bits(plan)
    (pair,) = build_pairs(costs, plan.workload, bits, [plan.micro_batching])

    def step_s(device: int) -> float:
        item = devices[device]
        return min(costs.layer_s(item, Phase.DECODE, b, size, tokens, 0) for b in bits)

    used = [stage.device for stage in plan.stages if stage.num_layers]
    slowest = max(used, key=step_s)
    reasons = {}
    for device in plan.dropped_devices:
        group = devices[device].group
        room, layer = int(pair.capacity_bytes[group]), int(pair.layer_bytes[group].min())
        if room < layer:
            reasons[device] = (
                f"no room: {format_bytes(max(0, room))} free, "
                f"the smallest layer takes {format_bytes(layer)}"
            )
        elif step_s(device) > step_s(slowest):
            reasons[device] = (
                f"slower: {format_seconds(step_s(device))} a layer and decode step, at best, "
                f"against {format_seconds(step_s(slowest))} on {devices[slowest].label}"
            )
        else:
            hop = costs.send_s(devices[slowest], devices[device], Phase.DECODE, size, 1)
            reasons[device] = (
                "not needed: the others hold every layer, and one more stage adds "
                f"{format_seconds(hop)} of sending a step"
            )
    return reasons


def _smallest_pair(request: PlanRequest) -> tuple[PairCosts, ClusterCosts]:
    """Return the pair of least memory; only bytes are needed, so no table is read."""
    costs = costs_of(replace(request, latency="roofline", profile_dir=None))
    (pair,) = build_pairs(costs, request.workload, request.bits, [SMALLEST])
    return pair, costs


def _held_by_order(pair: PairCosts, order: tuple[int, ...], kinds: tuple[int, ...]) -> int:
    """Return how many layers fit when each device in turn takes all it can."""
    if pair.first_capacity_bytes[order[0]] < 0:
        return -1
    smallest: IntArray = pair.layer_bytes.min(axis=2)
    layer = 0
    for position, group in enumerate(order):
        room = pair.capacity_bytes[group] - (pair.master_bytes[group] if position == 0 else 0)
        while layer < len(kinds) and smallest[group, kinds[layer]] <= room:
            room -= smallest[group, kinds[layer]]
            layer += 1
    return layer


def _fixes(request: PlanRequest) -> list[str]:
    work = request.workload
    fixes = []
    for width in (b for b in BITS if b < min(request.bits)):
        if _fits(replace(request, bits=(*request.bits, width))):
            fixes.append(f"allow {width} bits")
            break
    for field, text in (
        ("batch", "batch <= {}"),
        ("prompt_tokens", "prompts <= {} tokens"),
        ("new_tokens", "<= {} new tokens"),
    ):

        def fits(value: int, field: str = field) -> bool:
            return _fits(replace(request, workload=replace(work, **{field: value})))

        largest = _largest(getattr(work, field) - 1, fits)
        fixes += [text.format(largest)] if largest else []
    types = [group.type for node in request.cluster.nodes for group in node.devices]
    for index, name in enumerate(types):
        for more in range(1, MAX_ADDED_DEVICES + 1):
            if _fits(replace(request, cluster=larger_cluster(request.cluster, index, more))):
                fixes.append(f"+{more} {name}")
                break
    return fixes


def _fits(request: PlanRequest) -> bool:
    return held_layers(request) >= request.model.num_layers


def _largest(top: int, holds: Callable[[int], bool]) -> int:
    """Return the largest value in ``[1, top]`` for which a falling condition holds, or 0."""
    low, high = 0, top
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def larger_cluster(cluster: Cluster, index: int, more: int) -> Cluster:
    """Return a cluster with ``more`` devices in its group number ``index``."""
    counts = Counter(device.group for device in cluster.devices)
    counts[index] += more
    return with_counts(cluster, counts)


def _rounded_up(value: float) -> str:
    rounded = float(f"{value:.3g}")
    return f"{rounded if rounded >= value else float(f'{value * 1.005:.3g}'):g}"
