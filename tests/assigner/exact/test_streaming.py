"""Plans with weights on disk: the search and the integer programs against trying everything."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from exact_cases import Shape, best_value, random_space, with_disks
from hypothesis import given
from hypothesis import strategies as st

from llmpq.assigner.enumeration import device_orders, lower_bounds
from llmpq.assigner.exact.search import solve_exact
from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp
from llmpq.assigner.objective import SearchSpace, least_streamed
from llmpq.errors import InfeasibleError
from llmpq.spec.runtime_constants import STREAM_BUFFERS

BLOCK = 20


def random_shape(rng: np.random.Generator) -> Shape:
    counts = [(1,), (2,), (1, 1), (1,), (2,), (1, 1), (1, 1, 1)]
    chosen = counts[rng.integers(len(counts))]
    return Shape(
        counts=chosen,
        layers=int(rng.integers(4, 9 - sum(chosen))),
        widths=2,
        kinds=int(rng.integers(1, 3)),
        pairs=int(rng.integers(1, 3)),
        formula=["steady", "paper"][rng.integers(2)],
        memory=float(rng.choice([0.6, 0.7, 0.8, 0.9, 1.0])),
        link=float(rng.choice([0, 0.3, 3])),
        theta=float(rng.choice([0, 0.1, 1, 10])),
        budget=[None, None, 0.3, 0.1][rng.integers(4)],
    )


def exact(space: SearchSpace, orders: str):
    try:
        return solve_exact(space, orders=orders)
    except InfeasibleError:
        return None


def value(space: SearchSpace, orders: str) -> float:
    found = exact(space, orders)
    if found is None:
        return math.inf
    assert found.gap <= 1e-6
    return found.value_s


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=[] if b < 3 else pytest.mark.slow) for b in range(15)],
)
def test_exact_search_equals_trying_everything(block: int) -> None:
    rng = np.random.default_rng(7000 + block)
    streamed = 0
    for _ in range(BLOCK):
        shape = random_shape(rng)
        resident = random_space(rng, shape)
        space = with_disks(rng, resident)
        want = best_value(space, "types")
        found = exact(space, "types")
        if found is None:
            assert math.isinf(want), shape
            continue
        assert found.gap <= 1e-6
        assert found.value_s == pytest.approx(want, rel=1e-9), shape
        assert found.value_s <= value(resident, "types") * (1 + 1e-9)
        streamed += any(stage.streamed for stage in found.evaluation.stages)
        bounds = lower_bounds(space)
        assert bounds.min() <= want * (1 + 1e-9)
    assert streamed >= BLOCK // 10


@pytest.mark.parametrize("block", range(3))
def test_programs_equal_trying_everything(block: int) -> None:
    rng = np.random.default_rng(8000 + block)
    for _ in range(BLOCK // 2):
        shape = replace(random_shape(rng), pairs=1, layers=int(rng.integers(4, 6)))
        space = with_disks(rng, random_space(rng, shape))
        (pair,) = space.pairs
        found = [
            solve_ilp(space.problem(pair, order), IlpOptions(solver="highs")).evaluation
            for order in device_orders(space.group_counts, "types")
        ]
        values = [one.objective_s for one in found if one is not None]
        assert min(values, default=math.inf) == pytest.approx(best_value(space, "types"), rel=1e-6)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.integers(1, 300),
)
def test_the_fewest_bytes_are_streamed(sizes, counts, excess):
    sizes = sorted(sizes, reverse=True)
    counts = counts[: len(sizes)]
    fitting = [
        sum(size * number for size, number in zip(sizes, taken, strict=True))
        for taken in itertools.product(*(range(count + 1) for count in counts))
        if sum(size * number for size, number in zip(sizes, taken, strict=True))
        >= excess
        + STREAM_BUFFERS
        * max((s for s, number in zip(sizes, taken, strict=True) if number), default=0)
    ]
    found = least_streamed(sizes, counts, excess)
    assert (found is None) == (not fitting)
    if found is not None:
        assert all(number <= count for number, count in zip(found, counts, strict=True))
        assert sum(s * n for s, n in zip(sizes, found, strict=True)) == min(fitting)
