"""What a finished plan holds, stage by stage, and what one with stages of either phase (WAA) takes.

A search does not know yet which place is last, nor which gets a layer of 16 bits, and counts enough
for either; a finished plan knows. The planner's problems also know one pipeline only. WAA has two:
weights are held twice, KV slots by stages that decode, and what two prefill micro-batches leave by
those that prefill; the master embeds and projects for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmpq.assigner.forecast import forecast
from llmpq.assigner.problem import FloatArray
from llmpq.costmodel import ClusterCosts
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.cluster import Device
from llmpq.spec.plan import MemoryParts, Plan, PlanEstimate, StageAssignment, StageEstimate
from llmpq.spec.precision import BITS, Phase


def stage_memory(
    plan: Plan, costs: ClusterCosts, stage: StageAssignment, device: Device | None = None
) -> MemoryParts:
    """Return the bytes of one stage, by cause.

    What lives during a step is counted for both phases, though a stage may compute only one.

    Args:
        plan: the plan.
        costs: the cost models.
        stage: one of its stages.
        device: its device as the cost models' cluster has it, the plan's own by default.
    """
    device, is_master = device or plan.device_of(stage), stage.rank == 0
    layers = range(stage.first_layer, stage.end_layer)
    kinds = [costs.model.layer_kinds[layer] for layer in layers]
    slots, tokens = plan.slots_of(stage)
    weights = (
        costs.layer_weight_bytes(device, kind, bits)
        for kind, bits in zip(kinds, stage.bits, strict=True)
    )
    kv = sum(costs.layer_kv_bytes(kind, slots, tokens) for kind in kinds)
    return MemoryParts(
        weights=sum(weights),
        kv=kv,
        temporary=costs.temporary_bytes(
            device,
            plan.workload,
            plan.micro_batching,
            is_master,
            is_last=not plan.is_split and stage.rank == len(plan.stages) - 1,
            dense_layers=stage.bits.count(16),
            kv_bytes=kv,
        ),
        master=costs.master_bytes() if is_master else 0,
        runtime=costs.runtime_bytes(device),
    )


def with_memory(
    plan: Plan, costs: ClusterCosts, devices: Sequence[Device] | None = None
) -> PlanEstimate:
    """Return the estimate of a plan with the bytes that are known now that it is finished.

    Args:
        plan: the plan; its estimate may count more.
        costs: the cost models.
        devices: of its stages, as the cost models' cluster has them; the plan's own by default.
    """
    places = devices or [plan.device_of(stage) for stage in plan.stages]
    counted = zip(plan.estimate.stages, plan.stages, places, strict=True)
    stages = []
    for estimate, stage, place in counted:
        known = stage_memory(plan, costs, stage, place)
        # On accelerators nothing more is known, and a search's own parts stay as they are.
        differs = known.total != estimate.memory.total
        stages.append(replace(estimate, memory=known) if differs else estimate)
    return replace(plan.estimate, stages=tuple(stages))


def excess_bytes(plan: Plan, costs: ClusterCosts) -> int:
    """Return the bytes over capacity, of all stages together; 0 when the plan fits."""
    return sum(
        max(0, stage_memory(plan, costs, stage).total - costs.capacity_bytes(plan.device_of(stage)))
        for stage in plan.stages
    )


def price_split(plan: Plan, costs: ClusterCosts, omega: FloatArray) -> tuple[PlanEstimate, int]:
    """Return the estimate of a plan with stages of either phase, and the bytes over capacity.

    Its latency is that of the workload played forward: the closed formula knows one pipeline.

    Args:
        plan: the plan.
        costs: the cost models.
        omega: ``[L, B]`` normalised degradation over all of ``BITS``.
    """
    played = forecast(plan, costs)
    quality = sum(float(omega[layer, BITS.index(bits)]) for layer, bits in enumerate(plan.bits))
    stages = _stages(plan, costs)
    excess = sum(max(0, stage.memory.total - stage.capacity_bytes) for stage in stages)
    return (
        PlanEstimate(
            latency_s=played.latency_s,
            quality=quality,
            objective_s=played.latency_s + plan.search.theta_s * quality,
            stages=tuple(stages),
            forecast=played,
        ),
        excess,
    )


def _stages(plan: Plan, costs: ClusterCosts) -> Sequence[StageEstimate]:
    seconds = PlanCosts(plan, costs)
    work, sizes = plan.workload, plan.micro_batching
    shapes = (
        (Phase.PREFILL, sizes.prefill, float(work.prompt_tokens)),
        (Phase.DECODE, sizes.decode, work.mean_context_tokens),
    )
    found = []
    for stage in plan.stages:
        device, steps_s, sends_s = plan.device_of(stage), [], []
        for phase, rows, tokens in shapes:
            path = plan.path(phase)
            has_layers = seconds.has_layers(stage.rank, phase)
            step_s = seconds.layers_s(stage.rank, phase, rows, tokens) if has_layers else 0.0
            if stage.rank == 0:
                step_s += costs.master_s(device, phase, rows, round(tokens))
            send_s = 0.0
            if stage.rank in path and len(path) > 1:
                target = path[(path.index(stage.rank) + 1) % len(path)]
                is_last = target == 0
                send_s = costs.send_s(
                    device,
                    plan.device_of(plan.stages[target]),
                    phase,
                    rows,
                    1 if is_last else round(tokens),
                )
            steps_s.append(step_s)
            sends_s.append(send_s)
        found.append(
            StageEstimate(
                prefill_s=steps_s[0],
                decode_s=steps_s[1],
                send_prefill_s=sends_s[0],
                send_decode_s=sends_s[1],
                memory=stage_memory(plan, costs, stage),
                capacity_bytes=costs.capacity_bytes(device),
            )
        )
    return found
