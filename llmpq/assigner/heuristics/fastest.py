"""Fastest: the best single device alone, with the best bitwidths it has room for.

On one device nothing is sent and nothing waits, so the latency is a sum over layers and the
choice of bitwidths is exact. It is what "is two slower than one?" compares with.
"""

from __future__ import annotations

from llmpq.assigner.explain.explain import explain_memory
from llmpq.assigner.heuristics.additive import additive_problem, least_cost
from llmpq.assigner.heuristics.pair_table import Choice, better, budget_text, solution_of
from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp
from llmpq.assigner.objective import evaluate, is_feasible
from llmpq.assigner.problem import Assignment, AssignmentProblem, FloatArray
from llmpq.assigner.task import PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError


def find_fastest(task: PlanningTask, progress: Progress) -> Solution:
    """Return the best plan that uses one device only.

    Raises:
        InfeasibleError: no device holds the whole model alone (within the quality budget).
    """
    if not task.pairs:
        raise InfeasibleError(explain_memory(task.request))
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
        problem = task.problem(task.pairs[pair], (group,))
        best = better(best, _choice(task, problem, pair, costs))
    if best is not None:
        return solution_of(task, best, orders=len(task.groups))
    raise InfeasibleError(
        f"no single device holds the {task.request.model.num_layers} layers of "
        f"{task.request.model.name}, its embeddings and its KV cache at any of "
        f"{list(task.request.bits)} bits{budget_text(task)}; several together may: use "
        "the method llmpq"
    )


def layer_costs(problem: AssignmentProblem) -> tuple[FloatArray, float]:
    """Return ``[L, B]`` seconds of a layer's share in the objective on a single device.

    Also the seconds of what is there whatever the bitwidths are: the master's own work.
    """
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


def _choice(
    task: PlanningTask, problem: AssignmentProblem, pair: int, costs: FloatArray
) -> Choice | None:
    assignment = _widths(task, problem, costs)
    if assignment is None:
        return None
    found = evaluate(problem, assignment)
    if not is_feasible(problem, found):
        return None
    return Choice(
        objective_s=found.objective_s, pair=pair, order=problem.order, assignment=assignment
    )


def _widths(task: PlanningTask, problem: AssignmentProblem, costs: FloatArray) -> Assignment | None:
    if problem.quality_budget is None:
        return least_cost(additive_problem(problem, costs[None]))
    # The budget is a second limit beside memory: the integer program takes both.
    return solve_ilp(problem, IlpOptions(solver=task.request.program_solver)).assignment
