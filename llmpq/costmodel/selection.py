"""Selection: which laws a set of samples supports, and how far their answers carry.

Every candidate, LLM-PQ's own regression among them, is cross-validated on the samples alone. The
better ones are blended, the best counting most: with few or coarsely timed samples the winner is
often luck, and a mean errs less. Where nothing beats the paper's regression clearly, it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
import numpy.typing as npt

from llmpq.costmodel.laws import (
    BlendedLaw,
    HingedProblem,
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
_CLEARLY = 0.98
"""Share of the paper's validated error that a blend must stay under to replace it."""
_FLOOR = 0.5
"""A validated law answers at least this share of the least measured seconds, as a fit does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A law before it is fitted: a straight one, of the paper's features, or a hinged one."""

    power: float
    hinges: int | None = None

    def fit(self, samples: Samples) -> Law:
        """Fit it."""
        if self.hinges is None:
            return fit_straight(samples, self.power)
        return fit_hinged(samples, self.hinges, self.power)

    def validated(
        self, samples: Samples, folds: Sequence[npt.NDArray[np.bool_]]
    ) -> tuple[Law, list[Array]]:
        """Return the law of all samples, and the seconds of each fold foretold from the rest."""
        if self.hinges is None:
            pairs = ((samples.take(fold), self.fit(samples.take(~fold))) for fold in folds)
            return self.fit(samples), [law.seconds(one.batch, one.tokens) for one, law in pairs]
        problem = HingedProblem.of(samples, self.hinges, self.power)
        law = problem.solved()
        return law, problem.left_out(law, folds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen.

    Attributes:
        candidates: the members of the blend.
        shares: their weights, adding up to 1.
        power: of the seconds that weighs errors in the best law; 1 is relative errors.
        deviation: relative error within which two thirds of the validated samples lay.
    """

    candidates: tuple[Candidate, ...]
    shares: tuple[float, ...]
    power: float
    deviation: float

    def fit(self, samples: Samples) -> Law:
        """Fit the blend to other samples."""
        return BlendedLaw(
            laws=tuple(one.fit(samples) for one in self.candidates), shares=self.shares
        )


def choose_law(samples: Samples) -> tuple[Choice, Law]:
    """Cross-validate the candidates and blend the better ones; return the blend, fitted, too."""
    if len(samples) < MIN_HINGED:
        choice = Choice(
            candidates=(Candidate(power=1.0),), shares=(1.0,), power=1.0, deviation=BLIND_GROWTH
        )
        return choice, choice.fit(samples)
    candidates, folds = _candidates(len(samples)), _folds(len(samples))
    held = np.concatenate([samples.seconds[fold] for fold in folds])
    floor = _FLOOR * float(samples.seconds.min())
    laws, columns = [], []
    for one in candidates:
        law, found = one.validated(samples, folds)
        laws.append(law)
        columns.append(np.maximum(np.concatenate(found), floor) / held)
    ratios = np.stack(columns, axis=1)
    errors = np.abs(ratios - 1.0).mean(axis=0)
    shares = _shares(ratios, errors)
    kept = np.flatnonzero(shares)
    choice = Choice(
        candidates=tuple(candidates[index] for index in kept),
        shares=tuple(shares[kept].tolist()),
        power=candidates[int(kept[np.argmin(errors[kept])])].power,
        deviation=float(np.quantile(np.abs(np.log(ratios @ shares)), 0.68)),
    )
    return choice, BlendedLaw(laws=tuple(laws[index] for index in kept), shares=choice.shares)


def _candidates(count: int) -> tuple[Candidate, ...]:
    """Return the candidates, the paper's first.

    Many samples need neither the coarsest hinges nor the trust in large ones alone.
    """
    powers, densities = (_POWERS, _SAMPLES_A_HINGE) if count < _FEW else (_POWERS[:2], _FINE)
    found = [Candidate(power=0.0)]
    for power in powers:
        found += [Candidate(power=power)] if power else []
        hinges = (min(max(2, count // density), _MAX_HINGES) for density in densities)
        found += [Candidate(power=power, hinges=one) for one in hinges]
    return tuple(found)


def _shares(ratios: Array, errors: Array) -> Array:
    """Return the weights of the candidates ``[C]``, the paper's being the first.

    Args:
        ratios: foretold over measured ``[R, C]``.
        errors: their mean errors ``[C]``.
    """
    weights = (errors.min() / errors) ** _SHARPNESS
    weights = np.where(weights < _LEAST_SHARE, 0.0, weights)
    weights = weights / weights.sum()
    alone = np.zeros(len(errors))
    alone[0] = 1.0
    blended = float(np.abs(ratios @ weights - 1.0).mean())
    return weights if blended < _CLEARLY * errors[0] else alone


def _folds(count: int) -> list[npt.NDArray[np.bool_]]:
    """Return masks ``[count]``; every sample is in one of each round."""
    folds = []
    for seed in range(_ROUNDS if count < _FEW else 1):
        fold = np.random.default_rng(seed).permutation(count) % _FOLDS
        folds += [fold == index for index in range(_FOLDS)]
    return folds


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
