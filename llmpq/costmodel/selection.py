"""Selection: which laws a set of samples supports, and how far their answers carry.

Every candidate is cross-validated on the samples alone. The better ones are blended, the best
counting most: with few or coarsely timed samples the winner is often luck, and a mean errs less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log2

import numpy as np
import numpy.typing as npt

from llmpq.costmodel.laws import (
    BlendedLaw,
    Law,
    Samples,
    fit_hinged,
    fit_straight,
    rows_of,
)
from llmpq.costmodel.nnls import Array

Fit = Callable[[Samples], Law]

MIN_HINGED = 12
"""Shapes from which hinges and a correction are tried; fewer get the straight law."""
_FOLDS = 5
_ROUNDS = 3
_FEW = 150
"""Samples under which cross-validation is repeated, since one round would be luck."""
_POWERS = (1.0, 0.5, 0.0)
_SAMPLES_A_HINGE = (12, 6, 3)
_FINE = (6, 3)
_MAX_HINGES = 24
_SHARPNESS = 6.0
"""Power of (least error / its error) that is a law's share of the blend."""
_LEAST_SHARE = 0.05
_FLOOR = 0.5
"""A validated law answers at least this share of the least measured seconds, as a fit does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen.

    Attributes:
        fit: fits the blend to samples.
        power: of the seconds that weighs errors in the best law; 1 is relative errors.
        deviation: relative error within which two thirds of the validated samples lay.
    """

    fit: Fit
    power: float
    deviation: float


def choose_law(samples: Samples) -> Choice:
    """Cross-validate the candidates and blend the better ones."""
    if len(samples) < MIN_HINGED:
        return Choice(fit=fit_straight, power=1.0, deviation=BLIND_GROWTH)
    candidates: list[tuple[Fit, float]] = []
    # Many samples need neither the coarsest hinges nor the trust in large ones alone.
    powers, shares = (_POWERS, _SAMPLES_A_HINGE) if len(samples) < _FEW else (_POWERS[:2], _FINE)
    for power in powers:
        candidates.append((partial(fit_straight, power=power), power))
        for share in shares:
            hinges = min(max(2, len(samples) // share), _MAX_HINGES)
            candidates.append((partial(fit_hinged, hinges=hinges, power=power), power))
    ratios = np.stack([_validated(samples, fit) for fit, _ in candidates], axis=1)
    errors = np.abs(ratios - 1.0).mean(axis=0)
    best = int(np.argmin(errors))
    weights = (errors[best] / errors) ** _SHARPNESS
    weights = np.where(weights < _LEAST_SHARE, 0.0, weights)
    weights /= weights.sum()
    blended = np.abs(np.log(ratios @ weights))
    kept = [index for index, weight in enumerate(weights) if weight]
    return Choice(
        fit=partial(
            _blend,
            fits=tuple(candidates[index][0] for index in kept),
            shares=tuple(float(weights[index]) for index in kept),
        ),
        power=candidates[best][1],
        deviation=float(np.quantile(blended, 0.68)),
    )


def _blend(samples: Samples, fits: Sequence[Fit], shares: tuple[float, ...]) -> Law:
    return BlendedLaw(laws=tuple(fit(samples) for fit in fits), shares=shares)


def _validated(samples: Samples, fit: Fit) -> Array:
    """Return predicted over measured of every sample, each time from the others ``[R x P]``."""
    ratios = []
    floor = _FLOOR * float(samples.seconds.min())
    for seed in range(_ROUNDS if len(samples) < _FEW else 1):
        fold = np.random.default_rng(seed).permutation(len(samples)) % _FOLDS
        for index in range(_FOLDS):
            held = samples.take(fold == index)
            predicted = fit(samples.take(fold != index)).seconds(held.batch, held.tokens)
            ratios.append(np.maximum(predicted, floor) / held.seconds)
    return np.concatenate(ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What was measured: the least and the most rows, tokens, and rows times tokens."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]

    @classmethod
    def around(cls, rows: Array, tokens: Array) -> Box:
        """Return the box of samples ``[P]``."""
        axes = (rows, tokens, rows * tokens)
        least, most = ([float(end(one)) for one in axes] for end in (np.min, np.max))
        return cls(low=(least[0], least[1], least[2]), high=(most[0], most[1], most[2]))

    def octaves_outside(self, rows: float, tokens: float) -> tuple[float, float, float]:
        """Return how many octaves a shape lies outside in rows, in tokens and in their product.

        A corner that no sample comes near is outside: few rows of long contexts and many rows of
        short ones do not tell of many rows of long ones.
        """
        rows_out, tokens_out, work_out = (
            max(0.0, log2(size / most), log2(least / size))
            for size, least, most in zip(
                (rows, tokens, rows * tokens), self.low, self.high, strict=True
            )
        )
        return rows_out, tokens_out, work_out

    def clamped(self, rows: Array, tokens: Array) -> tuple[Array, Array]:
        """Return the nearest measured sizes: outside, the edge's correction carries on."""
        return (
            np.clip(rows, self.low[0], self.high[0]),
            np.clip(tokens, self.low[1], self.high[1]),
        )


BLIND_GROWTH = 0.25
"""Deviation gained an octave outside, when there are too few shapes to find it out."""
_LEAST_GROWTH = 0.02
_KEPT_SHARES = (0.5, 0.75)


def growth_outside(samples: Samples, fit: Fit) -> tuple[float, float, float]:
    """Return the deviation gained an octave outside: in rows, in tokens, in their product.

    Tried out on the samples: the largest quarter, then half, in each direction, is foretold from
    the rest.
    """
    rows = rows_of(samples.phase, samples.batch, samples.tokens)
    rows_growth, tokens_growth, work_growth = (
        _growth(samples, np.argsort(sizes, kind="stable"), axis, fit)
        for axis, sizes in enumerate((rows, samples.tokens, rows * samples.tokens))
    )
    return rows_growth, tokens_growth, work_growth


def _growth(samples: Samples, order: npt.NDArray[np.intp], axis: int, fit: Fit) -> float:
    slopes = []
    for share in _KEPT_SHARES:
        count = int(share * len(order))
        kept, held = samples.take(order[:count]), samples.take(order[count:])
        if len(kept) < MIN_HINGED:
            continue
        box = Box.around(rows_of(samples.phase, kept.batch, kept.tokens), kept.tokens)
        rows = rows_of(samples.phase, held.batch, held.tokens).tolist()
        shapes = zip(rows, held.tokens.tolist(), strict=True)
        octaves = np.array([box.octaves_outside(*shape)[axis] for shape in shapes])
        floor = _FLOOR * float(kept.seconds.min())
        found = np.maximum(fit(kept).seconds(held.batch, held.tokens), floor)
        errors = np.abs(np.log(found / held.seconds)) / np.maximum(octaves, 1.0)
        slopes.append(errors[octaves > 0])
    tried = np.concatenate(slopes) if slopes else np.empty(0)
    return max(_LEAST_GROWTH, float(np.quantile(tried, 0.68))) if len(tried) else BLIND_GROWTH
