"""make_plan: one request, one method, one plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from llmpq.assigner.constraints.overrides import NO_OVERRIDES
from llmpq.assigner.decode import plan_of
from llmpq.assigner.exact.method import find_exact
from llmpq.assigner.explain.infeasible import explain_memory
from llmpq.assigner.heuristics import adabits, fastest, pipeedge, proportional, transfer
from llmpq.assigner.milp.search import find_plan
from llmpq.assigner.request import (
    OutOfTimeError,
    PlanningTask,
    PlanRequest,
    Progress,
    Solution,
    build_task,
    silent,
)
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.plan import Plan

Method = Callable[[PlanningTask, Progress], Solution]
"""Finds a solution of a task that has at least one micro-batch pair, or raises ``InfeasibleError``
with what leaves no plan: memory, the quality budget, or the time limit."""


def find_best(task: PlanningTask, progress: Progress) -> Solution:
    """Find the best plan: exactly, or by integer programs when the request names their solver."""
    find = find_exact if task.request.solver == "exact" else find_plan
    return find(task, progress)


METHODS: Mapping[str, Method] = {
    "llmpq": find_best,
    "uniform": proportional.find_uniform,
    "adaptive_even": adabits.find_adaptive_even,
    "memory_proportional": proportional.find_memory_proportional,
    "speed_proportional": proportional.find_speed_proportional,
    "pipeedge": pipeedge.find_pipeedge,
    "fastest": fastest.find_fastest,
    "adabits": adabits.find_adabits,
    "heuristic": transfer.find_transfer,
}
"""The planning methods by name."""

FIRST_PLAN_GAP = 0.99
"""Gap at which a search stops with the first plan that it finds."""

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
    task = build_task(request)
    try:
        return plan_task(task, method, command=command, progress=progress, started=started)
    except InfeasibleError as error:
        raise explain_infeasible_overrides(request, method, error) from None


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


def solve_task(task: PlanningTask, method: str, progress: Progress = silent) -> Solution:
    """Return a method's solution; raises ``InfeasibleError`` as ``make_plan`` does."""
    if not task.pairs:
        raise InfeasibleError(explain_memory(task.request))
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
    try:
        solve_task(build_task(replace(request, gap=FIRST_PLAN_GAP, deadline=deadline)), method)
    except (InfeasibleError, SpecError):
        return False
    return True
