"""Layers in proportion to what a device has: memory, or speed.

What most tools do when devices are unlike: exo and llama.cpp split by free memory, prima.cpp and
dnet by speed. All layers get one bitwidth, lowered until the split fits. Devices stand in the
order of the cluster file. The split itself looks at nothing else: that memory and speed disagree,
or that the first device also holds the embeddings, is not its concern.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmpq.assigner.explain.explain import explain_memory
from llmpq.assigner.heuristics.pair_table import (
    Choice,
    PairTable,
    better,
    budget_text,
    file_order,
    solution_of,
)
from llmpq.assigner.problem import Assignment, FloatArray
from llmpq.assigner.task import PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError


def find_memory_proportional(task: PlanningTask, progress: Progress) -> Solution:
    """Return the split by memory, less what the process itself holds, at the widest bits that fit.

    Raises:
        InfeasibleError: it fits at no allowed bitwidth, although another split may.
    """
    free = np.maximum(0, [pair.total_bytes - pair.runtime_bytes for pair in task.pairs])
    return _find(task, progress, free.astype(np.float64), "memory")


def find_speed_proportional(task: PlanningTask, progress: Progress) -> Solution:
    """Return the split by speed at the widest bitwidth, at the widest bits that fit.

    A device's speed is how many layers it would run through the whole workload in a second, both
    phases together, so it depends on the micro-batch pair.

    Raises:
        InfeasibleError: it fits at no allowed bitwidth, although another split may.
    """
    layers = [
        pair.prefill_batches * pair.prefill_s[:, task.kinds, 0].mean(axis=1)
        + (pair.new_tokens - 1) * pair.decode_batches * pair.decode_s[:, task.kinds, 0].mean(axis=1)
        for pair in task.pairs
    ]
    return _find(task, progress, 1.0 / np.maximum(1e-30, layers), "speed")


def _find(task: PlanningTask, progress: Progress, weights: FloatArray, by: str) -> Solution:
    """Return the best pair of the widest bitwidth that fits; ``weights`` are ``[P, T]``."""
    if not task.pairs:
        raise InfeasibleError(explain_memory(task.request))
    order, table = file_order(task), PairTable(task)
    splits: dict[tuple[int, ...], list[int]] = {}
    for pair, row in enumerate(weights[:, list(order)].tolist()):
        splits.setdefault(proportional_split(len(task.kinds), row), []).append(pair)
    best: Choice | None = None
    for width in range(len(task.request.bits)):
        for positions, pairs in splits.items():
            among = np.isin(np.arange(len(task.pairs)), pairs)
            assignment = Assignment(positions, (width,) * len(positions))
            best = better(best, table.best(order, assignment, among))
        progress(width + 1, len(task.request.bits), best.objective_s if best else None)
        if best is not None:
            return solution_of(task, best, orders=1)
    raise InfeasibleError(
        f"layers in proportion to {by} fit at none of {list(task.request.bits)} bits"
        f"{budget_text(task)}; other splits may fit: use the method llmpq"
    )


def proportional_split(num_layers: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return the position of every layer: shares by weight, the remainder to the largest fractions.

    Equal fractions favour the later position, as the first one has the embeddings and the head
    besides. Without any weight all shares are equal.
    """
    total = sum(weights)
    shares = [weight / total if total > 0 else 1 / len(weights) for weight in weights]
    quotas = [share * num_layers for share in shares]
    # A quota that should be whole may lie a rounding error below.
    sizes = [int(quota + 1e-9) for quota in quotas]
    by_fraction = sorted(
        range(len(weights)),
        key=lambda position: (round(quotas[position] - sizes[position], 9), position),
        reverse=True,
    )
    for position in by_fraction[: num_layers - sum(sizes)]:
        sizes[position] += 1
    return tuple(position for position, size in enumerate(sizes) for _ in range(size))
