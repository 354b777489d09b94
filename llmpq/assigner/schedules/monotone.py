"""Branch and bound on two variables in which throughput and latency both rise (ExeGPT, Alg. 1).

A block of the grid is worth looking into when its lower corner meets the latency bound and its
corners' throughput, which bounds the whole block, can beat the best found. Tolerances, a few points
all over the grid and a climb at the end let the search survive places where the functions are not
quite monotone: padding makes large encode batches dearer, whole micro-batches make steps.
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
    """What one point of the grid gives; an infinite latency is a point that cannot be."""

    throughput: float
    latency_s: float

    def meets(self, bound_s: float) -> bool:
        """Whether the point can be, and keeps the bound."""
        return self.latency_s <= bound_s and not math.isinf(self.latency_s)


Point = tuple[int, int]

_STRIDES = (-4, -2, -1, 0, 1, 2, 4)
_SEEDS = 7
_FEW_POINTS = 2000
Evaluate = Callable[[Point], Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of a search.

    Attributes:
        point: the best point that meets the bound, ``None`` when none was found.
        value: what it gives.
        evaluated: points looked at.
        space: points of the whole grid.
    """

    point: Point | None
    value: Value | None
    evaluated: int
    space: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    low: Point
    high: Point

    @property
    def is_point(self) -> bool:
        return self.low == self.high

    def split(self, axis: int) -> tuple[_Block, _Block]:
        middle = (self.low[axis] + self.high[axis]) // 2
        lower_high = (middle, self.high[1]) if axis == 0 else (self.high[0], middle)
        upper_low = (middle + 1, self.low[1]) if axis == 0 else (self.low[0], middle + 1)
        return _Block(low=self.low, high=lower_high), _Block(low=upper_low, high=self.high)


class _Memory:
    """Evaluates each point once, and keeps the best that meets the bound."""

    def __init__(self, evaluate: Evaluate, bound_s: float = math.inf) -> None:
        self._evaluate = evaluate
        self._bound_s = bound_s
        self.known: dict[Point, Value] = {}
        self.best: Point | None = None

    def __call__(self, point: Point) -> Value:
        if point not in self.known:
            value = self.known[point] = self._evaluate(point)
            if value.meets(self._bound_s) and value.throughput > self.best_throughput:
                self.best = point
        return self.known[point]

    @property
    def best_throughput(self) -> float:
        return -math.inf if self.best is None else self.known[self.best].throughput


def search(
    evaluate: Evaluate,
    shape: tuple[int, int],
    latency_bound_s: float,
    *,
    throughput_tolerance: float = 0.0,
    latency_tolerance: float = 0.0,
) -> Found:
    """Find the point of highest throughput whose latency is within the bound.

    Args:
        evaluate: gives throughput and latency of a point ``(i, j)``.
        shape: the grid, ``0 <= i < shape[0]``, ``0 <= j < shape[1]``; both functions rise, up to
            the tolerances, with either index.
        latency_bound_s: largest latency; infinity is no bound.
        throughput_tolerance: relative; a block is kept while its upper corner may be this much
            better than it looks.
        latency_tolerance: relative; likewise for its lower corner's latency.

    Raises:
        SpecError: the grid is empty.
    """
    if min(shape) < 1:
        raise SpecError(f"schedule search: found a grid of {shape}, expected at least 1 x 1")
    look = _Memory(evaluate, latency_bound_s)
    ties = count()
    whole = _Block(low=(0, 0), high=(shape[0] - 1, shape[1] - 1))
    look(whole.low)
    if shape[0] * shape[1] > _FEW_POINTS:
        _seed(look, shape)
    queue: list[tuple[float, int, _Block]] = [(-_upper(look, whole), next(ties), whole)]
    while queue:
        bound, _, block = heapq.heappop(queue)
        if -bound * (1 + throughput_tolerance) <= look.best_throughput:
            break  # the queue is sorted: nothing left can be better
        if block.is_point:
            continue
        for part in block.split(_axis(look, block, latency_bound_s)):
            if look(part.low).meets(latency_bound_s * (1 + latency_tolerance)):
                heapq.heappush(queue, (-_upper(look, part), next(ties), part))
    _climb(look, shape)
    return Found(
        point=look.best,
        value=None if look.best is None else look.known[look.best],
        evaluated=len(look.known),
        space=shape[0] * shape[1],
    )


def _climb(look: _Memory, shape: tuple[int, int]) -> None:
    """Walk from the best point to better neighbours while there are any.

    Whole numbers of micro-batches make small steps in the functions that the blocks do not see.
    """
    before: Point | None = None
    while look.best is not None and look.best != before:
        before = look.best
        for step, other in product(_STRIDES, _STRIDES):
            point = before[0] + step, before[1] + other
            if 0 <= point[0] < shape[0] and 0 <= point[1] < shape[1]:
                look(point)


def exhaustive(evaluate: Evaluate, shape: tuple[int, int], latency_bound_s: float) -> Found:
    """Look at every point: the oracle of :func:`search`."""
    best: Point | None = None
    values = {point: evaluate(point) for point in product(range(shape[0]), range(shape[1]))}
    for point, value in values.items():
        if value.meets(latency_bound_s) and (
            best is None or value.throughput > values[best].throughput
        ):
            best = point
    return Found(
        point=best,
        value=None if best is None else values[best],
        evaluated=len(values),
        space=len(values),
    )


def non_monotone(
    evaluate: Evaluate, shape: tuple[int, int], tolerance: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the share of steps that go down, as ExeGPT's Table 5 reports it.

    Args:
        evaluate: gives throughput and latency of a point.
        shape: the grid.
        tolerance: relative; smaller falls do not count.

    Returns:
        for either variable ``(latency, throughput)``; points that cannot be are left out.
    """
    look = _Memory(evaluate)
    shares = []
    for axis in (0, 1):
        steps = [(look(low), look(high)) for low, high in _steps(shape, axis)]
        real = [(low, high) for low, high in steps if high.latency_s < float("inf")]
        falls = (
            sum(high.latency_s < low.latency_s * (1 - tolerance) for low, high in real),
            sum(high.throughput < low.throughput * (1 - tolerance) for low, high in real),
        )
        shares.append((falls[0] / max(1, len(real)), falls[1] / max(1, len(real))))
    return shares[0], shares[1]


def _steps(shape: tuple[int, int], axis: int) -> Iterator[tuple[Point, Point]]:
    for first, second in product(range(shape[0]), range(shape[1])):
        after = (first + 1, second) if axis == 0 else (first, second + 1)
        if after[axis] < shape[axis]:
            yield (first, second), after


def _upper(look: _Memory, block: _Block) -> float:
    """Return the best throughput of a block's corners: of the upper one, were it monotone."""
    (low_i, low_j), (high_i, high_j) = block.low, block.high
    corners = ((i, j) for i in (low_i, high_i) for j in (low_j, high_j))
    return max(look(corner).throughput for corner in corners)


def _seed(look: _Memory, shape: tuple[int, int]) -> None:
    """Look at a few points all over the grid, closer together where the indices are small."""
    for point in product(_spread(shape[0]), _spread(shape[1])):
        look(point)


def _spread(size: int) -> list[int]:
    steps = min(_SEEDS, size)
    return sorted({round(size ** (step / max(1, steps - 1))) - 1 for step in range(steps)})


def _axis(look: _Memory, block: _Block, bound_s: float) -> int:
    """Split where the better of the two other corners lies (Alg. 1, lines 7-10)."""
    sides = (block.high[0] - block.low[0], block.high[1] - block.low[1])
    if min(sides) == 0:
        return 0 if sides[0] else 1
    corners = ((block.low[0], block.high[1]), (block.high[0], block.low[1]))
    values = [look(corner) for corner in corners]
    rates = [value.throughput if value.meets(bound_s) else -1.0 for value in values]
    if max(rates) < 0:
        return 0 if sides[0] >= sides[1] else 1
    return 0 if rates[0] > rates[1] else 1
