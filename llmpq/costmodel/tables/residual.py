"""Residual: a small smooth correction of a law, learned from its own relative errors.

A Gaussian process on the logarithm of measured over predicted, over the octaves of rows and tokens.
Its scales are those with the least leave-one-out error (exact, without refitting); where no scales
beat "no correction", there is none. Far from every sample it fades away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from llmpq.costmodel.tables.nnls import Array

MAX_POINTS = 1000
"""Samples that are kept; more are thinned at random, by a fixed seed."""
WORTH = 0.8
"""Share of the law's error that a correction must stay under; less gain is luck."""
_TUNED_POINTS = 120
MEDIAN_SQUARE = 0.455
"""Median of the square of a standard normal deviate."""
_CHUNK = 1024
"""Shapes priced at a time, so that the covariances stay in the cache."""
_ROW_OCTAVES = (0.1, 0.25, 0.5, 1.0, 2.0)
_SHAPE_OCTAVES = (0.5, 1.0, 2.0, 4.0)
_ROW_WEIGHTS = (0.0, 1.0, 3.0)
_NOISES = (0.003, 0.03, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """How far a residual reaches.

    Attributes:
        shape_octaves: along rows and tokens together.
        row_octaves: along rows alone, whatever the tokens: what the matrix products share.
        row_weight: variance of that part, the other's being 1.
        noise: variance of what no neighbour explains.
    """

    shape_octaves: float
    row_octaves: float
    row_weight: float
    noise: float


_START = Scales(shape_octaves=1.0, row_octaves=0.5, row_weight=1.0, noise=0.03)
_ROUND: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("noise", _NOISES),
    ("shape_octaves", _SHAPE_OCTAVES),
    ("row_weight", _ROW_WEIGHTS),
    ("row_octaves", _ROW_OCTAVES),
)


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: the inverse is made when asked for
class Residual:
    """A fitted correction.

    Attributes:
        points: octaves of the samples ``[P, 2]``.
        weights: ``[P]``, all zero when no correction helped.
        noise: how much noisier a sample is than the typical one, as variance ``[P]``.
        variance: variance of a residual far from every sample, noise apart; such that two thirds
            of the left-out samples lie within one deviation.
        scales: its reach.
    """

    points: Array
    weights: Array
    noise: Array
    variance: float
    scales: Scales

    @cached_property
    def inverse(self) -> Array:
        """Inverse covariance of the samples ``[P, P]``."""
        covariance = _noisy(self.points, self.scales, self.noise)
        return np.linalg.inv(covariance).astype(np.float64)

    @property
    def helps(self) -> bool:
        """Whether there is a correction."""
        return bool(self.weights.any())

    @property
    def noise_deviation(self) -> float:
        """The deviation of a repeated measurement, as far as the fit can tell."""
        return float(np.sqrt(self.variance * self.scales.noise))

    def log_factor(self, rows: Array, tokens: Array) -> Array:
        """Return the logarithm of the factor on the law ``[Q]``."""
        if not self.helps:
            return np.zeros(len(rows))
        asked = _octaves(rows, tokens)
        parts = [
            _kernel(asked[first : first + _CHUNK], self.points, self.scales) @ self.weights
            for first in range(0, len(asked), _CHUNK)
        ]
        return np.concatenate(parts)

    def deviation(self, rows: Array, tokens: Array) -> Array:
        """Return the standard deviation of the corrected logarithm ``[Q]``."""
        across = _kernel(_octaves(rows, tokens), self.points, self.scales)
        known = ((across @ self.inverse) * across).sum(axis=1)
        left = np.maximum(1.0 + self.scales.row_weight - known, 0.0) + self.scales.noise
        result: Array = np.sqrt(self.variance * left)
        return result


def fit_residual(
    rows: Array, tokens: Array, residuals: Array, noise: Array, seed: int = 0
) -> Residual:
    """Fit the correction.

    Args:
        rows: ``[P]``.
        tokens: ``[P]``.
        residuals: logarithms of measured over predicted ``[P]``.
        noise: how much noisier a sample is than the typical one, as variance ``[P]``.
        seed: of the thinning of large tables.
    """
    order = np.random.default_rng(seed).permutation(len(residuals))
    few, kept = order[:_TUNED_POINTS], order[:MAX_POINTS]
    octaves = _octaves(rows, tokens)
    scales, error = _tune(octaves[few], residuals[few], noise[few])
    inverse: Array = np.linalg.inv(_noisy(octaves[kept], scales, noise[kept])).astype(np.float64)
    weights = inverse @ residuals[kept]
    helps = error < WORTH * float((np.abs(residuals[few]) / np.sqrt(noise[few])).mean())
    left_out = (weights / np.diag(inverse)) if helps else residuals[kept]
    # The median square of a normal deviate is 0.455: outliers do not decide how sure we are.
    variance = float(np.median(left_out**2 * np.diag(inverse))) / MEDIAN_SQUARE
    return Residual(
        points=octaves[kept],
        weights=weights if helps else np.zeros(len(kept)),
        noise=noise[kept],
        variance=max(variance, np.finfo(float).tiny),
        scales=scales,
    )


def _tune(octaves: Array, residuals: Array, noise: Array) -> tuple[Scales, float]:
    """Return the scales with the least leave-one-out error found, and that error.

    One scale after the other is set to its best, twice over: as good as trying all their
    combinations to a few percent, in a quarter of the time.
    """
    rows, tokens = _gaps(octaves, octaves)
    across = {reach: _matern(np.hypot(rows, tokens) / reach) for reach in _SHAPE_OCTAVES}
    along = {reach: _matern(rows / reach) for reach in _ROW_OCTAVES}
    diagonal = np.diag(noise)
    spread = np.sqrt(noise)

    def error(scales: Scales) -> float:
        covariance = across[scales.shape_octaves] + scales.noise * diagonal
        if scales.row_weight:
            covariance = covariance + scales.row_weight * along[scales.row_octaves]
        inverse = np.linalg.inv(covariance)
        left_out = inverse @ residuals / inverse.diagonal()
        return float((np.abs(left_out) / spread).mean())

    known: dict[Scales, float] = {}
    best = _START
    for name, values in _ROUND * 2:
        for value in values:
            # What no correction needs is not tried: without that part its reach is idle.
            tried = replace(best, **{name: value})
            if tried not in known and (tried.row_weight or name != "row_octaves"):
                known[tried] = error(tried)
        best = min(known, key=known.__getitem__)
    return best, known[best]


def _octaves(rows: Array, tokens: Array) -> Array:
    return np.stack([np.log2(rows), np.log2(tokens)], axis=1)


def _noisy(octaves: Array, scales: Scales, noise: Array) -> Array:
    return _kernel(octaves, octaves, scales) + scales.noise * np.diag(noise)


def _gaps(left: Array, right: Array) -> tuple[Array, Array]:
    """Return the distances in rows and in tokens ``[L, R]``."""
    return (
        np.abs(left[:, None, 0] - right[None, :, 0]),
        np.abs(left[:, None, 1] - right[None, :, 1]),
    )


def _kernel(left: Array, right: Array, scales: Scales) -> Array:
    rows, tokens = _gaps(left, right)
    result = _matern(np.hypot(rows, tokens) / scales.shape_octaves)
    if scales.row_weight:
        result += scales.row_weight * _matern(rows / scales.row_octaves)
    return result


def _matern(distance: Array) -> Array:
    """Matern covariance of smoothness 3/2, its length scale absorbed in ``distance``."""
    result: Array = (1.0 + distance) * np.exp(-distance)
    return result
