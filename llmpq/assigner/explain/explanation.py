"""Why a plan is as it is: what binds on each device, and what other devices would change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmpq.assigner import PlanRequest
from llmpq.assigner.explain.binding import PlanBinding, plan_binding
from llmpq.assigner.explain.infeasible import dropped_reasons
from llmpq.assigner.explain.what_if import Alternative, forced_use, one_more
from llmpq.assigner.request import Progress, costs_of, silent
from llmpq.costmodel import ClusterCosts
from llmpq.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is known of a plan besides itself.

    Attributes:
        binding: what binds on every stage.
        dropped: the figure that speaks against each device left out, by its index.
        forced: best plans that use a device left out, empty when not asked.
        more: best plans with one device more, empty when not asked.
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
        request: what was asked.
        plan: the plan.
        resolve: plan again for every kind of device left out.
        more: plan again with one more device of each kind.
        progress: told how many of the questions are answered.
    """
    found = explain_costs(plan, costs_of(request, plan.cluster))
    # Only this method can be told to use a device.
    ask = resolve and plan.search.method == "llmpq"
    return Explanation(
        binding=found.binding,
        dropped=_with_wishes(request, plan, found.dropped),
        forced=forced_use(request, plan, progress) if ask else (),
        more=one_more(request, plan, progress) if more else (),
    )


def _with_wishes(request: PlanRequest, plan: Plan, dropped: Mapping[int, str]) -> dict[int, str]:
    """Say of a device that a person left out just that."""
    overrides = request.overrides
    found = dict(dropped)
    for index in dropped:
        item = plan.cluster.devices[index]
        called = {item.label, f"{item.node}/{item.type}", item.node, item.type}
        if called & set(overrides.exclude):
            found[index] = "as decided by --exclude"
        elif overrides.order and not called & set(overrides.order):
            found[index] = "as decided by --fix_order"
    return found
