"""The exact search as a planning method: a task in, a solution out."""

from __future__ import annotations

from dataclasses import replace

from llmpq.assigner.exact.native import NotCoveredError
from llmpq.assigner.exact.search import solve_exact
from llmpq.assigner.explain.infeasible import explain_budget, memory_error
from llmpq.assigner.heuristics.proportional import find_proportional
from llmpq.assigner.milp.search import find_plan
from llmpq.assigner.request import (
    DEFAULT_GAP,
    GAP_ROUNDING,
    OutOfTimeError,
    PlanningTask,
    Progress,
    Solution,
)
from llmpq.errors import InfeasibleError


def find_exact(task: PlanningTask, progress: Progress, *, explains: bool = True) -> Solution:
    """Find the best plan; by integer programs where the exact search does not support a task.

    Without ``explains``, the error does not say why there is no plan, which takes programs.
    """
    request = task.request
    try:
        result = solve_exact(
            task.space,
            orders=task.fixed_order or request.orders,
            gap=request.gap,
            deadline=request.deadline,
            progress=progress,
        )
    except NotCoveredError:
        # Programs cannot close the last thousandth in reasonable time.
        programs = replace(request, gap=max(request.gap, DEFAULT_GAP))
        return find_plan(replace(task, request=programs), progress)
    except OutOfTimeError:
        fallback = find_proportional(task)
        if fallback is None:
            raise
        return fallback
    except InfeasibleError as error:
        if not explains:
            raise
        if request.quality_budget is None:
            raise memory_error(request) from error
        raise InfeasibleError(explain_budget(task)) from error
    searched = result.stats.searched
    solution = Solution(
        problem=result.problem,
        assignment=result.assignment,
        evaluation=result.evaluation,
        solver="exact",
        status="optimal" if result.gap <= request.gap + GAP_ROUNDING else "feasible",
        bound_s=result.bound_s,
        orders=result.num_orders,
        order_set=result.orders,
        pairs_searched=searched,
        pairs_pruned=task.num_pairs - searched,
    )
    late = solution.status != "optimal" and request.deadline.has_passed
    return _with_fallback(solution, find_proportional(task)) if late else solution


def _with_fallback(found: Solution, fallback: Solution | None) -> Solution:
    """Return the search's solution, with the fallback's plan where that is cheaper."""
    if fallback is None or fallback.evaluation.objective_s >= found.evaluation.objective_s:
        return found
    assert found.bound_s is not None
    return replace(
        found,
        problem=fallback.problem,
        assignment=fallback.assignment,
        evaluation=fallback.evaluation,
        bound_s=min(found.bound_s, fallback.evaluation.objective_s),
    )
