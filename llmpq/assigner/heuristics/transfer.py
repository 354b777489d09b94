"""Bitwidth transfer (LLM-PQ, Algorithm 2): a good plan in little time, without a solver or a bound.

Starts from adabits and moves work off the slowest stage while that lowers the objective: layers
change stage, bitwidths are exchanged between stages. The paper's rules ``(b_straggler, b_other,
count)`` are among the steps of ``exchange``. Three deviations: every step is judged by exact memory
and the real objective; when relieving the slowest stage no longer helps, all stages are tried; and
the micro-batch pair is exchanged too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from llmpq.assigner.bit_assignment import assignment_of_counts
from llmpq.assigner.constraints.deadline import Deadline
from llmpq.assigner.heuristics.adabits import best_adabits, least_degradation
from llmpq.assigner.heuristics.exchange import BYTES, Exchange, Layout, Stages
from llmpq.assigner.heuristics.pair_table import (
    Choice,
    PairTable,
    better,
    block_orders,
    budget_text,
    choice_of,
    solution_of,
)
from llmpq.assigner.objective import evaluate
from llmpq.assigner.problem import Assignment, AssignmentProblem
from llmpq.assigner.request import PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError

PAIRS_PER_ORDER = 3
"""Micro-batch pairs of least bound to start from, for every device order."""

MAX_START_POSITIONS = 36
"""Positions of all starts together: wider pipelines get fewer starts, at least ``MIN_STARTS``."""

MIN_STARTS = 3

MAX_GIVEN = 4
"""Most layers that one stage gives at once: five at 3 bits for one at 16 is a net four."""

LEAST_GAIN = 1e-9
"""Relative gain below which a step is a rounding error."""


def find_transfer(task: PlanningTask, progress: Progress) -> Solution:
    """Return the best plan that bitwidth transfer reaches from adabits."""
    deadline = task.request.deadline
    table, orders = PairTable(task), block_orders(task)
    best = best_adabits(table, progress)
    if best is not None:
        best = _Transfer(table, best.order, deadline).improved(best)
    starts = _starts(task, orders)
    for number, (bound_s, pair, order) in enumerate(starts):
        progress(number, len(starts), best.objective_s if best else None)
        if best is not None and deadline.has_passed:
            break
        if best is not None and bound_s >= best.objective_s:
            continue
        assignment = least_degradation(task.problem(task.pairs[pair], order))
        start = choice_of(task, pair, order, assignment)
        best = better(best, start and _Transfer(table, order, deadline).improved(start))
    if best is None:
        raise InfeasibleError(
            "bitwidth transfer has no start: the placement of least degradation does not fit on "
            f"{task.request.cluster.name} with any micro-batch pair tried{budget_text(task)}; "
            "other plans may fit: use the method llmpq"
        )
    return solution_of(task, best, orders=len(orders))


def _starts(
    task: PlanningTask, orders: Sequence[tuple[int, ...]]
) -> list[tuple[float, int, tuple[int, ...]]]:
    """Return bounds, pairs and orders to start from: the best pair of every order first."""
    number = min(
        PAIRS_PER_ORDER * len(orders), max(MIN_STARTS, MAX_START_POSITIONS // len(orders[0]))
    )
    bounds = task.bounds(task.theta_s)
    ranked = np.argsort(bounds, axis=0, kind="stable")
    found = [
        (rank, float(bounds[pair, order[0]]), pair, order)
        for rank in range(min(PAIRS_PER_ORDER, len(ranked)))
        for order in orders
        for pair in [int(ranked[rank, order[0]])]
        if math.isfinite(bounds[pair, order[0]])
    ]
    found.sort(key=lambda item: item[:2])
    return [item[1:] for item in found[:number]]


class _Transfer:
    def __init__(self, table: PairTable, order: tuple[int, ...], deadline: Deadline) -> None:
        self.table = table
        self.order = order
        self.deadline = deadline
        self.sets = _position_sets(order)

    def improved(self, start: Choice) -> Choice:
        """Return a choice after the transfer, no worse than ``start``."""
        task, best = self.table.task, start
        current: Choice | None = start
        while current is not None:
            problem = task.problem(task.pairs[current.pair], self.order)
            assignment = self._exchanged(problem, current.assignment)
            found = choice_of(task, current.pair, self.order, assignment)
            best = found if found is not None and _gains(found, best) else best
            # Another pair may suit the new plan better: continue with that.
            other = self.table.best(self.order, assignment)
            current = other if other is not None and _gains(other, best) else None
            best = current or best
        return best

    def _exchanged(self, problem: AssignmentProblem, assignment: Assignment) -> Assignment:
        """Apply the best exchange while one helps, then assign each stage's bits optimally."""
        counts = np.zeros((problem.num_positions, len(problem.bits)), dtype=np.int64)
        np.add.at(counts, (list(assignment.positions), list(assignment.widths)), 1)
        layout = Layout(Stages(problem), counts)
        while not self.deadline.has_passed:
            better_layout = self._step(layout)
            if better_layout is None:
                break
            layout = better_layout
        found = layout.stages.assignment(layout.counts)
        reassigned = assignment_of_counts(problem, _counts_by_kind(problem, found))
        values = [evaluate(problem, item).objective_s for item in (found, reassigned)]
        return found if values[0] <= values[1] else reassigned

    def _step(self, layout: Layout) -> Layout | None:
        """Relieve a slowest stage; if that does not help, try all stages."""
        slowest = set(layout.totals[:, :BYTES].argmax(axis=0).tolist())
        for stragglers in (slowest, None):
            found = [
                option
                for exchange in _exchanges(self.sets, stragglers)
                if (option := layout.best_of(exchange)) is not None
            ]
            if found:
                objective_s, counts = min(found, key=lambda option: option[0])
                if objective_s < layout.objective_s * (1 - LEAST_GAIN):
                    return Layout(layout.stages, counts)
        return None


def _position_sets(order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of positions that may act as one: each by itself, and equal devices."""
    single = [(position,) for position in range(len(order))]
    equal = [tuple(j for j, group in enumerate(order) if group == each) for each in set(order)]
    return tuple(dict.fromkeys([*single, *equal]))


def _exchanges(sets: Sequence[tuple[int, ...]], stragglers: set[int] | None) -> Iterator[Exchange]:
    """Yield the exchanges in which a straggler gives, or all when ``stragglers`` is ``None``."""
    for givers in sets:
        if stragglers is None or stragglers & set(givers):
            yield Exchange(givers, (), 0, 0)
    for givers, takers in permutations(sets, 2):
        if set(givers) & set(takers):
            continue
        if stragglers is not None and not stragglers & set(givers):
            continue
        size = math.lcm(len(givers), len(takers))
        for number in range(max(1, MAX_GIVEN // size) + 1):
            yield Exchange(
                givers, takers, number * size // len(givers), number * size // len(takers)
            )


def _counts_by_kind(problem: AssignmentProblem, assignment: Assignment) -> list[np.ndarray]:
    """Return ``N`` tables ``[K, B]`` of layers by kind and bitwidth."""
    counts = np.zeros((problem.num_positions, problem.costs.kv_bytes.size, len(problem.bits)))
    cells = list(assignment.positions), problem.kinds.tolist(), list(assignment.widths)
    np.add.at(counts, cells, 1)
    return list(counts)


def _gains(new: Choice, old: Choice) -> bool:
    return new.objective_s < old.objective_s * (1 - LEAST_GAIN)
