"""Every point of a grid: the oracle of ``schedules.monotone.branch_and_bound``."""

from __future__ import annotations

from itertools import product

from llmpq.assigner.schedules.monotone import Evaluate, GridOptimum, Point


def exhaustive(evaluate: Evaluate, shape: tuple[int, int], latency_bound_s: float) -> GridOptimum:
    """Return the best of all points that meet the bound."""
    best: Point | None = None
    values = {point: evaluate(point) for point in product(range(shape[0]), range(shape[1]))}
    for point, value in values.items():
        if value.meets(latency_bound_s) and (
            best is None or value.throughput > values[best].throughput
        ):
            best = point
    return GridOptimum(
        point=best,
        value=None if best is None else values[best],
        evaluated=len(values),
        space=len(values),
    )
