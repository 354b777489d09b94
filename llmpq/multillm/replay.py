"""Playing a schedule with other answer lengths than it was planned with.

Models then finish in another order than planned; the same rules as in a run decide what comes next
(``llmpq.multillm.dynamic``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmpq.assigner.fleet.partition import Pools
from llmpq.costmodel import build_costs
from llmpq.errors import SpecError
from llmpq.multillm.candidates import Candidate, PlannedModel, find_candidates, load_seconds
from llmpq.multillm.dynamic import DynamicScheduler
from llmpq.multillm.engine.law import plan_law
from llmpq.multillm.estimate import Progress, Simulator, StageRun
from llmpq.multillm.planner.problem import Solution
from llmpq.multillm.schedule import ApplicationSchedule, ScheduledModel
from llmpq.multillm.workload import AppWorkload
from llmpq.spec.cluster import Cluster

FindCandidate = Callable[[ScheduledModel], Candidate]


def replay(
    workload: AppWorkload,
    schedule: ApplicationSchedule,
    cluster: Cluster,
    candidate_of: FindCandidate,
) -> Solution:
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
    return Solution(tuple(stages), tuple(before))


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
    pools = Pools.of(cluster)
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
