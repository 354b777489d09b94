"""Every assignment of a tiny problem, every point of a grid: the oracles of the planner's tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product

from llmpq.assigner.constraints.resolve import obeys
from llmpq.assigner.objective import (
    Assignment,
    AssignmentProblem,
    Evaluation,
    evaluate,
    is_feasible,
)
from llmpq.assigner.schedules.monotone import Evaluate, GridOptimum, Point


def all_assignments(problem: AssignmentProblem) -> Iterator[Assignment]:
    """Yield every contiguous placement with every choice of bitwidths that the limits allow."""
    layers = problem.num_layers
    for positions in combinations_with_replacement(range(problem.num_positions), layers):
        for widths in product(range(len(problem.bits)), repeat=layers):
            if obeys(problem.limits, problem.order, positions, widths):
                yield Assignment(positions, widths)


def brute_force(problem: AssignmentProblem) -> tuple[Assignment, Evaluation] | None:
    """Return a best feasible assignment and its evaluation, ``None`` without one.

    Time grows as ``C(L + N - 1, L) * B**L``: for problems of a few layers only.
    """
    best: tuple[Assignment, Evaluation] | None = None
    for assignment in all_assignments(problem):
        found = evaluate(problem, assignment)
        if is_feasible(problem, found) and (
            best is None or found.objective_s < best[1].objective_s
        ):
            best = assignment, found
    return best


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
