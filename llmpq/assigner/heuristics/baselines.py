"""Planners to compare with: proportional splits, the fastest device, PipeEdge, adabits.

- Proportional: layers in proportion to a property of the devices, which stand in the order of the
  cluster file. exo and llama.cpp split by free memory, prima.cpp and dnet by speed; LLM-PQ compares
  with an even split (Sec. 6.1). All layers get one bitwidth, lowered until the split fits.
- Fastest: the best single device, with the best bitwidths for its memory. Nothing is sent and
  nothing waits, so the latency is a sum over layers and the choice of bitwidths is exact.
- PipeEdge (Hu et al., 2021, as in LLM-PQ, Sec. 6.1): layers of one bitwidth, lowered until they
  fit, by dynamic programming on the slowest stage or link. It was made for encoders, so it looks
  at prefill alone; of splits whose slowest part is equal it takes the one of the least sum.
- Adabits: bits of least degradation, without regard to latency (LLM-PQ, Sec. 4.3 and 6.9). Of all
  contiguous placements that fit, the one of least degradation; of equal ones, the one with least
  work in all layers. ``find_adaptive_even`` keeps an even split instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmpq.assigner.enumeration import leading_orders
from llmpq.assigner.heuristics.additive import AdditiveProblem, additive_problem, least_cost
from llmpq.assigner.heuristics.pair_table import (
    Choice,
    PairTable,
    better,
    block_orders,
    budget_text,
    choice_of,
    file_order,
    solution_of,
)
from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp
from llmpq.assigner.objective import Assignment, AssignmentProblem, FloatArray, evaluate
from llmpq.assigner.request import PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError


def find_memory_proportional(task: PlanningTask, progress: Progress) -> Solution:
    """Return the split by memory, less the runtime's own, at the widest bits that fit."""
    return _find(task, progress, _free_bytes(task), "layers in proportion to memory fit")


def find_speed_proportional(task: PlanningTask, progress: Progress) -> Solution:
    """Return the split by speed at the widest bitwidth, at the widest bits that fit.

    A device's speed is the number of layers that it runs through the whole workload in a second,
    both phases together, so it depends on the micro-batch pair.
    """
    return _find(task, progress, _speeds(task), "layers in proportion to speed fit")


def _free_bytes(task: PlanningTask) -> FloatArray:
    """Return ``[P, T]`` bytes that the runtime leaves."""
    free = [pair.total_bytes - pair.runtime_bytes for pair in task.pairs]
    return np.maximum(0, free).astype(np.float64)


def _speeds(task: PlanningTask) -> FloatArray:
    """Return ``[P, T]`` layers a second at the widest bitwidth."""
    layers = [
        pair.prefill_batches * pair.prefill_s[:, task.kinds, 0].mean(axis=1)
        + (pair.new_tokens - 1) * pair.decode_batches * pair.decode_s[:, task.kinds, 0].mean(axis=1)
        for pair in task.pairs
    ]
    found: FloatArray = 1.0 / np.maximum(1e-30, layers)
    return found


def find_uniform(task: PlanningTask, progress: Progress) -> Solution:
    """Return the even split at the widest bits that fit; later stages take the remainder."""
    equal = np.ones((len(task.pairs), len(task.groups)))
    layers, devices = task.request.model.num_layers, len(task.request.cluster.devices)
    text = f"an even split of {layers} layers over {devices} devices fits"
    return _find(task, progress, equal, text)


def find_proportional(task: PlanningTask) -> Solution | None:
    """Return the cheapest split by speed or by memory at one bitwidth, ``None`` where none fits.

    It takes milliseconds: the plan when the time is up. With manual limits it returns ``None``.
    """
    if task.has_limits or not task.pairs:
        return None
    table = PairTable(task)
    found: Choice | None = None
    for weights in (_speeds(task), _free_bytes(task)):
        for width in range(len(task.request.bits)):
            found = better(found, _best_split(table, weights, width))
    return None if found is None else solution_of(task, found, orders=1)


def _find(task: PlanningTask, progress: Progress, weights: FloatArray, text: str) -> Solution:
    """Return the best pair of the widest bitwidth that fits; ``weights`` are ``[P, T]``."""
    table = PairTable(task)
    for width in range(len(task.request.bits)):
        best = _best_split(table, weights, width)
        progress(width + 1, len(task.request.bits), best.objective_s if best else None)
        if best is not None:
            return solution_of(task, best, orders=1)
    raise InfeasibleError(
        f"{text} at none of {list(task.request.bits)} bits{budget_text(task)}; other splits may "
        "fit: use the method llmpq"
    )


def _best_split(table: PairTable, weights: FloatArray, width: int) -> Choice | None:
    """Return the best pair with layers in proportion to ``weights`` ``[P, T]``, all at a width."""
    task = table.task
    order = file_order(task)
    splits: dict[tuple[int, ...], list[int]] = {}
    for pair, row in enumerate(weights[:, list(order)].tolist()):
        splits.setdefault(proportional_split(len(task.kinds), row), []).append(pair)
    best: Choice | None = None
    for positions, pairs in splits.items():
        among = np.isin(np.arange(len(task.pairs)), pairs)
        assignment = Assignment(positions, (width,) * len(positions))
        best = better(best, table.best(order, assignment, among))
    return best


def proportional_split(num_layers: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return the position of every layer: shares by weight, the remainder to the largest fractions.

    Equal fractions favour the later position, because the first one also has the embeddings and the
    head. With zero weights all shares are equal.
    """
    total = sum(weights)
    shares = [weight / total if total > 0 else 1 / len(weights) for weight in weights]
    quotas = [share * num_layers for share in shares]
    # A quota that should be whole may be a rounding error below.
    sizes = [int(quota + 1e-9) for quota in quotas]
    by_fraction = sorted(
        range(len(weights)),
        key=lambda position: (round(quotas[position] - sizes[position], 9), position),
        reverse=True,
    )
    for position in by_fraction[: num_layers - sum(sizes)]:
        sizes[position] += 1
    return tuple(position for position, size in enumerate(sizes) for _ in range(size))


def find_fastest(task: PlanningTask, progress: Progress) -> Solution:
    """Return the best plan that uses one device only."""
    found = [
        (float(costs.min(axis=1).sum()) + constant_s, pair, group, costs)
        for pair in range(len(task.pairs))
        for group in range(len(task.groups))
        for costs, constant_s in [layer_costs(task.problem(task.pairs[pair], (group,)))]
    ]
    found.sort(key=lambda item: item[:3])
    best: Choice | None = None
    for number, (bound_s, pair, group, costs) in enumerate(found):
        progress(number, len(found), best.objective_s if best else None)
        if best is not None and bound_s >= best.objective_s:
            break
        assignment = _widths(task, task.problem(task.pairs[pair], (group,)), costs)
        best = better(best, choice_of(task, pair, (group,), assignment))
    if best is not None:
        return solution_of(task, best, orders=len(task.groups))
    raise InfeasibleError(
        f"no single device holds the {task.request.model.num_layers} layers of "
        f"{task.request.model.name}, its embeddings and its KV cache at any of "
        f"{list(task.request.bits)} bits{budget_text(task)}; several together may: use "
        "the method llmpq"
    )


def layer_costs(problem: AssignmentProblem) -> tuple[FloatArray, float]:
    """Return ``[L, B]`` each layer's part of the objective, and the master's own seconds."""
    costs, (group,) = problem.costs, problem.order
    rounds = costs.new_tokens - 1
    if problem.formula == "paper":
        passes = rounds * (costs.decode_batches - 1) + 1
    else:
        passes = rounds * costs.decode_batches
    prefill = costs.prefill_batches * costs.prefill_s[group][problem.kinds]
    decode = passes * costs.decode_s[group][problem.kinds]
    master_s = costs.prefill_batches * costs.master_prefill_s[group]
    master_s += passes * costs.master_decode_s[group]
    return prefill + decode + problem.theta_s * problem.omega, float(master_s)


def _widths(task: PlanningTask, problem: AssignmentProblem, costs: FloatArray) -> Assignment | None:
    if problem.quality_budget is None:
        return least_cost(additive_problem(problem, costs[None]))
    # The budget is a second limit in addition to memory, so it takes the integer program.
    return solve_ilp(problem, IlpOptions(solver=task.request.program_solver)).assignment


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


TIE = 1e-9
"""Weight of all work relative to degradation: it only decides between equals."""


def find_adabits(task: PlanningTask, progress: Progress) -> Solution:
    """Return the least degradation that memory allows; each group leads once."""
    best = best_adabits(PairTable(task), progress)
    if best is None:
        raise InfeasibleError(_reason(task, "the placement of least degradation"))
    return solution_of(task, best, orders=len(task.groups))


def best_adabits(table: PairTable, progress: Progress) -> Choice | None:
    """Return the choice of ``find_adabits``, ``None`` when it fits with no pair."""
    task = table.task
    orders = leading_orders(task.group_counts.tolist())
    classes = [(order, pairs) for order in orders for pairs in _classes(table, order)]
    best: Choice | None = None
    before: tuple[AssignmentProblem, Assignment] | None = None
    for number, (order, pairs) in enumerate(classes):
        if best is not None and task.request.deadline.has_passed:
            break
        progress(number, len(classes), best.objective_s if best else None)
        problem = task.problem(task.pairs[int(np.flatnonzero(pairs)[0])], order)
        if before is not None and _still_best(*before, problem):
            assignment: Assignment | None = before[1]
        else:
            assignment = least_degradation(problem)
        if assignment is not None:
            before = problem, assignment
            best = better(best, table.best(order, assignment, pairs))
    return best


def find_adaptive_even(task: PlanningTask, progress: Progress) -> Solution:
    """Return the even split with each device's bits of least degradation, in file order."""
    table, order = PairTable(task), file_order(task)
    positions = proportional_split(len(task.kinds), [1.0] * len(order))
    classes = _classes(table, order)
    best: Choice | None = None
    for number, pairs in enumerate(classes):
        if best is not None and task.request.deadline.has_passed:
            break
        progress(number, len(classes), best.objective_s if best else None)
        problem = task.problem(task.pairs[int(np.flatnonzero(pairs)[0])], order)
        assignment = least_degradation_of_split(problem, positions)
        if assignment is not None:
            best = better(best, table.best(order, assignment, pairs))
    if best is not None:
        return solution_of(task, best, orders=1)
    raise InfeasibleError(_reason(task, "an even split"))


def least_degradation(problem: AssignmentProblem) -> Assignment | None:
    """Return a placement of least degradation, ``None`` when nothing fits in memory.

    Of placements of equal degradation it has the least work (``TIE``).
    """
    costs, groups = problem.costs, list(problem.order)
    prefill, decode = (
        table[groups][:, problem.kinds] for table in (costs.prefill_s, costs.decode_s)
    )  # [N, L, B]
    steps = (costs.new_tokens - 1) * costs.decode_batches
    work = costs.prefill_batches * prefill + steps * decode
    all_s = float(work.max(axis=(0, 2)).sum())
    weight = TIE / all_s if all_s > 0 else 0.0
    return least_cost(additive_problem(problem, problem.omega + weight * work))


def least_degradation_of_split(
    problem: AssignmentProblem, positions: tuple[int, ...]
) -> Assignment | None:
    """Return the bits of least degradation for layers whose positions are given."""
    if problem.capacity_bytes(0) < 0:
        return None
    widths: list[int] = []
    for position in sorted(set(positions)):
        layers = [layer for layer, where in enumerate(positions) if where == position]
        sizes = problem.safe_bytes[problem.order[position]][problem.kinds[layers]]
        found = least_cost(
            AdditiveProblem(
                costs=problem.omega[layers][None],
                sizes=sizes[None],
                capacities=np.array([problem.capacity_bytes(position)]),
            )
        )
        if found is None:
            return None
        widths += found.widths
    return Assignment(positions, tuple(widths))


def _classes(table: PairTable, order: tuple[int, ...]) -> list[np.ndarray]:
    """Return masks ``[P]`` of the pairs that leave equal memory for layers, largest first."""
    groups = sorted(set(order))
    room = np.concatenate(
        [table.capacity_bytes[:, groups], table.first_capacity_bytes[:, order[:1]]], axis=1
    )
    rows, which = np.unique(room, axis=0, return_inverse=True)
    by_room = np.argsort(-rows.sum(axis=1), kind="stable")
    return [which.ravel() == index for index in by_room]


def _still_best(old: AssignmentProblem, best: Assignment, new: AssignmentProblem) -> bool:
    """Whether the best of one problem also is that of another with no more room anywhere."""
    if old.order != new.order or evaluate(new, best).excess_bytes:
        return False
    positions = range(new.num_positions)
    return all(new.capacity_bytes(at) <= old.capacity_bytes(at) for at in positions)


def _reason(task: PlanningTask, what: str) -> str:
    return (
        f"{what} does not fit on {task.request.cluster.name} with any micro-batch pair"
        f"{budget_text(task)}; another placement may: use the method llmpq"
    )
