from __future__ import annotations

import numpy as np
import pytest
from helpers.brute_force import brute_force
from helpers.builders import plan_request, random_problem

from llmpq.assigner.enumeration import lower_bounds
from llmpq.assigner.objective import SearchSpace
from llmpq.assigner.request import build_task


def bounds_of(problem) -> np.ndarray:
    groups = problem.costs.prefill_s.shape[0]
    space = SearchSpace(
        pairs=(problem.costs,),
        group_counts=tuple(max(1, problem.order.count(group)) for group in range(groups)),
        kinds=problem.kinds,
        bits=problem.bits,
        omega=problem.omega,
        theta_s=problem.theta_s,
        quality_budget=problem.quality_budget,
        formula=problem.formula,
    )
    return lower_bounds(space)[0]


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
