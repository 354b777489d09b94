"""Law: seconds of one layer as a non-negative sum of piecewise-linear functions of the shape.

Matrix products take a function of the rows that they multiply, with steps where libraries switch
kernels; attention one of its work, rows times tokens, and rows times one of the tokens. A constant
and terms in tokens and in sequences are added. No coefficient is negative, so the law is positive
and never falls with batch or tokens. Without knots it is the regression of LLM-PQ, Sec. 4.1.
Where sequences of a step differ, tokens are their mean, and a term in the longest of them is added:
attention ends with its longest sequence, and tables of blocks are padded to it.

Samples far from the law on which most others agree are left out. Weighted fits find that law: of
least absolute errors, and then of errors that count no more than small ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from llmpq.costmodel.tables.nnls import Array, solve_nnls
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample

STEPS = (4, 8, 16, 32, 64, 128, 256, 512)
"""Rows above which seconds may jump: libraries and compiled kernels switch there."""
ROW_OCTAVES, WORK_OCTAVES, LENGTH_OCTAVES = 0.5, 2.0, 2.0
"""Spacing of the knots over rows, over work and over tokens, in powers of two."""
MIN_LENGTH_SAMPLES = 16
"""Samples from which attention may also bend over the tokens; fewer do not determine it."""
SMOOTHNESS = 0.2
"""Weight of a change of slope against relative errors; larger is straighter."""
STEP_CHARGE = 0.03
"""Weight of a step's relative height against relative errors, times the square of the ratio of the
samples around it: a bend is preferred to a step."""
MIN_TESTED = 12
"""Samples from which a fit is tested on some of them; fewer do not show an outlier."""
OUTLIER, OUTLIER_SPREADS = 1.4, 10.0
"""Ratio to the law and standard deviations of the other samples from which a sample is an outlier,
both of them. Kernels that get faster with more rows are up to 1.3 times off, as are their
neighbours (Helix's V100)."""
FITS = 3
"""Weighted fits of each kind that find the law on which most samples agree."""
_SMALL_ERROR = 0.02
"""Relative error up to which a sample has its full weight in them."""
_STANDARD = 1.4826
"""Standard deviation of normal errors, relative to their median size."""
_LEAST_SHARE = 1e-3
"""Of the least measured seconds: what a law answers at least."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Measured shapes of one phase and bitwidth: arrays of equal length ``[P]``.

    ``tokens`` are those of each sequence in the mean, ``longest`` those of the longest.
    """

    phase: Phase
    batch: Array
    tokens: Array
    longest: Array
    seconds: Array

    def take(self, chosen: npt.NDArray[np.bool_]) -> Samples:
        """Return the samples at ``chosen [P]``."""
        return Samples(
            phase=self.phase,
            batch=self.batch[chosen],
            tokens=self.tokens[chosen],
            longest=self.longest[chosen],
            seconds=self.seconds[chosen],
        )

    def precedes(self) -> npt.NDArray[np.bool_]:
        """Return whether the sample of a row is no larger than that of a column ``[P, P]``."""
        axes = (self.batch, self.tokens, self.longest)
        found = [axis[:, None] <= axis for axis in axes]
        result: npt.NDArray[np.bool_] = np.logical_and.reduce(found)
        return result

    @property
    def shapes(self) -> list[tuple[float, float, float]]:
        """Batch, tokens and longest sequence of each."""
        axes = (self.batch, self.tokens, self.longest)
        return list(zip(*(axis.tolist() for axis in axes), strict=True))

    @property
    def rows(self) -> Array:
        """Rows that the matrix products multiply ``[P]``: ``v s`` in prefill, ``v`` in decode."""
        return self.batch * self.tokens if self.phase is Phase.PREFILL else self.batch

    def __len__(self) -> int:
        return len(self.seconds)


def gather(samples: Sequence[LatencySample]) -> Samples:
    """Return samples of one phase and bitwidth as arrays; repeated shapes by their median."""
    repeated: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        repeated.setdefault((sample.batch, sample.tokens), []).append(sample.seconds)
    shapes = sorted(repeated)
    tokens = np.array([float(tokens) for _, tokens in shapes])
    return Samples(
        phase=samples[0].phase,
        batch=np.array([float(batch) for batch, _ in shapes]),
        tokens=tokens,
        longest=tokens,
        seconds=np.array([median(repeated[shape]) for shape in shapes]),
    )


class Polyline:
    """A non-decreasing piecewise-linear function that is 0 at 0."""

    def __init__(self, knots: Array, slopes: Array) -> None:
        """Take ``knots [K]``, ascending and positive, and ``slopes [K + 1]``, none negative."""
        starts = np.concatenate([[0.0], knots])
        values = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(starts))])
        self._starts: list[float] = starts.tolist()
        self._values: list[float] = values.tolist()
        self._slopes: list[float] = slopes.tolist()

    def __call__(self, size: float) -> float:
        """Return the value at a positive size."""
        piece = bisect_right(self._starts, size) - 1
        return self._values[piece] + self._slopes[piece] * (size - self._starts[piece])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Law:
    """Seconds of a layer: a non-negative sum of piecewise-linear functions of its shape.

    ``jumps`` sums the jumps of the seconds up to each of the ``steps`` of the rows, from 0;
    ``of_work`` is a function of rows times tokens, ``of_length`` one of the tokens, times rows;
    ``each_longest`` and ``of_longest``, one of the rows, are multiplied by the longest sequence.
    """

    phase: Phase
    least: float
    constant: float
    each_sequence: float
    each_token: float
    steps: tuple[float, ...]
    jumps: tuple[float, ...]
    of_rows: Polyline
    of_work: Polyline
    of_length: Polyline
    each_longest: float
    of_longest: Polyline

    def seconds(self, batch: float, tokens: float, longest: float | None = None) -> float:
        """Return the seconds at a shape, all at least 1; ``longest`` is ``tokens`` by default."""
        rows = batch * tokens if self.phase is Phase.PREFILL else batch
        total = self.constant + self.each_sequence * batch + self.each_token * tokens
        total += self.jumps[bisect_left(self.steps, rows)] + self.of_rows(rows)
        total += self.of_work(rows * tokens) + rows * self.of_length(tokens)
        total += (longest or tokens) * (self.each_longest + self.of_longest(rows))
        return max(total, self.least)

    def seconds_of(self, samples: Samples) -> Array:
        """Return the seconds at the shapes of samples ``[P]``."""
        return np.array([self.seconds(*shape) for shape in samples.shapes])


def fit_without_outliers(samples: Samples) -> tuple[Law, npt.NDArray[np.bool_]]:
    """Return the law of the samples that agree with most others, and which to trust ``[P]``.

    These have in addition a slow one without a larger shape and a fast one without a smaller one:
    kernels change, and nothing else was measured there.
    """
    law = fit_law(samples)
    gaps = _gaps(law, samples)
    # An outlier bends the first fit towards itself.
    if len(samples) < MIN_TESTED or np.abs(gaps).max() <= math.log(OUTLIER) / 2.0:
        return law, np.ones(len(samples), dtype=bool)
    for weights in FITS * (_absolute,) + FITS * (_bounded,):
        gaps = _gaps(fit_law(samples, weights(gaps)), samples)
    spread = _STANDARD * float(np.median(np.abs(gaps)))
    most = max(math.log(OUTLIER), OUTLIER_SPREADS * spread)
    precedes = samples.precedes()
    has_larger, has_smaller = precedes.sum(axis=1) > 1, precedes.sum(axis=0) > 1
    is_outlier = (gaps > most) & has_larger | (gaps < -most) & has_smaller
    return fit_law(samples.take(np.abs(gaps) <= most)), ~is_outlier


def _gaps(law: Law, samples: Samples) -> Array:
    """Return the logarithms of measured over fitted seconds ``[P]``."""
    result: Array = np.log(samples.seconds / law.seconds_of(samples))
    return result


def _absolute(gaps: Array) -> Array:
    """Return weights with which the squares of relative errors become absolute gaps ``[P]``."""
    squares = np.maximum(np.expm1(-gaps) ** 2, np.finfo(float).tiny)
    result: Array = np.sqrt(np.minimum(1.0, _SMALL_ERROR * np.abs(gaps) / squares))
    return result


def _bounded(gaps: Array) -> Array:
    """Return weights with which no relative error counts more than a small one ``[P]``."""
    result: Array = _SMALL_ERROR / np.maximum(np.abs(np.expm1(-gaps)), _SMALL_ERROR)
    return result


def fit_law(samples: Samples, weights: Array | None = None) -> Law:
    """Fit a law to relative errors, with a preference for equal neighbouring slopes.

    Args:
        samples: of one phase and bitwidth.
        weights: of the relative errors, up to 1 ``[P]``; 1 by default.
    """
    rows, tokens, longest = samples.rows, samples.tokens, samples.longest
    differ = bool((longest > tokens).any())
    bends_with_length = len(samples) >= MIN_LENGTH_SAMPLES
    knots = {
        "rows": _knots(rows, ROW_OCTAVES),
        "work": _knots(rows * tokens, WORK_OCTAVES),
        "length": _knots(tokens, LENGTH_OCTAVES) if bends_with_length else np.empty(0),
    }
    steps, step_charges = _determined_steps(rows)
    is_prefill = samples.phase is Phase.PREFILL
    one = np.ones((len(samples), 1))
    parts = {
        "rows": _pieces(rows, knots["rows"]),
        "constant": one,
        "sequence": one * samples.batch[:, None] * is_prefill,  # in decode these are the rows
        "token": one * tokens[:, None],
        "steps": (rows[:, None] > steps).astype(float),
        "work": _pieces(rows * tokens, knots["work"]),
        "length": rows[:, None] * _pieces(tokens, knots["length"]) * bends_with_length,
        "longest": one * longest[:, None] * differ,
        "padding": longest[:, None] * _pieces(rows, knots["rows"]) * differ,
    }
    # A single sample is explained by the first part: rows in prefill, the constant in decode.
    order = (
        list(parts) if is_prefill else ["constant", *(name for name in parts if name != "constant")]
    )
    rates = 1.0 / samples.seconds
    charges = {
        "steps": np.diag(step_charges * _near(steps, rows, rates)),
        "rows": _smoothing(rows, rates, knots["rows"]),
        "work": _smoothing(rows * tokens, rates, knots["work"]),
        "length": float(np.median(rows)) * _smoothing(tokens, rates, knots["length"]),
        "padding": float(np.median(longest)) * _smoothing(rows, rates, knots["rows"]),
    }
    target = np.ones(len(samples)) if weights is None else weights
    found = _solve({name: parts[name] for name in order}, charges, rates, target)
    jumps = np.concatenate([[0.0], np.cumsum(found["steps"])])
    return Law(
        phase=samples.phase,
        least=_LEAST_SHARE * float(samples.seconds.min()),
        constant=float(found["constant"][0]),
        each_sequence=float(found["sequence"][0]),
        each_token=float(found["token"][0]),
        steps=tuple(steps.tolist()),
        jumps=tuple(jumps.tolist()),
        of_rows=Polyline(knots["rows"], found["rows"]),
        of_work=Polyline(knots["work"], found["work"]),
        of_length=Polyline(knots["length"], found["length"]),
        each_longest=float(found["longest"][0]),
        of_longest=Polyline(knots["rows"], found["padding"]),
    )


def paper_features(phase: Phase, batch: Array, tokens: Array) -> Array:
    """Return LLM-PQ's features (Sec. 4.1) ``[P, F]``: ``v s, 1, v, s``, in prefill ``v s^2``."""
    columns = [batch * tokens, np.ones_like(batch), batch, tokens]
    if phase is Phase.PREFILL:
        columns.append(batch * tokens**2)
    return np.stack(columns, axis=1)


def _solve(
    parts: dict[str, Array], charges: dict[str, Array], rates: Array, weights: Array
) -> dict[str, Array]:
    """Return the coefficients of each part, ``[P, C]`` columns, ``charges`` ``[K, C]`` added."""
    edges = np.cumsum([0, *(one.shape[1] for one in parts.values())])
    first = dict(zip(parts, edges, strict=False))
    blocks = [np.column_stack(list(parts.values())) * (rates * weights)[:, None]]
    for name, charge in charges.items():
        block = np.zeros((len(charge), edges[-1]))
        block[:, first[name] : first[name] + charge.shape[1]] = charge
        blocks.append(block)
    matrix = np.vstack(blocks)
    target = np.zeros(len(matrix))
    target[: len(weights)] = weights
    solution = solve_nnls(matrix, target)
    return dict(zip(parts, np.split(solution, edges[1:-1]), strict=True))


def _pieces(sizes: Array, knots: Array) -> Array:
    """Return how much of each size lies between neighbouring knots ``[P, K + 1]``."""
    lows = np.concatenate([[0.0], knots])
    highs = np.concatenate([knots, [np.inf]])
    result: Array = np.clip(sizes[:, None], lows, highs) - lows
    return result


def _knots(sizes: Array, octaves: float) -> Array:
    """Return the powers of ``2^octaves`` strictly between the least and the largest size."""
    low, high = np.log2(sizes.min()) / octaves, np.log2(sizes.max()) / octaves
    result: Array = 2.0 ** (octaves * np.arange(np.floor(low) + 1.0, np.ceil(high)))
    return result


def _determined_steps(rows: Array) -> tuple[Array, Array]:
    """Return the steps with a sample within an octave on both sides; wide gaps are charged more."""
    steps = np.array(STEPS, dtype=float)
    below = np.array([rows[rows <= step].max(initial=0.0) for step in steps])
    above = np.array([rows[rows > step].min(initial=np.inf) for step in steps])
    near = (below > steps / 2) & (above <= 2 * steps)
    return steps[near], STEP_CHARGE * (above[near] / below[near]) ** 2


def _smoothing(sizes: Array, rates: Array, knots: Array) -> Array:
    """Return one row a knot that charges the change of slope there ``[K, K + 1]``."""
    widths = np.diff(np.concatenate([[0.0], knots]))
    charge = widths * _near(knots, sizes, rates) * np.sqrt(len(sizes) / (len(knots) + 1))
    charges = SMOOTHNESS * charge[:, None]
    result: Array = charges * (
        np.eye(len(knots), len(knots) + 1, 1) - np.eye(len(knots), len(knots) + 1)
    )
    return result


def _near(places: Array, sizes: Array, rates: Array) -> Array:
    """Return one over the seconds near each place ``[K]``: larger sizes take longer."""
    result: Array = np.interp(places, np.sort(sizes), np.sort(rates)[::-1])
    return result
