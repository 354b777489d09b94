"""The exact search against the integer program, on problems too large to try everything."""

from __future__ import annotations

import math

import numpy as np
import pytest
from exact_cases import Shape, random_space

from llmpq.assigner.exact import solve_exact
from llmpq.assigner.ilp import IlpOptions, solve_ilp
from llmpq.errors import InfeasibleError


def middle_shape(rng: np.random.Generator) -> Shape:
    return Shape(
        counts=[(3,), (2, 1), (2, 2), (1, 1, 1)][rng.integers(4)],
        layers=int(rng.integers(7, 12)),
        widths=int(rng.integers(2, 5)),
        kinds=int(rng.integers(1, 3)),
        pairs=1,
        formula=["steady", "paper"][rng.integers(2)],
        memory=float(rng.choice([0.5, 0.8, 1.5])),
        link=float(rng.choice([0.3, 3])),
        theta=float(rng.choice([0.1, 1, 10])),
        budget=[None, 0.3][rng.integers(2)],
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s < 5 else pytest.mark.slow) for s in range(60)]
)
def test_exact_search_of_one_order_equals_the_integer_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    space = random_space(rng, middle_shape(rng))
    groups = [group for group, count in enumerate(space.group_counts) for _ in range(count)]
    order = tuple(rng.permutation(groups).tolist())
    program = solve_ilp(space.problem(space.pairs[0], order), IlpOptions(gap=0.0))
    want = math.inf if program.price is None else program.price.objective_s
    try:
        got = solve_exact(space, orders=order).value_s
    except InfeasibleError:
        got = math.inf
    assert got == pytest.approx(want, rel=2e-6)
