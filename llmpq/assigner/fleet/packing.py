"""The set packing program of a fleet, as arrays: thousands of columns, a row for each pool."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmpq.assigner.problem import FloatArray, IntArray
from llmpq.errors import SolverError

ROUNDED_TO = 1e-6
"""Values up to here count as 0: the solver's tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """The best packing.

    Attributes:
        taken: ``[C]`` how often each column is taken, also in part unless whole ones are wanted.
        bound: of the sum of values.
        costs: ``[C]`` by how much the bound falls where a column is taken once, of packings in
            part; else 0.
    """

    taken: FloatArray
    bound: float
    costs: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """What columns take of the cluster; ``C`` columns, ``T`` pools, ``H`` hosts with shared cores.

    Attributes:
        counts: ``[C, T]`` devices of a column.
        sizes: ``[C]`` its sequences.
        core_shares: ``[C, H]`` the part of a host's cores that it takes.
        devices: ``[T]`` devices there are.
        sequences: sequences there are.
        number: of columns to take, ``None`` for any.
    """

    counts: IntArray
    sizes: IntArray
    core_shares: FloatArray
    devices: IntArray
    sequences: int
    number: int | None

    def best(self, values: FloatArray, *, is_whole: bool, time_limit_s: float) -> Packed:
        """Return the best packing.

        Args:
            values: ``[C]``, all positive.
            is_whole: whether columns are taken a whole number of times.
            time_limit_s: of the solver. No column is taken where it finds nothing in time.
        """
        import highspy

        largest = float(values.max())  # for the solver's tolerances
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0),
                            ("mip_abs_gap", 0.0)):  # fmt: skip
            solver.setOptionValue(name, value)
        if math.isfinite(time_limit_s):
            solver.setOptionValue("time_limit", max(0.0, time_limit_s))
        solver.passModel(self._model(values / largest, is_whole=is_whole))
        solver.run()
        outcome, states = solver.getModelStatus(), highspy.HighsModelStatus
        nothing = np.zeros(len(values))
        if outcome in (states.kInfeasible, states.kUnboundedOrInfeasible):
            return Packed(taken=nothing, bound=0.0, costs=nothing)
        if outcome not in (states.kOptimal, states.kTimeLimit):
            text = solver.modelStatusToString(outcome)
            raise SolverError(f"solver 'highs' stopped with '{text}'")
        info, found = solver.getInfo(), solver.getSolution()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Packed(taken=nothing, bound=math.inf, costs=nothing)
        taken = np.array(found.col_value)
        is_optimal = outcome == states.kOptimal
        least = info.mip_dual_bound if is_whole else info.objective_function_value
        return Packed(
            taken=np.where(taken > ROUNDED_TO, taken, 0.0),
            bound=-float(least) * largest if is_whole or is_optimal else math.inf,
            costs=nothing if is_whole else np.maximum(0.0, np.array(found.col_dual)) * largest,
        )

    def _model(self, values: FloatArray, *, is_whole: bool) -> Any:
        """Return the program in the solver's form."""
        import highspy

        numbers = [] if self.number is None else [np.ones(len(values))]
        shares = self.core_shares.T
        rows = np.vstack([self.counts.T, shares, self.sizes, *numbers]).astype(np.float64)  # [R, C]
        upper = np.array(
            [*self.devices, *np.ones(len(shares)), self.sequences, *([self.number] * len(numbers))],
            dtype=np.float64,
        )
        lower = np.zeros(len(upper))
        if numbers:
            lower[-1] = upper[-1]
        columns, places = np.nonzero(rows.T)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(values), len(rows)
        model.col_cost_ = -values
        model.col_lower_ = np.zeros(len(values))
        model.col_upper_ = np.full(len(values), float(self.sequences))
        model.row_lower_, model.row_upper_ = lower, upper
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_ = np.searchsorted(columns, np.arange(len(values) + 1))
        model.a_matrix_.index_ = places
        model.a_matrix_.value_ = rows.T[columns, places]
        if is_whole:
            model.integrality_ = [highspy.HighsVarType.kInteger] * len(values)
        return model
