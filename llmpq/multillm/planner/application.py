"""plan_application: from an application, its items and a cluster to a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmpq import __version__
from llmpq.assigner.fleet.partition import Pools
from llmpq.multillm.candidates import (
    Candidate,
    PlannedModel,
    find_candidates,
    resolve_models,
)
from llmpq.multillm.cost import IterationModel
from llmpq.multillm.estimate import Process, Progress, Simulator, StageRun
from llmpq.multillm.graph import Application
from llmpq.multillm.planner.placement import place
from llmpq.multillm.planner.problem import Problem, Solution
from llmpq.multillm.planner.search import TIME_LIMIT_S, Found, Method, find
from llmpq.multillm.requests import Item
from llmpq.multillm.schedule import (
    ApplicationSchedule,
    ExecutionStage,
    ModelReplica,
    ScheduledModel,
    application_digest,
    cluster_digest,
)
from llmpq.multillm.workload import AppWorkload, build_workload
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import Provenance


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanOptions:
    """How to plan an application.

    Attributes:
        method: a name in ``METHODS``.
        preemption: whether a model that runs may be stopped or get another plan.
        seed: of answer lengths and routing.
        limit_s: seconds for improving and for the exact search.
        pipelines: plan pipelines for models without a table of iterations; else SamuLLM's plans at
            estimated seconds, which cannot be run.
        command: command line, for the provenance.
    """

    method: Method = "greedy"
    preemption: bool = True
    seed: int = 0
    limit_s: float = TIME_LIMIT_S
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
    found: Found
    problem: Problem


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
    pools = Pools.of(cluster)
    candidates = find_candidates(
        models, pools, workload, pipelines=options.pipelines, fitted=fitted
    )
    problem = Problem(
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


def idle_s(solution: Solution, devices: int) -> float:
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


def _stages(workload: AppWorkload, pools: Pools, solution: Solution) -> Iterator[ExecutionStage]:
    before: dict[Process, tuple[tuple[int, ...], ...]] = {}
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
    process: Process,
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
