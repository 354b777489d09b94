"""Evaluation with all pairs at once equals single evaluations; the orders of the baselines."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.builders import cluster_of, plan_request
from helpers.small_clusters import TYPES, small_request

from llmpq.assigner.enumeration import device_orders, leading_orders
from llmpq.assigner.heuristics.pair_table import (
    MAX_FULL_ORDERS,
    PairTable,
    block_orders,
    file_order,
)
from llmpq.assigner.objective import Assignment, evaluate, is_feasible
from llmpq.assigner.request import build_task


def test_every_pair_has_the_objective_of_its_own_evaluation() -> None:
    feasible = 0
    for seed in range(20):
        task, rng = build_task(small_request(seed)), np.random.default_rng(seed)
        if not task.pairs:
            continue
        table, layers = PairTable(task), len(task.kinds)
        for order in block_orders(task):
            assignment = Assignment(
                tuple(np.sort(rng.integers(0, len(order), layers)).tolist()),
                tuple(rng.integers(0, len(task.request.bits), layers).tolist()),
            )
            values = table.objectives(order, assignment)
            for pair, value in zip(task.pairs, values.tolist(), strict=True):
                problem = task.problem(pair, order)
                found = evaluate(problem, assignment)
                expected = found.objective_s if is_feasible(problem, found) else np.inf
                assert value == pytest.approx(expected, rel=1e-12)
            best = table.best(order, assignment)
            assert (best.objective_s if best else np.inf) == values.min()
            feasible += int(np.isfinite(values).sum())
    assert feasible > 40


@pytest.mark.parametrize("number", [1, 3, 4])
def test_baselines_use_orders_of_the_search(number: int) -> None:
    groups = [(name, 1 + index % 2, 500) for index, name in enumerate(TYPES[:number])]
    task = build_task(plan_request(cluster=cluster_of(*groups)))
    types = device_orders(task.group_counts.tolist(), "types")
    leading = leading_orders(task.group_counts.tolist())
    assert block_orders(task) == types
    assert set(leading) <= set(types)
    assert [order[0] for order in leading] == list(range(number))
    assert file_order(task) == tuple(device.group for device in task.request.cluster.devices)
    assert file_order(task) == leading[0]


def test_many_types_lead_once_each() -> None:
    groups = [(name, 1, 500) for name in (*TYPES, "L4")]
    task = build_task(plan_request(cluster=cluster_of(*groups)))
    assert len(device_orders(task.group_counts.tolist(), "types")) > MAX_FULL_ORDERS
    assert block_orders(task) == leading_orders(task.group_counts.tolist())
