"""The exact search compared with the integer program, on problems too large for brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from exact_cases import Shape, random_space

from llmpq.assigner.constraints.resolve import Limits
from llmpq.assigner.exact.search import solve_exact
from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp
from llmpq.assigner.objective import SearchSpace
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


def random_limits(rng: np.random.Generator, space: SearchSpace, order: tuple[int, ...]) -> Limits:
    layer_widths = np.ones(space.omega.shape, dtype=bool)
    layer_widths[int(rng.integers(space.num_layers)), 0] = False
    single = [group for group in order if order.count(group) == 1]
    return Limits(
        layer_widths=layer_widths,
        group_widths=np.ones((space.num_groups, len(space.bits)), dtype=bool),
        used=tuple(single[-1:]),
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s < 5 else pytest.mark.slow) for s in range(60)]
)
def test_exact_search_of_one_order_equals_the_integer_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    space = random_space(rng, middle_shape(rng))
    groups = [group for group, count in enumerate(space.group_counts) for _ in range(count)]
    order = tuple(rng.permutation(groups).tolist())
    if rng.integers(2):
        space = replace(space, limits=random_limits(rng, space, order))
    program = solve_ilp(space.problem(space.pairs[0], order), IlpOptions(gap=0.0))
    want = math.inf if program.evaluation is None else program.evaluation.objective_s
    try:
        got = solve_exact(space, orders=order).value_s
    except InfeasibleError:
        got = math.inf
    assert got == pytest.approx(want, rel=2e-6)
