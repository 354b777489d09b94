from __future__ import annotations

import numpy as np
import pytest
from helpers.builders import plan_request, random_problem

from llmpq.assigner.bruteforce import brute_force
from llmpq.assigner.milp.bounds import BoundInputs, lower_bounds
from llmpq.assigner.task import build_task


def bounds_of(problem) -> np.ndarray:
    groups = problem.costs.prefill_s.shape[0]
    counts = np.array([max(1, problem.order.count(group)) for group in range(groups)])
    inputs = BoundInputs(
        counts=counts,
        kinds=problem.kinds,
        prices=problem.theta_s * problem.omega,
        omega=problem.omega,
        quality_budget=problem.quality_budget,
        formula=problem.formula,
    )
    return lower_bounds(inputs, [problem.costs])[0]


@pytest.mark.parametrize("block", range(4))
def test_no_plan_beats_the_bound_of_its_first_group(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        problem = random_problem(seed)
        oracle = brute_force(problem)
        if oracle is not None:
            bound_s = bounds_of(problem)[problem.order[0]]
            assert bound_s <= oracle[1].objective_s * (1 + 1e-9)


def test_bound_is_infinite_where_the_master_does_not_fit() -> None:
    problem = random_problem(5, order=(0,))
    problem.costs.master_bytes[0] = problem.costs.total_bytes[0] + 1
    assert bounds_of(problem)[0] == np.inf


def test_bound_is_close_on_one_device() -> None:
    request = plan_request(theta_s=1.0)
    task = build_task(request)
    again = task.bounds(1.0)
    assert again.shape == (len(task.pairs), 2)
    assert (again == task.bounds(1.0)).all()  # deterministic
    assert np.isfinite(again).all()
