"""The degree of tensor parallelism as a variable of the schedule search (ExeGPT, Sec. 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from llmpq.assigner.request import PlanRequest, costs_of
from llmpq.assigner.schedules.plan import (
    ScheduleRequest,
    best_of_policies,
    simulated,
    with_schedule,
)
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import with_tensor_parallel
from llmpq.spec.plan import Plan


def schedule_plan(
    request: PlanRequest,
    plan: Plan,
    wanted: ScheduleRequest,
    policy: Literal["rra", "waa", "auto"],
    *,
    degrees: Sequence[int],
    planned: Callable[[PlanRequest], Plan],
) -> tuple[PlanRequest, Plan]:
    """Return the plan with a searched schedule, and the request that it is a plan of.

    Every degree gets its own plan by ``planned``; the result is the one with the most requests per
    second in simulation. Degree 1 is ``plan`` itself; the policy ``auto`` compares all.

    Raises:
        SpecError: no group of devices divides into teams of a degree.
        InfeasibleError: no schedule meets the bound.
    """
    found: list[tuple[float, PlanRequest, Plan]] = []
    failures: list[InfeasibleError] = []
    for degree in sorted(set(degrees)):
        if degree < 1:
            raise SpecError(f"--tensor_parallel: found {degree}, expected 1 or more")
        own, base = request, plan
        try:
            if degree > 1:
                own = replace(request, cluster=with_tensor_parallel(request.cluster, degree))
                base = planned(own)
            costs = costs_of(own, base.cluster)
            if policy == "auto":
                made = best_of_policies(base, costs, wanted)
            else:
                made = with_schedule(base, costs, wanted, policy)
        except InfeasibleError as error:
            failures.append(error)
            continue
        if len(degrees) == 1:
            return own, made
        report = simulated(made, costs_of(own, made.cluster), wanted)
        found.append((report.throughput_requests_per_s, own, made))
    if not found:
        raise failures[0]
    _, best, made = max(found, key=lambda item: item[0])
    return best, made
