"""The explanation of a plan: its binding constraints, and the effect of other devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmpq.assigner import PlanRequest
from llmpq.assigner.constraints.resolve import device_names
from llmpq.assigner.explain.binding import PlanBinding, plan_binding
from llmpq.assigner.explain.infeasible import dropped_reasons
from llmpq.assigner.explain.what_if import Alternative, forced_use, one_more
from llmpq.assigner.request import Progress, costs_of, silent
from llmpq.costmodel import ClusterCosts
from llmpq.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of a plan.

    Attributes:
        binding: binding constraints of every stage.
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

    Args:
        request: the request of the plan.
        plan: the plan.
        resolve: plan again for every kind of device left out.
        more: plan again with one more device of each kind.
        progress: called with the number of finished searches.
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
