"""What if: the best plan that must use a device that was left out, or has one more of a type.

Each answer is another search, at the same price of degradation where costs are compared and at the
same quality where speeds are. Each is short because it stops at a time limit, and then says only
what it has found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmpq.assigner.explain.explain import grown_cluster
from llmpq.assigner.milp.search import OutOfTimeError
from llmpq.assigner.planner import plan_task, silent
from llmpq.assigner.task import PlanRequest, Progress, build_task
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.plan import Plan

MOST_QUESTIONS = 8
"""Searches at most; a cluster of more kinds of devices has the first ones asked about."""

SHORTEST_LIMIT_S = 2.0
LONGEST_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The answer to one question.

    Attributes:
        devices: what it is about: labels of the devices left out, or the type added.
        plan: the best plan found, ``None`` when there is none.
        reason: why there is none.
        proven: whether no better answer exists (within the gap asked for).
    """

    devices: tuple[str, ...]
    plan: Plan | None
    reason: str = ""
    proven: bool = False


def forced_use(
    request: PlanRequest, plan: Plan, progress: Progress = silent
) -> tuple[Alternative, ...]:
    """Return for every kind of device left out the best plan that uses one of them.

    Devices that a person left out are not asked about.
    """
    overrides = request.overrides
    wanted = set(_searched(request, plan))
    found = []
    kinds = _alike(plan, [index for index in plan.dropped_devices if index in wanted])
    for number, members in enumerate(kinds):
        progress(number, len(kinds), None)
        labels = tuple(plan.cluster.devices[index].label for index in members)
        question = replace(
            request,
            overrides=replace(overrides, use=(*overrides.use, labels[0])),
            theta_s=plan.search.theta_s,
        )
        found.append(_answer(question, plan, labels))
    return tuple(found)


def one_more(
    request: PlanRequest, plan: Plan, progress: Progress = silent
) -> tuple[Alternative, ...]:
    """Return for every kind of device the fastest plan with one more of it that loses no more."""
    names = [
        f"{node.name}/{group.type}" for node in request.cluster.nodes for group in node.devices
    ]
    found = []
    for index, name in enumerate(names[:MOST_QUESTIONS]):
        progress(index, min(len(names), MOST_QUESTIONS), None)
        question = replace(
            request,
            cluster=grown_cluster(request.cluster, index, 1),
            quality_budget=plan.estimate.quality,
            theta_s=0.0,
        )
        found.append(_answer(question, plan, (name,)))
    return tuple(found)


def _searched(request: PlanRequest, plan: Plan) -> Sequence[int]:
    """Return the devices that the search could have used."""
    overrides = request.overrides
    names = [
        {item.label, f"{item.node}/{item.type}", item.node, item.type}
        for item in plan.cluster.devices
    ]
    return [
        index
        for index, called in enumerate(names)
        if not called & set(overrides.exclude)
        and (not overrides.order or called & set(overrides.order))
    ]


def _alike(plan: Plan, devices: Sequence[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for index in devices:
        groups.setdefault(plan.cluster.devices[index].group, []).append(index)
    return list(groups.values())[:MOST_QUESTIONS]


def _answer(request: PlanRequest, plan: Plan, devices: tuple[str, ...]) -> Alternative:
    search = plan.search
    limit_s = min(LONGEST_LIMIT_S, max(SHORTEST_LIMIT_S, 2 * search.planning_s))
    if request.deadline.has_passed:
        return Alternative(devices=devices, plan=None, reason="not asked: the time was up")
    request = replace(request, deadline=request.deadline.within(limit_s))
    try:
        found = plan_task(build_task(request), search.method)
    except OutOfTimeError:
        reason = f"none found within {limit_s:.3g} s"
        return Alternative(devices=devices, plan=None, reason=reason)
    except (InfeasibleError, SpecError):
        return Alternative(devices=devices, plan=None, reason="there is no such plan")
    return Alternative(devices=devices, plan=found, proven=found.search.status == "optimal")
