"""Bitwidth transfer (LLM-PQ, Algorithm 2): a good plan in little time, without a solver or a bound.

Starts from adabits and moves work off the slowest stage while that lowers the objective: layers
change stage, bitwidths are exchanged between stages. The paper's rules ``(b_straggler, b_other,
count)`` are among the steps of ``exchange``. Three deviations: every step is judged by exact memory
and the real objective; when relieving the slowest stage no longer helps, all stages are tried; and
the micro-batch pair is exchanged too.

Exchanges of layers and bitwidths between stages are its steps. A plan is a table of counts of
layers by position and bitwidth; within a stage the most sensitive layers have the widest bits. In
an exchange one set of positions gives layers to another while layers of both change their bitwidth;
positions in between keep their counts and shift.

Array legend: ``N`` positions, ``B`` bitwidths, ``M`` layers of a stage, ``A`` and ``C`` options of
the two sides, and ``4`` totals: prefill seconds, decode seconds, bytes, degradation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np

from llmpq.assigner.constraints.resolve import Deadline
from llmpq.assigner.heuristics.baselines import best_adabits, least_degradation
from llmpq.assigner.heuristics.pair_table import (
    Choice,
    PairTable,
    better,
    block_orders,
    budget_text,
    choice_of,
    solution_of,
)
from llmpq.assigner.objective import (
    Assignment,
    AssignmentProblem,
    FloatArray,
    IntArray,
    assignment_of_counts,
    evaluate,
)
from llmpq.assigner.request import PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError

MAX_CHANGES = 3
"""Layers of a stage that change from one bitwidth to another in one exchange."""

PREFILL, DECODE, BYTES, QUALITY = range(4)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Every giver loses ``given`` layers, every taker gains ``taken``; both may be 0.

    Givers and takers are disjoint sets of positions, ``len(givers) * given == len(takers) *
    taken``. The members of a side do the same, so that equal devices that are equally slow can be
    relieved together. Without takers the givers only change bitwidths.
    """

    givers: tuple[int, ...]
    takers: tuple[int, ...]
    given: int
    taken: int


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """All options of one side: changes ``[A, B]``, summed totals ``[A, 4]``, maxima ``[A, 2]``."""

    changes: IntArray
    total: FloatArray
    slowest: FloatArray


@cache
def changes(num_widths: int, net: int, *, alone: bool = False) -> IntArray:
    """Return ``[A, B]`` changes of a stage's counts that add up to ``net`` layers of one bitwidth.

    In addition up to ``MAX_CHANGES`` layers change from one bitwidth to another; a stage that
    changes ``alone`` may make two such changes. The rules ``(b_straggler, b_other, count)`` of
    LLM-PQ are among them.
    """
    unit = np.eye(num_widths, dtype=np.int64)
    changed = [
        number * (unit[target] - unit[source])
        for number in range(MAX_CHANGES + 1)
        for source in range(num_widths)
        for target in range(num_widths)
    ]
    moved = changed if alone else [net * row for row in unit]
    found: IntArray = np.unique([a + b for a in moved for b in changed], axis=0)
    return found


class Stages:
    """Totals of any stage of a problem by its position, range and counts."""

    def __init__(self, problem: AssignmentProblem) -> None:
        self.problem = problem
        positions = range(problem.num_positions)
        # An empty position takes no memory, even with a negative capacity.
        self.rooms = [max(0, problem.capacity_bytes(position)) for position in positions]
        self.sensitivity = problem.omega[:, -1] - problem.omega[:, 0]
        self.tables: dict[tuple[int, int, int], FloatArray] = {}

    def totals(self, position: int, start: int, counts: IntArray) -> FloatArray:
        """Return ``[A, 4]`` totals for ``[A, B]`` counts of equal sum, from layer ``start`` on."""
        problem = self.problem
        group = problem.order[position]
        table = self._table(group, start, start + int(counts[0].sum()))
        upto, width = counts.cumsum(axis=1), np.arange(counts.shape[1])
        found: FloatArray = (table[upto, width] - table[upto - counts, width]).sum(axis=1)
        if position == 0:
            found[:, PREFILL] += problem.costs.master_prefill_s[group]
            found[:, DECODE] += problem.costs.master_decode_s[group]
        return found

    def _table(self, group: int, start: int, end: int) -> FloatArray:
        """Return ``[M + 1, B, 4]`` sums over the most sensitive layers of a range."""
        key = group, start, end
        if key not in self.tables:
            costs, layers = self.problem.costs, self._ranked(start, end)
            kinds = self.problem.kinds[layers]
            each = np.stack(
                [
                    costs.prefill_s[group][kinds],
                    costs.decode_s[group][kinds],
                    self.problem.safe_bytes[group][kinds].astype(np.float64),
                    self.problem.omega[layers],
                ],
                axis=2,
            )
            self.tables[key] = np.concatenate([np.zeros((1, *each.shape[1:])), each.cumsum(axis=0)])
        return self.tables[key]

    def _ranked(self, start: int, end: int) -> IntArray:
        """Return the layers of a range, the most sensitive first."""
        return start + np.argsort(-self.sensitivity[start:end], kind="stable")

    def assignment(self, counts: IntArray) -> Assignment:
        """Return the assignment that ``[N, B]`` counts stand for."""
        positions = np.repeat(np.arange(len(counts)), counts.sum(axis=1))
        widths = np.empty(len(positions), dtype=np.int64)
        start = 0
        for row in counts:
            end = start + int(row.sum())
            widths[self._ranked(start, end)] = np.repeat(np.arange(len(row)), row)
            start = end
        return Assignment(tuple(positions.tolist()), tuple(widths.tolist()))

    def sends(self, sizes: Sequence[int]) -> tuple[float, float, float, float]:
        """Return maximum and sum of the prefill sends, then of the decode sends, in use."""
        order, costs = self.problem.order, self.problem.costs
        used = [order[j] for j, size in enumerate(sizes) if size or j == 0]
        if len(used) == 1:
            return 0.0, 0.0, 0.0, 0.0
        hops, back = (used[:-1], used[1:]), (used[-1], used[0])
        prefill = [*costs.send_prefill_s[hops].tolist(), float(costs.return_prefill_s[back])]
        decode = [*costs.send_decode_s[hops].tolist(), float(costs.return_decode_s[back])]
        return max(prefill), sum(prefill), max(decode), sum(decode)


class Layout:
    """Counts ``[N, B]`` and totals ``[N, 4]`` of every position, and the results of exchanges."""

    def __init__(self, stages: Stages, counts: IntArray) -> None:
        self.stages = stages
        self.counts = counts
        self.starts = _starts(counts.sum(axis=1))
        rows = zip(self.starts, counts, strict=True)
        self.totals = np.concatenate(
            [stages.totals(j, start, row[None]) for j, (start, row) in enumerate(rows)]
        )
        slowest = self.totals[:, :BYTES].max(axis=0)
        sends = stages.sends(counts.sum(axis=1).tolist())
        self.objective_s = float(_objective(stages, slowest, self.totals.sum(axis=0), sends))

    def best_of(self, exchange: Exchange) -> tuple[float, IntArray] | None:
        """Return objective and counts of an exchange's best option; ``None`` without."""
        sizes = self.counts.sum(axis=1)
        sizes[list(exchange.givers)] -= exchange.given
        sizes[list(exchange.takers)] += exchange.taken
        if sizes.min() < 0:
            return None
        starts = _starts(sizes)
        rest = self._rest(exchange, starts)
        if rest is None:
            return None
        widths, alone = self.counts.shape[1], not exchange.takers
        giving = changes(widths, -exchange.given, alone=alone)
        givers = self._side(exchange.givers, giving, starts)
        takers = self._side(exchange.takers, changes(widths, exchange.taken), starts)
        if givers is None or takers is None:
            return None
        slowest = np.maximum(givers.slowest[:, None], takers.slowest[None])  # [A, C, 2]
        slowest = np.maximum(slowest, rest[:, :BYTES].max(axis=0, initial=0.0))
        total = givers.total[:, None] + takers.total[None] + rest.sum(axis=0)  # [A, C, 4]
        sends = self.stages.sends(sizes.tolist())
        values = _objective(self.stages, slowest, total, sends)
        giver, taker = np.unravel_index(int(values.argmin()), values.shape)
        counts = self.counts.copy()
        counts[list(exchange.givers)] += givers.changes[giver]
        counts[list(exchange.takers)] += takers.changes[taker]
        return float(values[giver, taker]), counts

    def _rest(self, exchange: Exchange, starts: Sequence[int]) -> FloatArray | None:
        """Return the totals of positions that only shift, ``None`` when one no longer fits."""
        others = [
            position
            for position in range(len(starts))
            if position not in exchange.givers and position not in exchange.takers
        ]
        found = self.totals[others]
        for row, position in enumerate(others):
            if starts[position] != self.starts[position] and self.counts[position].any():
                counts = self.counts[position][None]
                found[row] = self.stages.totals(position, starts[position], counts)[0]
                if found[row, BYTES] > self.stages.rooms[position]:
                    return None
        return found

    def _side(
        self, members: Sequence[int], options: IntArray, starts: Sequence[int]
    ) -> _Side | None:
        """Return the options ``[A, B]`` that all members of a side can hold."""
        if not members:
            return _Side(
                np.zeros((1, self.counts.shape[1]), dtype=np.int64),
                np.zeros((1, QUALITY + 1)),
                np.zeros((1, BYTES)),
            )
        options = options[(self.counts[list(members)][:, None] + options >= 0).all(axis=(0, 2))]
        if not len(options):
            return None
        found = [
            self.stages.totals(position, starts[position], self.counts[position] + options)
            for position in members
        ]
        fits = np.all(
            [
                totals[:, BYTES] <= self.stages.rooms[position]
                for totals, position in zip(found, members, strict=True)
            ],
            axis=0,
        )
        if not fits.any():
            return None
        stacked = np.stack(found)[:, fits]  # [members, A, 4]
        return _Side(options[fits], stacked.sum(axis=0), stacked[..., :BYTES].max(axis=0))


def _starts(sizes: IntArray) -> list[int]:
    return [0, *sizes.cumsum()[:-1].tolist()]


def _objective(
    stages: Stages,
    slowest: FloatArray,
    total: FloatArray,
    sends: tuple[float, float, float, float],
) -> FloatArray:
    """Return objectives of ``[..., 2]`` maxima and ``[..., 4]`` sums; infinite over the budget."""
    problem, costs = stages.problem, stages.problem.costs
    rounds = costs.new_tokens - 1
    slow_prefill = np.maximum(slowest[..., PREFILL], sends[0])
    slow_decode = np.maximum(slowest[..., DECODE], sends[2])
    value = (costs.prefill_batches - 1) * slow_prefill + total[..., PREFILL]
    if problem.formula == "paper":
        value += rounds * (costs.decode_batches - 1) * slow_decode + total[..., DECODE]
    else:
        once = total[..., DECODE] + sends[3]
        value += sends[1] + rounds * np.maximum(costs.decode_batches * slow_decode, once)
    value += problem.theta_s * total[..., QUALITY]
    budget = math.inf if problem.quality_budget is None else problem.quality_budget
    return np.where(total[..., QUALITY] <= budget, value, math.inf)


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
    starts = _start_points(task, orders)
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


def _start_points(
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
