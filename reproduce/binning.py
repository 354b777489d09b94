"""The theory of multi-bin batching: throughput, bins needed, best boundaries, in closed form.

A batch of ``B`` requests of one bin is served as long as its longest member takes; throughput is
``B / E[T_k]`` (multi-bin batching, Sec. 4 and Appendix A.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from llmpq.errors import SpecError


def uniform_boundaries(shortest: float, longest: float, bins: int) -> tuple[float, ...]:
    """Return the boundaries of k bins of equal width, optimal for uniform lengths (Lemma 4.1)."""
    _check(1, bins)
    width = (longest - shortest) / bins
    return tuple(shortest + index * width for index in range(1, bins))


def uniform_service_s(shortest_s: float, longest_s: float, batch: int, bins: int) -> float:
    """Return ``E[T_k]`` for service times uniform on an interval (Theorem 4.2).

    ``(l_min + l_max) / 2 + (l_max - l_min) / (2 k) * (B - 1) / (B + 1)``.
    """
    _check(batch, bins)
    spread = longest_s - shortest_s
    return (shortest_s + longest_s) / 2 + spread / (2 * bins) * (batch - 1) / (batch + 1)


def uniform_throughput(shortest_s: float, longest_s: float, batch: int, bins: int) -> float:
    """Return requests a second ``B / E[T_k]``; without end as k grows it is ``B / E[T]``."""
    return batch / uniform_service_s(shortest_s, longest_s, batch, bins)


def bins_needed(shortest_s: float, longest_s: float, batch: int, throughput: float) -> int:
    """Return the fewest bins that reach a throughput (Theorem 4.3).

    Raises:
        SpecError: no number of bins does, because the throughput is that of perfect batches or
            above.
    """
    _check(batch, 1)
    mean_s = (shortest_s + longest_s) / 2
    left_s = batch / throughput - mean_s  # what waiting for the longest member may cost
    most_s = (longest_s - shortest_s) / 2 * (batch - 1) / (batch + 1)
    if most_s == 0 and left_s >= 0:
        return 1
    if left_s <= 0:
        raise SpecError(
            f"multi-bin batching: found a wanted throughput of {throughput:g} requests a second, "
            f"expected less than {batch / mean_s:g}, which no number of bins reaches"
        )
    return max(1, math.ceil(most_s / left_s * (1 - 1e-12)))


def uniform_bin_mix_service_s(edges_s: Sequence[float], batch: int) -> float:
    """Return ``E[T]`` of uniform service times under any bins (Eq. 9).

    Args:
        edges_s: ends of the bins, rising, from the shortest service time to the longest.
        batch: requests of a batch.
    """
    _check(batch, len(edges_s) - 1)
    whole = edges_s[-1] - edges_s[0]
    return math.fsum(
        (high - low) / whole * (low + (high - low) * batch / (batch + 1))
        for low, high in pairwise(edges_s)
    )


def exponential_boundaries(mean_s: float, batch: int, bins: int) -> tuple[float, ...]:
    """Return the boundaries that minimise the bound of :func:`exponential_service_bound_s`.

    Args:
        mean_s: mean service time.
        batch: requests of a batch.
        bins: how many; the last is open.

    Returns:
        the k - 1 boundaries, rising (Lemma A.1). In units of the mean, setting the derivatives of
        the bound to zero gives for the gaps between boundaries ``gap[k-1] = ln H_B`` and
        ``gap[i] = ln(1 + gap[i+1])``.
    """
    _check(batch, bins)
    gap = math.log(max(1.0, _harmonic(batch)))
    gaps = []
    for _ in range(bins - 1):
        gaps.append(gap)
        gap = math.log1p(gap)
    boundaries, edge = [], 0.0
    for gap in reversed(gaps):
        edge += gap
        boundaries.append(edge * mean_s)
    return tuple(boundaries)


def exponential_service_bound_s(mean_s: float, batch: int, boundaries_s: Sequence[float]) -> float:
    """Return an upper bound of ``E[T]`` for exponential service times (Eq. 27).

    A batch of a closed bin takes at most the bin's upper end; one of the open bin takes its lower
    end and ``H_B`` means, ``H_B`` the B-th harmonic number.
    """
    _check(batch, len(boundaries_s) + 1)
    edges = [0.0, *boundaries_s]
    closed = math.fsum(
        (math.exp(-low / mean_s) - math.exp(-high / mean_s)) * high for low, high in pairwise(edges)
    )
    last = edges[-1]
    return closed + math.exp(-last / mean_s) * (last + _harmonic(batch) * mean_s)


def _harmonic(count: int) -> float:
    return math.fsum(1 / number for number in range(1, count + 1))


def _check(batch: int, bins: int) -> None:
    if batch < 1 or bins < 1:
        raise SpecError(
            f"multi-bin batching: found a batch of {batch} and {bins} bins, expected at least 1"
        )
