"""Adabits: bits of least degradation, without regard to latency (LLM-PQ, Sec. 4.3 and 6.9).

Of all contiguous placements that fit, the one of least degradation; of equal ones, the one with
least work in all layers. ``find_adaptive_even`` keeps an even split instead.
"""

from __future__ import annotations

import numpy as np

from llmpq.assigner.enumeration import leading_orders
from llmpq.assigner.heuristics.additive import AdditiveProblem, additive_problem, least_cost
from llmpq.assigner.heuristics.pair_table import (
    Choice,
    PairTable,
    better,
    budget_text,
    file_order,
    solution_of,
)
from llmpq.assigner.heuristics.proportional import proportional_split
from llmpq.assigner.objective import Assignment, AssignmentProblem, evaluate
from llmpq.assigner.request import PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError

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
        sizes = problem.costs.layer_bytes[problem.order[position]][problem.kinds[layers]]
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
