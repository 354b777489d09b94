"""A plan as one JSON object and as a table, for ``llmpq-algo`` and ``llmpq-check``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmpq.spec.codec import to_json
from llmpq.spec.plan import Plan, StageAssignment, StageEstimate
from llmpq.units import GIB, MIB, format_seconds

BAR_WIDTH = 12
FROM_GIB = 4 * GIB
"""Memory is told in GiB from here on, below in MiB: small devices differ in their megabytes."""


def plan_record(plan: Plan, path: str | None) -> dict[str, Any]:
    """Return what ``--json`` says of a plan (design of the interfaces; units in the names)."""
    devices, search = plan.cluster.devices, plan.search
    return {
        "status": search.status,
        "method": search.method,
        "objective_s": plan.estimate.objective_s,
        "latency_s": plan.estimate.latency_s,
        "quality": plan.estimate.quality,
        "throughput_tokens_per_s": plan.throughput_tokens_per_s,
        "bound_s": search.bound_s,
        "gap": search.gap,
        "planning_s": search.planning_s,
        "orders": search.orders,
        "pairs_searched": search.pairs_searched,
        "pairs_pruned": search.pairs_pruned,
        "prefill_micro_batch": plan.micro_batching.prefill,
        "decode_micro_batch": plan.micro_batching.decode,
        "schedule": None if plan.schedule is None else to_json(plan.schedule),
        "dropped_devices": [devices[index].label for index in plan.dropped_devices],
        "stages": [
            _stage_record(plan, stage, estimate)
            for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True)
        ],
        "strategy": path,
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "workload": plan.workload.name,
        "dtype": plan.dtype,
        "formula": search.formula,
        "solver": search.solver,
        "theta_s": search.theta_s,
        "quality_budget": search.quality_budget,
        "omega": dict(plan.provenance.inputs).get("omega"),
    }


def _stage_record(plan: Plan, stage: StageAssignment, estimate: StageEstimate) -> dict[str, Any]:
    memory = estimate.memory
    return {
        "rank": stage.rank,
        "device": plan.device_of(stage).label,
        "device_index": stage.device,
        "phase": None if stage.phase is None else stage.phase.value,
        "first_layer": stage.first_layer,
        "end_layer": stage.end_layer,
        "bits": list(stage.bits),
        "memory_bytes": memory.total,
        "memory_parts_bytes": {
            "weights": memory.weights,
            "kv": memory.kv,
            "temporary": memory.temporary,
            "master": memory.master,
            "runtime": memory.runtime,
        },
        "capacity_bytes": estimate.capacity_bytes,
        "prefill_s": estimate.prefill_s,
        "decode_s": estimate.decode_s,
        "send_prefill_s": estimate.send_prefill_s,
        "send_decode_s": estimate.send_decode_s,
    }


def plan_table(plan: Plan, dropped: Mapping[int, str]) -> str:
    """Return a plan as text: stages, then the totals, then who was left out and why."""
    work = plan.workload
    lines = [
        f"{plan.model.name} on {plan.cluster.name}: {work.batch} x {work.prompt_tokens} prompt "
        f"tokens, {work.new_tokens} new tokens each, {plan.dtype}",
        "",
        *_aligned(_stage_rows(plan)),
        "",
        *_totals(plan),
    ]
    alike: dict[str, list[int]] = {}
    for device, reason in dropped.items():
        alike.setdefault(reason, []).append(device)
    for reason, members in alike.items():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        lines.append(f"left out       {plan.cluster.devices[members[0]].label}{more}: {reason}")
    return "\n".join(lines)


def memory_unit(largest_bytes: float) -> tuple[int, str, str]:
    """Return the unit that suits the largest of some sizes: bytes, name, and number format."""
    return (GIB, "GiB", ".1f") if largest_bytes >= FROM_GIB else (MIB, "MiB", ".0f")


def memory_pair(used: int, capacity: int) -> str:
    """Return ``used of capacity`` in one unit."""
    size, name, digits = memory_unit(max(used, capacity))
    return f"{used / size:{digits}} of {capacity / size:{digits}} {name}"


def plans_text(number: int) -> str:
    """Return how many plans there are, in words."""
    return "1 plan" if number == 1 else f"{number} plans"


def front_record(
    plans: Sequence[Plan], paths: Sequence[str], picture: str | None
) -> dict[str, Any]:
    """Return what ``--pareto --json`` says: every plan, the best quality first."""
    return {
        "plans": [plan_record(plan, path) for plan, path in zip(plans, paths, strict=True)],
        "picture": picture,
    }


def front_table(plans: Sequence[Plan], paths: Sequence[str]) -> str:
    """Return the plans of a front as one table."""
    rows: list[tuple[str, ...]] = [
        ("plan", "quality lost", "latency", "tokens/s", "bits", "batches", "devices", "file")
    ]
    for number, (plan, path) in enumerate(zip(plans, paths, strict=True), start=1):
        micro = plan.micro_batching
        rows.append(
            (
                str(number),
                f"{plan.estimate.quality:.4g}",
                f"{plan.estimate.latency_s:.4g} s",
                f"{plan.throughput_tokens_per_s:.4g}",
                compact_bits(plan.bits),
                f"{micro.prefill}, {micro.decode}",
                f"{len(plan.stages)} of {len(plan.cluster.devices)}",
                path,
            )
        )
    first = plans[0]
    work = first.workload
    title = (
        f"{first.model.name} on {first.cluster.name}: {work.batch} x {work.prompt_tokens} prompt "
        f"tokens, {work.new_tokens} new tokens each; quality lost: 0 = unquantized, 1 = every "
        "layer at 4 bits"
    )
    return "\n".join([title, "", *_aligned(rows), ""])


def compact_bits(bits: Sequence[int]) -> str:
    """Return bitwidths as counts, widest first, such as ``12x16 4x8``."""
    counts = Counter(bits)
    return " ".join(f"{counts[width]}x{width}" for width in sorted(counts, reverse=True)) or "-"


def _stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return the table of stages; with stages of either phase (WAA) a column says which."""
    rows: list[tuple[str, ...]] = [
        ("rank", "device", *_phase(plan, "phase"), "layers", "bits", "memory", "prefill", "decode")
    ]
    for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True):
        layers = f"{stage.first_layer}-{stage.end_layer - 1}" if stage.num_layers else "none"
        rows.append(
            (
                str(stage.rank),
                plan.device_of(stage).label,
                *_phase(plan, "both" if stage.phase is None else stage.phase.value),
                layers,
                compact_bits(stage.bits),
                _memory_text(estimate.memory.total, estimate.capacity_bytes),
                format_seconds(estimate.prefill_s),
                format_seconds(estimate.decode_s),
            )
        )
    return rows


def _phase(plan: Plan, cell: str) -> tuple[str, ...]:
    return (cell,) if plan.is_split else ()


def _memory_text(used: int, capacity: int) -> str:
    share = used / capacity if capacity else 1.0
    filled = min(BAR_WIDTH, round(share * BAR_WIDTH))
    bar = "#" * filled + "." * (BAR_WIDTH - filled)
    return f"[{bar}] {memory_pair(used, capacity)}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _totals(plan: Plan) -> list[str]:
    estimate, search = plan.estimate, plan.search
    micro = plan.micro_batching
    lines = [
        f"micro-batches  prefill {micro.prefill}, decode {micro.decode}",
        f"latency        {estimate.latency_s:.4g} s for the whole batch, "
        f"{plan.throughput_tokens_per_s:.4g} tokens/s ({search.formula} formula)",
        f"quality        {estimate.quality:.4g} lost (0 = unquantized, 1 = every layer at 4 bits)",
        f"objective      {estimate.objective_s:.4g} s = latency + {search.theta_s:g} s x quality",
    ]
    omega = dict(plan.provenance.inputs).get("omega")
    if omega is not None:
        lines.append(f"sensitivity    {omega}")
    if search.bound_s is not None and search.gap is not None:
        proof = "proven optimal" if search.status == "optimal" else "not proven optimal"
        lines.append(
            f"bound          {search.bound_s:.4g} s, gap {max(0.0, search.gap):.2%} ({proof} over "
            f"{search.orders} device orders: candidates solved {search.pairs_searched}, "
            f"ruled out by their bound {search.pairs_pruned})"
        )
    lines.append(
        f"planning       {format_seconds(search.planning_s)}, method {search.method}"
        + (f", solver {search.solver}" if search.solver else "")
    )
    return lines
