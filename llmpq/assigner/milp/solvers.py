"""PuLP models solved by HiGHS (embedded), CBC or Gurobi, behind one function.

PuLP and the solvers are imported when a program is made or solved: machines that only run or
profile a plan may lack them.
Each runs on one thread, so that a plan does not depend on the machine's load. At the time limit the
incumbent is returned with its proven bound.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmpq.errors import SolverError, SpecError
from llmpq.options.plan import SolverName

if TYPE_CHECKING:
    import pulp

SolverStatus = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverResult:
    """A solver's answer to a minimisation.

    The status is ``optimal`` within the requested gap, ``feasible`` with an incumbent at the time
    limit, ``infeasible`` when proven, and ``unknown`` without solution or proof. Without a solution
    ``values`` (by variable name) is empty and ``objective`` infinite; without a proven bound
    ``bound`` is minus infinity.
    """

    status: SolverStatus
    values: Mapping[str, float]
    objective: float
    bound: float


def solve(
    program: pulp.LpProblem, solver: SolverName, *, gap: float, time_limit_s: float | None
) -> SolverResult:
    """Minimise ``program``, whose variables have unique names, to a relative optimality gap.

    Raises:
        SpecError: the solver is not installed or not licensed.
        SolverError: the solver failed.
    """
    import pulp

    try:
        status, bound = SOLVERS[solver](program, gap, time_limit_s)
    except pulp.PulpSolverError as error:
        raise SolverError(f"solver '{solver}' failed: {error}") from error
    if status == "infeasible":
        return SolverResult(status=status, values={}, objective=math.inf, bound=math.inf)
    bound += program.objective.constant
    if status == "unknown":
        return SolverResult(status=status, values={}, objective=math.inf, bound=bound)
    objective = float(pulp.value(program.objective))
    return SolverResult(
        status=status,
        values={item.name: float(item.varValue) for item in program.variables()},
        objective=objective,
        # Rounding inside a solver may leave its bound slightly above its own solution.
        bound=min(bound, objective),
    )


_Outcome = tuple[SolverStatus, float]
"""Status, and the bound without the objective's constant; variables hold the solution."""


def _highs(program: pulp.LpProblem, gap: float, time_limit_s: float | None) -> _Outcome:
    import highspy
    import pulp

    solver = pulp.HiGHS(msg=False, gapRel=gap, gapAbs=0.0, timeLimit=time_limit_s, threads=1)
    # Not ``program.solve``: PuLP fails without a solution, and drops the bound.
    solver.createAndConfigureSolver(program)
    solver.buildSolverModel(program)
    solver.callSolver(program)
    model, states = program.solverModel, highspy.HighsModelStatus
    outcome, info = model.getModelStatus(), model.getInfo()
    if outcome in (states.kInfeasible, states.kUnboundedOrInfeasible):
        return "infeasible", math.inf
    limits = (states.kTimeLimit, states.kIterationLimit, states.kInterrupt)
    if outcome != states.kOptimal and outcome not in limits:
        raise SolverError(f"solver 'highs' stopped with '{model.modelStatusToString(outcome)}'")
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return "unknown", float(info.mip_dual_bound)
    columns = model.getSolution().col_value
    program.assignVarsVals({item.name: columns[item.index] for item in program.variables()})
    return ("optimal" if outcome == states.kOptimal else "feasible"), float(info.mip_dual_bound)


def _cbc(program: pulp.LpProblem, gap: float, time_limit_s: float | None) -> _Outcome:
    import pulp

    solver = _cbc_program(msg=False, gapRel=gap, timeLimit=time_limit_s, threads=1)
    with tempfile.TemporaryDirectory(prefix="llmpq-cbc-") as folder:
        solver.tmpDir = folder
        program.solve(solver)
    if program.status in (pulp.LpStatusInfeasible, pulp.LpStatusUndefined):
        return "infeasible", math.inf
    if program.sol_status == pulp.LpSolutionOptimal:
        # PuLP does not report CBC's bound; an optimal solution is within the gap of it.
        value = float(pulp.value(program.objective)) - program.objective.constant
        return "optimal", value - gap * abs(value)
    feasible = program.sol_status == pulp.LpSolutionIntegerFeasible
    return ("feasible" if feasible else "unknown"), -math.inf


def _cbc_program(**options: Any) -> Any:
    """Return the CBC on the path, or else the one that PuLP 3 includes."""
    import pulp

    solver = pulp.COIN_CMD(**options)
    if not solver.available() and hasattr(pulp, "PULP_CBC_CMD"):
        with warnings.catch_warnings():
            # PuLP 3.3 announces its removal in 4.0.
            warnings.simplefilter("ignore", DeprecationWarning)
            solver = pulp.PULP_CBC_CMD(**options)
    if not solver.available():
        raise SpecError(
            "solver 'cbc': found no CBC program for this machine; install it, or use highs"
        )
    return solver


def _gurobi(program: pulp.LpProblem, gap: float, time_limit_s: float | None) -> _Outcome:
    if importlib.util.find_spec("gurobipy") is None:
        raise SpecError(
            "solver 'gurobi': the package gurobipy is not installed; "
            "install llmpq[gurobi], or use highs"
        )
    import gurobipy
    import pulp

    codes = gurobipy.GRB
    try:
        solver = pulp.GUROBI(
            msg=False, gapRel=gap, timeLimit=time_limit_s, manageEnv=True, Threads=1
        )
        try:
            program.solve(solver)
            model = program.solverModel
            if model.Status in (codes.INFEASIBLE, codes.INF_OR_UNBD):
                return "infeasible", math.inf
            if model.SolCount == 0:
                return "unknown", float(model.ObjBound)
            done = model.Status == codes.OPTIMAL
            return ("optimal" if done else "feasible"), float(model.ObjBound)
        finally:
            solver.close()
    except gurobipy.GurobiError as error:
        # The free licence allows 2000 variables and 2000 constraints.
        raise SpecError(f"solver 'gurobi': {error}; use highs") from None


SOLVERS: Mapping[str, Callable[[pulp.LpProblem, float, float | None], _Outcome]] = {
    "highs": _highs,
    "cbc": _cbc,
    "gurobi": _gurobi,
}
"""The solvers by name."""
