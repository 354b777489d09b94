"""Which layers of a stage get which bits, given how many of each there are.

Layers of one kind cost the same time and memory, so for given counts only the degradation is left
to minimise: a transportation problem, solved exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from llmpq.assigner.problem import Assignment, AssignmentProblem, FloatArray
from llmpq.errors import SolverError

TOLERANCE = 1e-12
"""Relative improvement below which an exchange is a rounding error."""

FORBIDDEN = 1e3
"""Degradation of a width that a limit forbids, in sums of all degradations."""


def assignment_of_counts(problem: AssignmentProblem, counts: Sequence[FloatArray]) -> Assignment:
    """Return the assignment of least degradation with the given counts of every position.

    ``counts`` holds ``N`` arrays ``[K, B]``: how many layers of a kind a position holds at each
    width, whole up to a solver's tolerance.

    Raises:
        SolverError: the counts do not describe contiguous stages of this model.
    """
    layer = 0
    positions: list[int] = []
    widths = [0] * problem.num_layers
    for position, table in enumerate(counts):
        whole = table.round().astype(int)
        end = layer + int(whole.sum())
        held = problem.kinds[layer:end].tolist()
        for kind, row in enumerate(whole.tolist()):
            members = [layer + index for index, found in enumerate(held) if found == kind]
            if len(members) != sum(row):
                raise SolverError(
                    f"position {position} holds layers [{layer}, {end}) with {len(members)} of "
                    f"kind {kind}, but the solver counted {sum(row)}"
                )
            omega = problem.omega[members]
            if problem.limits is not None:
                allowed = problem.allowed(position)[members]
                omega = np.where(allowed, omega, FORBIDDEN * (1 + problem.omega.sum()))
            chosen = assign_bits_within_stage(omega, row)
            for member, width in zip(members, chosen, strict=True):
                widths[member] = width
        positions += [position] * (end - layer)
        layer = end
    if layer != problem.num_layers:
        raise SolverError(f"the solver placed {layer} of {problem.num_layers} layers")
    return Assignment(tuple(positions), tuple(widths))


def assign_bits_within_stage(omega: FloatArray, counts: Sequence[int]) -> list[int]:
    """Return the width index of every layer, of least total ``omega [M, B]``, with ``counts [B]``.

    Exchanges layers along cycles of bitwidths while that helps: a cycle moves the cheapest layer
    along each of its arcs. A flow without an improving cycle is optimal, and with at most four
    bitwidths there are at most twenty cycles.
    """
    widths = [width for width, count in enumerate(counts) for _ in range(count)]
    used = [width for width, count in enumerate(counts) if count]
    rows = omega.tolist()
    floor = TOLERANCE * max((abs(value) for row in rows for value in row), default=0.0)
    cycles = [
        cycle
        for length in range(2, len(counts) + 1)
        for cycle in permutations(used, length)
        if cycle[0] == min(cycle)
    ]
    improved = True
    while improved:
        improved = False
        for cycle in cycles:
            moves = _cheapest_moves(rows, widths, cycle)
            gain = sum(rows[layer][widths[layer]] - rows[layer][target] for layer, target in moves)
            if gain > floor:
                for layer, width in moves:
                    widths[layer] = width
                improved = True
    return widths


def _cheapest_moves(
    rows: Sequence[Sequence[float]], widths: Sequence[int], cycle: Sequence[int]
) -> list[tuple[int, int]]:
    """Return for each arc of a cycle the layer that moves along it cheapest, and its target."""
    moves = []
    for source, target in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        holders = [layer for layer, width in enumerate(widths) if width == source]
        layer = min(holders, key=lambda item: rows[item][target] - rows[item][source])
        moves.append((layer, target))
    return moves
