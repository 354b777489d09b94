from __future__ import annotations

import math
import sys

import pytest

from llmpq.assigner.milp.solvers import MixedProgram, solve
from llmpq.errors import SpecError


def knapsack(*, capacity: float = 7.0, constant: float = 5.0) -> MixedProgram:
    program = MixedProgram()
    weights, gains = (3, 4, 2), (4.0, 5.0, 3.0)
    items = [program.variable(0, 1, is_whole=True) for _ in range(3)]
    program.minimise(((item, -gain) for item, gain in zip(items, gains, strict=True)), constant)
    program.constrain(zip(items, weights, strict=True), "<=", capacity)
    return program


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_solvers_agree_and_include_the_constant(solver: str) -> None:
    found = solve(knapsack(), solver, gap=0.0, time_limit_s=None)
    assert found.status == "optimal"
    assert found.objective == pytest.approx(5.0 - 9.0)
    assert found.bound == pytest.approx(5.0 - 9.0)
    assert [round(value) for value in found.values] == [1, 1, 0]


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_solvers_prove_infeasibility(solver: str) -> None:
    found = solve(knapsack(capacity=-1.0), solver, gap=0.0, time_limit_s=None)
    assert found.status == "infeasible"
    assert not found.values
    assert found.objective == math.inf


def test_terms_of_one_variable_are_added() -> None:
    program = MixedProgram()
    one = program.variable(0, 10)
    program.minimise([(one, 2.0), (one, 1.0)])
    program.constrain([(one, 1.0), (one, 1.0)], ">=", 6.0)
    found = solve(program, "highs", gap=0.0, time_limit_s=None)
    assert found.objective == pytest.approx(9.0)


def test_a_row_without_terms_contradicts() -> None:
    program = MixedProgram()
    program.constrain([(program.variable(0, is_whole=True), 0.0)], ">=", 1.0)
    assert solve(program, "highs", gap=0.0, time_limit_s=None).status == "infeasible"


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
