"""PipeEdge: one bitwidth, and the split with the shortest pipeline of a single phase.

Hu et al., 2021, as LLM-PQ (Sec. 6.1) compares with it: layers of one bitwidth, lowered until they
fit, by dynamic programming on the slowest stage or link. It was made for encoders, so it considers
prefill alone; of splits whose slowest part is equal it takes the one of the least sum.
"""

from __future__ import annotations

import numpy as np

from llmpq.assigner.heuristics.pair_table import (
    Choice,
    PairTable,
    better,
    block_orders,
    budget_text,
    solution_of,
)
from llmpq.assigner.objective import Assignment, AssignmentProblem, FloatArray
from llmpq.assigner.request import PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError


def find_pipeedge(task: PlanningTask, progress: Progress) -> Solution:
    """Return the prefill-optimal split of the widest bitwidth that fits, with its best pair."""
    table, orders = PairTable(task), block_orders(task)
    best: Choice | None = None
    total = len(task.request.bits) * len(orders)
    for width in range(len(task.request.bits)):
        for number, order in enumerate(orders):
            if best is not None and task.request.deadline.has_passed:
                break
            progress(width * len(orders) + number, total, best.objective_s if best else None)
            for positions in _splits(task, order, width):
                assignment = Assignment(positions, (width,) * len(positions))
                best = better(best, table.best(order, assignment))
        if best is not None:
            return solution_of(task, best, orders=len(orders))
    raise InfeasibleError(
        f"no split fits at a single bitwidth of {list(task.request.bits)}{budget_text(task)}; "
        "mixed bitwidths may: use the method llmpq"
    )


def _splits(task: PlanningTask, order: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    """Return the split of every prefill size and amount of room, each once."""
    solved: dict[tuple[int, bytes], tuple[int, ...] | None] = {}
    for pair in task.pairs:
        problem = task.problem(pair, order)
        fits = fitting_ranges(problem, width)
        key = pair.micro_batching.prefill, fits.tobytes()
        if key not in solved:
            solved[key] = shortest_pipeline(problem, width, fits)
    return list(dict.fromkeys(found for found in solved.values() if found is not None))


def fitting_ranges(problem: AssignmentProblem, width: int) -> np.ndarray:
    """Return ``[N, L + 1, L + 1]`` whether a position holds layers ``[start, end)``.

    Without layers only the master's position runs, so only that needs its own memory then.
    """
    sizes = problem.costs.layer_bytes[list(problem.order)][:, problem.kinds, width]
    rooms = np.array([problem.capacity_bytes(j) for j in range(problem.num_positions)])
    held: np.ndarray = _spans(sizes.astype(np.float64)) <= rooms[:, None, None]
    return held


def _spans(values: FloatArray) -> FloatArray:
    """Return ``[N, L + 1, L + 1]`` sums of ``values [N, L]`` over ``[start, end)``, or infinity."""
    done = np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)
    spans = done[:, None, :] - done[:, :, None]
    forward = np.triu(np.ones(spans.shape[1:], dtype=bool))
    return np.where(forward, spans, np.inf)


def shortest_pipeline(
    problem: AssignmentProblem, width: int, fits: np.ndarray
) -> tuple[int, ...] | None:
    """Return the position of every layer for the shortest slowest part, ``None`` if nothing fits.

    ``fits`` is ``[N, L + 1, L + 1]``: whether a position holds layers ``[start, end)``.
    """
    costs, group = problem.costs, list(problem.order)
    times = _spans(costs.prefill_s[group][:, problem.kinds, width])
    times[0] += costs.master_prefill_s[group[0]]
    times = np.where(fits, times, np.inf)
    slowest_s, _ = _Pipeline(problem, times, np.inf).solve(additive=False)
    if np.isinf(slowest_s):
        return None
    # A rounding error must not lose the split that was just found.
    ceiling_s = slowest_s * (1 + 1e-12)
    return _Pipeline(problem, times, ceiling_s).solve(additive=True)[1]


class _Pipeline:
    """Dynamic program over (last position used, layers placed): a maximum, or a sum."""

    def __init__(self, problem: AssignmentProblem, times: FloatArray, ceiling_s: float) -> None:
        costs, order = problem.costs, np.array(problem.order)
        self.times = np.where(times <= ceiling_s, times, np.inf)
        sends = costs.send_prefill_s[order[:, None], order]
        backs = costs.return_prefill_s[order, order[0]].copy()
        backs[0] = 0.0  # the master alone sends nothing
        self.sends = np.where(sends <= ceiling_s, sends, np.inf)
        self.backs = np.where(backs <= ceiling_s, backs, np.inf)

    def solve(self, *, additive: bool) -> tuple[float, tuple[int, ...]]:
        """Return the least maximum or sum, and the position of every layer."""
        join = np.add if additive else np.maximum
        positions, size, _ = self.times.shape
        value = np.full((positions, size), np.inf)  # [last position, layers placed]
        value[0] = self.times[0, 0]
        source = np.zeros((positions, size), dtype=np.int64)
        start = np.zeros((positions, size), dtype=np.int64)
        for here in range(1, positions):
            arrived = join(value[:here], self.sends[:here, here, None])  # [before, start]
            source_of_start = arrived.argmin(axis=0)
            whole = join(arrived.min(axis=0)[:, None], self.times[here])  # [start, end]
            # A position that is used holds at least one layer.
            whole[np.arange(size), np.arange(size)] = np.inf
            start[here] = whole.argmin(axis=0)
            value[here] = whole.min(axis=0)
            source[here] = source_of_start[start[here]]
        ends = join(value[:, -1], self.backs)
        here = int(ends.argmin())
        best, end = float(ends[here]), size - 1
        places = np.zeros(size - 1, dtype=np.int64)
        while here and np.isfinite(best):
            begin = int(start[here, end])
            places[begin:end] = here
            here, end = int(source[here, end]), begin
        return best, tuple(places.tolist())
