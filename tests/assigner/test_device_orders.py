"""Orders of devices: which are searched, how many there are up to symmetry, and what is claimed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from helpers.brute_force import brute_force
from helpers.builders import cluster_of, model_spec, plan_request, sensitivity
from helpers.small_clusters import optimum_s

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.enumeration import (
    MAX_COUNT,
    MAX_ORDERS,
    device_orders,
    leading_orders,
    listed_orders,
    num_orders,
)
from llmpq.assigner.exact import lattice
from llmpq.assigner.request import build_task
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import LinkSpec
from llmpq.spec.workload import Workload


def test_type_orders_keep_equal_devices_together() -> None:
    assert set(device_orders([2, 1], "types")) == {(0, 0, 1), (1, 0, 0)}
    assert len(device_orders([3, 2, 4], "types")) == 6


def test_all_orders_are_the_distinct_interleavings() -> None:
    orders = device_orders([2, 2], "all")
    assert len(orders) == len(set(orders)) == 6
    assert (0, 1, 0, 1) in orders


def test_too_many_orders_name_the_alternative() -> None:
    with pytest.raises(SpecError, match="--orders types"):
        device_orders([8, 8], "all")


def classes_of(counts: list[int], twins: list[int]) -> set[frozenset[tuple[int, ...]]]:
    """Return every order of all devices with those that differ by an exchange of twins."""
    devices = [group for group, count in enumerate(counts) for _ in range(count)]
    groups = range(len(counts))
    exchanges = [
        names
        for names in itertools.permutations(groups)
        if all(twins[names[group]] == twins[group] for group in groups)
    ]
    return {
        frozenset(tuple(names[group] for group in order) for names in exchanges)
        for order in itertools.permutations(devices)
    }


@pytest.mark.parametrize(
    ("counts", "twins"),
    [
        ([2, 1], [0, 1]),
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([1, 1, 1, 1], [0, 1, 0, 1]),
        ([2, 2], [0, 0]),
        ([2, 2, 2], [0, 1, 0]),
        ([2, 1, 2, 1], [0, 1, 0, 3]),
    ],
)
def test_one_order_of_every_symmetric_kind_is_tried(counts, twins) -> None:
    every = classes_of(counts, twins)
    found = device_orders(counts, "all", twins)
    assert len(found) == len(every) == num_orders(counts, "all", twins)
    assert all(len(kind & set(found)) == 1 for kind in every)

    def is_blocks(order: tuple[int, ...]) -> bool:
        return len(list(itertools.groupby(order))) == len(counts)

    blocks = [kind for kind in every if all(map(is_blocks, kind))]
    found = device_orders(counts, "types", twins)
    assert len(found) == len(blocks) == num_orders(counts, "types", twins)
    assert all(len(kind & set(found)) == 1 for kind in blocks)
    assert [order[0] for order in leading_orders(counts, twins)] == sorted(set(twins))


def test_counts_of_orders_fit_in_a_plan_file() -> None:
    assert num_orders([40, 40], "all") == MAX_COUNT
    assert num_orders([1] * 40, "types") == MAX_COUNT
    assert num_orders([1] * 40, "types", [0] * 40) == 1


def test_programs_try_as_many_orders_as_they_can_list() -> None:
    assert listed_orders([1, 2], "auto", range(2)) == "all"
    assert listed_orders([4, 4], "auto", range(2)) == "types"
    assert listed_orders([1] * 8, "types", range(8)) == "leading"
    assert listed_orders([1] * 8, "auto", [0] * 8) == "all"
    assert listed_orders([4, 4], "all", range(2)) == "all"
    assert num_orders([1] * 8, "types") > MAX_ORDERS


def single_nodes(number: int, **options) -> PlanRequest:
    """A request on nodes of one device each, which hold less than a third of the model."""
    values = {
        "model": model_spec(layers=6),
        "cluster": cluster_of(*[("T4-16G", 1, 90)] * number),
        "workload": Workload(batch=2, prompt_tokens=64, new_tokens=4),
        "bits": (16, 8, 4),
    }
    return plan_request(**(values | options))


def test_eighteen_equal_nodes_have_the_plan_of_four() -> None:
    four, many = (make_plan(single_nodes(n)) for n in (4, 18))
    assert many.search.status == "optimal"
    assert (many.search.orders, many.search.order_set) == (1, "all")
    assert many.estimate.objective_s == pytest.approx(four.estimate.objective_s, rel=1e-9)
    assert len(many.stages) == len(four.stages) > 1


def test_integer_programs_plan_more_equal_nodes_than_have_listed_orders() -> None:
    """Eight nodes of their own have 40,320 orders, which were refused."""
    request = single_nodes(8, solver="highs", bits=(16, 8), gap=0.01)
    plan, exact = make_plan(request), make_plan(replace(request, solver="exact", gap=0.0))
    assert (plan.search.orders, plan.search.order_set) == (1, "all")
    assert plan.estimate.objective_s <= exact.estimate.objective_s * 1.011


@pytest.mark.parametrize("solver", ["exact", "highs"])
def test_a_budget_that_eighteen_nodes_cannot_keep_is_explained(solver) -> None:
    request = single_nodes(18, solver=solver, quality_budget=0.0, cluster=cluster_of(
        *[("T4-16G", 1, 26)] * 18))  # fmt: skip
    with pytest.raises(InfeasibleError, match="memory forces a degradation of at least"):
        make_plan(request)


def test_nodes_with_other_links_are_no_twins() -> None:
    slow = LinkSpec(between=("node0", "node1"), bytes_per_s=1e7, latency_s=1e-3)
    nodes = [("T4-16G", 1, 90)] * 4
    task = build_task(single_nodes(4))
    assert task.twins == (0, 0, 0, 0)
    task = build_task(single_nodes(4, cluster=cluster_of(*nodes, links=(slow,))))
    assert task.twins == (0, 0, 2, 2)
    inner = LinkSpec(between=("node2", "node2"), bytes_per_s=1e7, latency_s=1e-3)
    pairs = [("T4-16G", 2, 90)] * 3
    task = build_task(single_nodes(3, cluster=cluster_of(*pairs, links=(inner,))))
    assert task.twins == (0, 0, 2)


def slow_pair(**options) -> PlanRequest:
    """A request on two nodes of two devices; the link inside each node is the slowest."""
    links = (
        LinkSpec(between=("node0", "node0"), bytes_per_s=3e7, latency_s=1e-4),
        LinkSpec(between=("node1", "node1"), bytes_per_s=3e7, latency_s=1e-4),
        LinkSpec(between=("node0", "node1"), bytes_per_s=1e10, latency_s=1e-5),
    )
    model = model_spec(layers=4)
    values = {
        "model": model,
        "cluster": cluster_of(("V100-32G", 2, 60), ("T4-16G", 2, 45), links=links),
        "workload": Workload(batch=2, prompt_tokens=64, new_tokens=12),
        "bits": (16, 8),
        "sensitivity": sensitivity(model),
        "theta_s": 0.05,
    }
    return plan_request(**(values | options))


def test_devices_with_a_slow_link_between_them_are_set_apart_by_default() -> None:
    blocks, plan = make_plan(slow_pair(orders="types")), make_plan(slow_pair())
    assert plan.estimate.objective_s == pytest.approx(optimum_s(build_task(slow_pair())), rel=1e-9)
    assert plan.estimate.objective_s < 0.9 * blocks.estimate.objective_s
    assert (plan.search.orders, plan.search.order_set) == (6, "all")
    assert (blocks.search.orders, blocks.search.order_set) == (2, "types")
    oracle_s = optimum_s(build_task(slow_pair(orders="types")))
    assert blocks.estimate.objective_s == pytest.approx(oracle_s, rel=1e-9)


def test_where_all_orders_are_too_many_groups_stay_together_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lattice, "QUICK_CELLS", 20)
    plan, blocks = make_plan(slow_pair()), make_plan(slow_pair(orders="types"))
    assert plan.search.order_set == "types"
    assert plan.estimate.objective_s == blocks.estimate.objective_s


def test_where_groups_are_too_many_each_leads_once_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [("T4-16G", 1, 60 + 5 * index) for index in range(4)]
    request = single_nodes(4, cluster=cluster_of(*sizes), bits=(16, 8))
    monkeypatch.setattr(lattice, "MAX_CELLS", 200)
    plan = make_plan(request)
    assert (plan.search.orders, plan.search.order_set) == (4, "leading")
    task = build_task(request)
    found = [
        brute_force(task.problem(pair, order))
        for pair in task.pairs
        for order in leading_orders(task.group_counts.tolist())
    ]
    best_s = min(item[1].objective_s for item in found if item is not None)
    assert plan.estimate.objective_s == pytest.approx(best_s, rel=1e-9)


def test_a_given_order_is_the_only_one() -> None:
    overrides = replace(slow_pair().overrides, order=("node0/V100-32G#0", "node1/T4-16G#1"))
    plan = make_plan(slow_pair(overrides=overrides, bits=(8, 4)))
    assert (plan.search.orders, plan.search.order_set) == (1, "given")
