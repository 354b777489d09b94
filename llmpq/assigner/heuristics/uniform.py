"""Uniform: the same number of layers on every device, all at one bitwidth.

All devices in the order of the cluster file; the bitwidth is lowered until it fits (LLM-PQ,
Sec. 6.1). When the layers do not divide evenly, the later stages take one more: the first one
carries the embeddings and the head.
"""

from __future__ import annotations

from llmpq.assigner.explain.explain import explain_memory
from llmpq.assigner.objective import Evaluation, evaluate, is_feasible
from llmpq.assigner.problem import Assignment, AssignmentProblem
from llmpq.assigner.task import PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError


def find_uniform(task: PlanningTask, progress: Progress) -> Solution:
    """Return the even split at the widest bitwidth that fits, with its best micro-batch pair.

    Raises:
        InfeasibleError: it fits at no allowed bitwidth, although another split may.
    """
    order = tuple(device.group for device in task.request.cluster.devices)
    positions = even_split(len(task.kinds), len(order))
    if not task.pairs:
        raise InfeasibleError(explain_memory(task.request))
    for width in range(len(task.request.bits)):
        assignment = Assignment(positions, (width,) * len(positions))
        best: tuple[AssignmentProblem, Evaluation] | None = None
        for number, pair in enumerate(task.pairs):
            progress(number, len(task.pairs), best[1].objective_s if best else None)
            problem = task.problem(pair, order)
            found = evaluate(problem, assignment)
            if is_feasible(problem, found) and (
                best is None or found.objective_s < best[1].objective_s
            ):
                best = problem, found
        if best is not None:
            return Solution(
                problem=best[0],
                assignment=assignment,
                evaluation=best[1],
                solver="",
                status="feasible",
                bound_s=None,
                orders=1,
                pairs_searched=len(task.pairs),
                pairs_pruned=task.num_pairs - len(task.pairs),
            )
    budget = task.request.quality_budget
    within = "" if budget is None else f" within a quality budget of {budget:g}"
    raise InfeasibleError(
        f"an even split of {task.request.model.num_layers} layers over {len(order)} devices fits "
        f"at none of {list(task.request.bits)} bits{within}; uneven splits may fit: use the "
        "method llmpq"
    )


def even_split(num_layers: int, num_positions: int) -> tuple[int, ...]:
    """Return the position of every layer: shares differ by at most one, the later ones larger."""
    share, rest = divmod(num_layers, num_positions)
    sizes = [share + (position >= num_positions - rest) for position in range(num_positions)]
    return tuple(position for position, size in enumerate(sizes) for _ in range(size))
