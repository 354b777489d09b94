"""The exact search as a planning method: a task in, a solution out."""

from __future__ import annotations

import math
from dataclasses import replace

from llmpq.assigner.exact.coverage import NotCoveredError
from llmpq.assigner.exact.lattice import Orders
from llmpq.assigner.exact.result import ExactResult
from llmpq.assigner.exact.search import solve_exact
from llmpq.assigner.exact.space import SearchSpace
from llmpq.assigner.explain.explain import explain_budget, explain_memory
from llmpq.assigner.heuristics.quick import find_quick
from llmpq.assigner.milp.search import GAP_SLACK, OutOfTimeError, find_plan
from llmpq.assigner.task import DEFAULT_GAP, PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError


def find_exact(task: PlanningTask, progress: Progress) -> Solution:
    """Find the best plan of a task; by integer programs where the exact search does not cover it.

    Raises:
        InfeasibleError: memory, the quality budget or the time limit leaves no plan; says which.
    """
    request = task.request
    if not task.pairs:
        raise InfeasibleError(explain_memory(request))
    try:
        result = solve_exact(
            space_of(task),
            orders=orders_of(task),
            gap=request.gap,
            deadline=request.deadline,
            progress=progress,
        )
    except NotCoveredError:
        # Programs cannot close the last thousandth in reasonable time.
        programs = replace(task.request, gap=max(task.request.gap, DEFAULT_GAP))
        return find_plan(replace(task, request=programs), progress)
    except OutOfTimeError:
        if (hasty := find_quick(task)) is None:
            raise
        return hasty
    except InfeasibleError as error:
        if request.quality_budget is None:
            raise InfeasibleError(explain_memory(request)) from error
        raise InfeasibleError(explain_budget(task, task.orders())) from error
    return never_worse(_solution(task, result), task)


def space_of(task: PlanningTask) -> SearchSpace:
    """Return what there is to choose from."""
    return SearchSpace(
        pairs=task.pairs,
        group_counts=tuple(task.group_counts.tolist()),
        kinds=task.kinds,
        bits=task.request.bits,
        omega=task.omega,
        theta_s=task.theta_s,
        quality_budget=task.request.quality_budget,
        formula=task.request.formula,
        limits=task.limits,
    )


def orders_of(task: PlanningTask) -> Orders:
    """Return the orders to search."""
    return task.request.orders if task.fixed_order is None else task.fixed_order


def num_orders(task: PlanningTask) -> int:
    """Return how many orders of all devices there are."""
    counts = task.group_counts.tolist()
    if task.fixed_order is not None:
        return 1
    if task.request.orders == "types":
        return math.factorial(len(counts))
    return math.factorial(sum(counts)) // math.prod(math.factorial(count) for count in counts)


def never_worse(found: Solution, task: PlanningTask) -> Solution:
    """Return what the search found, or out of time the proportional split that is better."""
    if found.status == "optimal" or not task.request.deadline.has_passed:
        return found
    hasty = find_quick(task)
    if hasty is None or hasty.evaluation.objective_s >= found.evaluation.objective_s:
        return found
    assert found.bound_s is not None
    return replace(
        found,
        problem=hasty.problem,
        assignment=hasty.assignment,
        evaluation=hasty.evaluation,
        bound_s=min(found.bound_s, hasty.evaluation.objective_s),
    )


def _solution(task: PlanningTask, result: ExactResult) -> Solution:
    searched = result.stats.searched
    return Solution(
        problem=result.problem,
        assignment=result.assignment,
        evaluation=result.evaluation,
        solver="exact",
        status="optimal" if result.gap <= task.request.gap + GAP_SLACK else "feasible",
        bound_s=result.bound_s,
        orders=num_orders(task),
        pairs_searched=searched,
        pairs_pruned=task.num_pairs - searched,
    )
