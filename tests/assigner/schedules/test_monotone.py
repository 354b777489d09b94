"""Branch and bound compared with an exhaustive search."""

from __future__ import annotations

import math
import random

import pytest
from helpers.brute_force import exhaustive
from hypothesis import given
from hypothesis import strategies as st

from llmpq.assigner.schedules.monotone import Value, branch_and_bound
from llmpq.errors import SpecError
from reproduce.exegpt_paper import non_monotone_shares


def _rising(seed: int, shape: tuple[int, int], noise: float = 0.0):
    """Random functions that rise with either index, disturbed by ``noise``."""
    chance = random.Random(seed)
    values = {}
    for i in range(shape[0]):
        for j in range(shape[1]):
            low = [values[p] for p in ((i - 1, j), (i, j - 1)) if p in values]
            throughput = max((v.throughput for v in low), default=0.0) + chance.random()
            latency = max((v.latency_s for v in low), default=0.0) + chance.random()
            values[i, j] = Value(throughput, latency)
    jitter = {point: 1 + noise * (2 * chance.random() - 1) for point in values}
    return lambda point: Value(
        values[point].throughput * jitter[point], values[point].latency_s * jitter[point]
    )


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    bound=st.floats(0.05, 30),
)
def test_monotone_spaces_are_solved_exactly(seed, shape, bound):
    evaluate = _rising(seed, shape)
    found, best = branch_and_bound(evaluate, shape, bound), exhaustive(evaluate, shape, bound)
    assert (found.point is None) == (best.point is None)
    if best.value is not None:
        assert found.value.throughput == pytest.approx(best.value.throughput)
        assert found.value.latency_s <= bound


@given(seed=st.integers(0, 10**6), bound=st.floats(1, 20))
def test_tolerances_handle_slightly_non_monotone_spaces(seed, bound):
    evaluate = _rising(seed, (10, 10), noise=0.02)
    found = branch_and_bound(
        evaluate, (10, 10), bound, throughput_tolerance=0.05, latency_tolerance=0.05
    )
    best = exhaustive(evaluate, (10, 10), bound)
    if best.value is not None:
        assert found.value.throughput >= 0.99 * best.value.throughput


def test_a_small_part_of_the_space_is_evaluated():
    def evaluate(point):
        return Value(math.log1p(point[0]) + math.log1p(point[1]), point[0] + 2 * point[1])

    found = branch_and_bound(evaluate, (300, 300), 200)
    assert found.value == exhaustive(evaluate, (300, 300), 200).value
    assert found.evaluated < 0.05 * found.space


def test_no_point_meets_an_impossible_bound():
    found = branch_and_bound(_rising(1, (5, 5)), (5, 5), 0.0)
    assert found.point is None
    with pytest.raises(SpecError):
        branch_and_bound(_rising(1, (1, 1)), (0, 3), 1.0)


def test_steps_that_fall_are_counted():
    rising = non_monotone_shares(_rising(3, (8, 8)), (8, 8), 0.0)
    assert rising == ((0, 0), (0, 0))
    falling = non_monotone_shares(lambda point: Value(-point[0] + 100, point[1]), (4, 4), 0.0)
    assert falling == ((0, 1), (0, 0))
    assert non_monotone_shares(lambda point: Value(100 - point[0], 1), (4, 4), 0.5)[0][1] == 0
