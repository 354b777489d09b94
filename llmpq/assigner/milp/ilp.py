"""Solving the integer program of one device order and one micro-batch pair.

Every answer is turned into an assignment and priced again by ``objective``; a solver whose value
disagrees is an error, never a plan. The program itself is ``program``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmpq.assigner.constraints.limits import obeys
from llmpq.assigner.milp.program import Program, layers_alike
from llmpq.assigner.milp.solvers import SolverName, SolverResult, SolverStatus, solve
from llmpq.assigner.objective import Evaluation, evaluate, is_feasible
from llmpq.assigner.problem import Assignment, AssignmentProblem
from llmpq.assigner.spread import assignment_of_counts
from llmpq.errors import SolverError

VALUE_TOLERANCE = 1e-6
"""Largest relative difference between a solver's value and our own price."""

MARGIN = 2e-6
"""Relative tightening of memory and budget after a solver used up its own tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpOptions:
    """How to solve.

    Attributes:
        solver: solver's name.
        gap: relative gap at which to stop.
        time_limit_s: seconds at most, ``None`` for no limit.
        cutoff_s: only plans of at most this objective are of interest.
        contiguous: when false, degradation is priced as if neighbours that are equal devices shared
            their layers freely. That takes away most of ``v`` and ``z``, gives a lower bound in a
            fraction of the time, and its counts, spread over contiguous stages, are usually a good
            plan.
        prove: a good plan is known, so that proving the cutoff comes before finding another.
    """

    solver: SolverName = "highs"
    gap: float = 0.0
    time_limit_s: float | None = None
    cutoff_s: float = math.inf
    contiguous: bool = True
    prove: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpResult:
    """What one program gave.

    Attributes:
        status: as a solver's; ``infeasible`` also when nothing is below the cutoff.
        assignment, price: the plan found, ``None`` without one.
        bound_s: proven lower bound of the objective among plans below the cutoff.
    """

    status: SolverStatus
    assignment: Assignment | None
    evaluation: Evaluation | None
    bound_s: float


def solve_ilp(problem: AssignmentProblem, options: IlpOptions) -> IlpResult:
    """Solve a problem to the gap asked for.

    Raises:
        SolverError: the solver's value and our own price of its answer disagree.
    """
    first = _solve_once(problem, options, margin=0.0)
    if first.evaluation is None or is_feasible(problem, first.evaluation):
        return first
    if not options.contiguous:
        return replace(first, assignment=None, evaluation=None)
    # The solver overdrew a row by less than its tolerance; bytes are exact, so ask again with
    # rows a little tighter. The first bound stays valid.
    second = _solve_once(problem, options, margin=MARGIN)
    if second.evaluation is not None and not is_feasible(problem, second.evaluation):
        raise SolverError(f"solver '{options.solver}' overdraws memory or the quality budget")
    return replace(second, bound_s=first.bound_s)


def is_exact_without_steps(problem: AssignmentProblem) -> bool:
    """Tell whether dropping contiguity loses nothing: all layers alike, or one position."""
    return problem.num_positions == 1 or layers_alike(problem)


def _solve_once(problem: AssignmentProblem, options: IlpOptions, margin: float) -> IlpResult:
    program = Program(
        problem, margin=margin, cutoff_s=options.cutoff_s, contiguous=options.contiguous
    )
    found = solve(
        program.lp,
        options.solver,
        gap=options.gap,
        time_limit_s=options.time_limit_s,
        prove=options.prove,
    )
    unit_s = program.unit_s
    nothing = IlpResult(
        status=found.status, assignment=None, evaluation=None, bound_s=found.bound * unit_s
    )
    if not found.values:
        return nothing
    try:
        assignment = assignment_of_counts(problem, program.counts_of(found))
    except SolverError:
        if options.contiguous:
            raise
        # With several kinds of layer, free counts need not be contiguous stages.
        return nothing
    if not obeys(problem.limits, problem.order, assignment.positions, assignment.widths):
        if options.contiguous:
            raise SolverError(f"solver '{options.solver}' breaks a manual decision")
        return nothing
    priced = evaluate(problem, assignment)
    _check_value(priced.objective_s, found, unit_s, options)
    return IlpResult(
        status=found.status,
        assignment=assignment,
        evaluation=priced,
        bound_s=min(found.bound * unit_s, priced.objective_s),
    )


def _check_value(
    objective_s: float, found: SolverResult, unit_s: float, options: IlpOptions
) -> None:
    """Hold the price between the solver's bound and its value; they meet when it is optimal.

    Without contiguity the value itself is only a bound.
    """
    slack = VALUE_TOLERANCE * abs(objective_s)
    top_s = found.objective * unit_s + slack if options.contiguous else math.inf
    if not found.bound * unit_s - slack <= objective_s <= top_s:
        raise SolverError(
            f"solver '{options.solver}' claims a value of {found.objective * unit_s!r} s (bound "
            f"{found.bound * unit_s!r} s), but its answer costs {objective_s!r} s"
        )
