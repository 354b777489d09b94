"""Branch and bound over two variables in which throughput and latency both rise (ExeGPT, Alg. 1).

A block of the grid is searched when its lower corner meets the latency bound and the best
throughput of its corners exceeds the best found. Tolerances, a few seed points and a local search
compensate for functions that are slightly non-monotone. Small grids are tried whole.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, product
from typing import NamedTuple

from llmpq.errors import SpecError


class Value(NamedTuple):
    """Throughput and latency of one point; an infinite latency marks an infeasible point."""

    throughput: float
    latency_s: float

    def meets(self, bound_s: float) -> bool:
        """Whether the point is feasible and within the latency bound."""
        return self.latency_s <= bound_s and not math.isinf(self.latency_s)


Point = tuple[int, int]
Evaluate = Callable[[Point], Value]

_STRIDES = (-4, -2, -1, 0, 1, 2, 4)
"""Steps of the local search along the second axis."""
_NEAR = range(-8, 9)
"""Steps along the first, where batches that divide evenly stand out from their neighbours."""
_WHOLE = 150
"""Points of a grid that is tried whole."""
_SEEDS = 7
_FEW_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class GridOptimum:
    """The best point within the bound, if any, its value, and how many points were evaluated."""

    point: Point | None
    value: Value | None
    evaluated: int
    space: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    low: Point
    high: Point

    def split(self, axis: int) -> tuple[_Block, _Block]:
        middle = (self.low[axis] + self.high[axis]) // 2
        lower_high = (middle, self.high[1]) if axis == 0 else (self.high[0], middle)
        upper_low = (middle + 1, self.low[1]) if axis == 0 else (self.low[0], middle + 1)
        return _Block(low=self.low, high=lower_high), _Block(low=upper_low, high=self.high)


class MemoizedEvaluator:
    """Evaluates each point once and keeps the best one within the bound."""

    def __init__(self, evaluate: Evaluate, bound_s: float = math.inf) -> None:
        self._evaluate = evaluate
        self._bound_s = bound_s
        self.values: dict[Point, Value] = {}
        self.best: Point | None = None

    def __call__(self, point: Point) -> Value:
        """Return the value of a point."""
        if point not in self.values:
            value = self.values[point] = self._evaluate(point)
            if value.meets(self._bound_s) and value.throughput > self.best_throughput:
                self.best = point
        return self.values[point]

    @property
    def best_throughput(self) -> float:
        """Throughput of the best point, minus infinity without one."""
        return -math.inf if self.best is None else self.values[self.best].throughput


def branch_and_bound(
    evaluate: Evaluate,
    shape: tuple[int, int],
    latency_bound_s: float,
    *,
    throughput_tolerance: float = 0.0,
    latency_tolerance: float = 0.0,
) -> GridOptimum:
    """Find the point of highest throughput on a grid within a latency bound.

    Up to the tolerances both values rise with either index: ``throughput_tolerance`` is how far a
    block may exceed its corners' throughput, ``latency_tolerance`` how far it may undercut its
    lower corner's latency, both relative.

    Raises:
        SpecError: the grid is empty.
    """
    if min(shape) < 1:
        raise SpecError(f"schedule search: found a grid of {shape}, expected at least 1 x 1")
    value_of = MemoizedEvaluator(evaluate, latency_bound_s)
    ties = count()
    whole = _Block(low=(0, 0), high=(shape[0] - 1, shape[1] - 1))
    value_of(whole.low)
    for point in _first_points(shape):
        value_of(point)
    queue: list[tuple[float, int, _Block]] = [(-_upper(value_of, whole), next(ties), whole)]
    while queue:
        bound, _, block = heapq.heappop(queue)
        if -bound * (1 + throughput_tolerance) <= value_of.best_throughput:
            break
        if block.low == block.high:
            continue
        for part in block.split(_axis(value_of, block, latency_bound_s)):
            if value_of(part.low).meets(latency_bound_s * (1 + latency_tolerance)):
                heapq.heappush(queue, (-_upper(value_of, part), next(ties), part))
    _local_search(value_of, shape)
    return GridOptimum(
        point=value_of.best,
        value=None if value_of.best is None else value_of.values[value_of.best],
        evaluated=len(value_of.values),
        space=shape[0] * shape[1],
    )


def _first_points(shape: tuple[int, int]) -> Iterator[Point]:
    """Return all points of a small grid, a few of a large one."""
    points = shape[0] * shape[1]
    if points <= _WHOLE:
        return product(range(shape[0]), range(shape[1]))
    return product(*(map(_seeds, shape) if points > _FEW_POINTS else ((), ())))


def _local_search(value_of: MemoizedEvaluator, shape: tuple[int, int]) -> None:
    """Move from the best point to better neighbours until there are none."""
    center: Point | None = None
    while value_of.best is not None and value_of.best != center:
        center = value_of.best
        for step, other in product(_NEAR, _STRIDES):
            point = center[0] + step, center[1] + other
            if 0 <= point[0] < shape[0] and 0 <= point[1] < shape[1]:
                value_of(point)


def _upper(value_of: MemoizedEvaluator, block: _Block) -> float:
    """Return the best throughput of a block's corners."""
    corners = product((block.low[0], block.high[0]), (block.low[1], block.high[1]))
    return max(value_of(corner).throughput for corner in corners)


def _seeds(size: int) -> list[int]:
    """Return a few indices, closer together where they are small."""
    steps = min(_SEEDS, size)
    return sorted({round(size ** (step / max(1, steps - 1))) - 1 for step in range(steps)})


def _axis(value_of: MemoizedEvaluator, block: _Block, bound_s: float) -> int:
    """Return the axis to split: toward the better of the two other corners (Alg. 1, lines 7-10)."""
    sides = (block.high[0] - block.low[0], block.high[1] - block.low[1])
    if min(sides) == 0:
        return 0 if sides[0] else 1
    corners = ((block.low[0], block.high[1]), (block.high[0], block.low[1]))
    values = [value_of(corner) for corner in corners]
    rates = [value.throughput if value.meets(bound_s) else -1.0 for value in values]
    if max(rates) < 0:
        return 0 if sides[0] >= sides[1] else 1
    return 0 if rates[0] > rates[1] else 1
