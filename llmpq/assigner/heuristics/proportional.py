"""Layers in proportion to a property of the devices: memory, speed, or none (uniform).

exo and llama.cpp split by free memory, prima.cpp and dnet by speed; LLM-PQ compares with an even
split (Sec. 6.1). All layers get one bitwidth, lowered until the split fits. Devices stand in the
order of the cluster file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmpq.assigner.heuristics.pair_table import (
    Choice,
    PairTable,
    better,
    budget_text,
    file_order,
    solution_of,
)
from llmpq.assigner.objective import Assignment, FloatArray
from llmpq.assigner.request import PlanningTask, Progress, Solution, silent
from llmpq.errors import InfeasibleError


def find_memory_proportional(task: PlanningTask, progress: Progress) -> Solution:
    """Return the split by memory, less the runtime's own, at the widest bits that fit."""
    free = np.maximum(0, [pair.total_bytes - pair.runtime_bytes for pair in task.pairs])
    return _find(task, progress, free.astype(np.float64), "layers in proportion to memory fit")


def find_speed_proportional(task: PlanningTask, progress: Progress) -> Solution:
    """Return the split by speed at the widest bitwidth, at the widest bits that fit.

    A device's speed is the number of layers that it runs through the whole workload in a second,
    both phases together, so it depends on the micro-batch pair.
    """
    layers = [
        pair.prefill_batches * pair.prefill_s[:, task.kinds, 0].mean(axis=1)
        + (pair.new_tokens - 1) * pair.decode_batches * pair.decode_s[:, task.kinds, 0].mean(axis=1)
        for pair in task.pairs
    ]
    speeds = 1.0 / np.maximum(1e-30, layers)
    return _find(task, progress, speeds, "layers in proportion to speed fit")


def find_uniform(task: PlanningTask, progress: Progress) -> Solution:
    """Return the even split at the widest bits that fit; later stages take the remainder."""
    equal = np.ones((len(task.pairs), len(task.groups)))
    layers, devices = task.request.model.num_layers, len(task.request.cluster.devices)
    text = f"an even split of {layers} layers over {devices} devices fits"
    return _find(task, progress, equal, text)


def find_proportional(task: PlanningTask) -> Solution | None:
    """Return the cheaper of the splits by speed and by memory, ``None`` where neither fits.

    It takes milliseconds: the plan when the time is up. With manual limits it returns ``None``.
    """
    if task.has_limits:
        return None
    found = []
    for find in (find_speed_proportional, find_memory_proportional):
        try:
            found.append(find(task, silent))
        except InfeasibleError:
            continue
    return min(found, key=lambda solution: solution.evaluation.objective_s, default=None)


def _find(task: PlanningTask, progress: Progress, weights: FloatArray, text: str) -> Solution:
    """Return the best pair of the widest bitwidth that fits; ``weights`` are ``[P, T]``."""
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
        f"{text} at none of {list(task.request.bits)} bits{budget_text(task)}; other splits may "
        "fit: use the method llmpq"
    )


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
