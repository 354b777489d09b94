"""All methods on one request, evaluated with the same costs.

The search stops within its gap, and a baseline's plan may lie inside it: then the search returns
that plan with its own bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmpq.assigner.objective import relative_gap
from llmpq.assigner.planner import METHODS, check_method, explain_infeasible_overrides, plan_task
from llmpq.assigner.request import PlanRequest, Progress, build_task, silent
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.plan import Plan

SEARCH = "llmpq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A method's plan, or why there is none."""

    method: str
    plan: Plan | None
    error: InfeasibleError | SpecError | None = None


Runner = Callable[[str, Callable[[Progress], Plan]], Plan]
"""Calls a method's work, given its name, with a ``Progress``."""


def _silently(_: str, work: Callable[[Progress], Plan]) -> Plan:
    return work(silent)


def compare_methods(
    request: PlanRequest, *, command: str = "", run: Runner = _silently
) -> tuple[Outcome, ...]:
    """Return the outcome of every method, the search first.

    ``run`` calls the work of every method, for instance with a progress bar.

    Raises:
        SpecError: the request is invalid for every method.
    """
    check_method(request, SEARCH)
    started = time.perf_counter()
    request = request.with_deadline()
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
            explained = explain_infeasible_overrides(request, method, error)
            return Outcome(method=method, plan=None, error=explained)
        except SpecError as error:
            return Outcome(method=method, plan=None, error=error)

    baselines = [outcome(method) for method in METHODS if method != SEARCH]
    return best_with_bound(outcome(SEARCH), baselines, request.gap), *baselines


def best_with_bound(search: Outcome, baselines: list[Outcome], gap: float) -> Outcome:
    """Return the search's outcome, with the cheapest baseline's plan where that is cheaper."""
    plans = [baseline.plan for baseline in baselines if baseline.plan is not None]
    if not plans:
        return search
    best = min(plans, key=lambda plan: plan.estimate.objective_s)
    if search.plan is None:  # out of time
        own = replace(best.search, method=search.method)
        return Outcome(method=search.method, plan=replace(best, search=own))
    objective_s = best.estimate.objective_s
    if search.plan.estimate.objective_s <= objective_s:
        return search
    found = search.plan.search
    if found.bound_s is not None:
        bound_s = min(found.bound_s, objective_s)
        left = relative_gap(objective_s, bound_s)
        status = "optimal" if left <= gap else found.status
        found = replace(found, bound_s=bound_s, gap=left, status=status)
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
