"""Latency: seconds of one model's layers on one type of device, from a measured table.

The law ``hinged``, the default, is a non-negative sum of piecewise-linear functions of the shape,
without outliers, kept between the measured shapes around the asked one. ``paper`` is the regression
of LLM-PQ by plain least squares, for comparison; ``features`` has its features with non-negative
coefficients fitted to relative errors.

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
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import hypot, inf, log, sqrt
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt

from llmpq.costmodel.base import Estimate, LatencyModel
from llmpq.errors import ProfileMissError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import MASTER_BITS, LatencySample, LatencyTable, master_bits

Array = npt.NDArray[np.float64]

_TOLERANCE = 1e-10
_JITTER = 1e-12
"""Added to the diagonal of the scaled Gram matrix, so that equal columns have a solution."""


def fit_relative(features: Array, seconds: Array) -> Array:
    """Return coefficients ``c >= 0`` that minimise ``sum ((features c - seconds) / seconds)^2``.

    Costs add up, so a negative coefficient is noise. ``features`` is ``[samples, features]``, none
    negative, and all ``seconds`` are positive.
    """
    return solve_nnls(features / seconds[:, None], np.ones(len(seconds)))


def solve_nnls(matrix: Array, target: Array) -> Array:
    """Return ``x >= 0`` that minimises ``|matrix x - target|``, all finite.

    Where several columns explain the target equally well, the leftmost is taken.
    """
    # Columns are scaled first: squaring large and tiny ones would cost the tiny ones their digits.
    scale = np.sqrt(np.maximum((matrix**2).sum(axis=0), np.finfo(float).tiny))
    scaled = matrix / scale
    gram = scaled.T @ scaled + _JITTER * np.eye(len(scale))
    pull = scaled.T @ target
    found = np.zeros(len(scale))
    active = np.zeros(len(scale), dtype=bool)
    least = _TOLERANCE * max(1.0, float(np.abs(pull).max()))
    for _ in range(3 * len(scale)):
        gradient = np.where(active, -np.inf, pull - gram @ found)
        # Rounding must not decide between columns that are equally good.
        entering = int(np.argmax(gradient >= gradient.max() * (1.0 - _TOLERANCE)))
        if gradient[entering] <= least:
            break
        active[entering] = True
        found, active = _solve_active(gram, pull, found, active)
    if active.any():  # without the digits that the Gram matrix cost
        exact = np.linalg.lstsq(scaled[:, active], target, rcond=None)[0]
        found[active] = exact if exact.min() > 0.0 else found[active]
    solution: Array = found / scale
    return solution


def _solve_active(
    gram: Array, pull: Array, found: Array, active: npt.NDArray[np.bool_]
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Move to the least-squares point of the active columns; drop those that become negative."""
    while len(index := active.nonzero()[0]):
        wanted = np.zeros(len(pull))
        wanted[index] = np.linalg.solve(gram[index[:, None], index], pull[index])
        if wanted[index].min() > 0.0:
            return wanted, active
        negative = active & (wanted <= 0.0)
        steps = found[negative] / np.maximum(found[negative] - wanted[negative], _JITTER**2)
        found = found + float(steps.min()) * (wanted - found)
        active = active & (found > _TOLERANCE**1.5) & ~(negative & (found <= _TOLERANCE))
        found = np.where(active, found, 0.0)
    return np.zeros(len(pull)), active


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
class LatencyFit:
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


def fit_without_outliers(samples: Samples) -> tuple[LatencyFit, npt.NDArray[np.bool_]]:
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


def _gaps(law: LatencyFit, samples: Samples) -> Array:
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


def fit_law(samples: Samples, weights: Array | None = None) -> LatencyFit:
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
    return LatencyFit(
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


LawName = Literal["hinged", "paper", "features"]

LEAST_DEVIATION = 0.04
"""No claim is surer than this. Whole models measured on an A100 were forecast within 3.9 % in
prefill and 3.8 % in decode 19 times in 20 (``benchmarks/results/fit-ablation.json``)."""
BLIND_DEVIATION = 0.25
"""Deviation inside where too few shapes were measured to leave some out and forecast them."""
OUTSIDE_DEVIATION = 0.15
"""Deviation gained an octave outside, along rows, tokens and their product."""
BATCH_DEVIATION = 0.02
"""The same for more sequences of the same work, which differ little."""
_OTHER_KIND_DEVIATION = 0.1
"""Added where a kind of layer that was not profiled is priced by the analytic ratio."""
_FILLED_DEVIATION = 0.13
"""Added where a bitwidth was not measured but filled by the roofline's ratio: all that were
compared with measured kernels lay within it (``docs/evidence/forecasts.md``)."""
_FOLDS = 5
_TWO_THIRDS = 0.68


class Curve:
    """Seconds of one phase and bitwidth; positive, non-decreasing in batch, tokens and the longest.

    A shape costs at least what any measured shape that is no larger costs, and at most what any
    that is no smaller does. Where measurements contradict each other, the smaller one is the lower
    bound and the larger one the upper bound, and the law decides between them: a single slow or
    fast sample moves no other shape. All others keep their measured seconds.
    """

    def __init__(self, samples: Samples) -> None:
        self._law, is_kept = fit_without_outliers(samples)
        self._samples = samples.take(is_kept)
        self._outliers = samples.take(~is_kept)
        self._least, self._most = _bounds(self._samples)
        self._known: dict[tuple[float, float, float], float] = {}

    def seconds(self, batch: float, tokens: float, longest: float | None = None) -> float:
        """Return the seconds at a shape, ``batch`` and ``tokens`` at least 1.

        Args:
            batch: sequences.
            tokens: of each of them, in the mean.
            longest: tokens of the longest; by default all have equally many.
        """
        shape = (batch, tokens, tokens if longest is None else longest)
        if shape not in self._known:
            least, most = self._bounds_at(*shape)
            self._known[shape] = min(max(self._law.seconds(*shape), least), most)
        return self._known[shape]

    def outliers(self) -> list[tuple[float, float, float, float]]:
        """Return batch, tokens and seconds of the samples left out, and their ratio to the law."""
        left = self._outliers
        ratios = left.seconds / self._law.seconds_of(left)
        columns = (left.batch, left.tokens, left.seconds, ratios)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def estimate(self, batch: float, tokens: float) -> Estimate:
        """Return the seconds at a shape with how far to trust them."""
        seconds = self.seconds(batch, tokens)
        least, most = self._bounds_at(batch, tokens, tokens)
        # Neighbours that cost nearly the same leave little room, however poor the fit is.
        room = log(most / least) / 2.0 if least > 0.0 else inf
        parts = [LEAST_DEVIATION, min(self._deviation_inside, room)]
        *work, more_sequences = _octaves_outside(self._samples, batch, tokens)
        parts += [OUTSIDE_DEVIATION * _reach(octaves) for octaves in work]
        parts.append(BATCH_DEVIATION * _reach(more_sequences))
        if any(work):
            parts.append(self._regime_change(batch, tokens, seconds))
        return Estimate(
            seconds=seconds,
            is_extrapolated=any(work) or more_sequences > 0.0,
            relative_deviation=hypot(*parts),
        )

    def _bounds_at(self, batch: float, tokens: float, longest: float) -> tuple[float, float]:
        """Return the least and the most seconds that measurements allow."""
        own = self._samples
        below = self._least[
            (own.batch <= batch) & (own.tokens <= tokens) & (own.longest <= longest)
        ]
        above = self._most[(own.batch >= batch) & (own.tokens >= tokens) & (own.longest >= longest)]
        return float(below.max(initial=0.0)), float(above.min(initial=inf))

    @cached_property
    def _deviation_inside(self) -> float:
        """Error within which two thirds of the samples lie when left out of the fit in fifths."""
        if len(self._samples) < MIN_TESTED:
            return BLIND_DEVIATION
        fold = np.random.default_rng(0).permutation(len(self._samples)) % _FOLDS
        errors: list[float] = []
        for one in range(_FOLDS):
            curve, held = Curve(self._samples.take(fold != one)), self._samples.take(fold == one)
            pairs = zip(held.shapes, held.seconds, strict=True)
            errors += [abs(log(curve.seconds(*shape) / measured)) for shape, measured in pairs]
        return float(np.quantile(errors, _TWO_THIRDS))

    def _regime_change(self, batch: float, tokens: float, seconds: float) -> float:
        """Return the deviation for a kernel that becomes proportional outside what was measured.

        Seconds lie between the forecast and the edge's in proportion.
        """
        most = float(self._samples.batch.max()), float(self._samples.tokens.max())
        edge = self.seconds(min(batch, most[0]), min(tokens, most[1]))
        ratio = max(1.0, batch / most[0]) * max(1.0, tokens / most[1])
        return max(0.0, log(edge * ratio / seconds)) / 2.0


def _bounds(samples: Samples) -> tuple[Array, Array]:
    """Return for each sample the least seconds from its shape on, and the most up to it ``[P]``."""
    precedes, seconds = samples.precedes(), samples.seconds
    least: Array = np.where(precedes, seconds, inf).min(axis=1)
    most: Array = np.where(precedes, seconds[:, None], 0.0).max(axis=0)
    return least, most


class PaperCurve:
    """LLM-PQ's regression of one phase and bitwidth.

    By plain least squares it may be negative outside its samples; with ``is_positive`` no
    coefficient is negative and errors are relative.
    """

    def __init__(self, samples: Samples, *, is_positive: bool) -> None:
        self._samples = samples
        features = paper_features(samples.phase, samples.batch, samples.tokens)
        if is_positive:
            self._coefficients = fit_relative(features, samples.seconds)
        else:
            scale = np.abs(features).max(axis=0)
            found = np.linalg.lstsq(features / scale, samples.seconds, rcond=None)[0]
            self._coefficients = found / scale
        errors = features @ self._coefficients / samples.seconds - 1.0
        self._deviation = float(np.sqrt((errors**2).mean()))

    def seconds(self, batch: float, tokens: float) -> float:
        """Return the seconds at a shape."""
        shape = np.array([float(batch)]), np.array([float(tokens)])
        return float((paper_features(self._samples.phase, *shape) @ self._coefficients)[0])

    def outliers(self) -> list[tuple[float, float, float, float]]:
        """Return nothing: the regression of the paper learns from every sample."""
        return []

    def estimate(self, batch: float, tokens: float) -> Estimate:
        """Return the seconds with the deviation of the fit from its own samples."""
        return Estimate(
            seconds=self.seconds(batch, tokens),
            is_extrapolated=any(_octaves_outside(self._samples, batch, tokens)),
            relative_deviation=max(LEAST_DEVIATION, self._deviation),
        )


class RegressionLatencyModel:
    """Every phase and bitwidth of a table; each is fitted when it is first asked for.

    ``bits`` up to 0 are the master's own work; ``file`` names the table in messages.
    """

    def __init__(
        self, table: LatencyTable, law: LawName = "hinged", file: str = "in memory"
    ) -> None:
        self._law, self._file = law, file
        self._samples: dict[tuple[Phase, int], list[LatencySample]] = {}
        for one in table.samples:
            self._samples.setdefault((one.phase, one.bits), []).append(one)
        self._curves: dict[tuple[Phase, int], Curve | PaperCurve] = {}

    def has(self, phase: Phase, bits: int) -> bool:
        """Return whether there are samples of this phase and bitwidth."""
        return (phase, bits) in self._samples

    def seconds(self, phase: Phase, bits: int, batch: float, tokens: float) -> float:
        """Return the seconds of one layer; raises ``ProfileMissError`` without a sample."""
        return self._curve(phase, bits).seconds(batch, tokens)

    def estimate(self, phase: Phase, bits: int, batch: float, tokens: float) -> Estimate:
        """Return the seconds with how far to trust them; raises as ``seconds`` does."""
        return self._curve(phase, bits).estimate(batch, tokens)

    def outliers(self) -> list[tuple[LatencySample, float]]:
        """Return the samples that the law leaves out, each with its ratio to the law."""
        found: list[tuple[LatencySample, float]] = []
        for phase, bits in self._samples:
            curve = self._curve(phase, bits)
            for batch, tokens, seconds, ratio in curve.outliers():
                sample = LatencySample(
                    phase=phase, bits=bits, batch=int(batch), tokens=int(tokens), seconds=seconds
                )
                found.append((sample, ratio))
        return found

    def _curve(self, phase: Phase, bits: int) -> Curve | PaperCurve:
        if (phase, bits) not in self._curves:
            if not self.has(phase, bits):
                known = sorted(width for one, width in self._samples if one is phase and width > 0)
                raise ProfileMissError(
                    f"{self._file}: found no {phase.value} samples at {bits} bits, only at "
                    f"{known}; profile that bitwidth, or leave it out of the search"
                )
            samples = gather(self._samples[phase, bits])
            self._curves[phase, bits] = (
                Curve(samples)
                if self._law == "hinged"
                else PaperCurve(samples, is_positive=self._law == "features")
            )
        return self._curves[phase, bits]


@lru_cache(maxsize=64)
def fitted(table: LatencyTable, law: LawName, file: str) -> RegressionLatencyModel:
    """Return the regression of a table; equal tables share one, with what it has fitted so far."""
    return RegressionLatencyModel(table, law, file)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLatencyModel:
    """Latency of one model on one type of device, from samples of layers of one kind.

    Attributes:
        analytic: prices the other kinds by its ratio to the profiled one, and the master's work
            where the table has none (rows of 0 bits).
        fitted_only: answer with the paper's features everywhere, at measured points too.
    """

    table: LatencyTable
    analytic: LatencyModel
    profiled_kind: int = 0
    file: str = "in memory"
    fitted_only: bool = False
    _regression: RegressionLatencyModel = field(init=False, repr=False, compare=False)
    _filled: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        regression = fitted(self.table, "features" if self.fitted_only else "hinged", self.file)
        object.__setattr__(self, "_regression", regression)
        filled = frozenset(key for key, _ in self.table.provenance if key.startswith("filled_"))
        object.__setattr__(self, "_filled", filled)

    @property
    def source(self) -> str:
        """Where the seconds come from."""
        return f"{'fit of ' if self.fitted_only else ''}table {self.file}"

    def layer_s(self, phase: Phase, bits: int, batch: int, tokens: float, kind: int) -> float:
        """Return the seconds of one decoder layer; see ``LatencyModel``."""
        seconds = self._regression.seconds(phase, bits, batch, tokens)
        return seconds * self._ratio(phase, bits, batch, tokens, kind)

    def layer_estimate(
        self, phase: Phase, bits: int, batch: int, tokens: float, kind: int
    ) -> Estimate:
        """Return the same with how far to trust it; see ``LatencyModel``."""
        found = fitted(self.table, "hinged", self.file).estimate(phase, bits, batch, tokens)
        return replace(
            found,
            seconds=self.layer_s(phase, bits, batch, tokens, kind),
            relative_deviation=hypot(
                found.relative_deviation,
                0.0 if kind == self.profiled_kind else _OTHER_KIND_DEVIATION,
                _FILLED_DEVIATION if f"filled_{bits}_bits" in self._filled else 0.0,
            ),
        )

    def master_s(self, phase: Phase, batch: int, tokens: float, head_bits: int = 16) -> float:
        """Return the seconds of the master's own work; see ``LatencyModel``.

        Decode with a quantized head is measured. A prefill scores one position a sequence, too: it
        changes by the same seconds. Without such rows the roofline's ratio counts.
        """
        asked_s = self.analytic.master_s(phase, batch, tokens, head_bits)
        measured, rows = self._regression, master_bits(head_bits)
        if measured.has(phase, rows):
            return measured.seconds(phase, rows, batch, tokens)
        if not measured.has(phase, MASTER_BITS):
            return asked_s
        plain_s = measured.seconds(phase, MASTER_BITS, batch, tokens)
        if not (measured.has(Phase.DECODE, rows) and measured.has(Phase.DECODE, MASTER_BITS)):
            return plain_s * asked_s / self.analytic.master_s(phase, batch, tokens)
        step_s = measured.seconds(Phase.DECODE, rows, batch, 1)
        return max(step_s, plain_s + step_s - measured.seconds(Phase.DECODE, MASTER_BITS, batch, 1))

    def _ratio(self, phase: Phase, bits: int, batch: int, tokens: float, kind: int) -> float:
        if kind == self.profiled_kind:
            return 1.0
        other = self.analytic.layer_s(phase, bits, batch, tokens, kind)
        return other / self.analytic.layer_s(phase, bits, batch, tokens, self.profiled_kind)


def _octaves_outside(samples: Samples, batch: float, tokens: float) -> list[float]:
    """Return how many octaves a shape lies outside along rows, tokens, their product and batch."""
    rows = batch * tokens if samples.phase is Phase.PREFILL else batch
    axes = [(rows, samples.rows), (tokens, samples.tokens)]
    axes += [(rows * tokens, samples.rows * samples.tokens), (batch, samples.batch)]
    return [
        max(0.0, float(np.log2(max(size / known.max(), known.min() / size))))
        for size, known in axes
    ]


def _reach(octaves: float) -> float:
    """Return the octaves, or their root: a kernel may change just behind the last measured size."""
    return max(octaves, sqrt(octaves))
