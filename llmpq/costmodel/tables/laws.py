"""Laws: closed forms of one layer's seconds over batch and tokens, fitted to measured samples.

``fit_paper`` is the regression of LLM-PQ, Sec. 4.1, by plain least squares, kept to compare with.
``fit_straight`` has the same features, weighted errors and no negative coefficient. ``HingedLaw``
adds hinges where kernels change regime: the matrix products are any growing piecewise-linear
function of the rows they multiply, attention one of the work it does, each with its own
coefficients, so a total is enough to tell the two apart. ``BlendedLaw`` is a weighted mean of such
laws; one more kind is in ``llmpq.costmodel.tables.parabola``. All but the paper's are positive and
monotone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmpq.costmodel.tables.nnls import Array, solve_gram, solve_nnls
from llmpq.spec.precision import Phase

TILES = (64, 128)
"""Rows of the tiles in which kernels multiply."""
STRIPS = (4, 6, 8)
"""Rows that kernels for few rows take at a time; one at most, where samples tell it."""
STEPS = (16, 32, 64, 128, 256, 512)
"""Rows behind which libraries switch to another kernel, for a step up or none."""
SMOOTHNESS = 0.05
"""Weight of equal neighbouring slopes against relative errors; larger is straighter."""
STEP_CHARGE = 0.03
"""Weight of a step's relative height against relative errors: what bends needs no step."""
STEP_DOUBT = 3.0
"""How much more a step is charged for every octave between the samples on both sides of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Measured shapes of one phase and bitwidth: arrays of equal length ``[P]``.

    ``noise`` is the relative deviation of each measurement (``llmpq.costmodel.tables.clock``).
    """

    phase: Phase
    batch: Array
    tokens: Array
    seconds: Array
    noise: Array

    def take(self, chosen: npt.NDArray[Any]) -> Samples:
        """Return the samples at ``chosen`` (indices or a mask)."""
        return Samples(
            phase=self.phase,
            batch=self.batch[chosen],
            tokens=self.tokens[chosen],
            seconds=self.seconds[chosen],
            noise=self.noise[chosen],
        )

    def weights(self, power: float) -> Array:
        """Return weights of errors ``[P]``: ``seconds^-power``, less under a coarse clock."""
        result: Array = self.seconds**-power * (self.noise.min() / self.noise)
        return result

    def __len__(self) -> int:
        """Return the number of samples ``P``."""
        return len(self.seconds)


class Law(Protocol):
    """Seconds as a function of the shape: ``shared(rows, tokens) + each * batch``."""

    @property
    def each(self) -> float:
        """Seconds of a sequence that neither rows nor tokens explain."""
        ...

    def shared(self, rows: Array, tokens: Array) -> Array:
        """Return the seconds that grow with rows and with tokens ``[P]``."""
        ...

    def seconds(self, batch: Array, tokens: Array) -> Array:
        """Return seconds ``[P]`` at shapes ``batch [P]``, ``tokens [P]``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StraightLaw:
    """A weighted sum of the paper's features: ``1, v, s, v s`` and in prefill ``v s^2``."""

    phase: Phase
    coefficients: Array

    def seconds(self, batch: Array, tokens: Array) -> Array:
        """Return seconds; see ``Law``."""
        result: Array = _paper_features(self.phase, batch, tokens) @ self.coefficients
        return result

    @property
    def each(self) -> float:
        """Seconds of a sequence that neither rows nor tokens explain, never below 0."""
        return max(0.0, float(self.coefficients[1])) if self.phase is Phase.PREFILL else 0.0

    def shared(self, rows: Array, tokens: Array) -> Array:
        """Return the seconds that grow with rows and with tokens ``[P]``."""
        batch = rows / tokens if self.phase is Phase.PREFILL else rows
        result: Array = self.seconds(batch, tokens) - self.each * batch
        return result


def fit_paper(samples: Samples) -> StraightLaw:
    """Fit the paper's regression as the paper does: least squares on seconds, any sign."""
    features = _paper_features(samples.phase, samples.batch, samples.tokens)
    scale = np.abs(features).max(axis=0)
    found = np.linalg.lstsq(features / scale, samples.seconds, rcond=None)[0] / scale
    return StraightLaw(phase=samples.phase, coefficients=found)


def fit_straight(samples: Samples, power: float = 1.0) -> StraightLaw:
    """Fit the paper's features, none negative, to errors weighted by ``seconds^-power``."""
    features = _paper_features(samples.phase, samples.batch, samples.tokens)
    # The likeliest lone cause stands first, for tables with fewer samples than features.
    order = [3, 0, 1, 2, 4] if samples.phase is Phase.PREFILL else [0, 1, 3, 2]
    weights = samples.weights(power)
    found = np.zeros(features.shape[1])
    weighted = features[:, order] * weights[:, None]
    found[order] = solve_nnls(weighted, samples.seconds * weights)
    return StraightLaw(phase=samples.phase, coefficients=found)


def _paper_features(phase: Phase, batch: Array, tokens: Array) -> Array:
    columns = [np.ones_like(batch), batch, tokens, batch * tokens]
    if phase is Phase.PREFILL:
        columns.append(batch * tokens**2)
    return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HingedLaw:
    """Growing functions of the products' rows and of attention's work, summed.

    Rows are ``v s``, in decode ``v``; work is rows times tokens. Both enter piecewise linearly;
    rows also rounded up to whole tiles, since a kernel multiplies a half-filled tile as a full one.

    Attributes:
        phase: prefill or decode.
        row_knots: rows at which their slope may change.
        work_knots: work at which its slope may change.
        tiles: rows that are multiplied as one.
        coefficients: none negative: ``1``, tokens, one a tile size, the slopes of rows and of work,
            and last, in prefill, ``v``.
    """

    phase: Phase
    row_knots: Array
    work_knots: Array
    tiles: tuple[int, ...]
    coefficients: Array

    def seconds(self, batch: Array, tokens: Array) -> Array:
        """Return seconds; see ``Law``."""
        return self.shared(rows_of(self.phase, batch, tokens), tokens) + self.each * batch

    @property
    def each(self) -> float:
        """Seconds of a sequence that neither rows nor tokens explain."""
        return float(self.coefficients[-1]) if self.phase is Phase.PREFILL else 0.0

    def shared(self, rows: Array, tokens: Array) -> Array:
        """Return the seconds that grow with rows and with tokens ``[P]``."""
        features = _hinged_features(rows, tokens, self.tiles, self.row_knots, self.work_knots)
        result: Array = features @ self.coefficients[: features.shape[1]]
        return result


def fit_hinged(
    samples: Samples, hinges: int, power: float = 1.0, strip: int | None = None
) -> HingedLaw:
    """Fit hinges to relative errors, with a mild preference for equal neighbouring slopes.

    Args:
        samples: the measurements.
        hinges: knots on the rows, at most, spread over the measured sizes; half as many on work.
        power: errors are weighted by ``seconds^-power``. 1 is relative; less trusts the large
            ones more, as a clock with a coarse tick asks for.
        strip: rows below the tiles' that are also multiplied as one.
    """
    return HingedProblem.of(samples, hinges, power, strip).solved()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HingedProblem:
    """The least squares behind ``fit_hinged``, kept so that leaving samples out is cheap.

    Attributes:
        samples: the measurements.
        row_knots, work_knots, tiles: as in ``HingedLaw``.
        weighted: features times weights ``[P, C]``.
        target: seconds times weights ``[P]``.
        smooth: rows that charge steps and changes of slope ``[K, C]``.
    """

    samples: Samples
    row_knots: Array
    work_knots: Array
    tiles: tuple[int, ...]
    features: Array
    weighted: Array
    target: Array
    smooth: Array

    @classmethod
    def of(
        cls, samples: Samples, hinges: int, power: float, strip: int | None = None
    ) -> HingedProblem:
        """Set the problem up; arguments as of ``fit_hinged``."""
        phase, tokens = samples.phase, samples.tokens
        rows = rows_of(phase, samples.batch, tokens)
        knots = _knots(rows, hinges), _knots(rows * tokens, max(2, hinges // 2))
        tiles = TILES if strip is None else (strip, *TILES)
        features = _hinged_features(rows, tokens, tiles, *knots)
        if phase is Phase.PREFILL:
            features = np.column_stack([features, samples.batch])
        weights = samples.weights(power)
        first = 2 + len(tiles)
        features[:, first : first + len(STEPS)] *= _seen(rows)
        smooth = [_charged_steps(rows, weights, features.shape[1], first)]
        first += len(STEPS)
        for values, places in zip((rows, rows * tokens), knots, strict=True):
            smooth.append(_smoothing(values, weights, places, features.shape[1], first))
            first += len(places) + 1
        return cls(
            samples=samples,
            row_knots=knots[0],
            work_knots=knots[1],
            tiles=tiles,
            features=features,
            weighted=features * weights[:, None],
            target=samples.seconds * weights,
            smooth=np.vstack(smooth),
        )

    def solved(self) -> HingedLaw:
        """Return the law of all samples."""
        return HingedLaw(
            phase=self.samples.phase,
            row_knots=self.row_knots,
            work_knots=self.work_knots,
            tiles=self.tiles,
            coefficients=solve_gram(self._gram(), self.weighted.T @ self.target),
        )

    def left_out(self, law: HingedLaw, folds: Sequence[npt.NDArray[np.bool_]]) -> list[Array]:
        """Return the seconds of each fold ``[P] bool``, foretold from the samples outside it.

        The knots stay those of all shapes; the seconds of a fold play no part. Every fold starts
        from the columns of ``law``, which solves the whole, so a handful of steps is enough.
        """
        gram, pull = self._gram(), self.weighted.T @ self.target
        found = []
        for fold in folds:
            held = self.weighted[fold]
            left = float((~fold).sum()) / len(fold)
            rest = gram - held.T @ held - (1.0 - left) * (self.smooth.T @ self.smooth)
            coefficients = solve_gram(rest, pull - held.T @ self.target[fold], law.coefficients)
            found.append(self.features[fold] @ coefficients)
        return found

    def _gram(self) -> Array:
        result: Array = self.weighted.T @ self.weighted + self.smooth.T @ self.smooth
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlendedLaw:
    """A mean of laws: it errs less than the one that happened to validate best.

    Attributes:
        laws: of one phase.
        shares: weights of the laws, adding up to 1.
    """

    laws: tuple[Law, ...]
    shares: tuple[float, ...]

    @property
    def each(self) -> float:
        """Seconds of a sequence that neither rows nor tokens explain."""
        return sum(share * law.each for share, law in zip(self.shares, self.laws, strict=True))

    def shared(self, rows: Array, tokens: Array) -> Array:
        """Return the seconds that grow with rows and with tokens ``[P]``."""
        parts = [law.shared(rows, tokens) for law in self.laws]
        result: Array = np.average(parts, axis=0, weights=self.shares)
        return result

    def seconds(self, batch: Array, tokens: Array) -> Array:
        """Return seconds; see ``Law``."""
        parts = [law.seconds(batch, tokens) for law in self.laws]
        result: Array = np.average(parts, axis=0, weights=self.shares)
        return result


def rows_of(phase: Phase, batch: Array, tokens: Array) -> Array:
    """Return the rows that the matrix products of a step multiply."""
    return batch * tokens if phase is Phase.PREFILL else batch


def _hinged_features(
    rows: Array, tokens: Array, tiles: Sequence[int], row_knots: Array, work_knots: Array
) -> Array:
    steps = [(rows > step).astype(float) for step in STEPS]
    return np.column_stack(
        [
            np.ones_like(rows),
            tokens,
            *(np.ceil(rows / tile) for tile in tiles),
            *steps,
            _pieces(rows, row_knots),
            _pieces(rows * tokens, work_knots),
        ]
    )


def _pieces(values: Array, knots: Array) -> Array:
    """Return how much of each value lies between neighbouring knots ``[P, knots + 1]``."""
    lows = np.concatenate([[0.0], knots])
    highs = np.concatenate([knots, [np.inf]])
    result: Array = np.clip(values[:, None], lows, highs) - lows
    return result


def _knots(values: Array, count: int) -> Array:
    sizes = np.unique(values)
    if len(sizes) - 1 <= count:
        return sizes[:-1]
    inner: Array = np.unique(np.quantile(sizes, np.linspace(0.0, 1.0, count + 2)[1:-1]))
    return inner


def _smoothing(values: Array, weights: Array, knots: Array, columns: int, first: int) -> Array:
    """Return one row a knot that charges the change of slope there, in the errors' own unit."""
    rows = np.zeros((len(knots), columns))
    if not len(knots):
        return rows
    widths = np.diff(np.concatenate([[0.0], knots]))
    near = _near(knots, values, weights)
    charge = SMOOTHNESS * widths * near * np.sqrt(len(weights) / (len(knots) + 1))
    index = np.arange(len(knots))
    rows[index, first + index] = -charge
    rows[index, first + index + 1] = charge
    return rows


def _seen(rows: Array) -> npt.NDArray[np.bool_]:
    """Return which steps have a sample within an octave on both sides ``[S]``.

    In a wider gap nobody can tell where a step lies, nor a step from a bend.
    """
    below, above = _neighbours(rows)
    steps = np.array(STEPS)
    result: npt.NDArray[np.bool_] = (below > steps / 2) & (above <= steps * 2)
    return result


def _neighbours(rows: Array) -> tuple[Array, Array]:
    """Return the measured rows next to each step, below and above it ``[S]``; 0 and infinite."""
    below = [max(rows[rows <= step], default=0.0) for step in STEPS]
    above = [min(rows[rows > step], default=np.inf) for step in STEPS]
    return np.array(below, dtype=float), np.array(above, dtype=float)


def _charged_steps(rows: Array, weights: Array, columns: int, first: int) -> Array:
    """Return one row a step that charges its height, in the errors' own unit ``[S, C]``.

    The wider the gap between the samples around it, the likelier a bend is taken for a step.
    """
    below, above = _neighbours(rows)
    gaps = np.log2(
        above / np.maximum(below, 1.0), where=np.isfinite(above), out=np.zeros(len(STEPS))
    )
    index = np.arange(len(STEPS))
    found = np.zeros((len(STEPS), columns))
    charges = STEP_CHARGE * (1.0 + STEP_DOUBT * gaps)
    found[index, first + index] = charges * _near(np.array(STEPS), rows, weights)
    return found


def _near(places: npt.NDArray[Any], values: Array, weights: Array) -> Array:
    """Return the weight of samples near each place; sorted against sorted will do for a scale."""
    result: Array = np.interp(places, np.sort(values), np.sort(weights)[::-1])
    return result
