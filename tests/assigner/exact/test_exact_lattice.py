"""The order lattice: its paths are exactly the device orders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from exact_cases import Shape, random_space

from llmpq.assigner.enumeration import device_orders
from llmpq.assigner.exact import lattice
from llmpq.assigner.exact.native import NotCoveredError
from llmpq.assigner.exact.search import solve_exact
from llmpq.assigner.objective import SearchSpace


def space_of(counts: tuple[int, ...], *, equal: bool = False) -> SearchSpace:
    rng = np.random.default_rng(0)
    return random_space(rng, Shape(counts=counts, layers=4, equal_links=equal))


def paths(built: lattice.OrderLattice) -> list[tuple[int, ...]]:
    """Every way through the graph, as groups of the used devices."""
    graph, found = built.graph, []

    def walk(node: int, used: tuple[int, ...]) -> None:
        if used:
            found.append(used)
        for edge in range(graph.edge_start[node], graph.edge_start[node + 1]):
            target = graph.edge_target[edge]
            assert target > node
            walk(target, (*used, built.node_group[target]))

    walk(0, ())
    return found


def sub_orders(orders: tuple[tuple[int, ...], ...]) -> set[tuple[int, ...]]:
    """Every order with any devices but the first left out."""
    found = set()
    for order in orders:
        for mask in range(2 ** (len(order) - 1)):
            rest = [group for k, group in enumerate(order[1:]) if mask >> k & 1]
            found.add((order[0], *rest))
    return found


@pytest.mark.parametrize("counts", [(1,), (3,), (2, 1), (2, 2), (1, 2, 1)])
@pytest.mark.parametrize("mode", ["types", "all"])
@pytest.mark.parametrize("equal", [False, True])
def test_paths_are_the_orders_with_any_devices_dropped(
    counts: tuple[int, ...], mode: str, equal: bool
) -> None:
    found = paths(lattice.build_lattice(space_of(counts, equal=equal), mode))
    assert len(found) == len(set(found))
    assert set(found) == sub_orders(device_orders(counts, mode))


def test_paths_of_a_fixed_order_start_at_its_first_device() -> None:
    order = (0, 1, 0)
    found = paths(lattice.build_lattice(space_of((2, 1)), order))
    assert set(found) == {(0,), (0, 1), (0, 0), (0, 1, 0)}


def test_interchangeable_groups_are_entered_in_one_order_only() -> None:
    space = space_of((1, 1), equal=True)
    equal_pairs = []
    for pair in space.pairs:
        names = (
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
        equal_pairs.append(replace(pair, **{name: getattr(pair, name)[[0, 0]] for name in names}))
    found = paths(lattice.build_lattice(replace(space, pairs=tuple(equal_pairs)), "types"))
    assert set(found) == {(0,), (0, 1)}


@pytest.mark.parametrize("mode", ["types", "all"])
def test_no_path_uses_more_multipliers_than_exist(mode: str) -> None:
    space = space_of((2, 1, 1))
    built = lattice.build_lattice(space, mode)
    graph, size = built.graph, space.num_groups
    for node in range(1, graph.nodes):
        left = [graph.remaining[node * 2 * size + j] for j in range(2 * size)]
        for edge in range(graph.edge_start[node], graph.edge_start[node + 1]):
            target = graph.edge_target[edge]
            group = built.node_group[target]
            after = [graph.remaining[target * 2 * size + j] for j in range(2 * size)]
            assert after[group] <= left[group] - 1
            crossing = group != built.node_group[node]
            assert after[size + group] <= left[size + group] - crossing
            assert all(one >= other for one, other in zip(left, after, strict=True))


def test_too_many_orders_are_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lattice, "MAX_CELLS", 50)
    with pytest.raises(NotCoveredError, match="found more than 10 states"):
        solve_exact(space_of((3, 3, 3)), orders="all")
