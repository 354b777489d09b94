"""ExeGPT's formulas as the paper states them (Sec. 6), and the monotonicity of Table 5."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from llmpq.assigner.schedules.monotone import Evaluate, MemoizedEvaluator, Point
from llmpq.spec.workload import LengthDistribution


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
