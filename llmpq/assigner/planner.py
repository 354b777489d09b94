"""make_plan: one request, one method, one plan, with its estimate, proof and provenance.

``even_plan`` makes equal stages on CPU workers of this machine, with a forecast of memory only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from pathlib import Path

from llmpq import __version__
from llmpq.assigner.constraints.resolve import NO_OVERRIDES
from llmpq.assigner.exact.search import find_exact
from llmpq.assigner.explain.infeasible import memory_error
from llmpq.assigner.forecast import (
    empty_estimate,
    estimate_of,
    forecast,
    stage_memory,
    with_exact_memory,
)
from llmpq.assigner.heuristics import baselines, transfer
from llmpq.assigner.milp.search import find_plan
from llmpq.assigner.objective import relative_gap
from llmpq.assigner.request import (
    DEFAULT_HEAD_LOSS,
    DEFAULT_OMEGA,
    FIRST_PLAN_GAP,
    NO_PLAN,
    OutOfTimeError,
    PlanningTask,
    PlanRequest,
    Progress,
    Solution,
    build_task,
    head_loss,
    silent,
)
from llmpq.costmodel import build_costs
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.fields import digest_of, to_json
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.plan import (
    QUALITY_UNIT,
    MicroBatching,
    ModelRef,
    Plan,
    Provenance,
    Search,
    StageAssignment,
    WeightsPlace,
)
from llmpq.spec.precision import DTYPE_BYTES, Dtype, LayerExperts, StageExperts
from llmpq.spec.workload import Workload

Method = Callable[[PlanningTask, Progress], Solution]
"""Finds a solution of a task that has at least one micro-batch pair, or raises ``InfeasibleError``
with what leaves no plan: memory, the quality budget, or the time limit."""


def find_best(task: PlanningTask, progress: Progress) -> Solution:
    """Find the best plan: exactly, or by integer programs when the request names their solver."""
    find = find_exact if task.request.solver == "exact" else find_plan
    return find(task, progress)


METHODS: Mapping[str, Method] = {
    "llmpq": find_best,
    "uniform": baselines.find_uniform,
    "adaptive_even": baselines.find_adaptive_even,
    "memory_proportional": baselines.find_memory_proportional,
    "speed_proportional": baselines.find_speed_proportional,
    "pipeedge": baselines.find_pipeedge,
    "fastest": baselines.find_fastest,
    "adabits": baselines.find_adabits,
    "heuristic": transfer.find_transfer,
}
"""The planning methods by name."""

EXPLANATION_LIMIT_S = 20.0
"""Seconds of each search for the manual decision that leaves no plan."""

_OVERRIDES_OF_ALL_METHODS = ("--memory_gib", "--exclude", "--micro_batch")


def make_plan(
    request: PlanRequest,
    method: str = "llmpq",
    *,
    command: str = "",
    progress: Progress | None = None,
) -> Plan:
    """Plan a request.

    Args:
        request: what to plan.
        method: a name in ``METHODS``.
        command: the command line, for the plan's provenance.
        progress: called during the search.

    Raises:
        SpecError: the request or the method is invalid.
        InfeasibleError: no plan exists, or none was found in time; the message says why.
    """
    check_method(request, method)
    started = time.perf_counter()
    request = request.with_deadline()
    try:
        task, solution = solve_request(request, method, progress or silent)
    except InfeasibleError as error:
        if not request.gives_reasons:
            raise
        raise explain_infeasible_overrides(request, method, error) from None
    planning_s = time.perf_counter() - started
    return plan_of(task, solution, method=method, command=command, planning_s=planning_s)


def best_plan(request: PlanRequest, clusters: Sequence[Cluster], *, command: str = "") -> Plan:
    """Return the plan of least objective on any of some clusters, the first of equal ones.

    One unit of degradation costs the same on all.

    Args:
        request: what to plan; its own cluster does not count.
        clusters: to choose from.
        command: as in ``make_plan``.

    Raises:
        InfeasibleError: no plan exists on any; the message is about the first.
    """
    best: Plan | None = None
    first: InfeasibleError | None = None
    for cluster in clusters:
        try:
            found = make_plan(replace(request, cluster=cluster), command=command)
        except InfeasibleError as error:
            first = first or error
            continue
        request = replace(request, theta_s=found.search.theta_s)
        if best is None or found.estimate.objective_s < best.estimate.objective_s:
            best = found
            request = replace(request, below_s=found.estimate.objective_s)
    if best is None:
        assert first is not None, "there is a cluster"
        raise first
    return best


def plan_task(
    task: PlanningTask,
    method: str,
    *,
    command: str = "",
    progress: Progress | None = None,
    started: float | None = None,
) -> Plan:
    """Plan a request whose arrays are built; arguments and errors are those of ``make_plan``.

    The planning time counts from ``started``, by ``time.perf_counter``; from now by default.
    """
    begun = time.perf_counter() if started is None else started
    solution = solve_task(task, method, progress or silent)
    planning_s = time.perf_counter() - begun
    return plan_of(task, solution, method=method, command=command, planning_s=planning_s)


def solve_request(
    request: PlanRequest, method: str, progress: Progress = silent
) -> tuple[PlanningTask, Solution]:
    """Solve a request with each bitwidth that its head may have; return the best solution.

    Its bound, status and counts are those of all searches together. Errors are those of
    ``make_plan``.
    """
    tasks = _tasks_by_head(request)
    if len(tasks) == 1:
        return tasks[0], solve_task(tasks[0], method, progress)
    found: list[tuple[PlanningTask, Solution]] = []
    errors: list[InfeasibleError] = []
    for task in tasks:
        try:
            found.append((task, solve_task(task, method, progress)))
        except InfeasibleError as error:
            errors.append(error)
    if not found:
        raise errors[-1]
    task, best = min(found, key=lambda item: item[1].evaluation.objective_s)
    solutions = [solution for _, solution in found]
    bounds = [solution.bound_s for solution in solutions if solution.bound_s is not None]
    is_late = any(isinstance(error, OutOfTimeError) for error in errors)
    is_proven = not is_late and all(one.status == "optimal" for one in solutions)
    return task, replace(
        best,
        status=best.status if is_proven or best.status != "optimal" else "feasible",
        bound_s=None if is_late or len(bounds) < len(solutions) else min(bounds),
        pairs_searched=sum(one.pairs_searched for one in solutions),
        pairs_pruned=sum(one.pairs_pruned for one in solutions),
    )


def _tasks_by_head(request: PlanRequest) -> list[PlanningTask]:
    """Return a task for each bitwidth of the head; one unit of degradation costs the same in all.

    That is the price of the widest head with which the model may fit.
    """
    tasks = []
    for bits in request.head_choices:
        task = build_task(replace(request, head_bits=(bits,)))
        if task.pairs:
            request = replace(request, theta_s=task.theta_s)
        tasks.append(task)
    return tasks


def solve_task(task: PlanningTask, method: str, progress: Progress = silent) -> Solution:
    """Return a method's solution; raises ``InfeasibleError`` as ``make_plan`` does."""
    if not task.pairs:
        raise memory_error(task.request) if task.request.gives_reasons else InfeasibleError(NO_PLAN)
    return METHODS[method](task, progress)


def check_method(request: PlanRequest, method: str) -> None:
    """Raise ``SpecError`` for an unknown method or overrides that a method does not support."""
    if method not in METHODS:
        raise SpecError(f"method: found '{method}', expected one of {', '.join(METHODS)}")
    if method != "llmpq" and request.overrides.shapes_the_plan:
        found = next(
            option
            for option in request.overrides.options()
            if option.split()[0] not in _OVERRIDES_OF_ALL_METHODS
        )
        raise SpecError(
            f"{found}: found method '{method}', expected llmpq: the other methods only support "
            f"{', '.join(_OVERRIDES_OF_ALL_METHODS)}"
        )


def explain_infeasible_overrides(
    request: PlanRequest, method: str, error: InfeasibleError
) -> InfeasibleError:
    """Return the error with the overrides that leave no plan, found by planning without them.

    Each takes a search of at most ``EXPLANATION_LIMIT_S``, which stops at its first plan.
    """
    overrides = request.overrides
    if not overrides or isinstance(error, OutOfTimeError) or request.deadline.has_passed:
        return error
    causes = [
        option
        for option, others in overrides.without_each()
        if _has_plan(replace(request, overrides=others), method)
    ]
    # The search's own message is about memory, which other overrides make irrelevant.
    others = overrides.shapes_the_plan or overrides.micro_batching is not None
    detail = "" if others else f": {error}"
    if causes:
        without = "it" if len(causes) == 1 else "any one of them"
        return InfeasibleError(
            f"no plan exists with {' and '.join(causes)}; without {without} there is one{detail}"
        )
    if _has_plan(replace(request, overrides=NO_OVERRIDES), method):
        return InfeasibleError(
            f"no plan exists with {' and '.join(overrides.options())} together; without any of "
            f"them there is one{detail}"
        )
    return error


def _has_plan(request: PlanRequest, method: str) -> bool:
    deadline = request.deadline.within(EXPLANATION_LIMIT_S)
    request = replace(request, gap=FIRST_PLAN_GAP, deadline=deadline, gives_reasons=False)
    try:
        solve_request(request, method)
    except (InfeasibleError, SpecError):
        return False
    return True


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
        head_bits=None if request.head_width == 16 else request.head_width,
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
            order_set=solution.order_set,
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
        widths = [
            assignment.widths[run]
            for run, where in enumerate(assignment.positions)
            if where == position
            for _ in range(starts[run], starts[run + 1])
        ]
        bits = [problem.bits[width] for width in widths]
        streamed = solution.evaluation.stages[rank].streamed
        # Devices of a group are equal: the used positions take the first of them.
        member = free[problem.order[position]].pop(0)
        form = task.costs.format_of(task.request.cluster.devices[member])
        stages.append(
            StageAssignment(
                rank=rank,
                device=task.device_indices[member],
                first_layer=layer,
                end_layer=layer + len(bits),
                bits=tuple(bits),
                weights=_places(task, widths, layer, dict(streamed)) if streamed else None,
                dtype=None if form == task.request.dtype else form,
                experts=_experts(task, widths, layer, member),
            )
        )
        layer += len(bits)
    return tuple(stages)


def _places(
    task: PlanningTask,
    widths: Sequence[int],
    first_layer: int,
    streamed: Mapping[tuple[int, int], int],
) -> tuple[WeightsPlace, ...]:
    """Return where the weights of a stage rest, spread evenly: reading goes on all the time."""
    found: list[WeightsPlace] = ["resident"] * len(widths)
    kinds = task.request.model.layer_kinds[first_layer : first_layer + len(widths)]
    cells = list(zip(kinds, widths, strict=True))
    for cell, count in streamed.items():
        members = [place for place, own in enumerate(cells) if own == cell]
        for number in range(count):
            found[members[(2 * number + 1) * len(members) // (2 * count)]] = "disk"
    return tuple(found)


def _experts(
    task: PlanningTask, widths: Sequence[int], first_layer: int, device: int
) -> StageExperts | None:
    """Return the experts of a stage that its host computes; ``None`` for none."""
    host, plain = task.request.cluster.devices[device].host, len(task.request.bits)
    layers = tuple(
        LayerExperts(layer=layer, resident=tuple(range(task.apart[width - plain].resident or 0)))
        for layer, width in enumerate(widths, first_layer)
        if width >= plain
    )
    if host is None or not layers:
        return None
    return StageExperts(threads=host.threads, layers=layers)


def _inputs(task: PlanningTask) -> tuple[tuple[str, str], ...]:
    request = task.request
    found = [
        ("model", digest_of(asdict(request.model))),
        ("cluster", digest_of(to_json(task.cluster))),
        ("workload", digest_of(to_json(request.workload))),
        ("omega", _omega_text(task)),
        ("bits", " ".join(str(width) for width in request.bits)),
    ]
    if request.head_width != 16:
        found.append(("head_loss", _head_loss_text(request)))
    if (table := request.sensitivity) is not None and table.unit_nats is not None:
        found.append((QUALITY_UNIT, f"{table.unit_nats:.6g} nats of KL divergence a token"))
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


def _head_loss_text(request: PlanRequest) -> str:
    """Return what the head loses, and where the figure comes from."""
    table = request.sensitivity
    source = DEFAULT_HEAD_LOSS if table is None or table.head is None else table.method
    return f"{head_loss(request):.4g} ({source})"


def _omega_text(task: PlanningTask) -> str:
    """Return where the degradation comes from: the default in words, or a table's digest."""
    table = task.request.sensitivity
    if table is None:
        return DEFAULT_OMEGA
    digest = digest_of({str(width): list(column) for width, column in table.omega})
    return f"{table.method} {digest}"


def even_plan(  # noqa: PLR0913  keywords
    folder: Path,
    *,
    bits: Sequence[int],
    stages: int,
    shape: Sequence[int],
    micro_batch: Sequence[int],
    kv_bits: int | None = None,
    dtype: Dtype | None = None,
    cuts: Sequence[int] | None = None,
    instruction_set: str | None = None,
) -> Plan:
    """Return a plan of even stages on CPU workers of this machine, with its memory forecast.

    Args:
        folder: the model.
        bits: bitwidths, repeated over the layers.
        stages: CPU workers, of one thread each.
        shape: sequences, prompt tokens and new tokens.
        micro_batch: sequences of a prefill and of a decode micro-batch.
        kv_bits: bits of cached values, ``None`` for the dtype's.
        dtype: number format, ``None`` for the checkpoint's.
        cuts: first layer of every stage and end of the last, ``None`` for even stages.
        instruction_set: that the workers compute with, ``None`` for the catalogue's CPU.

    Raises:
        SpecError: more stages than layers, or an invalid ``Plan``.
    """
    model = load_model_dir(folder)
    if stages > model.num_layers:
        raise SpecError(f"--stages: found {stages}, expected at most {model.num_layers} layers")
    group = DeviceGroup(type="cpu", count=stages, threads=1, instruction_set=instruction_set)
    cluster = Cluster(name="here", nodes=(Node(name="here", devices=(group,)),))
    form = dtype or model.dtype
    width = kv_bits or 8 * DTYPE_BYTES[form]
    costs = build_costs(model, cluster, dtype=form, kv_bits=width)
    workload = Workload(batch=shape[0], prompt_tokens=shape[1], new_tokens=shape[2])
    sizes = MicroBatching(prefill=micro_batch[0], decode=micro_batch[1])
    cuts = cuts or [model.num_layers * rank // stages for rank in range(stages + 1)]
    assignments = tuple(
        StageAssignment(
            rank=rank,
            device=rank,
            first_layer=first,
            end_layer=end,
            bits=tuple(bits[layer % len(bits)] for layer in range(first, end)),
        )
        for rank, (first, end) in enumerate(pairwise(cuts))
    )
    plan = Plan(
        model=ModelRef(
            name=model.name, source=str(absolute_model_path(folder)), num_layers=model.num_layers
        ),
        cluster=cluster,
        workload=workload,
        dtype=form,
        kv_bits=width,
        micro_batching=sizes,
        stages=assignments,
        dropped_devices=(),
        estimate=empty_estimate(stages, quality=0.0),
        search=Search(method="even"),
        provenance=Provenance(command="llmpq-profile memory", version=__version__),
    )
    estimates = tuple(
        replace(
            estimate,
            memory=stage_memory(plan, costs, stage),
            capacity_bytes=costs.capacity_bytes(plan.device_of(stage)),
        )
        for estimate, stage in zip(plan.estimate.stages, plan.stages, strict=True)
    )
    return replace(plan, estimate=replace(plan.estimate, stages=estimates))
