"""make_plan: one request, one method, one plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from llmpq.assigner.baselines.uniform import find_uniform
from llmpq.assigner.decode import plan_of
from llmpq.assigner.search import find_plan
from llmpq.assigner.task import PlanningTask, PlanRequest, Progress, Solution, build_task
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan

Method = Callable[[PlanningTask, Progress], Solution]

METHODS: Mapping[str, Method] = {"llmpq": find_plan, "uniform": find_uniform}
"""The planning methods by name."""


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
    if method not in METHODS:
        raise SpecError(f"method: found '{method}', expected one of {', '.join(METHODS)}")
    started = time.perf_counter()
    task = build_task(request)
    solution = METHODS[method](task, progress or _silent)
    return plan_of(
        task,
        solution,
        method=method,
        command=command,
        planning_s=time.perf_counter() - started,
    )


def _silent(done: int, total: int, best_s: float | None) -> None:
    """Report to nobody."""
    del done, total, best_s
