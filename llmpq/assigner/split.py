"""What a plan with stages of either phase (WAA) holds and takes, stage by stage.

The planner's problems know one pipeline. Here are two: weights are held twice, KV slots by stages
that decode, and what two prefill micro-batches leave by those that prefill; the master embeds and
projects for both.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.assigner.forecast import forecast
from llmpq.assigner.problem import FloatArray
from llmpq.costmodel import ClusterCosts
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.plan import MemoryParts, Plan, PlanEstimate, StageAssignment, StageEstimate
from llmpq.spec.precision import BITS, Phase


def stage_memory(plan: Plan, costs: ClusterCosts, stage: StageAssignment) -> MemoryParts:
    """Return the bytes of one stage, by cause.

    What lives during a step is counted for both phases, though a stage computes only one.
    """
    device, is_master = plan.device_of(stage), stage.rank == 0
    layers = range(stage.first_layer, stage.end_layer)
    kinds = [costs.model.layer_kinds[layer] for layer in layers]
    slots, tokens = plan.slots_of(stage)
    weights = (
        costs.layer_weight_bytes(device, kind, bits)
        for kind, bits in zip(kinds, stage.bits, strict=True)
    )
    return MemoryParts(
        weights=sum(weights),
        kv=sum(costs.layer_kv_bytes(kind, slots, tokens) for kind in kinds),
        temporary=costs.temporary_bytes(device, plan.workload, plan.micro_batching, is_master),
        master=costs.master_bytes() if is_master else 0,
        runtime=costs.runtime_bytes(device),
    )


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
