"""Selection: which laws a set of samples supports, and how far their answers carry.

Every candidate, LLM-PQ's own regression among them, is cross-validated on the samples alone. The
better ones are blended, the best counting most: with few or coarsely timed samples the winner is
often luck, and a mean errs less. Where nothing beats the paper's features clearly, they answer; and
where they are the paper's regression as it stands, two samples at least must say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2, sqrt

import numpy as np
import numpy.typing as npt

from llmpq.costmodel.tables.laws import (
    STRIPS,
    BlendedLaw,
    HingedProblem,
    Law,
    Samples,
    fit_hinged,
    fit_straight,
    rows_of,
)
from llmpq.costmodel.tables.nnls import Array
from llmpq.costmodel.tables.parabola import fit_parabola, only_rows_differ
from llmpq.spec.precision import Phase

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
_STRIPS_SEEN = 8
"""Strips behind which one more is nothing to be seen."""
_STRIP_WORTH = 0.9
"""Share of the error without strips that one with them must stay under."""
_MAX_HINGES = 24
_SHARPNESS = 6.0
"""Power of (least error / its error) that is a law's share of the blend."""
_LEAST_SHARE = 0.05
_CLEARLY = 0.98
"""Share of the straight law's validated error that a blend must stay under to replace it."""
_FLOOR = 0.5
"""A validated law answers at least this share of the least measured seconds, as a fit does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A law before it is fitted: a straight one, of the paper's features, or a hinged one.

    Attributes:
        power: errors are weighted by ``seconds^-power``.
        hinges: how many at most, ``None`` for a law without.
        is_bent: the paper's features as a parabola of the rows alone, of any sign.
        strip: rows that a kernel for few rows takes at a time, ``None`` for a law without.
    """

    power: float
    hinges: int | None = None
    is_bent: bool = False
    strip: int | None = None

    def fit(self, samples: Samples) -> Law:
        """Fit it."""
        if self.is_bent:
            return fit_parabola(samples, self.power)
        if self.hinges is None:
            return fit_straight(samples, self.power)
        return fit_hinged(samples, self.hinges, self.power, self.strip)

    def validated(
        self, samples: Samples, folds: Sequence[npt.NDArray[np.bool_]]
    ) -> tuple[Law, list[Array]]:
        """Return the law of all samples, and the seconds of each fold foretold from the rest."""
        if self.hinges is None:
            pairs = ((samples.take(fold), self.fit(samples.take(~fold))) for fold in folds)
            return self.fit(samples), [law.seconds(one.batch, one.tokens) for one, law in pairs]
        problem = HingedProblem.of(samples, self.hinges, self.power, self.strip)
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

    @property
    def is_paper(self) -> bool:
        """Whether the paper's regression answers alone, any sign: nothing was seen to beat it."""
        return self.candidates == (Candidate(power=0.0, is_bent=True),)

    @property
    def strip(self) -> int | None:
        """Rows that a kernel takes at a time, the same in all laws that know any."""
        return max((one.strip for one in self.candidates if one.strip), default=None)

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
    folds = _folds(len(samples))
    candidates = _candidates(samples, _strip(samples, folds))
    held = np.concatenate([samples.seconds[fold] for fold in folds])
    floor = _FLOOR * float(samples.seconds.min())
    laws, columns = [], []
    for one in candidates:
        law, found = one.validated(samples, folds)
        laws.append(law)
        columns.append(np.maximum(np.concatenate(found), floor) / held)
    ratios = np.stack(columns, axis=1)
    order = np.argsort(np.concatenate([np.flatnonzero(fold) for fold in folds]), kind="stable")
    errors = np.abs(ratios - 1.0).mean(axis=0)
    shares = _shares(ratios[order], errors, len(samples), is_paper=candidates[0].is_bent)
    kept = np.flatnonzero(shares)
    choice = Choice(
        candidates=tuple(candidates[index] for index in kept),
        shares=tuple(shares[kept].tolist()),
        power=candidates[int(kept[np.argmin(errors[kept])])].power,
        deviation=float(np.quantile(np.abs(np.log(ratios @ shares)), 0.68)),
    )
    return choice, BlendedLaw(laws=tuple(laws[index] for index in kept), shares=choice.shares)


def _candidates(samples: Samples, strip: int | None) -> tuple[Candidate, ...]:
    """Return the candidates, the paper's first.

    Many samples need neither the coarsest hinges nor the trust in large ones alone.
    """
    count = len(samples)
    powers, densities = (_POWERS, _SAMPLES_A_HINGE) if count < _FEW else (_POWERS[:2], _FINE)
    found = [Candidate(power=0.0)]
    if only_rows_differ(samples):
        found = [Candidate(power=power, is_bent=True) for power in sorted({0.0, *powers})] + found
    for power in powers:
        found += [Candidate(power=power)] if power else []
        hinges = (min(max(2, count // density), _MAX_HINGES) for density in densities)
        found += [Candidate(power=power, hinges=one, strip=strip) for one in hinges]
    return tuple(found)


def _strip(samples: Samples, folds: Sequence[npt.NDArray[np.bool_]]) -> int | None:
    """Return the rows that a kernel for few rows takes at a time, where samples tell any.

    Only decode multiplies so few. One law, with and without, is cross-validated for all others.
    """
    inside = [one for one in STRIPS if _tells_strips(np.unique(samples.batch), one)]
    if samples.phase is not Phase.DECODE or not inside:
        return None
    order = np.argsort(np.concatenate([np.flatnonzero(fold) for fold in folds]), kind="stable")
    errors = {}
    for strip in (None, *inside):
        one = Candidate(power=1.0, hinges=max(2, len(samples) // _FINE[0]), strip=strip)
        _, found = one.validated(samples, folds)
        parts = zip(found, folds, strict=True)
        ratios = np.concatenate([part / samples.seconds[fold] for part, fold in parts])[order]
        errors[strip] = np.abs(ratios - 1.0).reshape(len(samples), -1).mean(axis=1)
    best = min(inside, key=lambda strip: float(errors[strip].mean()))
    told = believed(errors[None] - errors[best]) >= 1.0
    return best if told and errors[best].mean() < _STRIP_WORTH * errors[None].mean() else None


def _tells_strips(rows: Array, strip: int) -> bool:
    """Return whether sizes ``[R]``, ascending, tell steps behind every strip from a bend.

    Two neighbours less than a strip apart must lie on both sides of an edge, and two such within
    one strip, behind the first: powers of two take strips for a bend.
    """
    near = (rows[:-1] >= strip) & (np.diff(rows) < strip) & (rows[:-1] <= _STRIPS_SEEN * strip)
    crossed = np.diff(np.ceil(rows / strip)) > 0
    return bool((near & crossed).any() and (near & ~crossed).any())


def _shares(ratios: Array, errors: Array, count: int, *, is_paper: bool) -> Array:
    """Return the weights of the candidates ``[C]``.

    Args:
        ratios: foretold over measured ``[R, C]``, those of one sample together; first that of the
            paper's features, which may answer alone.
        errors: their mean errors ``[C]``.
        count: of the samples ``P``.
        is_paper: whether that first is the paper's regression, any sign, and not only akin to it.
    """
    weights = (errors.min() / errors) ** _SHARPNESS
    weights = np.where(weights < _LEAST_SHARE, 0.0, weights)
    weights = weights / weights.sum()
    alone = np.zeros(len(errors))
    alone[0] = 1.0
    gains = np.abs(ratios[:, 0] - 1.0) - np.abs(ratios @ weights - 1.0)
    if is_paper:
        share = believed(gains.reshape(count, -1).mean(axis=1))
    else:
        share = float(gains.mean() > (1.0 - _CLEARLY) * errors[0])
    result: Array = share * weights + (1.0 - share) * alone
    return result


def believed(gains: Array) -> float:
    """Return how far what samples gain ``[P]`` is to be believed, from 0 to 1.

    A mean may be the luck of one sample. Kish's effective number of samples behind it is 1 then,
    and 2 where two gain alike: what one says alone is not believed, what two agree on is.
    """
    largest = float(np.abs(gains).max())
    if float(gains.sum()) <= 0.0:
        return 0.0
    alike = gains / largest  # whose squares do not vanish, however small the gains
    return min(max(float(alike.sum() ** 2 / (alike**2).sum()) - 1.0, 0.0), 1.0)


def _folds(count: int) -> list[npt.NDArray[np.bool_]]:
    """Return masks ``[count]``; every sample is in one of each round."""
    folds = []
    for seed in range(_ROUNDS if count < _FEW else 1):
        fold = np.random.default_rng(seed).permutation(count) % _FOLDS
        folds += [fold == index for index in range(_FOLDS)]
    return folds


def _axes(phase: Phase, batch: Array, tokens: Array) -> list[Array]:
    """Return the sizes in which a shape may lie outside: rows, tokens, their product, batch.

    In decode rows are the batch already.
    """
    rows = rows_of(phase, batch, tokens)
    return [rows, tokens, rows * tokens, *([batch] if phase is Phase.PREFILL else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What was measured: the least and the most rows, tokens, rows times tokens, and batch.

    Attributes:
        phase: prefill or decode, which has no batch apart from its rows.
        low, high: by axis.
    """

    phase: Phase
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def around(cls, samples: Samples) -> Box:
        """Return the box of samples."""
        axes = _axes(samples.phase, samples.batch, samples.tokens)
        return cls(
            phase=samples.phase,
            low=tuple(float(one.min()) for one in axes),
            high=tuple(float(one.max()) for one in axes),
        )

    def octaves_outside(self, batch: float, tokens: float) -> tuple[float, ...]:
        """Return how many octaves a shape lies outside, by axis.

        A corner that no sample comes near is outside: few rows of long contexts and many rows of
        short ones do not tell of many rows of long ones.
        """
        rows = batch * tokens if self.phase is Phase.PREFILL else batch
        sizes = (rows, tokens, rows * tokens, batch)  # decode's box ends before the last
        return tuple(
            max(0.0, log2(size / most), log2(least / size))
            for size, least, most in zip(sizes, self.low, self.high, strict=False)
        )

    def clamped(self, rows: Array, tokens: Array) -> tuple[Array, Array]:
        """Return the nearest measured sizes: outside, the edge's correction carries on."""
        return (
            np.clip(rows, self.low[0], self.high[0]),
            np.clip(tokens, self.low[1], self.high[1]),
        )


WORK_AXES = 3
"""Axes of a box along which the work of a step grows; the batch of a prefill comes behind them."""
BLIND_GROWTH = 0.25
"""Deviation gained an octave outside, when there are too few shapes to find it out."""
_LEAST_GROWTH = 0.02
_KEPT_SHARES = (0.5, 0.75)
_SURE = 0.8
"""Share of tried shapes whose error a growth covers: a user's shapes are fewer and further."""


def reach(octaves: float) -> float:
    """Return what a deviation an octave is multiplied by, so many octaves outside.

    Nearer than an octave errors do not fade in proportion: a kernel may change just behind the
    last measured size.
    """
    return max(octaves, sqrt(octaves))


def growth_outside(samples: Samples, fit: Fit) -> tuple[float, ...]:
    """Return the deviation gained an octave outside, by axis of the box.

    Tried out on the samples: the largest quarter, then half, in each direction, is foretold from
    the rest.
    """
    axes = _axes(samples.phase, samples.batch, samples.tokens)
    orders = (np.argsort(sizes, kind="stable") for sizes in axes)
    return tuple(_growth(samples, order, axis, fit) for axis, order in enumerate(orders))


def _growth(samples: Samples, order: npt.NDArray[np.intp], axis: int, fit: Fit) -> float:
    slopes = []
    for share in _KEPT_SHARES:
        count = int(share * len(order))
        kept, held = samples.take(order[:count]), samples.take(order[count:])
        if len(kept) < MIN_HINGED:
            continue
        box = Box.around(kept)
        shapes = zip(held.batch.tolist(), held.tokens.tolist(), strict=True)
        octaves = np.array([box.octaves_outside(*shape) for shape in shapes])
        along = octaves[:, axis]
        outside = along > 0
        if axis == WORK_AXES:  # more sequences of the same work, or their work would be blamed
            outside &= ~octaves[:, :WORK_AXES].any(axis=1)
        floor = _FLOOR * float(kept.seconds.min())
        found = np.maximum(fit(kept).seconds(held.batch, held.tokens), floor)
        errors = np.abs(np.log(found / held.seconds))[outside]
        slopes.append(errors / np.maximum(along, np.sqrt(along))[outside])
    tried = np.concatenate(slopes) if slopes else np.empty(0)
    if len(tried):
        return max(_LEAST_GROWTH, float(np.quantile(tried, _SURE)))
    # The same work in other batches differs little where it was measured, rarely much elsewhere.
    return _LEAST_GROWTH if axis == WORK_AXES else BLIND_GROWTH
