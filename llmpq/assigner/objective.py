"""The cost of an assignment: the one evaluation of every method and of ``llmpq-check``.

LLM-PQ, Sec. 4.3. Two latency formulas, of which the first is ours (docs/how/equations.md):

- ``steady``: ``(mu_pre - 1) Tmax_pre + sum_j (T_pre[j] + c_pre[j]) + (n - 1) T_round`` with
  ``T_round = max(mu_dec max_j(T_dec[j], c_dec[j]), sum_j (T_dec[j] + c_dec[j]))``;
- ``paper``: ``(mu_pre - 1) Tmax_pre + sum_j T_pre[j] + (n - 1) (mu_dec - 1) Tmax_dec +
  sum_j T_dec[j]``.

``j`` runs over the used stages, ``c`` is the time to send one micro-batch on (the last stage sends
back to the master), ``Tmax`` covers stages and links. With one stage nothing is sent.

``assignment_of_counts`` chooses which layers of a stage get which bits, given how many of each
there are. Layers of one kind cost the same time and memory, so only the degradation is left to
minimise: a transportation problem, solved exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from llmpq.assigner.problem import Assignment, AssignmentProblem, FloatArray, PairCosts
from llmpq.errors import SolverError
from llmpq.spec.plan import Formula

QUALITY_SLACK = 1e-9
"""Relative slack of the quality budget, for sums of floating-point shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEvaluation:
    """Seconds of one micro-batch and bytes of the layers of one used position.

    The stage's seconds include the master's own work; the sends are those of its outgoing link.
    """

    position: int
    prefill_s: float
    decode_s: float
    send_prefill_s: float
    send_decode_s: float
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Cost of an assignment: latency, normalised degradation, and latency plus its price.

    ``excess_bytes`` are over capacity, summed over positions; 0 when it fits.
    """

    stages: tuple[StageEvaluation, ...]
    latency_s: float
    quality: float
    objective_s: float
    excess_bytes: int


def evaluate(problem: AssignmentProblem, assignment: Assignment) -> Evaluation:
    """Evaluate a contiguous assignment (positions never decrease), whether it fits or not."""
    used = assignment.used_positions()
    stages = tuple(_stage(problem, assignment, used, rank) for rank in range(len(used)))
    latency_s = latency(problem.costs, stages, problem.formula)
    quality = sum(
        float(problem.omega[layer, width]) for layer, width in enumerate(assignment.widths)
    )
    excess = sum(
        max(0, stage.weight_bytes + stage.kv_bytes - problem.capacity_bytes(stage.position))
        for stage in stages
    )
    return Evaluation(
        stages=stages,
        latency_s=latency_s,
        quality=quality,
        objective_s=latency_s + problem.theta_s * quality,
        excess_bytes=excess,
    )


def relative_gap(objective_s: float, bound_s: float) -> float:
    """Return the optimality gap ``(objective - bound) / objective``."""
    return (objective_s - bound_s) / objective_s if objective_s > 0 else 0.0


def is_feasible(problem: AssignmentProblem, found: Evaluation) -> bool:
    """Whether an assignment fits in memory and within the quality budget."""
    return found.excess_bytes == 0 and within_budget(problem, found.quality)


def within_budget(problem: AssignmentProblem, quality: float) -> bool:
    """Whether a degradation is within the budget, if there is one."""
    budget = problem.quality_budget
    return budget is None or quality <= budget * (1 + QUALITY_SLACK) + 1e-15


def latency(costs: PairCosts, stages: Sequence[StageEvaluation], formula: Formula) -> float:
    """Return the seconds of the whole batch for stages in pipeline order (module docstring)."""
    prefill_max = max(max(stage.prefill_s, stage.send_prefill_s) for stage in stages)
    decode_max = max(max(stage.decode_s, stage.send_decode_s) for stage in stages)
    prefill_s = (costs.prefill_batches - 1) * prefill_max + sum(s.prefill_s for s in stages)
    rounds = costs.new_tokens - 1
    if formula == "paper":
        bubbles = rounds * (costs.decode_batches - 1) * decode_max
        return prefill_s + bubbles + sum(stage.decode_s for stage in stages)
    prefill_s += sum(stage.send_prefill_s for stage in stages)
    pass_s = sum(stage.decode_s + stage.send_decode_s for stage in stages)
    return prefill_s + rounds * max(costs.decode_batches * decode_max, pass_s)


def _stage(
    problem: AssignmentProblem, assignment: Assignment, used: Sequence[int], rank: int
) -> StageEvaluation:
    costs, position = problem.costs, used[rank]
    group = problem.order[position]
    kinds = problem.kinds.tolist()
    cells = [
        (group, kinds[layer], assignment.widths[layer])
        for layer, where in enumerate(assignment.positions)
        if where == position
    ]
    prefill_s = sum(float(costs.prefill_s[cell]) for cell in cells)
    decode_s = sum(float(costs.decode_s[cell]) for cell in cells)
    if position == 0:
        prefill_s += float(costs.master_prefill_s[group])
        decode_s += float(costs.master_decode_s[group])
    kv_bytes = sum(int(costs.kv_bytes[kind]) for _, kind, _ in cells)
    send_prefill_s, send_decode_s = _sends(problem, used, rank)
    return StageEvaluation(
        position=position,
        prefill_s=prefill_s,
        decode_s=decode_s,
        send_prefill_s=send_prefill_s,
        send_decode_s=send_decode_s,
        weight_bytes=sum(int(costs.layer_bytes[cell]) for cell in cells) - kv_bytes,
        kv_bytes=kv_bytes,
    )


def _sends(problem: AssignmentProblem, used: Sequence[int], rank: int) -> tuple[float, float]:
    """Return the prefill and decode seconds of the link that leaves a stage."""
    costs, order = problem.costs, problem.order
    if len(used) == 1:
        return 0.0, 0.0
    if rank == len(used) - 1:
        link = order[used[rank]], order[0]
        return float(costs.return_prefill_s[link]), float(costs.return_decode_s[link])
    link = order[used[rank]], order[used[rank + 1]]
    return float(costs.send_prefill_s[link]), float(costs.send_decode_s[link])


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
