"""The exact search compared with brute force, on random problems of a few layers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from exact_cases import Shape, best_value, random_space
from helpers.brute_force import brute_force

from llmpq.assigner.constraints.resolve import Limits
from llmpq.assigner.enumeration import device_orders
from llmpq.assigner.exact import search
from llmpq.assigner.exact.search import solve_exact
from llmpq.assigner.objective import SearchSpace
from llmpq.errors import InfeasibleError

BLOCK = 25


def exact_value(space: SearchSpace, orders: str) -> float:
    try:
        result = solve_exact(space, orders=orders)
    except InfeasibleError:
        return math.inf
    assert result.gap <= 1e-6
    assert result.bound_s <= result.value_s
    return result.value_s


def random_shape(rng: np.random.Generator) -> Shape:
    counts = [(1,), (2,), (3,), (1, 1), (2, 1), (2, 2), (1, 1, 1), (2, 1, 1)]
    return Shape(
        counts=counts[rng.integers(len(counts))],
        layers=int(rng.integers(2, 6)),
        widths=int(rng.integers(2, 4)),
        kinds=int(rng.integers(1, 3)),
        formula=["steady", "paper"][rng.integers(2)],
        memory=float(rng.choice([0.3, 0.5, 0.8, 1.5, 3.0])),
        link=float(rng.choice([0, 0.3, 3])),
        theta=float(rng.choice([0, 0.1, 1, 10])),
        budget=[None, None, 0.3, 0.1][rng.integers(4)],
        equal_links=bool(rng.integers(2)),
    )


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=[] if b < 4 else pytest.mark.slow) for b in range(24)],
)
def test_exact_search_equals_trying_everything(block: int) -> None:
    rng = np.random.default_rng(1000 + block)
    feasible = 0
    for _ in range(BLOCK):
        shape = random_shape(rng)
        space = random_space(rng, shape)
        orders = ["types", "all"][rng.integers(2)]
        want = best_value(space, orders)
        assert exact_value(space, orders) == pytest.approx(want, rel=1e-9), shape
        feasible += math.isfinite(want)
    assert feasible >= BLOCK // 4


@pytest.mark.parametrize("seed", range(8))
def test_splitting_by_the_largest_prefill_time_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(search, "PASS_LABELS", 4)
    rng = np.random.default_rng(9000 + seed)
    for _ in range(BLOCK // 5):
        shape = replace(random_shape(rng), layers=6, counts=(2, 2), memory=1.5, widths=2)
        space = random_space(rng, shape)
        want = best_value(space, "types")
        assert exact_value(space, "types") == pytest.approx(want, rel=1e-9), shape


def random_limits(rng: np.random.Generator, space: SearchSpace) -> Limits:
    layers, groups, widths = space.num_layers, space.num_groups, len(space.bits)
    layer_widths = np.ones((layers, widths), dtype=bool)
    group_widths = np.ones((groups, widths), dtype=bool)
    ranges: tuple[tuple[int, int, int], ...] = ()
    if rng.integers(2):
        first = int(rng.integers(layers))
        layer_widths[first : first + 2] = np.arange(widths) == rng.integers(widths)
    if rng.integers(2):
        group_widths[rng.integers(groups)] = np.arange(widths) == rng.integers(widths)
    single = [group for group, count in enumerate(space.group_counts) if count == 1]
    if single and rng.integers(2):
        first = int(rng.integers(layers))
        ranges = ((single[0], first, int(rng.integers(first + 1, layers + 1))),)
    used = (single[-1],) if single and rng.integers(2) else ()
    return Limits(layer_widths=layer_widths, group_widths=group_widths, ranges=ranges, used=used)


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=[] if b < 3 else pytest.mark.slow) for b in range(10)],
)
def test_exact_search_keeps_manual_decisions(block: int) -> None:
    rng = np.random.default_rng(5000 + block)
    feasible = 0
    for _ in range(BLOCK):
        shape = replace(random_shape(rng), memory=float(rng.choice([0.8, 3.0])), budget=None)
        space = random_space(rng, shape)
        space = replace(space, limits=random_limits(rng, space))
        orders = ["types", "all"][rng.integers(2)]
        want = best_value(space, orders)
        assert exact_value(space, orders) == pytest.approx(want, rel=1e-9), (shape, space.limits)
        feasible += math.isfinite(want)
    assert feasible >= BLOCK // 4


def test_exact_search_equals_the_brute_force_of_the_package() -> None:
    rng = np.random.default_rng(7)
    space = random_space(rng, Shape(counts=(1, 1), layers=3, widths=2, pairs=1, memory=1.5))
    found = [
        brute_force(space.problem(space.pairs[0], order))
        for order in device_orders(space.group_counts, "types")
    ]
    want = min(item[1].objective_s for item in found if item is not None)
    assert exact_value(space, "types") == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("formula", ["steady", "paper"])
def test_exact_search_drops_a_device_that_only_slows(formula: str) -> None:
    rng = np.random.default_rng(3)
    shape = Shape(counts=(1, 1), layers=4, memory=4.0, link=0.0, formula=formula)
    space = random_space(rng, shape)
    for pair in space.pairs:
        pair.prefill_s[1] *= 1000
        pair.decode_s[1] *= 1000
        pair.master_prefill_s[1] *= 1000
        pair.master_decode_s[1] *= 1000
    result = solve_exact(space, orders="types")
    assert result.problem.order == (0,)
    assert result.value_s == pytest.approx(best_value(space, "types"), rel=1e-9)


def test_exact_search_lets_the_master_hold_no_layer() -> None:
    rng = np.random.default_rng(11)
    space = random_space(rng, Shape(counts=(1, 1), layers=3, memory=3.0, link=0.0, pairs=1))
    pair = space.pairs[0]
    pair.prefill_s[0] *= 1000
    pair.decode_s[0] *= 1000
    pair.master_bytes[1] += 10**9  # only group 0 can be the master
    result = solve_exact(space, orders="types")
    assert result.problem.order == (0, 1)
    assert result.assignment.positions == (1, 1, 1)
    assert result.value_s == pytest.approx(best_value(space, "types"), rel=1e-9)
