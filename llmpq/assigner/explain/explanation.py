"""The explanation of a plan: its binding constraints, and what other devices would change.

Each answer is another search with a time limit, at the same price of degradation where objectives
are compared and within the same degradation where speeds are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmpq.assigner.constraints.resolve import Overrides, device_names
from llmpq.assigner.explain.infeasible import (
    PlanBinding,
    dropped_reasons,
    larger_cluster,
    plan_binding,
)
from llmpq.assigner.fleet.partition import DevicePools
from llmpq.assigner.planner import plan_task
from llmpq.assigner.request import (
    OutOfTimeError,
    PlanRequest,
    Progress,
    build_task,
    costs_of,
    silent,
)
from llmpq.costmodel import ClusterCosts
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import Plan

MAX_QUESTIONS = 8
"""Most searches: the first kinds of devices of a cluster with more."""

MIN_LIMIT_S = 2.0
MAX_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan that uses a device left out or added, or the reason why there is none.

    Attributes:
        devices: the device, and those alike, for which the answer is the same.
        proven: whether no better answer exists (within the requested gap).
    """

    devices: tuple[str, ...]
    plan: Plan | None
    reason: str = ""
    proven: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a plan is as it is: what limits it, what was left out, and how sure it is.

    Attributes:
        dropped: the reason why each device is left out, by its index.
        forced: best plans that use a device left out, empty unless requested.
        more: best plans with one more device, empty unless requested.
    """

    binding: PlanBinding
    dropped: Mapping[int, str]
    forced: tuple[Alternative, ...] = ()
    more: tuple[Alternative, ...] = ()


def explain_costs(plan: Plan, costs: ClusterCosts) -> Explanation:
    """Explain a plan by its cost models alone."""
    return Explanation(binding=plan_binding(plan, costs), dropped=dropped_reasons(plan, costs))


def explain_plan(
    request: PlanRequest,
    plan: Plan,
    *,
    resolve: bool,
    more: bool,
    progress: Progress = silent,
) -> Explanation:
    """Explain a plan that was just made.

    With ``resolve`` plans again for every kind of device left out; with ``more`` with one more
    device of each kind. ``progress`` counts finished searches.
    """
    found = explain_costs(plan, costs_of(request, plan.cluster))
    # Only this method can be forced to use a device.
    search = resolve and plan.search.method == "llmpq"
    return Explanation(
        binding=found.binding,
        dropped=_with_overrides(request, plan, found.dropped),
        forced=forced_use(request, plan, progress) if search else (),
        more=one_more(request, plan, progress) if more else (),
    )


def _with_overrides(request: PlanRequest, plan: Plan, dropped: Mapping[int, str]) -> dict[int, str]:
    """Return the reasons, with the override that left out a device where there is one."""
    overrides = request.overrides
    found = dict(dropped)
    for index in dropped:
        names = set(device_names(plan.cluster.devices[index]))
        if names & set(overrides.exclude):
            found[index] = "as decided by --exclude"
        elif overrides.order and not names & set(overrides.order):
            found[index] = "as decided by --fix_order"
    return found


def forced_use(
    request: PlanRequest, plan: Plan, progress: Progress = silent
) -> tuple[Alternative, ...]:
    """Return for every kind of device that the search left out the best plan that uses one.

    It also uses the devices of the kind that ``plan`` uses: another one in the place of one of
    these makes the same plan.
    """
    overrides, devices = request.overrides, plan.cluster.devices
    kinds = _kinds(plan.cluster, overrides)
    left: dict[str, list[str]] = {}
    for index in plan.dropped_devices:
        names = set(device_names(devices[index]))
        excluded = names & set(overrides.exclude)
        if not excluded and (not overrides.order or names & set(overrides.order)):
            left.setdefault(kinds[devices[index].group], []).append(devices[index].label)
    used: dict[str, list[str]] = {}
    for stage in plan.stages:
        if stage.num_layers:
            device = plan.device_of(stage)
            used.setdefault(kinds[device.group], []).append(device.label)
    questions = [
        (
            tuple(labels),
            replace(
                request,
                overrides=replace(
                    overrides,
                    use=tuple(dict.fromkeys([*overrides.use, *used.get(kind, ()), labels[0]])),
                ),
                theta_s=plan.search.theta_s,
            ),
        )
        for kind, labels in left.items()
    ]
    return _answers(questions, plan, progress)


def _kinds(cluster: Cluster, overrides: Overrides) -> tuple[str, ...]:
    """Return a text for each group of devices, equal where exchanging the groups changes nothing.

    One more device of either then makes the same cluster.
    Decisions of the user name nodes and devices, so no groups are alike where there are any.
    """
    pools = DevicePools.of(cluster)
    places = range(len(pools.counts))
    if overrides:
        return tuple(map(str, places))
    return tuple(
        pools.key(tuple(count + (pool == place) for pool, count in enumerate(pools.counts)))
        for place in places
    )


def one_more(
    request: PlanRequest, plan: Plan, progress: Progress = silent
) -> tuple[Alternative, ...]:
    """Return for every kind of device the fastest plan with one more, without more degradation.

    It is no slower than ``plan``, which may leave the device out: fewer orders of devices may be
    searched with one more.
    """
    alike: dict[str, list[int]] = {}
    for place, kind in enumerate(_kinds(request.cluster, request.overrides)):
        alike.setdefault(kind, []).append(place)
    names = DevicePools.of(request.cluster).names()
    questions = [
        (
            tuple(names[place] for place in places),
            replace(
                request,
                cluster=larger_cluster(request.cluster, places[0], 1),
                quality_budget=plan.estimate.quality,
                theta_s=0.0,
            ),
        )
        for places in alike.values()
    ]
    return tuple(
        replace(answer, plan=plan, proven=False)
        if answer.plan is not None and answer.plan.estimate.latency_s > plan.estimate.latency_s
        else answer
        for answer in _answers(questions, plan, progress)
    )


def _answers(
    questions: Sequence[tuple[tuple[str, ...], PlanRequest]], plan: Plan, progress: Progress
) -> tuple[Alternative, ...]:
    found = []
    for number, (devices, question) in enumerate(questions[:MAX_QUESTIONS]):
        progress(number, min(len(questions), MAX_QUESTIONS), None)
        found.append(_answer(question, plan, devices))
    return tuple(found)


def _answer(request: PlanRequest, plan: Plan, devices: tuple[str, ...]) -> Alternative:
    limit_s = min(MAX_LIMIT_S, max(MIN_LIMIT_S, 2 * plan.search.planning_s))
    if request.deadline.has_passed:
        return Alternative(devices=devices, plan=None, reason="not searched: the time was up")
    request = replace(request, deadline=request.deadline.within(limit_s))
    try:
        found = plan_task(build_task(request), plan.search.method)
    except OutOfTimeError:
        reason = f"none found within {limit_s:.3g} s"
        return Alternative(devices=devices, plan=None, reason=reason)
    except (InfeasibleError, SpecError):
        return Alternative(devices=devices, plan=None, reason="there is no such plan")
    return Alternative(devices=devices, plan=found, proven=found.search.status == "optimal")
