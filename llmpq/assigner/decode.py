"""From positions and widths to a plan: concrete devices, stages, estimate, proof and provenance."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import accumulate

from llmpq import __version__
from llmpq.assigner.forecast import forecast
from llmpq.assigner.objective import relative_gap
from llmpq.assigner.plan_estimate import estimate_of, with_exact_memory
from llmpq.assigner.request import DEFAULT_OMEGA, PlanningTask, Solution
from llmpq.spec.codec import to_json
from llmpq.spec.fields import digest_of
from llmpq.spec.plan import ModelRef, Plan, Provenance, Search, StageAssignment


def plan_of(
    task: PlanningTask, solution: Solution, *, method: str, command: str, planning_s: float
) -> Plan:
    """Build the plan of a solution, with its estimate, forecast, proof and provenance."""
    request = task.request
    stages = _stages(task, solution)
    used = {stage.device for stage in stages}
    bound_s, objective_s = solution.bound_s, solution.evaluation.objective_s
    gap = None if bound_s is None else relative_gap(objective_s, bound_s)
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
    # The cost models cover the devices that may be used, the plan holds the whole cluster.
    known = request.cluster.devices
    devices = [known[task.device_indices.index(stage.device)] for stage in stages]
    played = forecast(plan, task.costs, devices)
    estimate = with_exact_memory(plan, task.costs, devices)
    return replace(plan, estimate=replace(estimate, forecast=played))


def _stages(task: PlanningTask, solution: Solution) -> tuple[StageAssignment, ...]:
    problem, assignment = solution.problem, solution.assignment
    starts = [0, *accumulate(task.run_lengths)]
    free = [list(members) for members in task.groups]
    stages = []
    layer = 0
    for rank, position in enumerate(assignment.used_positions()):
        bits = [
            problem.bits[assignment.widths[run]]
            for run, where in enumerate(assignment.positions)
            if where == position
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
    found = [
        ("model", digest_of(asdict(request.model))),
        ("cluster", digest_of(to_json(task.cluster))),
        ("workload", digest_of(to_json(request.workload))),
        ("omega", _omega_text(task)),
        ("bits", " ".join(str(width) for width in request.bits)),
    ]
    if request.overrides:
        found.append(("overrides", " ".join(request.overrides.options())))
    own, devices = request.cluster.devices, task.cluster.devices
    found += [
        (
            f"latency of {devices[task.device_indices[members[0]]].label}",
            task.costs.latency_source(own[members[0]]),
        )
        for members in task.groups
    ]
    return tuple(found)


def _omega_text(task: PlanningTask) -> str:
    """Return where the degradation comes from: the default in words, or a table's digest."""
    table = task.request.sensitivity
    if table is None:
        return DEFAULT_OMEGA
    digest = digest_of({str(width): list(column) for width, column in table.omega})
    return f"{table.method} {digest}"
