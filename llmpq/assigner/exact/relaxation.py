"""Lagrangian lower bounds of a pair, and a plan near the relaxation: the first incumbent.

Relaxing "no stage or link is slower than the maximum" and "a stage fits in its device" leaves a
shortest path over the order lattice (``csrc/lagrangian.c``); without contiguity every layer chooses
its group and bitwidth alone (``csrc/dual.c``), and those multipliers start the lattice's. All
multipliers within their totals prove a bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmpq.assigner.constraints.limits import obeys
from llmpq.assigner.exact import native
from llmpq.assigner.exact.lattice import OrderLattice
from llmpq.assigner.exact.space import NativePair
from llmpq.assigner.objective import Evaluation, evaluate, is_feasible
from llmpq.assigner.problem import Assignment, AssignmentProblem, FloatArray, SearchSpace


class Incumbent(NamedTuple):
    """An evaluated plan of one pair and order."""

    problem: AssignmentProblem
    assignment: Assignment
    evaluation: Evaluation


def _schedule(
    iterations: int, patience: int, step: float, shrink: float, momentum: float
) -> native.Ascent:
    return native.Ascent(
        iterations=iterations,
        patience=patience,
        restart=1,
        step=step,
        shrink=shrink,
        momentum=momentum,
        smallest_step=1e-5,
    )


NONCONTIGUOUS = _schedule(200, 25, 0.1, 0.6, 0.85)
NONCONTIGUOUS_OUT_OF_TIME = _schedule(15, 25, 0.1, 0.6, 0.85)
"""A few per cent below ``NONCONTIGUOUS`` for a fifth of its work."""
SHORT = (_schedule(150, 25, 0.03, 0.7, 0.9),)
LONG = (
    _schedule(1200, 50, 0.05, 0.7, 0.9),
    _schedule(1200, 50, 0.03, 0.7, 0.0),
    _schedule(1200, 40, 0.03, 0.7, 0.9),
)
"""Deflected and plain subgradient steps in turn: each continues where the other stalls."""


def start_multipliers(space: SearchSpace, pair: NativePair) -> FloatArray:
    """Return multipliers that share the weight of each maximum evenly over all devices."""
    size = space.num_groups
    found = np.zeros(6 * size + 3)
    devices = sum(space.group_counts)
    found[:size] = pair.problem.peak_prefill / devices
    found[2 * size : 3 * size] = pair.problem.peak_decode / devices
    return found


def noncontiguous_bound(
    space: SearchSpace,
    pair: NativePair,
    lattice: OrderLattice,
    warm: tuple[NativePair, FloatArray],
    steps: native.Ascent = NONCONTIGUOUS,
) -> tuple[float, FloatArray]:
    """Return the bound without contiguity, and its multipliers.

    ``warm`` is another pair and its multipliers to start from, scaled to this pair's totals.
    """
    size = space.num_groups
    other, multipliers = warm
    found = multipliers.copy()
    parts = slice(0, 2 * size), slice(2 * size, 4 * size + 1)
    for part, name in zip(parts, ("peak_prefill", "peak_decode"), strict=True):
        total, old_total = getattr(pair.problem, name), getattr(other.problem, name)
        if old_total > 0:
            found[part] *= total / old_total
        else:
            found[part] = start_multipliers(space, pair)[part]
    bound = native.noncontiguous_bound(pair.problem, lattice.graph, pair.floor, found, steps)
    return bound, found


def lattice_multipliers(space: SearchSpace, multipliers: FloatArray) -> FloatArray:
    """Return the lattice's first multipliers, with the master's memory as that of its group."""
    size = space.num_groups
    found = multipliers.copy()
    found[size : 2 * size] = found[3 * size : 4 * size] = 0.0
    found[5 * size + 1 : 6 * size + 1] = found[4 * size + 1 : 5 * size + 1]
    return found


def repaired_plan(
    space: SearchSpace, pair: NativePair, lattice: OrderLattice, multipliers: FloatArray
) -> Incumbent | None:
    """Return a feasible plan near the one that attains the bound, ``None`` without one.

    Layers over memory are narrowed where that costs least a byte, and free memory is used.
    """
    stages, choice = native.relaxed_plan(pair.problem, lattice.graph, multipliers)
    if not len(stages):
        return None
    order = tuple(lattice.node_group[node] for node, _, _ in stages.tolist())
    problem = space.problem(pair.costs, order)
    widths = choice.astype(np.int64)
    positions = np.zeros(space.num_layers, dtype=np.int64)
    for position, (_, first, end) in enumerate(stages.tolist()):
        positions[first:end] = position
        prices = _prices(space, pair, order[position], multipliers)[first:end]
        sizes = pair.costs.layer_bytes[order[position], space.kinds[first:end]]
        capacity = problem.capacity_bytes(position)
        widths[first:end] = _fitted(widths[first:end], prices, sizes, capacity)
    assignment = Assignment(tuple(positions.tolist()), tuple(widths.tolist()))
    if not obeys(space.limits, order, assignment.positions, assignment.widths):
        return None
    evaluation = evaluate(problem, assignment)
    if not is_feasible(problem, evaluation):
        return None
    return Incumbent(problem, assignment, evaluation)


def _prices(
    space: SearchSpace, pair: NativePair, group: int, multipliers: FloatArray
) -> FloatArray:
    """Return ``[L, B]`` the Lagrangian cost of a layer on a group, without memory."""
    size = space.num_groups
    sums = pair.problem.sum_weight[0] + multipliers[4 * size]
    base = (1 + multipliers[group]) * pair.costs.prefill_s[group]
    base = base + (sums + multipliers[2 * size + group]) * pair.costs.decode_s[group]
    prices: FloatArray = (
        base[space.kinds] + (space.theta_s + multipliers[6 * size + 1]) * space.omega
    )
    return np.where(space.allowed[group], prices, np.inf)


def _fitted(widths: np.ndarray, prices: FloatArray, sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return widths ``[M]`` near ``widths`` that fit in ``capacity``; tables are ``[M, B]``."""
    widths, rows = widths.copy(), np.arange(len(widths))
    while True:
        room = capacity - int(sizes[rows, widths].sum())
        dearer = prices - prices[rows, widths][:, None]
        freed = sizes[rows, widths][:, None] - sizes
        if room < 0:
            rate = np.where(freed > 0, dearer / np.maximum(freed, 1), np.inf)
        else:
            gains = (dearer < 0) & (-freed <= room)
            rate = np.where(gains, dearer / np.maximum(-freed, 1), np.inf)
        if not rate.size or np.isinf(rate.min()):
            return widths
        layer, width = np.unravel_index(int(rate.argmin()), rate.shape)
        widths[layer] = width
