from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.brute_force import brute_force
from helpers.builders import pair_costs, random_problem

from llmpq.assigner.milp import ilp
from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp
from llmpq.assigner.objective import AssignmentProblem
from llmpq.errors import SolverError


def assert_equals_brute_force(problem: AssignmentProblem, solver: str) -> None:
    oracle = brute_force(problem)
    found = solve_ilp(problem, IlpOptions(solver=solver))
    if oracle is None:
        assert found.status == "infeasible"
        assert found.evaluation is None
        return
    assert found.status == "optimal"
    assert found.evaluation.objective_s == pytest.approx(oracle[1].objective_s, rel=1e-7)
    assert found.bound_s == pytest.approx(oracle[1].objective_s, rel=1e-6)


@pytest.mark.parametrize("block", range(15))
def test_highs_equals_brute_force(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        assert_equals_brute_force(random_problem(seed), "highs")


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_highs_equals_brute_force_on_many(block: int) -> None:
    for seed in range(1000 + 40 * block, 1040 + 40 * block):
        assert_equals_brute_force(random_problem(seed), "highs")


@pytest.mark.solver
def test_gurobi_equals_brute_force() -> None:
    pytest.importorskip("gurobipy")
    for seed in range(20):
        assert_equals_brute_force(random_problem(seed), "gurobi")


@pytest.mark.slow
def test_highs_equals_brute_force_on_longer_pipelines() -> None:
    for seed in range(40):
        problem = random_problem(seed, max_layers=5, max_positions=5)
        assert_equals_brute_force(problem, "highs")


def test_solve_ilp_leaves_a_slow_device_out() -> None:
    costs = pair_costs(
        prefill_s=[[[1.0]], [[50.0]]],
        decode_s=[[[0.1]], [[5.0]]],
        layer_bytes=[[[1]], [[1]]],
        capacity_bytes=[4, 4],
        send_s=(0.5, 0.5),
        return_s=(0.5, 0.5),
    )
    problem = AssignmentProblem(
        costs=costs,
        kinds=np.zeros(3, dtype=np.int64),
        bits=(16,),
        omega=np.zeros((3, 1)),
        theta_s=0.0,
        quality_budget=None,
        formula="steady",
        order=(0, 1),
    )
    found = solve_ilp(problem, IlpOptions())
    assert found.assignment.positions == (0, 0, 0)
    assert found.evaluation.latency_s == pytest.approx(3 * 1.0 + 3 * 0.1)


def test_solve_ilp_finds_nothing_below_the_cutoff() -> None:
    problem = random_problem(2)
    best = brute_force(problem)[1].objective_s
    assert solve_ilp(problem, IlpOptions(cutoff_s=0.999 * best)).status == "infeasible"
    assert solve_ilp(problem, IlpOptions(cutoff_s=1.001 * best)).evaluation is not None


def test_solve_ilp_does_not_depend_on_the_unit_of_time() -> None:
    for seed in range(12):
        problem = random_problem(seed, formula="steady")
        tiny = replace(
            problem,
            costs=replace(
                problem.costs,
                **{
                    name: 1e-6 * getattr(problem.costs, name)
                    for name in type(problem.costs).__dataclass_fields__
                    if name.endswith("_s")
                },
            ),
            theta_s=1e-6 * problem.theta_s,
        )
        oracle, found = brute_force(tiny), solve_ilp(tiny, IlpOptions())
        if oracle is not None:
            assert found.evaluation.objective_s == pytest.approx(oracle[1].objective_s, rel=1e-7)


def test_a_solver_that_misstates_its_value_is_an_error(monkeypatch) -> None:
    honest = ilp.solve

    def lying(*args, **options):
        found = honest(*args, **options)
        return replace(found, objective=0.9 * found.objective, bound=0.9 * found.bound)

    monkeypatch.setattr(ilp, "solve", lying)
    with pytest.raises(SolverError, match="its answer costs"):
        solve_ilp(random_problem(2), IlpOptions())


def test_time_limit_keeps_the_incumbent_and_a_valid_bound() -> None:
    rng = np.random.default_rng(0)
    layers, bits = 40, (16, 8, 4, 3)
    costs = pair_costs(
        prefill_s=rng.random((6, 1, 4)),
        decode_s=rng.random((6, 1, 4)),
        layer_bytes=np.tile([16, 8, 4, 3], (6, 1, 1)),
        capacity_bytes=rng.integers(40, 90, size=6),
        prefill_batches=4,
        decode_batches=4,
        new_tokens=20,
    )
    problem = AssignmentProblem(
        costs=costs,
        kinds=np.zeros(layers, dtype=np.int64),
        bits=bits,
        omega=rng.random((layers, 4)),
        theta_s=100.0,
        quality_budget=None,
        formula="steady",
        order=(0, 1, 2, 3, 4, 5),
    )
    found = solve_ilp(problem, IlpOptions(time_limit_s=1.5))
    assert found.status in ("feasible", "unknown", "optimal")
    if found.evaluation is not None:
        assert found.bound_s <= found.evaluation.objective_s
