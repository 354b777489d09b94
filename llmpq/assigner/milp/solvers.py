"""Mixed-integer solvers behind one function: HiGHS (embedded), CBC and Gurobi, all through PuLP.

Each runs on one thread, so that a plan does not depend on the machine's load, and keeps what it
has at the time limit together with its proven bound. It refuses to know what is being solved.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pulp

from llmpq.errors import SolverError, SpecError

SolverName = Literal["highs", "cbc", "gurobi"]
SolverStatus = Literal["optimal", "feasible", "infeasible", "unknown"]

_CBC_BOUND = re.compile(r"^Lower bound:\s*(\S+)", re.MULTILINE)
_CBC_VALUE = re.compile(r"^Objective value:\s*(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverResult:
    """What a solver found for a minimisation.

    Attributes:
        status: ``optimal`` within the gap asked for; ``feasible`` an incumbent at the time limit;
            ``infeasible`` proven; ``unknown`` neither solution nor proof in the time given.
        values: value of every variable by name; empty without a solution.
        objective: value of the solution, infinite without one.
        bound: proven lower bound of the optimum, minus infinity when nothing is proven.
        seconds: time inside the solver.
    """

    status: SolverStatus
    values: Mapping[str, float]
    objective: float
    bound: float
    seconds: float


def solve(
    program: pulp.LpProblem,
    solver: SolverName,
    *,
    gap: float,
    time_limit_s: float | None,
    prove: bool = False,
) -> SolverResult:
    """Minimise ``program``.

    Args:
        program: the program; its variables have unique names.
        solver: which solver.
        gap: relative gap at which it may stop.
        time_limit_s: seconds after which it must, ``None`` for no limit.
        prove: a hint that there is hardly a solution to be found, so that work on finding one is
            better spent on the bound. The answer is valid either way.

    Raises:
        SpecError: the solver is not installed or not licensed.
        SolverError: the solver crashed or answered what cannot be.
    """
    started = time.perf_counter()
    try:
        status, values, objective, bound = SOLVERS[solver](program, gap, time_limit_s, prove)
    except pulp.PulpSolverError as error:
        raise SolverError(f"solver '{solver}' failed: {error}") from error
    return SolverResult(
        status=status,
        values=values,
        objective=objective,
        # Rounding inside a solver may leave its bound a hair above its own solution.
        bound=min(bound, objective),
        seconds=time.perf_counter() - started,
    )


_Answer = tuple[SolverStatus, dict[str, float], float, float]
_NOTHING: dict[str, float] = {}


_HIGHS_PROVES: Mapping[str, Any] = {
    # A root solved again after a few fixings, and programs within programs, took most of the time.
    "mip_allow_restart": False,
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
}


def _highs(program: pulp.LpProblem, gap: float, time_limit_s: float | None, prove: bool) -> _Answer:
    import highspy

    solver = pulp.HiGHS(msg=False, gapRel=gap, gapAbs=0.0, timeLimit=time_limit_s, threads=1)
    # PuLP's own reading of the answer fails when there is no solution, and drops the bound.
    solver.createAndConfigureSolver(program)
    for name, value in _HIGHS_PROVES.items() if prove else ():
        # HiGHS 1.10 lacks some of these; it then says so in its status, and goes on.
        program.solverModel.setOptionValue(name, value)
    solver.buildSolverModel(program)
    solver.callSolver(program)
    model = program.solverModel
    outcome, info = model.getModelStatus(), model.getInfo()
    states = highspy.HighsModelStatus
    if outcome in (states.kInfeasible, states.kUnboundedOrInfeasible):
        return "infeasible", _NOTHING, math.inf, math.inf
    limits = (states.kTimeLimit, states.kIterationLimit, states.kInterrupt)
    if outcome != states.kOptimal and outcome not in limits:
        raise SolverError(f"solver 'highs' stopped with '{model.modelStatusToString(outcome)}'")
    constant = program.objective.constant
    bound = float(info.mip_dual_bound) + constant
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return "unknown", _NOTHING, math.inf, bound
    columns = model.getSolution().col_value
    values = {item.name: float(columns[item.index]) for item in program.variables()}
    value = float(info.objective_function_value) + constant
    return ("optimal" if outcome == states.kOptimal else "feasible"), values, value, bound


def _cbc(program: pulp.LpProblem, gap: float, time_limit_s: float | None, prove: bool) -> _Answer:
    del prove
    with tempfile.TemporaryDirectory(prefix="llmpq-cbc-") as folder:
        log = Path(folder) / "cbc.log"
        solver = _cbc_program(
            msg=False, gapRel=gap, timeLimit=time_limit_s, threads=1, logPath=str(log)
        )
        solver.tmpDir = folder
        program.solve(solver)
        text = log.read_text(encoding="utf-8", errors="replace")
    if program.status in (pulp.LpStatusInfeasible, pulp.LpStatusUndefined):
        return "infeasible", _NOTHING, math.inf, math.inf
    constant = program.objective.constant
    if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return "unknown", _NOTHING, math.inf, _cbc_bound(text, constant)
    value = float(pulp.value(program.objective))
    values = {item.name: float(item.varValue) for item in program.variables()}
    if program.sol_status == pulp.LpSolutionIntegerFeasible:
        return "feasible", values, value, _cbc_bound(text, constant)
    # The log names a bound only when a gap is left open.
    bound = _cbc_bound(text, constant) if _CBC_BOUND.search(text) else value
    return "optimal", values, value, bound


def _cbc_program(**options: Any) -> Any:
    """Return the CBC on the path, or else the one that PuLP 3 brings."""
    solver = pulp.COIN_CMD(**options)
    if solver.available():
        return solver
    if hasattr(pulp, "PULP_CBC_CMD"):
        with warnings.catch_warnings():
            # PuLP 3.3 announces its removal in 4.0; until then it is the CBC there is.
            warnings.simplefilter("ignore", DeprecationWarning)
            solver = pulp.PULP_CBC_CMD(**options)
        if solver.available():
            return solver
    raise SpecError("solver 'cbc': found no CBC program for this machine; install it, or use highs")


def _cbc_bound(log: str, constant: float) -> float:
    match = _CBC_BOUND.search(log)
    return float(match.group(1)) + constant if match else -math.inf


def _gurobi(
    program: pulp.LpProblem, gap: float, time_limit_s: float | None, prove: bool
) -> _Answer:
    del prove
    try:
        import gurobipy
    except ImportError:
        raise SpecError(
            "solver 'gurobi': the package gurobipy is not installed; "
            "install llmpq[gurobi], or use highs"
        ) from None
    try:
        solver = pulp.GUROBI(
            msg=False, gapRel=gap, timeLimit=time_limit_s, manageEnv=True, Threads=1
        )
        try:
            solver.buildSolverModel(program)
            solver.callSolver(program)
            return _read_gurobi(program, gurobipy.GRB)
        finally:
            solver.close()
    except gurobipy.GurobiError as error:
        # The free licence holds 2000 variables and 2000 rows.
        raise SpecError(f"solver 'gurobi': {error}; use highs") from None


def _read_gurobi(program: pulp.LpProblem, codes: Any) -> _Answer:
    # PuLP leaves the objective's constant out of the model it gives to Gurobi.
    model, constant = program.solverModel, program.objective.constant
    if model.Status in (codes.INFEASIBLE, codes.INF_OR_UNBD):
        return "infeasible", _NOTHING, math.inf, math.inf
    bound = float(model.ObjBound) + constant
    if model.SolCount == 0:
        return "unknown", _NOTHING, math.inf, bound
    values = {item.name: float(item.solverVar.X) for item in program.variables()}
    done = model.Status == codes.OPTIMAL
    value = float(model.ObjVal) + constant
    return ("optimal" if done else "feasible"), values, value, bound


SOLVERS: Mapping[str, Callable[[pulp.LpProblem, float, float | None, bool], _Answer]] = {
    "highs": _highs,
    "cbc": _cbc,
    "gurobi": _gurobi,
}
"""The solvers by name."""
