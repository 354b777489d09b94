"""Exchanges of layers and bitwidths between stages: the steps of the bitwidth transfer.

A plan is a table of counts of layers by position and bitwidth; within a stage the most sensitive
layers have the widest bits. In an exchange one set of positions gives layers to another while
layers of both change their bitwidth; positions in between keep their counts and shift.

Array legend: ``N`` positions, ``B`` bitwidths, ``M`` layers of a stage, ``A`` and ``C`` options of
the two sides, and ``4`` totals: prefill seconds, decode seconds, bytes, degradation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from llmpq.assigner.problem import Assignment, AssignmentProblem, FloatArray, IntArray

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
                    costs.layer_bytes[group][kinds].astype(np.float64),
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
