"""Bounds: what measured shapes say of every other one, when seconds never fall with a shape.

A shape costs at least what any measured shape that is no larger in batch and tokens costs, and at
most what any that is no smaller does. Measurements that contradict each other by noise are first
pooled (isotonic regression); all others stay as they were measured, so a measured shape answers
for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from llmpq.costmodel.tables.laws import Samples
from llmpq.costmodel.tables.nnls import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """Measured seconds as bounds; monotone in batch and tokens, the lower never above the upper.

    Attributes:
        batch: of the samples ``[P]``.
        tokens: ``[P]``.
        seconds: as measured, pooled where they contradicted ``[P]``.
    """

    batch: Array
    tokens: Array
    seconds: Array

    def at(self, batch: float, tokens: float) -> tuple[float, float]:
        """Return the least and the most seconds, 0 and infinite where unknown."""
        below = self.seconds[(self.batch <= batch) & (self.tokens <= tokens)]
        above = self.seconds[(self.batch >= batch) & (self.tokens >= tokens)]
        return (
            float(below.max()) if len(below) else 0.0,
            float(above.min()) if len(above) else inf,
        )


def measured_bounds(samples: Samples) -> Bounds:
    """Return the bounds that samples of unlike shapes give; where pooled, the surer count more."""
    batch, tokens = samples.batch, samples.tokens
    below = (batch[:, None] <= batch) & (tokens[:, None] <= tokens)  # [P, P]: row precedes column
    order = np.lexsort((tokens, batch))
    values = np.log(samples.seconds)
    pooled = _isotonic(values, samples.noise**-2.0, below, order)
    # What was not pooled stays as it was measured, to the last digit.
    seconds = np.where(pooled == values, samples.seconds, np.exp(pooled))
    return Bounds(batch=batch, tokens=tokens, seconds=seconds)


def _isotonic(
    values: Array, weights: Array, below: npt.NDArray[np.bool_], order: npt.NDArray[np.intp]
) -> Array:
    """Return values that respect a partial order, contradicting ones pooled to their mean.

    The generalised pool-adjacent-violators of Burdakov and Sysoev (2006): samples enter in an
    order that follows the partial one, and absorb whichever preceding block lies highest above
    them. Exact for a total order, close to the least squares for others.
    """
    pooled = values.copy()
    block = np.arange(len(values))
    for index in order:
        members = block == index
        before = below[:, index].copy()
        while True:
            before &= ~members
            candidates = np.flatnonzero(before & (pooled > pooled[index]))
            if not len(candidates):
                break
            worst = candidates[np.argmax(pooled[candidates])]
            absorbed = block == block[worst]
            members |= absorbed
            before |= below[:, absorbed].any(axis=1)
            block[absorbed] = index
            pooled[members] = np.average(values[members], weights=weights[members])
    return pooled
