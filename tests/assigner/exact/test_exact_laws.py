"""Properties of any optimum: more resources never worsen it, and names do not matter."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from exact_cases import Shape, random_space

from llmpq.assigner.exact.search import solve_exact
from llmpq.assigner.objective import SearchSpace
from llmpq.errors import InfeasibleError

SHAPES = (
    Shape(counts=(2, 2), layers=8, memory=0.6),
    Shape(counts=(2, 1, 1), layers=7, memory=0.8, kinds=2, formula="paper"),
    Shape(counts=(1, 3), layers=9, memory=1.2, link=3.0, theta=0.1),
    Shape(counts=(2, 2), layers=7, memory=0.6, budget=0.3),
)


def value(space: SearchSpace, orders: str = "types") -> float:
    try:
        return solve_exact(space, orders=orders).value_s
    except InfeasibleError:
        return math.inf


def changed(space: SearchSpace, **factors: float) -> SearchSpace:
    pairs = []
    for pair in space.pairs:
        scaled = {}
        for name, factor in factors.items():
            array = getattr(pair, name)
            scaled[name] = (array * factor).astype(array.dtype)
        pairs.append(replace(pair, **scaled))
    return replace(space, pairs=tuple(pairs))


@pytest.fixture(params=range(8))
def space(request: pytest.FixtureRequest) -> SearchSpace:
    rng = np.random.default_rng(request.param)
    return random_space(rng, SHAPES[request.param % len(SHAPES)])


def no_worse(better: float, base: float) -> bool:
    return better <= base * (1 + 1e-9)


def test_more_memory_never_worsens_the_optimum(space: SearchSpace) -> None:
    assert no_worse(value(changed(space, total_bytes=1.3)), value(space))


def test_faster_links_never_worsen_the_optimum(space: SearchSpace) -> None:
    links = ("send_prefill_s", "send_decode_s", "return_prefill_s", "return_decode_s")
    assert no_worse(value(changed(space, **dict.fromkeys(links, 0.5))), value(space))


def test_a_faster_device_never_worsens_the_optimum(space: SearchSpace) -> None:
    faster = []
    for pair in space.pairs:
        prefill, decode = pair.prefill_s.copy(), pair.decode_s.copy()
        prefill[0] *= 0.6
        decode[0] *= 0.6
        faster.append(replace(pair, prefill_s=prefill, decode_s=decode))
    assert no_worse(value(replace(space, pairs=tuple(faster))), value(space))


def test_one_more_device_never_worsens_the_optimum(space: SearchSpace) -> None:
    counts = (space.group_counts[0] + 1, *space.group_counts[1:])
    assert no_worse(value(replace(space, group_counts=counts)), value(space))


def test_more_orders_never_worsen_the_optimum(space: SearchSpace) -> None:
    assert no_worse(value(space, "all"), value(space, "types"))


def test_a_lower_price_of_quality_never_raises_the_objective(space: SearchSpace) -> None:
    assert no_worse(value(replace(space, theta_s=space.theta_s / 2)), value(space))


def test_a_larger_price_never_worsens_quality(space: SearchSpace) -> None:
    def quality(theta_s: float) -> float:
        result = solve_exact(replace(space, theta_s=theta_s), orders="types")
        return result.evaluation.quality

    try:
        low = quality(space.theta_s)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):  # what fits does not depend on the price
            quality(8 * space.theta_s)
        return
    assert quality(8 * space.theta_s) <= low + 1e-9


def test_a_looser_budget_never_worsens_latency(space: SearchSpace) -> None:
    tight = replace(space, theta_s=0.0, quality_budget=0.5)
    assert no_worse(value(replace(tight, quality_budget=0.9)), value(tight))


@pytest.mark.parametrize("orders", ["types", "all"])
def test_renaming_groups_changes_nothing(space: SearchSpace, orders: str) -> None:
    renamed = list(range(space.num_groups))[::-1]
    pairs = []
    for pair in space.pairs:
        vectors = {
            name: getattr(pair, name)[renamed]
            for name in (
                *(
                    "prefill_s",
                    "decode_s",
                    "layer_bytes",
                    "host_bytes",
                    "host_capacity_bytes",
                    "stream_bytes",
                    "stream_prefill_s",
                    "stream_decode_s",
                    "total_bytes",
                    "runtime_bytes",
                ),
                *("temporary_bytes", "master_bytes", "master_prefill_s", "master_decode_s"),
            )
        }
        matrices = {
            name: getattr(pair, name)[np.ix_(renamed, renamed)]
            for name in ("send_prefill_s", "send_decode_s", "return_prefill_s", "return_decode_s")
        }
        pairs.append(replace(pair, **vectors, **matrices))
    counts = tuple(space.group_counts[group] for group in renamed)
    other = replace(space, pairs=tuple(pairs), group_counts=counts)
    assert value(other, orders) == pytest.approx(value(space, orders), rel=1e-9)


def test_splitting_a_group_into_equal_groups_changes_nothing_for_all_orders() -> None:
    rng = np.random.default_rng(2)
    space = random_space(rng, Shape(counts=(2, 1), layers=7, memory=0.8))
    rows = [0, 0, 1]
    pairs = []
    for pair in space.pairs:
        vectors = {
            name: getattr(pair, name)[rows]
            for name in (
                *(
                    "prefill_s",
                    "decode_s",
                    "layer_bytes",
                    "host_bytes",
                    "host_capacity_bytes",
                    "stream_bytes",
                    "stream_prefill_s",
                    "stream_decode_s",
                    "total_bytes",
                    "runtime_bytes",
                ),
                *("temporary_bytes", "master_bytes", "master_prefill_s", "master_decode_s"),
            )
        }
        matrices = {
            name: getattr(pair, name)[np.ix_(rows, rows)]
            for name in ("send_prefill_s", "send_decode_s", "return_prefill_s", "return_decode_s")
        }
        pairs.append(replace(pair, **vectors, **matrices))
    split = replace(space, pairs=tuple(pairs), group_counts=(1, 1, 1))
    assert value(split, "all") == pytest.approx(value(space, "all"), rel=1e-9)
