"""All methods on one request, side by side.

The methods share one task, so they are priced by the same numbers. The search stops within its
gap, and a rival may happen to lie inside it: then the search takes the rival's plan as its own,
with the bound it has proven, so it is never worse than any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmpq.assigner.planner import METHODS, blamed, check_method, plan_task, silent
from llmpq.assigner.task import PlanRequest, Progress, build_task
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.plan import Plan

SEARCH = "llmpq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one method made of the request.

    Attributes:
        method: its name in ``METHODS``.
        plan: its plan, ``None`` without one.
        error: why there is none.
    """

    method: str
    plan: Plan | None
    error: InfeasibleError | SpecError | None = None


Runner = Callable[[str, Callable[[Progress], Plan]], Plan]
"""Does a method's work, which is told by name, and gives it whom to tell how far it is."""


def _silently(name: str, work: Callable[[Progress], Plan]) -> Plan:
    del name
    return work(silent)


def compare_methods(
    request: PlanRequest, *, command: str = "", run: Runner = _silently
) -> tuple[Outcome, ...]:
    """Return the outcome of every method, the search first.

    Args:
        request: what is asked. A method that cannot follow its manual decisions says so.
        command: the command line, for provenance.
        run: does the work of every method, for instance with a progress bar.

    Raises:
        SpecError: the request cannot be accepted by any method.
    """
    check_method(request, SEARCH)
    started = time.perf_counter()
    request = request.begun()
    task = build_task(request)
    build_s = time.perf_counter() - started

    def outcome(method: str) -> Outcome:
        def work(progress: Progress) -> Plan:
            begun = time.perf_counter() - build_s
            return plan_task(task, method, command=command, progress=progress, started=begun)

        try:
            check_method(request, method)
            return Outcome(method=method, plan=run(method, work))
        except InfeasibleError as error:
            return Outcome(method=method, plan=None, error=blamed(request, method, error))
        except SpecError as error:
            return Outcome(method=method, plan=None, error=error)

    rivals = [outcome(method) for method in METHODS if method != SEARCH]
    return never_worse(outcome(SEARCH), rivals, request.gap), *rivals


def never_worse(search: Outcome, rivals: list[Outcome], gap: float) -> Outcome:
    """Return the outcome of the search, with the cheapest rival's plan where that is cheaper."""
    plans = [rival.plan for rival in rivals if rival.plan is not None]
    if not plans:
        return search
    best = min(plans, key=lambda plan: plan.estimate.objective_s)
    if search.plan is None:
        # Out of time without a plan of its own; what the rivals found is not thrown away.
        own = replace(best.search, method=search.method)
        return Outcome(method=search.method, plan=replace(best, search=own))
    objective_s = best.estimate.objective_s
    if search.plan.estimate.objective_s <= objective_s:
        return search
    bound_s, found = search.plan.search.bound_s, search.plan.search
    if bound_s is not None:
        bound_s = min(bound_s, objective_s)
        left = (objective_s - bound_s) / objective_s if objective_s > 0 else 0.0
        found = replace(
            found, bound_s=bound_s, gap=left, status="optimal" if left <= gap else found.status
        )
    return Outcome(
        method=search.method,
        plan=replace(
            search.plan,
            micro_batching=best.micro_batching,
            stages=best.stages,
            dropped_devices=best.dropped_devices,
            estimate=best.estimate,
            search=found,
        ),
    )
