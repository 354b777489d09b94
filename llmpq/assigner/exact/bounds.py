"""Lower bounds of a pair, by Lagrangian multipliers, and how they are improved.

Relaxing "no stage or link is slower than the maximum" and "a stage fits in its device" leaves a
shortest path over the order lattice (``csrc/bound.c``); dropping contiguity too leaves a choice of
group and bitwidth for every layer on its own. The sum over devices in the steady round has one
multiplier as well. Any multipliers within their totals prove a bound; the schedules below only
decide how good it is. The pool's multipliers start the lattice's.
"""

from __future__ import annotations

import math

import numpy as np

from llmpq.assigner.exact import native
from llmpq.assigner.exact.lattice import OrderLattice
from llmpq.assigner.exact.space import NativePair, SearchSpace
from llmpq.assigner.problem import FloatArray


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


POOL = _schedule(200, 25, 0.1, 0.6, 0.85)
HASTY = _schedule(15, 25, 0.1, 0.6, 0.85)
"""The pool's when the time is up: a few per cent below ``POOL`` for a fifth of its work."""
SHORT = (_schedule(150, 25, 0.03, 0.7, 0.9),)
LONG = (
    _schedule(1200, 50, 0.05, 0.7, 0.9),
    _schedule(1200, 50, 0.03, 0.7, 0.0),
    _schedule(1200, 40, 0.03, 0.7, 0.9),
)
"""Deflected and plain steps in turn: each gets past points where the other stalls."""


def start_multipliers(space: SearchSpace, pair: NativePair) -> FloatArray:
    """Return multipliers that share the weight of each maximum evenly over all devices."""
    size = space.num_groups
    found = np.zeros(6 * size + 3)
    devices = sum(space.group_counts)
    found[:size] = pair.problem.peak_prefill / devices
    found[2 * size : 3 * size] = pair.problem.peak_decode / devices
    return found


def pool_bound(
    space: SearchSpace,
    pair: NativePair,
    lattice: OrderLattice,
    warm: tuple[NativePair, FloatArray],
    steps: native.Ascent = POOL,
) -> tuple[float, FloatArray]:
    """Return the pool's bound and its multipliers.

    Args:
        space: what ``pair`` is of.
        pair: what is bounded.
        lattice: for the numbers of devices.
        warm: another pair and its multipliers to start from, scaled to this pair's totals.
        steps: what is done to improve them.
    """
    size = space.num_groups
    other, multipliers = warm
    found = multipliers.copy()
    parts = slice(0, 2 * size), slice(2 * size, 4 * size + 1)
    for part, name in zip(parts, ("peak_prefill", "peak_decode"), strict=True):
        total, had = getattr(pair.problem, name), getattr(other.problem, name)
        if had > 0:
            found[part] *= total / had
        else:
            found[part] = start_multipliers(space, pair)[part]
    bound = native.pool_bound(pair.problem, lattice.graph, pair.floor, found, steps)
    return bound, found


def lattice_start(space: SearchSpace, multipliers: FloatArray) -> FloatArray:
    """Return the lattice's multipliers for the pool's: the master's memory is priced alike."""
    size = space.num_groups
    found = multipliers.copy()
    found[size : 2 * size] = found[3 * size : 4 * size] = 0.0
    found[5 * size + 1 : 6 * size + 1] = found[4 * size + 1 : 5 * size + 1]
    return found


def lattice_bound(
    pair: NativePair,
    lattice: OrderLattice,
    multipliers: FloatArray,
    schedules: tuple[native.Ascent, ...],
    *,
    target: float = math.inf,
    seconds: float = math.inf,
) -> float:
    """Improve ``multipliers`` in place; return the bound, infinite when no plan fits.

    Args:
        pair: what is bounded.
        lattice: over which orders.
        multipliers: the core's layout.
        schedules: steps to take; none only evaluates.
        target: a bound that is good enough.
        seconds: time to spend at most.
    """
    return native.lattice_bound(
        pair.problem, lattice.graph, multipliers, schedules, target=target, seconds=seconds
    )
