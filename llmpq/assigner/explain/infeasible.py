"""Why there is no plan, and what limits one: each device of it, and its speed.

Every change that a message names was verified by the memory test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from llmpq.assigner.constraints.resolve import with_counts
from llmpq.assigner.enumeration import (
    MAX_ORDERS,
    build_pairs,
    device_groups,
    device_orders,
    layers_that_fit,
    leading_orders,
    most_layers,
    num_orders,
)
from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp
from llmpq.assigner.objective import IntArray, PairCosts
from llmpq.assigner.request import (
    DEFAULT_GAP,
    PlanningTask,
    PlanRequest,
    apart_variants,
    costs_of,
)
from llmpq.costmodel import ClusterCosts
from llmpq.costmodel.costs import kv_obstacle
from llmpq.errors import InfeasibleError
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import MicroBatching, OrderSet, Plan, StageAssignment, StageEstimate
from llmpq.spec.precision import BITS, Phase
from llmpq.spec.runtime_constants import KV_CODE_BITS, PROMPT_CHUNK_TOKENS
from llmpq.units import format_bytes, format_seconds

Constraint = Literal["memory", "disk", "prefill", "decode", "prefill_link", "decode_link"]

NEARLY = 5e-3
"""Relative difference within which a stage counts as slow as the slowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The binding constraints of one stage.

    Attributes:
        constraints: ``memory`` without room for the smallest step; ``disk`` when its decode step
            takes as long as reading its weights from disk; a phase or its link when among the
            slowest, where the phase's latency follows its slowest stage.
        step_bytes: the smallest step that would need more than ``slack_bytes``: a layer at the next
            wider bits, or one more layer; ``None`` when there is no such step.
        prefill_share, decode_share: its time relative to the slowest stage's or link's.
        master_share: the master's own work as a share of this stage's decode step, 0 elsewhere.
        read_bytes: weights that it reads from disk in each step.
    """

    rank: int
    constraints: tuple[Constraint, ...]
    slack_bytes: int
    step_bytes: int | None
    prefill_share: float
    decode_share: float
    master_share: float
    read_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBinding:
    """The binding constraints of a plan; whether a phase follows its slowest stage or the sum."""

    prefill_by_slowest: bool
    decode_by_slowest: bool
    stages: tuple[Binding, ...]


def plan_binding(plan: Plan, costs: ClusterCosts) -> PlanBinding:
    """Return the binding constraints of every stage of a plan."""
    stages = plan.estimate.stages
    prefill_s = max(max(stage.prefill_s, stage.send_prefill_s) for stage in stages)
    decode_s = max(max(stage.decode_s, stage.send_decode_s) for stage in stages)
    prefill_by_slowest = plan.workload.batch > plan.micro_batching.prefill
    decode_by_slowest = _decodes_by_slowest(plan, decode_s)
    found = []
    for stage, estimate in zip(plan.stages, stages, strict=True):
        slack = estimate.capacity_bytes - estimate.memory.total
        step = _smallest_step(plan, stage, costs)
        times: list[tuple[Constraint, float, float]] = []
        if prefill_by_slowest:
            times += [
                ("prefill", estimate.prefill_s, prefill_s),
                ("prefill_link", estimate.send_prefill_s, prefill_s),
            ]
        if decode_by_slowest:
            times += [
                ("decode", estimate.decode_s, decode_s),
                ("decode_link", estimate.send_decode_s, decode_s),
            ]
        names: list[Constraint] = ["memory"] if step is not None and slack < step else []
        device, kinds = plan.device_of(stage), costs.model.layer_kinds
        read = sum(
            costs.layer_weight_bytes(device, kinds[stage.first_layer + index], stage.bits[index])
            for index in stage.on_disk
        )
        if read and costs.stream_s(device, read) >= estimate.decode_s * (1 - NEARLY):
            names.append("disk")
        names += [name for name, own_s, slowest_s in times if own_s >= slowest_s * (1 - NEARLY)]
        found.append(
            Binding(
                rank=stage.rank,
                constraints=tuple(names),
                slack_bytes=slack,
                step_bytes=step,
                prefill_share=estimate.prefill_s / prefill_s if prefill_s > 0 else 1.0,
                decode_share=estimate.decode_s / decode_s if decode_s > 0 else 1.0,
                master_share=_master_share(plan, stage, estimate, costs),
                read_bytes=read,
            )
        )
    return PlanBinding(
        prefill_by_slowest=prefill_by_slowest,
        decode_by_slowest=decode_by_slowest,
        stages=tuple(found),
    )


def _decodes_by_slowest(plan: Plan, slowest_s: float) -> bool:
    """Return which side of ``T_round`` is the larger (``objective``)."""
    work, batches = plan.workload, -(-plan.workload.batch // plan.micro_batching.decode)
    if work.new_tokens == 1:
        return False
    if plan.search.formula == "paper":
        return batches > 1
    return batches * slowest_s > sum(s.decode_s + s.send_decode_s for s in plan.estimate.stages)


def binding_text(found: Binding) -> str:
    """Return the binding constraints of a stage in words."""
    parts = []
    if "memory" in found.constraints:
        assert found.step_bytes is not None
        parts.append(
            f"memory ({format_bytes(max(0, found.slack_bytes))} free, the smallest step takes "
            f"{format_bytes(found.step_bytes)})"
        )
    if "disk" in found.constraints:
        parts.append(f"reading {format_bytes(found.read_bytes)} of weights from disk a step")
    for phase in ("prefill", "decode"):
        if phase in found.constraints:
            parts.append(f"slowest in {phase}")
        if f"{phase}_link" in found.constraints:
            parts.append(f"its link is the slowest in {phase}")
    if found.master_share > 0 and {"prefill", "decode"} & set(found.constraints):
        parts.append(f"{found.master_share:.0%} of its decode step is the master's own work")
    if parts:
        return "; ".join(parts)
    return (
        f"nothing ({format_bytes(max(0, found.slack_bytes))} free; {found.prefill_share:.0%} of "
        f"the slowest in prefill, {found.decode_share:.0%} in decode)"
    )


def allowed_bits(plan: Plan) -> tuple[int, ...]:
    """Return the bitwidths allowed in the search, by the plan's provenance, widest first."""
    text = dict(plan.provenance.inputs).get("bits", "")
    widths = {int(word) for word in text.split() if word.isdecimal()}
    return tuple(width for width in BITS if width in widths | set(plan.bits))


def _smallest_step(plan: Plan, stage: StageAssignment, costs: ClusterCosts) -> int | None:
    """Return the fewest bytes that a better plan would need here."""
    device, work = plan.device_of(stage), plan.workload
    kinds, widths = costs.model.layer_kinds, sorted(allowed_bits(plan))
    steps = []
    for layer, bits in zip(range(stage.first_layer, stage.end_layer), stage.bits, strict=True):
        wider = next((width for width in widths if width > bits), None)
        if wider is not None:
            now = costs.layer_weight_bytes(device, kinds[layer], bits)
            steps.append(costs.layer_weight_bytes(device, kinds[layer], wider) - now)
    if stage.num_layers < plan.model.num_layers:
        steps += [
            costs.layer_weight_bytes(device, kind, widths[0])
            + costs.layer_kv_bytes(kind, work.batch, work.max_context_tokens, device)
            for kind in set(kinds)
        ]
    return min(steps, default=None)


def _master_share(
    plan: Plan, stage: StageAssignment, estimate: StageEstimate, costs: ClusterCosts
) -> float:
    if stage.rank or estimate.decode_s <= 0:
        return 0.0
    own_s = costs.master_s(plan.device_of(stage), Phase.DECODE, plan.micro_batching.decode, 1)
    return own_s / estimate.decode_s


MAX_ADDED_DEVICES = 16
_OTHER_BITS = "allow"
SMALLEST = MicroBatching(prefill=1, decode=1)
"""The pair with the least temporary memory: what does not fit with it fits with none."""


def memory_error(request: PlanRequest) -> InfeasibleError:
    """Return why a model does not fit, split by cause, and the smallest single changes."""
    held, layers = held_layers(request), request.model.num_layers
    if held >= layers:
        return InfeasibleError(
            f"{request.model.name} does not fit when its layers are decided in groups of "
            f"{request.layer_group}; it does with smaller groups",
            short=f"does not fit in groups of {request.layer_group} layers",
        )
    pair, costs = _smallest_pair(request)
    first = _first_parts(request, pair, costs)
    if held < 0:
        alone = format_bytes(sum(first.values()))
        short = "no device holds the embeddings and head"
        why = (
            f"no device holds {', '.join(first)}, which take {alone}, of at most "
            f"{format_bytes(int(pair.total_bytes.max()))}"
        )
    else:
        short = f"{held} of {layers} layers fit"
        why = f"{short} at {min(request.bits)} bits"
    kinds, work = request.model.layer_kinds, request.workload
    kv = sum(int(pair.kv_bytes[kind]) for kind in kinds)
    # Those of whole layers, which come first.
    bits = slice(len(request.bits))
    whole = sum(int(pair.layer_bytes[0, kind, bits].min()) for kind in kinds)
    wanted = {
        f"weights of {layers} layers at {min(request.bits)} bits": whole - kv,
        f"KV cache ({work.batch} sequences of {work.max_context_tokens} tokens)": kv,
    }
    devices = request.cluster.devices
    usable = sum(costs.capacity_bytes(device) for device in devices)
    fixes = _fixes(request, costs)
    advice = " or ".join(fixes) if fixes else "no single change of batch, length or devices helps"
    # The rows of a table have bits of their own.
    others = [fix for fix in fixes if not fix.startswith(_OTHER_BITS)]
    short += f"; needs {' or '.join(others)}" if others else "; no single change helps"
    return InfeasibleError(
        f"{request.model.name} does not fit on {request.cluster.name}: {why}; needed: "
        f"{_listed({**wanted, **first})}; {len(devices)} device{'s' * (len(devices) > 1)} "
        f"may use {format_bytes(usable)}{_reserve_text(costs)}{_hosts_text(request, pair)}; "
        f"smallest single fixes: {advice}",
        short=short,
    )


def _hosts_text(request: PlanRequest, pair: PairCosts) -> str:
    """Return the memory of hosts that may hold experts, empty where none does."""
    if not pair.host_bytes.any():
        return ""
    own = [device.host.memory_bytes for device in request.cluster.devices if device.host]
    return f", for experts their host{'s' * (len(own) > 1)} {format_bytes(sum(own))}"


def _first_parts(request: PlanRequest, pair: PairCosts, costs: ClusterCosts) -> dict[str, int]:
    """Return what the first device holds besides layers, by cause: on that with the most memory."""
    group = int(pair.first_capacity_bytes.argmax())
    device = next(item for item in request.cluster.devices if item.group == group)
    chunk = min(request.workload.max_prompt_tokens, PROMPT_CHUNK_TOKENS)
    master = costs.master_bytes(device)
    steps = int(pair.temporary_bytes[group] + pair.master_bytes[group]) - master
    return {
        f"temporary memory (prompts in chunks of {chunk} tokens)": steps,
        "embeddings and head": master,
        "process": int(pair.runtime_bytes[group]),
    }


def _listed(parts: dict[str, int]) -> str:
    """Return parts with their sizes, the largest first."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in ordered)


def _reserve_text(costs: ClusterCosts) -> str:
    """Return what of their memory devices may not use, ``""`` where it is nothing."""
    kept = sum(
        costs.specs[device.group].reserve_bytes
        for device in costs.cluster.devices
        if device.memory_bytes is None
    )
    return f" (another {format_bytes(kept)} is reserved)" if kept else ""


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
            IlpOptions(solver=request.program_solver, gap=DEFAULT_GAP),
        ).evaluation
        for order in orders
    ]
    qualities = [evaluation.quality for evaluation in found if evaluation is not None]
    if not qualities:
        return str(memory_error(request))
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
    return min(
        _held_by_devices(request, pair, counts),
        most_layers(pair, counts, request.model.layer_kinds),
    )


def _held_by_devices(request: PlanRequest, pair: PairCosts, counts: IntArray) -> int:
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
    apart = apart_variants(request, costs)
    (pair,) = build_pairs(costs, request.workload, request.bits, [SMALLEST], apart)
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


def _fixes(request: PlanRequest, costs: ClusterCosts) -> list[str]:
    work = request.workload
    fixes = []
    for width in (b for b in BITS if b < min(request.bits)):
        if _fits(replace(request, bits=(*request.bits, width))):
            fixes.append(f"{_OTHER_BITS} {width} bits")
            break
    for width in sorted((b for b in KV_CODE_BITS if b < request.kv_bits), reverse=True):
        obstacle = kv_obstacle(request.model, request.cluster, width)
        if obstacle is None and _fits(replace(request, kv_bits=width)):
            fixes.append(f"--kv_bits {width}")
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
                fixes.append(_added(more, name, index, costs))
                break
    return fixes


def _added(more: int, name: str, group: int, costs: ClusterCosts) -> str:
    """Return a number of devices more; of a CPU, whose number is fixed, their memory."""
    device = next(one for one in costs.cluster.devices if one.group == group)
    if costs.specs[group].kind != "cpu":
        return f"+{more} {name}"
    return f"+{format_bytes(more * costs.capacity_bytes(device))} memory for {name}"


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
    """Return a cluster with ``more`` devices in its group number ``index``.

    Devices of a node whose host computes experts share its memory with the new ones.
    """
    counts = Counter(device.group for device in cluster.devices)
    counts[index] += more
    found = with_counts(cluster, counts)
    nodes = []
    for before, node in zip(cluster.nodes, found.nodes, strict=True):
        old, new = (
            sum(group.count for group in one.devices if group.host is not None)
            for one in (before, node)
        )
        groups = [
            group
            if group.host is None or old == new
            else replace(
                group,
                host=replace(group.host, memory_bytes=group.host.memory_bytes * old // new),
            )
            for group in node.devices
        ]
        nodes.append(replace(node, devices=tuple(groups)))
    return replace(found, nodes=tuple(nodes))


def _rounded_up(value: float) -> str:
    rounded = float(f"{value:.3g}")
    return f"{rounded if rounded >= value else float(f'{value * 1.005:.3g}'):g}"
