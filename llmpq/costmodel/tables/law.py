"""Law: seconds of one layer as a non-negative sum of piecewise-linear functions of the shape.

Matrix products take a function of the rows that they multiply, with steps where libraries switch
kernels; attention one of its work, rows times tokens, and rows times one of the tokens. A constant
and terms in tokens and in sequences are added. No coefficient is negative, so the law is positive
and never falls with batch or tokens. Without knots it is the regression of LLM-PQ, Sec. 4.1.
"""

from __future__ import annotations

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
_LEAST_SHARE = 1e-3
"""Of the least measured seconds: what a law answers at least."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Measured shapes of one phase and bitwidth: arrays of equal length ``[P]``."""

    phase: Phase
    batch: Array
    tokens: Array
    seconds: Array

    def take(self, chosen: npt.NDArray[np.bool_]) -> Samples:
        """Return the samples at ``chosen [P]``."""
        return Samples(
            phase=self.phase,
            batch=self.batch[chosen],
            tokens=self.tokens[chosen],
            seconds=self.seconds[chosen],
        )

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
    return Samples(
        phase=samples[0].phase,
        batch=np.array([float(batch) for batch, _ in shapes]),
        tokens=np.array([float(tokens) for _, tokens in shapes]),
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
    ``of_work`` is a function of rows times tokens, ``of_length`` one of the tokens, times rows.
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

    def seconds(self, batch: float, tokens: float) -> float:
        """Return the seconds at a shape, ``batch`` and ``tokens`` at least 1."""
        rows = batch * tokens if self.phase is Phase.PREFILL else batch
        total = self.constant + self.each_sequence * batch + self.each_token * tokens
        total += self.jumps[bisect_left(self.steps, rows)] + self.of_rows(rows)
        total += self.of_work(rows * tokens) + rows * self.of_length(tokens)
        return max(total, self.least)


def fit_law(samples: Samples) -> Law:
    """Fit a law to relative errors, with a preference for equal neighbouring slopes."""
    rows, tokens = samples.rows, samples.tokens
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
    }
    # A single sample is explained by the first part: rows in prefill, the constant in decode.
    order = (
        list(parts) if is_prefill else ["constant", *(name for name in parts if name != "constant")]
    )
    weights = 1.0 / samples.seconds
    charges = {
        "steps": np.diag(step_charges * _near(steps, rows, weights)),
        "rows": _smoothing(rows, weights, knots["rows"]),
        "work": _smoothing(rows * tokens, weights, knots["work"]),
        "length": float(np.median(rows)) * _smoothing(tokens, weights, knots["length"]),
    }
    found = _solve({name: parts[name] for name in order}, charges, weights)
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
    )


def paper_features(phase: Phase, batch: Array, tokens: Array) -> Array:
    """Return LLM-PQ's features (Sec. 4.1) ``[P, F]``: ``v s, 1, v, s``, in prefill ``v s^2``."""
    columns = [batch * tokens, np.ones_like(batch), batch, tokens]
    if phase is Phase.PREFILL:
        columns.append(batch * tokens**2)
    return np.stack(columns, axis=1)


def _solve(parts: dict[str, Array], charges: dict[str, Array], weights: Array) -> dict[str, Array]:
    """Return the coefficients of each part, ``[P, C]`` columns, ``charges`` ``[K, C]`` added."""
    edges = np.cumsum([0, *(one.shape[1] for one in parts.values())])
    first = dict(zip(parts, edges, strict=False))
    blocks = [np.column_stack(list(parts.values())) * weights[:, None]]
    for name, charge in charges.items():
        block = np.zeros((len(charge), edges[-1]))
        block[:, first[name] : first[name] + charge.shape[1]] = charge
        blocks.append(block)
    matrix = np.vstack(blocks)
    target = np.zeros(len(matrix))
    target[: len(weights)] = 1.0
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


def _smoothing(sizes: Array, weights: Array, knots: Array) -> Array:
    """Return one row a knot that charges the change of slope there ``[K, K + 1]``."""
    widths = np.diff(np.concatenate([[0.0], knots]))
    charge = widths * _near(knots, sizes, weights) * np.sqrt(len(sizes) / (len(knots) + 1))
    charges = SMOOTHNESS * charge[:, None]
    result: Array = charges * (
        np.eye(len(knots), len(knots) + 1, 1) - np.eye(len(knots), len(knots) + 1)
    )
    return result


def _near(places: Array, sizes: Array, weights: Array) -> Array:
    """Return the weight of samples near each place ``[K]``: larger sizes weigh less."""
    result: Array = np.interp(places, np.sort(sizes), np.sort(weights)[::-1])
    return result
