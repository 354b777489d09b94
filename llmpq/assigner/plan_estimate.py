"""The estimate of a finished plan: seconds, quality and memory by cause, computed from its file.

During a search the last stage and the stages with layers of 16 bits are not known yet, so every
stage reserves memory for both; here only the stages that need it do. A plan with separate stages
per phase (WAA, experimental) holds its weights twice; its latency is that of the simulator, because
the closed formula describes one pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmpq.assigner.enumeration import build_pairs
from llmpq.assigner.forecast import forecast, micro_batches_of
from llmpq.assigner.objective import Evaluation, evaluate
from llmpq.assigner.problem import Assignment, AssignmentProblem, FloatArray
from llmpq.costmodel import ClusterCosts, LatencySource, build_costs
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.cluster import Device
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import MemoryParts, Plan, PlanEstimate, StageAssignment, StageEstimate
from llmpq.spec.precision import BITS


def costs_of_plan(
    plan: Plan,
    model: ModelSpec,
    profile_dir: Path | None = None,
    *,
    reads_tables: bool = True,
) -> ClusterCosts:
    """Return the cost models of a plan's cluster, of the kind that it was made with.

    Raises:
        SpecError: a measured table is not here; without ``reads_tables`` none is needed.
    """
    is_fitted = any(source.startswith("fit of ") for _, source in plan.provenance.inputs)
    latency: LatencySource = "fit" if is_fitted else "table"
    return build_costs(
        model,
        plan.cluster,
        dtype=plan.dtype,
        kv_bits=plan.kv_bits,
        head_bits=plan.head_width,
        profile_dir=profile_dir,
        latency=latency if reads_tables else "roofline",
    )


def evaluate_plan(plan: Plan, costs: ClusterCosts, omega: FloatArray) -> tuple[PlanEstimate, int]:
    """Return the estimate of a plan with the given cost models, and its bytes over capacity.

    ``omega`` is ``[L, B]`` over all of ``BITS``; the plan's own estimate is ignored.
    """
    if plan.is_split:
        estimate = _split_estimate(plan, costs, omega)
    else:
        # Only the bitwidths in use: a measured table need not hold the others.
        bits = tuple(width for width in BITS if width in plan.bits)
        (pair,) = build_pairs(costs, plan.workload, bits, [plan.micro_batching])
        problem = AssignmentProblem(
            costs=pair,
            kinds=np.array(costs.model.layer_kinds, dtype=np.int64),
            bits=bits,
            omega=omega[:, [BITS.index(width) for width in bits]],
            theta_s=plan.search.theta_s,
            quality_budget=None,
            formula=plan.search.formula,
            order=tuple(plan.device_of(stage).group for stage in plan.stages),
        )
        assignment = Assignment(
            tuple(stage.rank for stage in plan.stages for _ in stage.bits),
            tuple(bits.index(width) for width in plan.bits),
        )
        found = estimate_of(problem, evaluate(problem, assignment))
        estimate = with_exact_memory(replace(plan, estimate=found), costs)
    over = (stage.memory.total - stage.capacity_bytes for stage in estimate.stages)
    return estimate, sum(max(0, excess) for excess in over)


def estimate_of(problem: AssignmentProblem, found: Evaluation) -> PlanEstimate:
    """Return the estimate of an evaluated assignment, with the memory that the search reserved."""
    costs = problem.costs
    stages = []
    for stage in found.stages:
        group = problem.order[stage.position]
        memory = MemoryParts(
            weights=stage.weight_bytes,
            kv=stage.kv_bytes,
            temporary=int(costs.temporary_bytes[group]),
            master=int(costs.master_bytes[group]) if stage.position == 0 else 0,
            runtime=int(costs.runtime_bytes[group]),
        )
        stages.append(
            StageEstimate(
                prefill_s=stage.prefill_s,
                decode_s=stage.decode_s,
                send_prefill_s=stage.send_prefill_s,
                send_decode_s=stage.send_decode_s,
                memory=memory,
                capacity_bytes=int(costs.total_bytes[group]),
            )
        )
    return PlanEstimate(
        latency_s=found.latency_s,
        quality=found.quality,
        objective_s=found.objective_s,
        stages=tuple(stages),
    )


def empty_estimate(stages: int, *, quality: float) -> PlanEstimate:
    """Return the estimate of a plan that is not evaluated: no seconds and no bytes."""
    nothing = StageEstimate(
        prefill_s=0.0,
        decode_s=0.0,
        send_prefill_s=0.0,
        send_decode_s=0.0,
        memory=MemoryParts(weights=0, kv=0, temporary=0, master=0, runtime=0),
        capacity_bytes=0,
    )
    return PlanEstimate(latency_s=0.0, quality=quality, objective_s=0.0, stages=(nothing,) * stages)


def stage_memory(
    plan: Plan, costs: ClusterCosts, stage: StageAssignment, device: Device | None = None
) -> MemoryParts:
    """Return the bytes of one stage, by cause.

    Temporary buffers are those of both phases, even where a stage computes only one. ``device`` is
    the stage's in the cost models' cluster, the plan's own by default.
    """
    device, is_master = device or plan.device_of(stage), stage.rank == 0
    kinds = costs.model.layer_kinds[stage.first_layer : stage.end_layer]
    slots, tokens = plan.slots_of(stage)
    kv = sum(
        costs.layer_kv_bytes(kind, slots, tokens, device, keeps_all=plan.is_split) for kind in kinds
    )
    kv += costs.copied_kv_bytes(slots, tokens, device, (stage.first_layer, stage.end_layer))
    return MemoryParts(
        weights=sum(
            costs.layer_weight_bytes(device, kind, bits)
            for kind, bits in zip(kinds, stage.bits, strict=True)
        ),
        kv=kv,
        temporary=costs.temporary_bytes(
            device,
            plan.workload,
            plan.micro_batching,
            is_master,
            is_last=not plan.is_split and stage.rank == len(plan.stages) - 1,
            kv_bytes=kv,
        ),
        master=costs.master_bytes(device) if is_master else 0,
        runtime=costs.runtime_bytes(device),
    )


def with_exact_memory(
    plan: Plan, costs: ClusterCosts, devices: Sequence[Device] | None = None
) -> PlanEstimate:
    """Return a plan's estimate with the memory of its finished stages, on ``devices`` if given."""
    places = devices or [plan.device_of(stage) for stage in plan.stages]
    stages = []
    for estimate, stage, place in zip(plan.estimate.stages, plan.stages, places, strict=True):
        memory = stage_memory(plan, costs, stage, place)
        # Equal totals keep the parts as the search counted them.
        differs = memory.total != estimate.memory.total
        stages.append(replace(estimate, memory=memory) if differs else estimate)
    return replace(plan.estimate, stages=tuple(stages))


def excess_bytes(plan: Plan, costs: ClusterCosts) -> int:
    """Return the bytes over capacity, of all stages together; 0 when the plan fits."""
    return sum(
        max(0, stage_memory(plan, costs, stage).total - costs.capacity_bytes(plan.device_of(stage)))
        for stage in plan.stages
    )


def _split_estimate(plan: Plan, costs: ClusterCosts, omega: FloatArray) -> PlanEstimate:
    """Return the estimate of a plan with separate stages per phase."""
    played = forecast(plan, costs)
    quality = sum(float(omega[layer, BITS.index(bits)]) for layer, bits in enumerate(plan.bits))
    seconds = PlanCosts(plan, costs)
    return PlanEstimate(
        latency_s=played.latency_s,
        quality=quality,
        objective_s=played.latency_s + plan.search.theta_s * quality,
        stages=tuple(_split_stage(plan, costs, seconds, stage) for stage in plan.stages),
        forecast=played,
    )


def _split_stage(
    plan: Plan, costs: ClusterCosts, seconds: PlanCosts, stage: StageAssignment
) -> StageEstimate:
    device = plan.device_of(stage)
    steps_s, sends_s = [], []
    for phase, rows, tokens in micro_batches_of(plan):
        path = plan.path(phase)
        has_layers = seconds.has_layers(stage.rank, phase)
        step_s = seconds.layers_s(stage.rank, phase, rows, tokens) if has_layers else 0.0
        if stage.rank == 0:
            step_s += costs.master_s(device, phase, rows, round(tokens))
        send_s = 0.0
        if stage.rank in path and len(path) > 1:
            target = path[(path.index(stage.rank) + 1) % len(path)]
            sent = 1 if target == 0 else round(tokens)
            send_s = costs.send_s(device, plan.device_of(plan.stages[target]), phase, rows, sent)
        steps_s.append(step_s)
        sends_s.append(send_s)
    return StageEstimate(
        prefill_s=steps_s[0],
        decode_s=steps_s[1],
        send_prefill_s=sends_s[0],
        send_decode_s=sends_s[1],
        memory=stage_memory(plan, costs, stage),
        capacity_bytes=costs.capacity_bytes(device),
    )
