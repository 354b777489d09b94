"""ExeGPT's formulas and the numbers that it prints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from llmpq.assigner.schedules.monotone import Evaluate, MemoizedEvaluator, Point
from llmpq.spec.workload import LengthDistribution

# --- Formulas of the paper ---


def paper_ending(new_tokens: LengthDistribution, decode_iterations: int) -> tuple[float, ...]:
    """Return ``P_D(U)``, U = 1..N_D.

    ``P_D(U | S)`` is 1 at ``U = S`` for ``S <= N_D``, else ``1 / ceil(S / N_D)`` at
    ``U = 1 + (S - 1) mod N_D``; all S iterations are decoding.
    """
    shares = [0.0] * decode_iterations
    for tokens, share in zip(new_tokens.lengths, new_tokens.probabilities, strict=True):
        shares[(tokens - 1) % decode_iterations] += share / -(-tokens // decode_iterations)
    return tuple(shares)


def paper_encode_batch(
    new_tokens: LengthDistribution, decode_iterations: int, decode_batch: float
) -> float:
    """Return ``B_E = B_D sum_U P_D(U)``."""
    return decode_batch * math.fsum(paper_ending(new_tokens, decode_iterations))


def non_monotone_shares(
    evaluate: Evaluate, shape: tuple[int, int], tolerance: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the share of grid steps on which a function falls (Table 5).

    Args:
        evaluate: throughput and latency of a point.
        shape: the grid.
        tolerance: relative; smaller falls do not count.

    Returns:
        For each of the two variables ``(latency, throughput)``; infeasible points are left out.
    """
    value_of = MemoizedEvaluator(evaluate)
    shares = []
    for axis in (0, 1):
        steps = [(value_of(low), value_of(high)) for low, high in _steps(shape, axis)]
        feasible = [(low, high) for low, high in steps if high.latency_s < math.inf]
        falls = (
            sum(high.latency_s < low.latency_s * (1 - tolerance) for low, high in feasible),
            sum(high.throughput < low.throughput * (1 - tolerance) for low, high in feasible),
        )
        shares.append((falls[0] / max(1, len(feasible)), falls[1] / max(1, len(feasible))))
    return shares[0], shares[1]


def _steps(shape: tuple[int, int], axis: int) -> Iterator[tuple[Point, Point]]:
    for first, second in product(range(shape[0]), range(shape[1])):
        after = (first + 1, second) if axis == 0 else (first, second + 1)
        if after[axis] < shape[axis]:
            yield (first, second), after


# --- Numbers that the paper prints ---


TASKS = {
    "S": ((256, 252, 512), (32, 13, 80)),
    "T": ((128, 81, 256), (128, 68, 320)),
    "G": ((64, 23, 128), (192, 93, 480)),
    "C1": ((256, 115, 512), (64, 30, 160)),
    "C2": ((512, 252, 1024), (256, 134, 640)),
}
"""Mean, standard deviation and longest of prompts and answers (Table 3)."""

Falls = tuple[float, float]
"""Percent of steps in which latency, throughput fall although the variable rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A row of Table 6: OPT-13B, task S, four A40.

    Attributes:
        bound_s: latency bound, ``None`` without one.
        policy: the schedule that was selected.
        variables: its control variables.
        latency_s: what it takes.
        requests_per_s: what it answers.
    """

    bound_s: float | None
    policy: str
    variables: str
    latency_s: float
    requests_per_s: float


TABLE_6 = (
    Selected(
        bound_s=3.1, policy="WAA", variables="B_E 4, T_P 2", latency_s=3.01, requests_per_s=22.41
    ),
    Selected(
        bound_s=5.9, policy="WAA", variables="B_E 10, T_P 2", latency_s=4.11, requests_per_s=23.76
    ),
    Selected(
        bound_s=11.5,
        policy="RRA",
        variables="B_E 52, N_D 13, T_P 4",
        latency_s=10.23,
        requests_per_s=25.23,
    ),
    Selected(
        bound_s=None,
        policy="RRA",
        variables="B_E 49, N_D 7, T_P 4",
        latency_s=16.87,
        requests_per_s=26.15,
    ),
)

TABLE_5: dict[str, dict[int, dict[str, Falls]]] = {
    "S": {
        2: {"B_E": (0.6, 2.3), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (0.8, 0.0)},
        5: {"B_E": (0.6, 0.3), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (0.5, 0.0)},
        10: {"B_E": (0.3, 0.0), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (0.4, 0.0)},
    },
    "T": {
        2: {"B_E": (0.2, 0.1), "N_D": (0.0, 0.0), "WAA B_E": (0.1, 0.0), "B_m": (10.9, 0.0)},
        5: {"B_E": (0.2, 0.0), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (10.6, 0.0)},
        10: {"B_E": (0.2, 0.0), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (10.4, 0.0)},
    },
}
"""By task, tolerance in percent and variable: GPT-3 39B on sixteen A40. Its fifth is T_P."""

TABLE_4 = {"39B": (16, 0.9, 2.1), "101B": (32, 1.3, 7.1), "175B": (32, 2.1, 11.9),
           "341B": (48, 3.5, 15.1)}  # fmt: skip
"""By model: GPUs, seconds of loading from DRAM and from SSD."""
TABLE_7 = {
    "RRA": ("1.68 (± 7.1 %)", "0.038 (± 2.4 %)"),
    "WAA": ("0.85 (± 11.8 %)", "0.041 (± 5.5 %)"),
}
"""By schedule: seconds of encoder and decoder, and the range of 99 %."""
