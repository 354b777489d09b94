"""A plan in hundredths of a second, for when the time is up: layers in proportion.

Splits by speed and by memory, each at the widest bits that fit, under the best micro-batch pair.
They prove nothing and know no manual decisions about layers.
"""

from __future__ import annotations

from llmpq.assigner.heuristics.proportional import (
    find_memory_proportional,
    find_speed_proportional,
)
from llmpq.assigner.task import PlanningTask, Solution
from llmpq.errors import InfeasibleError


def find_quick(task: PlanningTask) -> Solution | None:
    """Return the cheaper of the proportional splits, ``None`` where neither fits or may be."""
    if task.limits is not None or task.fixed_order is not None or not task.pairs:
        return None
    found = []
    for find in (find_speed_proportional, find_memory_proportional):
        try:
            found.append(find(task, _silent))
        except InfeasibleError:
            continue
    return min(found, key=lambda one: one.evaluation.objective_s, default=None)


def _silent(done: int, total: int, best_s: float | None) -> None:
    """Report to nobody: it is over before anybody looks."""
    del done, total, best_s
