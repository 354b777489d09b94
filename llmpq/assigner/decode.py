"""From positions and widths to a strategy: concrete devices, runs of layers, memory by cause.

Also the way back: a plan read from a file is turned into a problem and priced again.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import accumulate

import numpy as np

from llmpq import __version__
from llmpq.assigner.enumeration import build_pairs
from llmpq.assigner.forecast import forecast
from llmpq.assigner.objective import Evaluation, evaluate
from llmpq.assigner.problem import Assignment, AssignmentProblem, FloatArray
from llmpq.assigner.split import price_split, with_memory
from llmpq.assigner.task import DEFAULT_OMEGA, PlanningTask, PlanRequest, Solution
from llmpq.costmodel import ClusterCosts
from llmpq.spec.codec import to_json
from llmpq.spec.fields import digest_of
from llmpq.spec.plan import (
    MemoryParts,
    ModelRef,
    Plan,
    PlanEstimate,
    Provenance,
    Search,
    StageAssignment,
    StageEstimate,
)
from llmpq.spec.precision import BITS


def plan_of(
    task: PlanningTask, solution: Solution, *, method: str, command: str, planning_s: float
) -> Plan:
    """Build the plan of a solution, with its estimate, forecast, proof and origin."""
    request = task.request
    stages = _stages(task, solution)
    used = {stage.device for stage in stages}
    bound_s, objective_s = solution.bound_s, solution.evaluation.objective_s
    gap = None
    if bound_s is not None:
        gap = (objective_s - bound_s) / objective_s if objective_s > 0 else 0.0
    plan = Plan(
        model=ModelRef(
            name=request.model.name,
            source=request.model_source,
            num_layers=request.model.num_layers,
        ),
        cluster=task.cluster,
        workload=request.workload,
        dtype=request.dtype,
        kv_bits=request.kv_bits,
        micro_batching=solution.problem.costs.micro_batching,
        stages=stages,
        dropped_devices=tuple(
            index for index in range(len(task.cluster.devices)) if index not in used
        ),
        estimate=estimate_of(solution.problem, solution.evaluation),
        search=Search(
            method=method,
            solver=solution.solver or None,
            formula=request.formula,
            theta_s=task.theta_s,
            quality_budget=request.quality_budget,
            status=solution.status,
            bound_s=bound_s,
            gap=gap,
            planning_s=planning_s,
            orders=solution.orders,
            pairs_searched=solution.pairs_searched,
            pairs_pruned=solution.pairs_pruned,
        ),
        provenance=Provenance(command=command, version=__version__, inputs=_inputs(task)),
    )
    # The costs were built for the devices that may be used, the plan shows the whole cluster.
    known = request.cluster.devices
    devices = [known[task.device_indices.index(stage.device)] for stage in stages]
    played = forecast(plan, task.costs, devices)
    estimate = with_memory(plan, task.costs, devices)
    return replace(plan, estimate=replace(estimate, forecast=played))


def estimate_of(problem: AssignmentProblem, found: Evaluation) -> PlanEstimate:
    """Return the estimate that a plan stores."""
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


def reprice(plan: Plan, costs: ClusterCosts, omega: FloatArray) -> tuple[PlanEstimate, int]:
    """Price a plan as if it were found now.

    Args:
        plan: the plan.
        costs: the cost models of today.
        omega: ``[L, B]`` normalised degradation over all of ``BITS``.

    Returns:
        The estimate, and the bytes over capacity (0 when it fits).
    """
    if plan.is_split:
        return price_split(plan, costs, omega)
    # Only what the plan uses: a measured table need not know other bitwidths.
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
    estimate = with_memory(replace(plan, estimate=found), costs)
    over = (stage.memory.total - stage.capacity_bytes for stage in estimate.stages)
    return estimate, sum(max(0, excess) for excess in over)


def _stages(task: PlanningTask, solution: Solution) -> tuple[StageAssignment, ...]:
    problem, assignment = solution.problem, solution.assignment
    starts = [0, *accumulate(task.run_lengths)]
    free = [list(members) for members in task.groups]
    stages = []
    layer = 0
    for rank, position in enumerate(assignment.used_positions()):
        runs = [run for run, where in enumerate(assignment.positions) if where == position]
        bits = [
            problem.bits[assignment.widths[run]]
            for run in runs
            for _ in range(starts[run], starts[run + 1])
        ]
        stages.append(
            StageAssignment(
                rank=rank,
                # Devices of a group are equal: the used positions take the first of them.
                device=task.device_indices[free[problem.order[position]].pop(0)],
                first_layer=layer,
                end_layer=layer + len(bits),
                bits=tuple(bits),
            )
        )
        layer += len(bits)
    return tuple(stages)


def _inputs(task: PlanningTask) -> tuple[tuple[str, str], ...]:
    request = task.request
    model = asdict(request.model)
    found = [
        ("model", digest_of(model)),
        ("cluster", digest_of(to_json(task.cluster))),
        ("workload", digest_of(to_json(request.workload))),
        ("omega", omega_text(request)),
        ("bits", " ".join(str(width) for width in request.bits)),
    ]
    if request.overrides:
        found.append(("overrides", " ".join(request.overrides.single())))
    own, devices = request.cluster.devices, task.cluster.devices
    found += [
        (
            f"latency of {devices[task.device_indices[members[0]]].label}",
            task.costs.latency_source(own[members[0]]),
        )
        for members in task.groups
    ]
    return tuple(found)


def omega_text(request: PlanRequest) -> str:
    """Return where the degradation comes from: the default in words, or a table's digest."""
    table = request.sensitivity
    if table is None:
        return DEFAULT_OMEGA
    return (
        f"{table.method} {digest_of({str(width): list(column) for width, column in table.omega})}"
    )
