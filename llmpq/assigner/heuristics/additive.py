"""Least additive cost under memory: exact placement when the objective is a sum over layers.

That is adabits (degradation alone), a single device (its latency is linear) and the bits of a stage
whose layers are given. Lagrange multipliers of memory give a lower bound; then the layers are
placed one by one, keeping every partial plan that is neither dominated by a cheaper one of at most
its memory nor ruled out by the bound. Array legend: ``N`` positions, ``L`` layers, ``B`` bitwidths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmpq.assigner.objective import Assignment, AssignmentProblem, FloatArray, IntArray

MULTIPLIER_STEPS = 60
FIRST_WINDOW = 1e-3
"""Share of the range of costs above the bound that the first sweep covers."""

WIDENING = 6.0
"""Factor by which the window grows until it holds a placement."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdditiveProblem:
    """Costs, positive bytes ``[N, L, B]`` of a layer at a position and width; capacities ``[N]``.

    A position of negative capacity cannot run.
    """

    costs: FloatArray
    sizes: IntArray
    capacities: IntArray


def additive_problem(problem: AssignmentProblem, layer_costs: FloatArray) -> AdditiveProblem:
    """Return the additive problem of an order and a pair with ``layer_costs`` ``[N, L, B]``."""
    positions = range(problem.num_positions)
    return AdditiveProblem(
        costs=layer_costs,
        sizes=problem.safe_bytes[list(problem.order)][:, problem.kinds],
        capacities=np.array([problem.capacity_bytes(position) for position in positions]),
    )


def least_cost(problem: AdditiveProblem) -> Assignment | None:
    """Return a contiguous placement of least total cost that fits, ``None`` when nothing fits.

    Of placements of equal cost the choice is arbitrary but deterministic.
    """
    if problem.capacities[0] < 0 or not _fits(problem):
        return None
    able = problem.capacities >= problem.sizes.min(axis=(1, 2))
    places = np.flatnonzero(able)
    part = AdditiveProblem(
        costs=problem.costs[places],
        sizes=problem.sizes[places],
        capacities=problem.capacities[places],
    )
    positions, widths = _solve(part)
    return Assignment(tuple(places[positions].tolist()), tuple(widths))


def _fits(problem: AdditiveProblem) -> bool:
    """Whether all layers fit at their least size, each position in turn taking all it can."""
    smallest = problem.sizes.min(axis=2)
    layer = 0
    for position, capacity in enumerate(problem.capacities.tolist()):
        total = np.cumsum(smallest[position, layer:])
        layer += int(np.searchsorted(total, capacity, side="right"))
    return bool(layer == smallest.shape[1])


def _solve(problem: AdditiveProblem) -> tuple[list[int], list[int]]:
    """Return position and width of every layer; something fits."""
    scale = _range(problem)
    relaxed = _Relaxed(problem, _multipliers(problem))
    window = FIRST_WINDOW * scale
    while True:
        # Beyond the whole range of costs nothing is ruled out, so this ends.
        ceiling = relaxed.bound + window if window < 4 * scale else math.inf
        sweep = _Sweep(problem, relaxed, ceiling)
        cost = sweep.run()
        if cost <= sweep.ceiling:
            return sweep.choices()
        # A placement above the ceiling is not proven best, but bounds the window.
        window = min(WIDENING * window, cost - relaxed.bound)


def _range(problem: AdditiveProblem) -> float:
    """Return an upper bound of the difference between the costs of two placements."""
    return float(np.ptp(problem.costs, axis=(0, 2)).sum()) or 1.0


class _Relaxed:
    """The Lagrangian relaxation of memory: ``bound`` is below the cost of all that fits.

    ``rest [N, L + 1]`` is the least cost of the other layers when layers ``[0, i)`` are placed up
    to this position; ``used_bytes [N]`` those of the cheapest relaxed placement.
    """

    def __init__(self, problem: AdditiveProblem, multipliers: FloatArray) -> None:
        positions, layers, _ = problem.costs.shape
        self.multipliers = multipliers
        costs = problem.costs + multipliers[:, None, None] * problem.sizes
        width = costs.argmin(axis=2)[:, :, None]
        least = np.take_along_axis(costs, width, axis=2)[:, :, 0]
        done = np.concatenate([np.zeros((positions, 1)), least.cumsum(axis=1)], axis=1)
        sizes = np.take_along_axis(problem.sizes, width, axis=2)[:, :, 0]
        self.rest = np.empty((positions, layers + 1))
        after = np.full(layers + 1, np.inf)
        after[layers] = 0.0
        ends = []
        for position in range(positions - 1, -1, -1):
            whole = done[position] + after
            lowest = np.minimum.accumulate(whole[::-1])[::-1]
            after = lowest - done[position] - multipliers[position] * problem.capacities[position]
            self.rest[position] = after
            ends.append((whole, lowest))
        self.bound = float(self.rest[0, 0])
        layer = 0
        self.used_bytes = np.zeros(positions)
        for position, (whole, lowest) in enumerate(reversed(ends)):
            end = layer + int(np.argmax(whole[layer:] <= lowest[layer]))
            self.used_bytes[position] = sizes[position, layer:end].sum()
            layer = end


def _multipliers(problem: AdditiveProblem) -> FloatArray:
    """Return ``[N]`` multipliers of each position's bytes: projected subgradient steps (Polyak)."""
    capacities = problem.capacities.astype(np.float64)
    best = multipliers = np.zeros(len(capacities))
    highest, target = -math.inf, 0.25 * _range(problem)
    stalled = 0
    for _ in range(MULTIPLIER_STEPS):
        relaxed = _Relaxed(problem, multipliers)
        stalled += 1
        if relaxed.bound > highest:
            stalled = 0 if relaxed.bound > highest + 0.1 * target else stalled
            best, highest = multipliers, relaxed.bound
        if stalled >= 3:
            target, stalled = 0.5 * target, 0
        slope = relaxed.used_bytes / capacities - 1.0
        slope[(multipliers == 0) & (slope < 0)] = 0.0
        length = float(slope @ slope)
        if length < 1e-24:
            break
        step = (highest - relaxed.bound + target) / length
        multipliers = np.maximum(0.0, multipliers + step * slope / capacities)
    return best


@dataclass(frozen=True, slots=True, eq=False)
class _Front:
    """Undominated partial plans; ``parents`` are rows of the last front, -1 starts a position."""

    memory: IntArray
    cost: FloatArray
    parents: IntArray
    widths: IntArray


class _Sweep:
    def __init__(self, problem: AdditiveProblem, relaxed: _Relaxed, ceiling: float) -> None:
        self.problem = problem
        self.relaxed = relaxed
        self.ceiling = ceiling + 1e-12 * max(_range(problem), abs(relaxed.bound))
        self.fronts: list[list[_Front]] = []

    def run(self) -> float:
        """Return the cost of the best placement found; optimal when it is not above the ceiling."""
        positions, layers, _ = self.problem.costs.shape
        for position in range(positions):
            row: list[_Front] = []
            self.fronts.append(row)
            for layer in range(layers + 1):
                parts = [self._entry(position, layer)]
                if layer:
                    parts.append(self._extension(position, layer - 1, row[-1]))
                row.append(self._kept(position, layer, parts))
        complete = self.fronts[-1][-1].cost
        return float(complete[-1]) if len(complete) else math.inf

    def _entry(self, position: int, layer: int) -> _Front:
        """Start a position without layers, after the cheapest plan of the previous ones."""
        if position == 0:
            size, cost, parent = int(layer == 0), 0.0, 0
        else:
            before = self.fronts[position - 1][layer].cost
            size = int(len(before) > 0)
            parent = len(before) - 1  # the cheapest is the last
            cost = float(before[parent]) if size else 0.0
        return _Front(
            np.zeros(size, dtype=np.int64),
            np.full(size, cost),
            np.full(size, parent),
            np.full(size, -1),
        )

    def _extension(self, position: int, layer: int, front: _Front) -> _Front:
        sizes, costs = self.problem.sizes[position, layer], self.problem.costs[position, layer]
        rows, widths = len(front.cost), len(sizes)
        return _Front(
            (front.memory[None] + sizes[:, None]).ravel(),
            (front.cost[None] + costs[:, None]).ravel(),
            np.tile(np.arange(rows), widths),
            np.repeat(np.arange(widths), rows),
        )

    def _kept(self, position: int, layer: int, parts: list[_Front]) -> _Front:
        """Drop what does not fit, what the bound rules out, and what another dominates."""
        memory = np.concatenate([part.memory for part in parts])
        cost = np.concatenate([part.cost for part in parts])
        least = (
            cost + self.relaxed.multipliers[position] * memory + self.relaxed.rest[position, layer]
        )
        inside = (memory <= self.problem.capacities[position]) & (least <= self.ceiling)
        rows = np.flatnonzero(inside)
        rows = rows[np.lexsort((cost[rows], memory[rows]))]
        lowest = np.minimum.accumulate(cost[rows])
        better = np.ones(len(rows), dtype=bool)
        better[1:] = lowest[1:] < lowest[:-1]
        rows = rows[better]
        parents = np.concatenate([part.parents for part in parts])[rows]
        widths = np.concatenate([part.widths for part in parts])[rows]
        return _Front(memory[rows], cost[rows], parents, widths)

    def choices(self) -> tuple[list[int], list[int]]:
        position, layer = len(self.fronts) - 1, len(self.fronts[0]) - 1
        row = len(self.fronts[position][layer].cost) - 1
        found: list[tuple[int, int]] = []
        while (position, layer) != (0, 0):
            front = self.fronts[position][layer]
            width = int(front.widths[row])
            row = int(front.parents[row])
            if width < 0:
                position -= 1
            else:
                layer -= 1
                found.append((position, width))
        found.reverse()
        return [place for place, _ in found], [width for _, width in found]
