"""Fastest: the best single device, with the best bitwidths for its memory.

On one device nothing is sent and nothing waits, so the latency is a sum over layers and the
choice of bitwidths is exact.
"""

from __future__ import annotations

from llmpq.assigner.heuristics.additive import additive_problem, least_cost
from llmpq.assigner.heuristics.pair_table import Choice, better, budget_text, choice_of, solution_of
from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp
from llmpq.assigner.objective import Assignment, AssignmentProblem, FloatArray
from llmpq.assigner.request import PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError


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
