"""Binding constraints: what limits each device of a plan, and the plan's speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmpq.costmodel import ClusterCosts
from llmpq.spec.plan import Plan, StageAssignment, StageEstimate
from llmpq.spec.precision import BITS, Phase
from llmpq.units import format_bytes

Constraint = Literal["memory", "prefill", "decode", "prefill_link", "decode_link"]

NEARLY = 5e-3
"""Relative difference within which a stage counts as slow as the slowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The binding constraints of one stage.

    Attributes:
        constraints: ``memory`` without room for the smallest step; a phase or its link when among
            the slowest, where the phase's latency follows its slowest stage.
        step_bytes: the smallest step that would need more than ``slack_bytes``: a layer at the next
            wider bits, or one more layer; ``None`` when there is no such step.
        prefill_share, decode_share: its time relative to the slowest stage's or link's.
        master_share: the master's own work as a share of this stage's decode step, 0 elsewhere.
    """

    rank: int
    constraints: tuple[Constraint, ...]
    slack_bytes: int
    step_bytes: int | None
    prefill_share: float
    decode_share: float
    master_share: float


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
