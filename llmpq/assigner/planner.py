"""make_plan: one request, one method, one plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from llmpq.assigner.constraints.overrides import NO_OVERRIDES
from llmpq.assigner.decode import plan_of
from llmpq.assigner.exact.method import find_exact
from llmpq.assigner.heuristics.adabits import find_adabits, find_adaptive_even
from llmpq.assigner.heuristics.fastest import find_fastest
from llmpq.assigner.heuristics.pipeedge import find_pipeedge
from llmpq.assigner.heuristics.proportional import (
    find_memory_proportional,
    find_speed_proportional,
)
from llmpq.assigner.heuristics.transfer import find_transfer
from llmpq.assigner.heuristics.uniform import find_uniform
from llmpq.assigner.milp.search import OutOfTimeError, find_plan
from llmpq.assigner.task import PlanningTask, PlanRequest, Progress, Solution, build_task
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.plan import Plan

Method = Callable[[PlanningTask, Progress], Solution]


def find_best(task: PlanningTask, progress: Progress) -> Solution:
    """Find the best plan: exactly, or by integer programs when the request names their solver."""
    find = find_exact if task.request.solver == "exact" else find_plan
    return find(task, progress)


METHODS: Mapping[str, Method] = {
    "llmpq": find_best,
    "uniform": find_uniform,
    "adaptive_even": find_adaptive_even,
    "memory_proportional": find_memory_proportional,
    "speed_proportional": find_speed_proportional,
    "pipeedge": find_pipeedge,
    "fastest": find_fastest,
    "adabits": find_adabits,
    "heuristic": find_transfer,
}
"""The planning methods by name."""

ANY_PLAN_GAP = 0.99
"""Gap at which a search stops with the first plan it meets."""

BLAME_LIMIT_S = 20.0
"""Seconds of each search for the manual decision that leaves no plan."""


def make_plan(
    request: PlanRequest,
    method: str = "llmpq",
    *,
    command: str = "",
    progress: Progress | None = None,
) -> Plan:
    """Plan a request.

    Args:
        request: what is asked.
        method: a name in ``METHODS``.
        command: the command line, for the plan's provenance.
        progress: told how far the search is.

    Raises:
        SpecError: the request or the method cannot be accepted.
        InfeasibleError: no plan exists, or none was found in time; the message says why.
    """
    check_method(request, method)
    started = time.perf_counter()
    request = request.begun()
    task = build_task(request)
    try:
        return plan_task(task, method, command=command, progress=progress, started=started)
    except InfeasibleError as error:
        raise blamed(request, method, error) from None


def plan_task(
    task: PlanningTask,
    method: str,
    *,
    command: str = "",
    progress: Progress | None = None,
    started: float | None = None,
) -> Plan:
    """Plan a request whose arrays are built.

    Args:
        task: the arrays.
        method: a name in ``METHODS``.
        command: the command line, for the plan's provenance.
        progress: told how far the search is.
        started: since when the planning time counts, by ``time.perf_counter``; now by default.

    Raises:
        InfeasibleError: no plan exists, or none was found in time.
    """
    begun = time.perf_counter() if started is None else started
    solution = METHODS[method](task, progress or silent)
    return plan_of(
        task,
        solution,
        method=method,
        command=command,
        planning_s=time.perf_counter() - begun,
    )


def check_method(request: PlanRequest, method: str) -> None:
    """Refuse an unknown method, and decisions that a method cannot follow.

    Raises:
        SpecError: names what was found.
    """
    if method not in METHODS:
        raise SpecError(f"method: found '{method}', expected one of {', '.join(METHODS)}")
    if method != "llmpq" and request.overrides.shapes_the_plan:
        found = next(
            text for text in request.overrides.single() if text.split()[0] not in _ANY_METHOD
        )
        raise SpecError(
            f"{found}: found method '{method}', expected llmpq: the other methods only follow "
            f"{', '.join(_ANY_METHOD)}"
        )


_ANY_METHOD = ("--memory_gib", "--exclude", "--micro_batch")


def silent(done: int, total: int, best_s: float | None) -> None:
    """Report to nobody."""
    del done, total, best_s


def blamed(request: PlanRequest, method: str, error: InfeasibleError) -> InfeasibleError:
    """Return the error with the manual decisions that leave no plan, found by planning without."""
    overrides = request.overrides
    if not overrides or isinstance(error, OutOfTimeError) or request.deadline.has_passed:
        return error
    guilty = [
        text
        for text, others in overrides.without_each()
        if _has_plan(replace(request, overrides=others), method)
    ]
    # What the search said is about memory, and wrong where something else is in the way.
    others = overrides.shapes_the_plan or overrides.micro_batching is not None
    detail = "" if others else f": {error}"
    if guilty:
        without = "it" if len(guilty) == 1 else "any one of them"
        return InfeasibleError(
            f"no plan exists with {' and '.join(guilty)}; without {without} there is one{detail}"
        )
    if _has_plan(replace(request, overrides=NO_OVERRIDES), method):
        return InfeasibleError(
            f"no plan exists with {' and '.join(overrides.single())} together; without any of "
            f"them there is one{detail}"
        )
    return error


def _has_plan(request: PlanRequest, method: str) -> bool:
    easier = replace(request, gap=ANY_PLAN_GAP, deadline=request.deadline.within(BLAME_LIMIT_S))
    try:
        METHODS[method](build_task(easier), silent)
    except (InfeasibleError, SpecError):
        return False
    return True
