"""One placement evaluated with every micro-batch pair at once, to rank pairs.

The formulas are those of ``objective``, which evaluates the choice. Array legend: ``P`` pairs,
``S`` stages, ``L`` layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmpq.assigner.enumeration import device_orders, leading_orders, num_orders
from llmpq.assigner.objective import (
    Assignment,
    FloatArray,
    IntArray,
    evaluate,
    is_feasible,
    within_budget,
)
from llmpq.assigner.request import PlanningTask, Solution

MAX_FULL_ORDERS = 24
"""Most block orders to try; beyond, each group leads once, the others in file order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A placement on an order of groups, and the index of its pair in ``PlanningTask.pairs``."""

    objective_s: float
    pair: int
    order: tuple[int, ...]
    assignment: Assignment


class PairTable:
    """The costs of all pairs of a task, stacked."""

    def __init__(self, task: PlanningTask) -> None:
        self.task = task
        self.times_s = self._stacked("prefill_s"), self._stacked("decode_s")  # [P, T, K, B]
        self.master_s = self._stacked("master_prefill_s"), self._stacked("master_decode_s")
        self.send_s = self._stacked("send_prefill_s"), self._stacked("send_decode_s")
        self.return_s = self._stacked("return_prefill_s"), self._stacked("return_decode_s")
        self.capacity_bytes = self._stacked("capacity_bytes")  # [P, T]
        self.first_capacity_bytes = self._stacked("first_capacity_bytes")
        self.prefill_batches = np.array([pair.prefill_batches for pair in task.pairs])
        self.decode_batches = np.array([pair.decode_batches for pair in task.pairs])
        self.rounds = np.array([pair.new_tokens - 1 for pair in task.pairs])

    def _stacked(self, name: str) -> FloatArray:
        stacked: FloatArray = np.stack([getattr(pair, name) for pair in self.task.pairs])
        return stacked

    def objectives(self, order: Sequence[int], assignment: Assignment) -> FloatArray:
        """Return ``[P]`` objectives of a placement, infinite where it does not fit."""
        task = self.task
        used = list(assignment.used_positions())
        groups = np.array([order[position] for position in used])
        positions = np.array(assignment.positions)
        member = (positions[:, None] == np.array(used)).astype(np.float64)  # [L, S]
        cells = np.array(order)[positions], task.kinds, np.array(assignment.widths)
        times = [table[:, cells[0], cells[1], cells[2]] @ member for table in self.times_s]
        for time_s, master_s in zip(times, self.master_s, strict=True):  # [P, S]
            time_s[:, 0] += master_s[:, groups[0]]
        sizes = task.pairs[0].layer_bytes[cells] @ member.astype(np.int64)  # [S]
        quality = float(task.omega[np.arange(len(cells[2])), cells[2]].sum())
        if not within_budget(task.problem(task.pairs[0], tuple(order)), quality):
            return np.full(len(task.pairs), np.inf)
        values = self._latency(times, groups) + task.theta_s * quality
        room = self.capacity_bytes[:, groups].copy()
        room[:, 0] = self.first_capacity_bytes[:, groups[0]]
        return np.where((sizes <= room).all(axis=1), values, np.inf)

    def _latency(self, times: Sequence[FloatArray], groups: IntArray) -> FloatArray:
        """Return ``[P]`` seconds of stages with ``[P, S]`` prefill and decode times."""
        sends = [
            self._sends(table, back, groups)
            for table, back in zip(self.send_s, self.return_s, strict=True)
        ]
        slowest = [
            np.maximum(time_s.max(axis=1), send_s.max(axis=1))
            for time_s, send_s in zip(times, sends, strict=True)
        ]
        value = (self.prefill_batches - 1) * slowest[0] + times[0].sum(axis=1)
        if self.task.request.formula == "paper":
            bubbles = self.rounds * (self.decode_batches - 1) * slowest[1]
            return np.asarray(value + bubbles + times[1].sum(axis=1))
        once = times[1].sum(axis=1) + sends[1].sum(axis=1)
        decode = self.rounds * np.maximum(self.decode_batches * slowest[1], once)
        return np.asarray(value + sends[0].sum(axis=1) + decode)

    def _sends(self, table: FloatArray, back: FloatArray, groups: IntArray) -> FloatArray:
        if len(groups) == 1:
            return np.zeros((len(self.task.pairs), 1))
        hops = table[:, groups[:-1], groups[1:]]
        return np.concatenate([hops, back[:, groups[-1], groups[0], None]], axis=1)

    def best(
        self, order: Sequence[int], assignment: Assignment, among: np.ndarray | None = None
    ) -> Choice | None:
        """Return a placement with its best pair of those in ``among [P]``; ``None`` without one."""
        values = self.objectives(order, assignment)
        if among is not None:
            values = np.where(among, values, np.inf)
        pair = int(values.argmin())
        if np.isinf(values[pair]):
            return None
        return Choice(
            objective_s=float(values[pair]),
            pair=pair,
            order=tuple(order),
            assignment=assignment,
        )


def choice_of(
    task: PlanningTask, pair: int, order: tuple[int, ...], assignment: Assignment | None
) -> Choice | None:
    """Return an assignment under a pair, evaluated; ``None`` unless it is feasible."""
    if assignment is None:
        return None
    problem = task.problem(task.pairs[pair], order)
    found = evaluate(problem, assignment)
    if not is_feasible(problem, found):
        return None
    return Choice(objective_s=found.objective_s, pair=pair, order=order, assignment=assignment)


def better(first: Choice | None, second: Choice | None) -> Choice | None:
    """Return the cheaper of two choices; the first when they are equal."""
    if first is None or second is None:
        return first or second
    return second if second.objective_s < first.objective_s else first


def solution_of(task: PlanningTask, choice: Choice, *, orders: int) -> Solution:
    """Return a choice as a solution without a bound."""
    problem = task.problem(task.pairs[choice.pair], choice.order)
    found = evaluate(problem, choice.assignment)
    assert is_feasible(problem, found)
    return Solution(
        problem=problem,
        assignment=choice.assignment,
        evaluation=found,
        solver="",
        status="feasible",
        bound_s=None,
        orders=orders,
        pairs_searched=orders * len(task.pairs),
        pairs_pruned=orders * (task.num_pairs - len(task.pairs)),
    )


def budget_text(task: PlanningTask) -> str:
    """Return the end of "does not fit": the quality budget, if there is one."""
    budget = task.request.quality_budget
    return "" if budget is None else f" within a quality budget of {budget:g}"


def file_order(task: PlanningTask) -> tuple[int, ...]:
    """Return the group of every device in the order of the cluster file."""
    return tuple(group for group, members in enumerate(task.groups) for _ in members)


def block_orders(task: PlanningTask) -> tuple[tuple[int, ...], ...]:
    """Return the orders that keep groups together: all, or the leading ones beyond a limit."""
    counts = task.group_counts.tolist()
    if num_orders(counts, "types") > MAX_FULL_ORDERS:
        return leading_orders(counts)
    return device_orders(counts, "types")
