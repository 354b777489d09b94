"""Mixed-integer programs, solved by HiGHS or Gurobi behind one function.

The solvers are imported when a program is solved: machines that only run or profile a plan may lack
them. Each runs on one thread, so that a plan does not depend on the machine's load. At the time
limit the incumbent is returned with its proven bound.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llmpq.errors import SolverError, SpecError
from llmpq.options.plan import SolverName

if TYPE_CHECKING:
    import highspy

SolverStatus = Literal["optimal", "feasible", "infeasible", "unknown"]
Sense = Literal["<=", "==", ">="]
Terms = list[tuple[int, float]]
"""Variables with their coefficients."""


class MixedProgram:
    """A minimisation over bounded variables, some of them whole, with linear constraints.

    A variable is a number: its place in ``lower``, ``upper`` and ``is_whole``.
    """

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.is_whole: list[bool] = []
        self.objective: dict[int, float] = {}
        self.constant = 0.0
        self.rows: list[tuple[dict[int, float], Sense, float]] = []

    def variable(self, lower: float, upper: float = math.inf, *, is_whole: bool = False) -> int:
        """Add a variable and return its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.is_whole.append(is_whole)
        return len(self.lower) - 1

    def minimise(self, terms: Iterable[tuple[int, float]], constant: float = 0.0) -> None:
        """Set the objective; terms of one variable are added."""
        self.objective, self.constant = _merged(terms), constant

    def constrain(self, terms: Iterable[tuple[int, float]], sense: Sense, value: float) -> None:
        """Add a constraint; terms of one variable are added."""
        self.rows.append((_merged(terms), sense, value))

    @property
    def costs(self) -> list[float]:
        """The objective's coefficient of every variable."""
        return [self.objective.get(place, 0.0) for place in range(len(self.lower))]


def _merged(terms: Iterable[tuple[int, float]]) -> dict[int, float]:
    sums: dict[int, float] = {}
    for variable, value in terms:
        sums[variable] = sums.get(variable, 0.0) + value
    return {variable: value for variable, value in sums.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverResult:
    """A solver's answer to a minimisation.

    The status is ``optimal`` within the requested gap, ``feasible`` with an incumbent at the time
    limit, ``infeasible`` when proven, and ``unknown`` without solution or proof. Without a solution
    ``values`` (by variable) is empty and ``objective`` infinite; without a proven bound ``bound``
    is minus infinity.
    """

    status: SolverStatus
    values: Sequence[float]
    objective: float
    bound: float


def solve(
    program: MixedProgram, solver: SolverName, *, gap: float, time_limit_s: float | None
) -> SolverResult:
    """Minimise a program to a relative optimality gap.

    Raises:
        SpecError: the solver is not installed or not licensed.
        SolverError: the solver failed.
    """
    status, bound, values = SOLVERS[solver](program, gap, time_limit_s)
    if status == "infeasible":
        return SolverResult(status=status, values=(), objective=math.inf, bound=math.inf)
    bound += program.constant
    if status == "unknown":
        return SolverResult(status=status, values=(), objective=math.inf, bound=bound)
    objective = program.constant + sum(
        cost * values[place] for place, cost in program.objective.items()
    )
    # Rounding inside a solver may leave its bound slightly above its own solution.
    return SolverResult(
        status=status, values=values, objective=objective, bound=min(bound, objective)
    )


_Outcome = tuple[SolverStatus, float, Sequence[float]]
"""Status, the bound without the objective's constant, and the solution."""


def _highs(program: MixedProgram, gap: float, time_limit_s: float | None) -> _Outcome:
    import highspy

    model = highspy.Highs()  # type: ignore[no-untyped-call]
    settings: dict[str, float | str] = {
        "output_flag": False,
        "mip_rel_gap": gap,
        "mip_abs_gap": 0.0,
        "threads": 1,
    }
    # With presolve, HiGHS 1.14 and 1.15 return some plans as optimal that are not (its issues 3043,
    # 3073 and 3094); without it, our programs take as long.
    settings["presolve"] = "off"
    if time_limit_s is not None:
        settings["time_limit"] = float(time_limit_s)
    for name, value in settings.items():
        model.setOptionValue(name, value)
    model.passModel(_highs_model(program))
    model.run()
    states = highspy.HighsModelStatus
    outcome, info = model.getModelStatus(), model.getInfo()
    if outcome in (states.kInfeasible, states.kUnboundedOrInfeasible):
        return "infeasible", math.inf, ()
    limits = (states.kTimeLimit, states.kIterationLimit, states.kInterrupt)
    if outcome != states.kOptimal and outcome not in limits:
        raise SolverError(f"solver 'highs' stopped with '{model.modelStatusToString(outcome)}'")
    bound = float(info.mip_dual_bound)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return "unknown", bound, ()
    values = list(model.getSolution().col_value)
    return ("optimal" if outcome == states.kOptimal else "feasible"), bound, values


def _highs_model(program: MixedProgram) -> highspy.HighsLp:
    import highspy

    found = highspy.HighsLp()
    found.num_col_, found.num_row_ = len(program.lower), len(program.rows)
    found.col_cost_ = program.costs
    found.col_lower_ = program.lower
    found.col_upper_ = program.upper
    kinds = highspy.HighsVarType
    found.integrality_ = [kinds.kInteger if one else kinds.kContinuous for one in program.is_whole]
    senses = [(sense, value) for _, sense, value in program.rows]
    found.row_lower_ = [-math.inf if sense == "<=" else value for sense, value in senses]
    found.row_upper_ = [math.inf if sense == ">=" else value for sense, value in senses]
    starts = [0]
    for terms, _, _ in program.rows:
        starts.append(starts[-1] + len(terms))
    found.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    found.a_matrix_.start_ = starts
    found.a_matrix_.index_ = [variable for terms, _, _ in program.rows for variable in terms]
    found.a_matrix_.value_ = [value for terms, _, _ in program.rows for value in terms.values()]
    return found


def _gurobi(program: MixedProgram, gap: float, time_limit_s: float | None) -> _Outcome:
    if importlib.util.find_spec("gurobipy") is None:
        raise SpecError(
            "solver 'gurobi': the package gurobipy is not installed; "
            "install llmpq[gurobi], or use highs"
        )
    import gurobipy

    codes = gurobipy.GRB
    settings = {"OutputFlag": 0, "Threads": 1, "MIPGap": gap}
    if time_limit_s is not None:
        settings["TimeLimit"] = time_limit_s
    try:
        with gurobipy.Env(params=settings) as env, gurobipy.Model(env=env) as model:
            columns = [
                model.addVar(lower, upper, cost, codes.INTEGER if is_whole else codes.CONTINUOUS)
                for lower, upper, cost, is_whole in zip(
                    program.lower, program.upper, program.costs, program.is_whole, strict=True
                )
            ]
            for terms, sense, value in program.rows:
                own = [columns[variable] for variable in terms]
                row = gurobipy.LinExpr(list(terms.values()), own)
                model.addLConstr(row, sense[0], value)
            model.optimize()
            if model.Status in (codes.INFEASIBLE, codes.INF_OR_UNBD):
                return "infeasible", math.inf, ()
            if model.SolCount == 0:
                return "unknown", float(model.ObjBound), ()
            done = model.Status == codes.OPTIMAL
            values = [float(column.X) for column in columns]
            return ("optimal" if done else "feasible"), float(model.ObjBound), values
    except gurobipy.GurobiError as error:
        # The free licence allows 2000 variables and 2000 constraints.
        raise SpecError(f"solver 'gurobi': {error}; use highs") from None


SOLVERS: Mapping[str, Callable[[MixedProgram, float, float | None], _Outcome]] = {
    "highs": _highs,
    "cbc": _highs,  # an old name
    "gurobi": _gurobi,
}
"""The solvers by name."""
