from __future__ import annotations

import math
import sys

import pulp
import pytest

from llmpq.assigner.milp.solvers import solve
from llmpq.errors import SpecError


def knapsack(*, capacity: float = 7.0, constant: float = 5.0) -> pulp.LpProblem:
    program = pulp.LpProblem("knapsack", pulp.LpMinimize)
    weights, gains = (3, 4, 2), (4.0, 5.0, 3.0)
    items = [program.add_variable(f"x{i}", 0, 1, pulp.LpInteger) for i in range(3)]
    program += pulp.LpAffineExpression(
        [(item, -gain) for item, gain in zip(items, gains, strict=True)], constant
    )
    load = pulp.LpAffineExpression(list(zip(items, weights, strict=True)))
    program.addConstraint(pulp.LpConstraint(load, pulp.LpConstraintLE, rhs=capacity))
    return program


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_solvers_agree_and_include_the_constant(solver: str) -> None:
    found = solve(knapsack(), solver, gap=0.0, time_limit_s=None)
    assert found.status == "optimal"
    assert found.objective == pytest.approx(5.0 - 9.0)
    assert found.bound == pytest.approx(5.0 - 9.0)
    assert [round(found.values[f"x{i}"]) for i in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_solvers_prove_infeasibility(solver: str) -> None:
    found = solve(knapsack(capacity=-1.0), solver, gap=0.0, time_limit_s=None)
    assert found.status == "infeasible"
    assert found.values == {}
    assert found.objective == math.inf


def test_a_missing_gurobi_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    with pytest.raises(SpecError, match=r"llmpq\[gurobi\]"):
        solve(knapsack(), "gurobi", gap=0.0, time_limit_s=None)


@pytest.mark.solver
def test_gurobi_agrees() -> None:
    pytest.importorskip("gurobipy")
    found = solve(knapsack(), "gurobi", gap=0.0, time_limit_s=None)
    assert found.objective == pytest.approx(-4.0)
    assert found.bound == pytest.approx(-4.0)
