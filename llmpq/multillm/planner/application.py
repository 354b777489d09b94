"""plan_application: from an application, its items and a cluster to a schedule.

``replay`` plays a schedule with other answer lengths than it was planned with. Models then finish
in another order than planned; the same rules as in a run decide what comes next
(``llmpq.multillm.dynamic``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmpq import __version__
from llmpq.assigner.fleet.partition import DevicePools
from llmpq.costmodel import build_costs
from llmpq.errors import SpecError
from llmpq.multillm.candidates import (
    Candidate,
    PlannedModel,
    find_candidates,
    load_seconds,
    resolve_models,
)
from llmpq.multillm.dynamic import DynamicScheduler
from llmpq.multillm.engine.law import IterationModel, plan_law
from llmpq.multillm.estimate import ModelProcess, Progress, Simulator, StageRun
from llmpq.multillm.graph import Application
from llmpq.multillm.planner.search import (
    AppProblem,
    AppSolution,
    SearchResult,
    find,
)
from llmpq.multillm.schedule import (
    ApplicationSchedule,
    ExecutionStage,
    ModelReplica,
    ScheduledModel,
    application_digest,
    cluster_digest,
)
from llmpq.multillm.workload import AppWorkload, Item, build_workload
from llmpq.options.plan import ApplicationSearch
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import Provenance


def place(
    pools: DevicePools,
    processes: Mapping[int, ModelProcess],
    before: Mapping[ModelProcess, tuple[tuple[int, ...], ...]],
) -> dict[ModelProcess, tuple[tuple[int, ...], ...]]:
    """Return the devices of every replica of the processes of a stage.

    A process that goes on keeps its devices. Replicas with most devices choose first, aligned
    blocks of as many devices (those that share a fast link) where one is free; single devices fill
    blocks that are in use already.

    Args:
        pools: of the cluster.
        processes: of the stage, which fit.
        before: devices of the processes of the stage before.
    """
    placed = {one: before[one] for one in processes.values() if one in before}
    taken = {device for replicas in placed.values() for own in replicas for device in own}
    new = [one for one in processes.values() if one not in before]
    for process in sorted(new, key=lambda one: -sum(one.candidate.counts)):
        replicas = []
        for _ in range(process.candidate.replicas):
            own = _devices_of(pools, process.candidate, taken)
            taken.update(own)
            replicas.append(own)
        placed[process] = tuple(replicas)
    return placed


def _devices_of(pools: DevicePools, candidate: Candidate, taken: set[int]) -> tuple[int, ...]:
    found: list[int] = []
    for members, count in zip(pools.members(), candidate.counts, strict=True):
        found += _block(members, count, taken)
    return tuple(found)


def _block(members: Sequence[int], count: int, taken: set[int]) -> Sequence[int]:
    """Return ``count`` free devices of a pool, side by side if possible."""
    if count > 1:
        for start in range(0, len(members) - count + 1, count):
            block = members[start : start + count]
            if not taken & set(block):
                return block

    def crowd(at: int) -> tuple[int, ...]:
        """Free devices in the aligned blocks of 2, 4 and 8 about a device: few first."""
        sizes = (2, 4, 8)
        return tuple(
            len(set(members[at // size * size : (at // size + 1) * size]) - taken) for size in sizes
        )

    free = [at for at, device in enumerate(members) if device not in taken]
    return [members[at] for at in sorted(free, key=crowd)[:count]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanOptions(ApplicationSearch):
    """How to plan an application.

    Attributes:
        pipelines: plan pipelines for models without a table of iterations; else SamuLLM's plans at
            estimated seconds, which cannot be run.
        command: command line, for the provenance.
    """

    pipelines: bool = True
    command: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedApplication:
    """A schedule with what it was made from.

    Attributes:
        schedule: what a schedule file holds.
        found: its stages as they were simulated, bound and rivals.
        problem: what there was to choose.
    """

    schedule: ApplicationSchedule
    found: SearchResult
    problem: AppProblem


def plan_application(
    app: Application,
    items: Mapping[str, Sequence[Item]],
    cluster: Cluster,
    options: PlanOptions | None = None,
    *,
    fitted: dict[str, IterationModel] | None = None,
) -> PlannedApplication:
    """Plan an application.

    Args:
        app: the application.
        items: items of each node with a request file.
        cluster: its devices.
        options: how to plan.
        fitted: fitted tables of iterations by path, kept from plan to plan.

    Raises:
        SpecError: a model is unknown, a file is malformed, or a prompt overflows its context.
        InfeasibleError: a model fits nowhere.
    """
    options = options or PlanOptions()
    models = resolve_models(app)
    workload = workload_of(app, items, models, options.seed)
    pools = DevicePools.of(cluster)
    candidates = find_candidates(
        models, pools, workload, pipelines=options.pipelines, fitted=fitted
    )
    problem = AppProblem(
        simulator=Simulator(workload),
        candidates=candidates,
        counts=pools.counts,
        preemption=options.preemption,
    )
    found = find(problem, options.method, options.limit_s)
    stages = tuple(_stages(workload, pools, found.solution))
    schedule = ApplicationSchedule(
        application=app.name,
        application_digest=application_digest(app),
        cluster=cluster.name,
        cluster_digest=cluster_digest(cluster),
        method=options.method,
        stages=stages,
        search_s=found.search_s,
        bound_s=found.bound_s,
        idle_s=idle_s(found.solution, problem.devices),
        provenance=Provenance(command=options.command, version=__version__, inputs=()),
    )
    return PlannedApplication(schedule=schedule, found=found, problem=problem)


def workload_of(
    app: Application,
    items: Mapping[str, Sequence[Item]],
    models: Sequence[PlannedModel],
    seed: int,
) -> AppWorkload:
    """Return the requests of an application with lengths drawn by a seed."""
    lengths = {model.model.name: model.lengths() for model in models}
    return build_workload(app, items, lengths, seed=seed)


def idle_s(solution: AppSolution, devices: int) -> float:
    """Return device-seconds without a model or without a request; loading is not idle."""
    used = 0.0
    for stage in solution.stages:
        for model, process in stage.processes.items():
            per_replica = sum(process.candidate.counts)
            run, start_s = stage.runs[model], process.start_s
            busy = run.until(stage.end_s - start_s)[1] - run.until(stage.begin_s - start_s)[1]
            used += busy * per_replica
            loading = min(stage.end_s, start_s) - max(stage.begin_s, process.begin_s)
            used += max(0.0, loading) * process.candidate.devices
    return solution.makespan_s * devices - used


def _stages(
    workload: AppWorkload, pools: DevicePools, solution: AppSolution
) -> Iterator[ExecutionStage]:
    before: dict[ModelProcess, tuple[tuple[int, ...], ...]] = {}
    labels = [device.label for device in pools.cluster.devices]
    for run, (begin, end) in zip(
        solution.stages, zip(solution.before, solution.before[1:], strict=False), strict=True
    ):
        before = place(pools, run.processes, before)
        yield ExecutionStage(
            start_s=run.begin_s,
            end_s=run.end_s,
            models=tuple(
                _scheduled(workload, run, process, before[process], labels, (begin, end))
                for process in run.processes.values()
            ),
        )


def _scheduled(
    workload: AppWorkload,
    run: StageRun,
    process: ModelProcess,
    devices: Sequence[Sequence[int]],
    labels: Sequence[str],
    around: tuple[Progress, Progress],
) -> ScheduledModel:
    app = workload.app
    own = app.models[process.model].name
    begin, end = around
    was_left = np.isinf(begin.finish_s) & (workload.model == process.model)
    is_done = was_left & np.isfinite(end.finish_s)
    nodes = [place for place, node in enumerate(app.nodes) if node.model == own]
    left = [place for place in nodes if was_left[workload.node == place].any()]
    return ScheduledModel(
        model=own,
        nodes=tuple(app.nodes[place].name for place in left),
        replicas=tuple(
            _replica(process.candidate, [labels[device] for device in replica])
            for replica in devices
        ),
        requests=tuple(
            (app.nodes[place].name, int(is_done[workload.node == place].sum())) for place in left
        ),
        load_s=process.candidate.load_s if process.begin_s >= run.begin_s else 0.0,
    )


def _replica(candidate: Candidate, labels: Sequence[str]) -> ModelReplica:
    if candidate.plan is not None:
        return ModelReplica(devices=tuple(labels), plan=candidate.plan)
    return ModelReplica(devices=tuple(labels), tensor_parallel=candidate.tensor_parallel)


FindCandidate = Callable[[ScheduledModel], Candidate]


def replay(
    workload: AppWorkload,
    schedule: ApplicationSchedule,
    cluster: Cluster,
    candidate_of: FindCandidate,
) -> AppSolution:
    """Play a schedule.

    Args:
        workload: requests with their lengths.
        schedule: of the same application, on the cluster.
        cluster: its devices.
        candidate_of: returns the execution plan of an entry.
    """
    app, simulator = workload.app, Simulator(workload)
    numbers = {model.name: place for place, model in enumerate(app.models)}
    scheduler = DynamicScheduler(app, schedule, cluster)
    stages: list[StageRun] = []
    before = [simulator.begin()]
    change = scheduler.begin()
    while simulator.unfinished(before[-1]):
        begun = {numbers[name] for name, _ in (*change.stop, *change.start)}
        before[-1] = simulator.stopped(before[-1], begun)
        stage = {numbers[name]: candidate_of(one) for name, one in scheduler.running.items()}
        run = simulator.run(before[-1], stage, may_wait=True) if stage else None
        if run is None:
            change = scheduler.stalled()
            continue
        stages.append(run)
        before.append(simulator.after(before[-1], run))
        change = scheduler.finish(_finished(workload, before[-1]) - scheduler.finished)
    return AppSolution(tuple(stages), tuple(before))


def _finished(workload: AppWorkload, progress: Progress) -> set[str]:
    left = set(np.unique(workload.node[np.isinf(progress.finish_s)]).tolist())
    return {node.name for place, node in enumerate(workload.app.nodes) if place not in left}


def candidate_finder(
    models: Sequence[PlannedModel],
    cluster: Cluster,
    workload: AppWorkload,
    known: Sequence[Sequence[Candidate]] = (),
) -> FindCandidate:
    """Return a function that returns the execution plan of an entry of a schedule.

    Args:
        models: of the application.
        cluster: its devices.
        workload: requests of the application.
        known: execution plans of each model, if they are known already.

    Raises:
        SpecError: by the function, for an entry whose replicas are of several plans or cannot be
            priced.
    """
    names = [model.model.name for model in models]
    pools = DevicePools.of(cluster)
    found: dict[tuple[object, ...], Candidate] = {}
    teams: list[Sequence[Sequence[Candidate]]] = [known] if known else []

    def candidate_of(one: ScheduledModel) -> Candidate:
        first = one.replicas[0]
        if any(replica.source != first.source for replica in one.replicas):
            raise SpecError(f"model '{one.model}': found replicas of several plans, expected one")
        counts = tuple(
            sum(pools.cluster.devices[device].label in first.devices for device in members)
            for members in pools.members()
        )
        key = one.model, len(one.replicas), counts, first.tensor_parallel, first.source
        if key not in found:
            if first.tensor_parallel is not None and not teams:
                teams.append(find_candidates(models, pools, workload, pipelines=False))
            own = teams[0][names.index(one.model)] if teams else ()
            found[key] = _match(one, counts, own) or _of_plan(
                one, counts, models[names.index(one.model)]
            )
        return found[key]

    return candidate_of


def _match(
    one: ScheduledModel, counts: Sequence[int], known: Sequence[Candidate]
) -> Candidate | None:
    first = one.replicas[0]
    for candidate in known:
        is_same = (
            candidate.tensor_parallel == first.tensor_parallel
            if candidate.plan is None
            else candidate.plan == first.plan
        )
        if is_same and len(one.replicas) == candidate.replicas and candidate.counts == counts:
            return candidate
    return None


def _of_plan(one: ScheduledModel, counts: tuple[int, ...], model: PlannedModel) -> Candidate:
    plan = one.replicas[0].load(f"model '{one.model}'")
    costs = build_costs(model.spec, plan.cluster, dtype=plan.dtype, kv_bits=plan.kv_bits)
    return Candidate(
        name=one.plan_name,
        replicas=len(one.replicas),
        counts=counts,
        law=plan_law(plan, costs),
        load_s=load_seconds(model, costs),
        plan=plan,
    )
