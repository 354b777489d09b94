"""Least additive cost, compared with brute force, and its properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.assigner.heuristics.additive import AdditiveProblem, least_cost

seeds = st.integers(min_value=0, max_value=10**6)


def random_additive(seed: int, *, most: tuple[int, int, int] = (3, 4, 3)) -> AdditiveProblem:
    rng = np.random.default_rng(seed)
    shape = tuple(int(rng.integers(1, top + 1)) for top in most)
    costs = rng.random(shape) * (rng.random(shape) < 0.9)
    if rng.random() < 0.3:
        costs[:] = costs[:1]
    return AdditiveProblem(
        costs=costs,
        sizes=rng.integers(1, 9, shape),
        capacities=rng.integers(-2, 18, shape[0]),
    )


def cost_of(problem: AdditiveProblem, positions, widths) -> float:
    """Cost of a placement, infinite when it does not fit."""
    layers = range(len(widths))
    held = np.zeros(len(problem.capacities))
    for layer in layers:
        held[positions[layer]] += problem.sizes[positions[layer], layer, widths[layer]]
    if problem.capacities[0] < 0 or (held > np.maximum(0, problem.capacities)).any():
        return np.inf
    return sum(problem.costs[positions[layer], layer, widths[layer]] for layer in layers)


def best_cost(problem: AdditiveProblem) -> float:
    positions, layers, widths = problem.costs.shape
    return min(
        cost_of(problem, where, choice)
        for where in combinations_with_replacement(range(positions), layers)
        for choice in product(range(widths), repeat=layers)
    )


@settings(max_examples=250, deadline=None)
@given(seeds)
def test_least_cost_equals_brute_force(seed: int) -> None:
    problem = random_additive(seed)
    best, found = best_cost(problem), least_cost(problem)
    if found is None:
        assert best == np.inf
        return
    assert list(found.positions) == sorted(found.positions)
    assert cost_of(problem, found.positions, found.widths) == pytest.approx(best, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(min_value=1, max_value=6))
def test_more_memory_never_costs_more(seed: int, extra: int) -> None:
    problem = random_additive(seed, most=(4, 12, 4))
    roomier = replace(problem, capacities=problem.capacities + extra)
    small, large = least_cost(problem), least_cost(roomier)
    if small is not None:
        assert large is not None
        cost = cost_of(problem, small.positions, small.widths)
        assert cost_of(roomier, large.positions, large.widths) <= cost + 1e-9


def test_a_master_without_room_for_itself_leaves_no_placement() -> None:
    problem = AdditiveProblem(
        costs=np.ones((2, 1, 1)),
        sizes=np.ones((2, 1, 1), dtype=np.int64),
        capacities=np.array([-1, 5]),
    )
    assert least_cost(problem) is None
    held = least_cost(replace(problem, capacities=np.array([0, 5])))
    assert held is not None
    assert held.positions == (1,)


def test_a_knapsack_that_a_greedy_choice_gets_wrong() -> None:
    # By cost per byte the first layer comes first, but the two others together save more.
    problem = AdditiveProblem(
        costs=np.array([[[0.0, 10.0], [0.0, 6.0], [0.0, 6.0]]]),
        sizes=np.array([[[6, 1], [5, 1], [5, 1]]]),
        capacities=np.array([11]),
    )
    found = least_cost(problem)
    assert found is not None
    assert found.widths == (1, 0, 0)
