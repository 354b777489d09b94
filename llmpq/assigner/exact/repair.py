"""A plan from a bound: the first incumbent, long before the search has one.

The stages that attain a Lagrangian bound keep within the slot cut, so that each fits at its
narrowest bitwidths. What is over memory is narrowed where that costs least a byte, and what room
is left is spent where it gains.
"""

from __future__ import annotations

import numpy as np

from llmpq.assigner.constraints.limits import obeys
from llmpq.assigner.exact import native
from llmpq.assigner.exact.lattice import OrderLattice
from llmpq.assigner.exact.space import NativePair, SearchSpace
from llmpq.assigner.objective import Evaluation, evaluate, is_feasible
from llmpq.assigner.problem import Assignment, AssignmentProblem, FloatArray

Plan = tuple[AssignmentProblem, Assignment, Evaluation]


def repaired_plan(
    space: SearchSpace, pair: NativePair, lattice: OrderLattice, multipliers: FloatArray
) -> Plan | None:
    """Return a feasible plan near the one that attains the bound, ``None`` without one."""
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
        widths[first:end] = fitted(
            widths[first:end], prices, sizes, problem.capacity_bytes(position)
        )
    assignment = Assignment(tuple(positions.tolist()), tuple(widths.tolist()))
    if not obeys(space.limits, order, assignment.positions, assignment.widths):
        return None
    priced = evaluate(problem, assignment)
    return (problem, assignment, priced) if is_feasible(problem, priced) else None


def _prices(
    space: SearchSpace, pair: NativePair, group: int, multipliers: FloatArray
) -> FloatArray:
    """Return ``[L, B]`` what a layer costs on a group under the multipliers, memory aside."""
    size = space.num_groups
    sums = pair.problem.sum_weight[0] + multipliers[4 * size]
    base = (1 + multipliers[group]) * pair.costs.prefill_s[group]
    base = base + (sums + multipliers[2 * size + group]) * pair.costs.decode_s[group]
    priced: FloatArray = (
        base[space.kinds] + (space.theta_s + multipliers[6 * size + 1]) * space.omega
    )
    return np.where(space.allowed[group], priced, np.inf)


def fitted(widths: np.ndarray, prices: FloatArray, sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return widths of one stage that fit in ``capacity``, near ``widths`` and cheap.

    Args:
        widths: ``[M]`` width of every layer.
        prices: ``[M, B]`` price of a layer at a width.
        sizes: ``[M, B]`` bytes of a layer at a width.
        capacity: bytes there are.
    """
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
