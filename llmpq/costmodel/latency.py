"""Regression: seconds of one layer at any shape, fitted to a measured table.

``paper`` is the regression of LLM-PQ as it stands. ``hinged``, the default, is the law with hinges
that cross-validates best, times a small smooth correction; both are then laid on one fine grid of
shapes and made monotone there, so that a larger batch or a longer context never costs less. An
answer comes with how far it lies outside what was measured and how sure it is. It refuses to
answer for a phase or bitwidth without samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log, log2
from typing import Literal

import numpy as np

from llmpq.costmodel.laws import (
    TILES,
    Law,
    Samples,
    fit_hinged,
    fit_paper,
    fit_straight,
    rows_of,
)
from llmpq.costmodel.nnls import Array
from llmpq.costmodel.residual import Residual, fit_residual
from llmpq.errors import ProfileMissError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

LawName = Literal["hinged", "paper"]
Fit = Callable[[Samples], Law]

MIN_HINGED = 12
"""Shapes from which hinges and a correction are tried; fewer get the straight law."""
_FOLDS = 5
_ROUNDS = 3
_FEW = 150
"""Samples under which cross-validation is repeated, since one round would be luck."""
_POWERS = (1.0, 0.5)
_SAMPLES_A_HINGE = (12, 6, 3)
_MAX_HINGES = 24
_STEP_OCTAVES = 0.25
"""Spacing of the grid where it was measured; twice that outside."""
_HEADROOM = 16.0
"""How far past the measured sizes the grid goes; further out seconds grow in proportion."""
_MAX_NODES = 64
_MAX_TILES = 16
"""Tiles whose edges get nodes; further out a step is under 6 %."""
_LEAST_GAP = 1e-9
_LEAST_SHARE = 1e-3
_BLIND_GROWTH = 0.25
"""Deviation gained an octave outside, when there are too few shapes to find it out."""
_LEAST_GROWTH = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An answer and how far to trust it.

    Attributes:
        seconds: of one layer.
        is_extrapolated: the shape lies outside the measured batches or lengths.
        relative_deviation: one standard deviation, as a share of ``seconds``.
    """

    seconds: float
    is_extrapolated: bool
    relative_deviation: float


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

    def octaves_outside(self, rows: float, tokens: float) -> float:
        """Return how many octaves a shape lies outside, all directions together.

        A corner that no sample comes near counts: few rows of long contexts and many rows of short
        ones do not tell of many rows of long ones.
        """
        return sum(
            max(0.0, log2(size / most), log2(least / size))
            for size, least, most in zip(
                (rows, tokens, rows * tokens), self.low, self.high, strict=True
            )
        )

    def clamped(self, rows: Array, tokens: Array) -> tuple[Array, Array]:
        """Return the nearest measured sizes: outside, the edge's correction carries on."""
        return (
            np.clip(rows, self.low[0], self.high[0]),
            np.clip(tokens, self.low[1], self.high[1]),
        )


class Curve:
    """Seconds of one phase and bitwidth; positive, growing with batch and with tokens.

    The grid lies over rows (of the matrix products) and tokens. Both grow with batch and tokens, so
    a surface that is monotone there is monotone in the shape; and a kernel's steps, which follow
    rows, lie along one of its axes.
    """

    def __init__(self, samples: Samples) -> None:
        self._phase = samples.phase
        rows = rows_of(samples.phase, samples.batch, samples.tokens)
        self._box = Box.around(rows, samples.tokens)
        fit, power = _choose_law(samples)
        law = fit(samples)
        self._each = law.each
        # A law may give all its seconds to ``each``; a logarithm needs some left.
        self._least = _LEAST_SHARE * float(samples.seconds.min())
        self._residual: Residual | None = None
        if len(samples) >= MIN_HINGED:
            shared = np.maximum(law.shared(rows, samples.tokens), self._least)
            # What one sequence costs apart is taken off, but never so much that noise is left.
            rest = np.maximum(samples.seconds - law.each * samples.batch, shared / 4.0)
            noise = (np.median(samples.seconds) / samples.seconds) ** (2.0 - 2.0 * power)
            self._residual = fit_residual(rows, samples.tokens, np.log(rest / shared), noise)
        self._growth = _growth(samples, fit)
        self._rows = _nodes(rows, TILES)
        self._lengths = _nodes(samples.tokens)
        self._log_seconds = self._lay_out(law)

    def seconds(self, batch: float, tokens: float) -> float:
        """Return the seconds at a shape, ``batch`` and ``tokens`` at least 1."""
        rows = batch * tokens if self._phase is Phase.PREFILL else batch
        row, row_share = _place(self._rows, rows)
        column, share = _place(self._lengths, tokens)
        low, high = self._log_seconds[row], self._log_seconds[row + 1]
        first = low[column] + share * (low[column + 1] - low[column])
        second = high[column] + share * (high[column + 1] - high[column])
        beyond = max(1.0, rows / self._rows[-1]) * max(1.0, tokens / self._lengths[-1])
        return exp(first + row_share * (second - first)) * beyond + self._each * batch

    def estimate(self, batch: float, tokens: float) -> Estimate:
        """Return the seconds at a shape with how far to trust them."""
        rows = batch * tokens if self._phase is Phase.PREFILL else batch
        beyond = self._box.octaves_outside(rows, tokens)
        inside = _BLIND_GROWTH
        if self._residual is not None:
            at = self._box.clamped(np.array([float(rows)]), np.array([float(tokens)]))
            inside = float(self._residual.deviation(*at)[0])
        return Estimate(
            seconds=self.seconds(batch, tokens),
            is_extrapolated=beyond > 0.0,
            relative_deviation=float(np.hypot(inside, beyond * self._growth)),
        )

    def _lay_out(self, law: Law) -> list[list[float]]:
        """Return the logarithms of the seconds at the grid's nodes, made monotone."""
        mesh = np.meshgrid(np.array(self._rows), np.array(self._lengths), indexing="ij")
        rows, tokens = mesh[0].ravel(), mesh[1].ravel()
        values = np.log(np.maximum(law.shared(rows, tokens), self._least))
        if self._residual is not None:
            values = values + self._residual.log_factor(*self._box.clamped(rows, tokens))
        grid = values.reshape(mesh[0].shape)
        # Midway between the running maximum and, from the far end, the running minimum: both are
        # monotone, and where the values already are, both equal them.
        upper = np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1)
        lower = grid[::-1, ::-1]
        lower = np.minimum.accumulate(np.minimum.accumulate(lower, axis=0), axis=1)[::-1, ::-1]
        nodes: list[list[float]] = ((upper + lower) / 2.0).tolist()
        return nodes


class PaperCurve:
    """LLM-PQ's regression of one phase and bitwidth; may turn negative outside its samples."""

    def __init__(self, samples: Samples) -> None:
        self._phase = samples.phase
        self._law = fit_paper(samples)
        rows = rows_of(samples.phase, samples.batch, samples.tokens)
        self._box = Box.around(rows, samples.tokens)
        errors = self._law.seconds(samples.batch, samples.tokens) / samples.seconds - 1.0
        self._deviation = float(np.sqrt((errors**2).mean()))

    def seconds(self, batch: float, tokens: float) -> float:
        """Return the seconds at a shape."""
        shape = np.array([float(batch)]), np.array([float(tokens)])
        return float(self._law.seconds(*shape)[0])

    def estimate(self, batch: float, tokens: float) -> Estimate:
        """Return the seconds with the deviation of the fit from its own samples."""
        rows = batch * tokens if self._phase is Phase.PREFILL else batch
        return Estimate(
            seconds=self.seconds(batch, tokens),
            is_extrapolated=self._box.octaves_outside(rows, tokens) > 0.0,
            relative_deviation=self._deviation,
        )


_CURVES: Mapping[LawName, Callable[[Samples], Curve | PaperCurve]] = {
    "hinged": Curve,
    "paper": PaperCurve,
}


class RegressionLatencyModel:
    """Every phase and bitwidth of a table, fitted; ``bits`` 0 is the master's own work."""

    def __init__(self, table: LatencyTable, law: LawName = "hinged") -> None:
        found = dict.fromkeys((sample.phase, sample.bits) for sample in table.samples)
        self._curves = {key: _CURVES[law](gather(table.select(*key))) for key in found}

    def seconds(self, phase: Phase, bits: int, batch: float, tokens: float) -> float:
        """Return the seconds of one layer at a shape.

        Raises:
            ProfileMissError: no sample of this phase and bitwidth.
        """
        return self._curve(phase, bits).seconds(batch, tokens)

    def estimate(self, phase: Phase, bits: int, batch: float, tokens: float) -> Estimate:
        """Return the same with how far to trust it."""
        return self._curve(phase, bits).estimate(batch, tokens)

    def _curve(self, phase: Phase, bits: int) -> Curve | PaperCurve:
        if (phase, bits) not in self._curves:
            known = sorted(width for one, width in self._curves if one is phase)
            raise ProfileMissError(
                f"regression: found no {phase.value} samples at {bits} bits, only at {known}"
            )
        return self._curves[phase, bits]


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
        seconds=np.array([float(np.median(repeated[shape])) for shape in shapes]),
    )


def _choose_law(samples: Samples) -> tuple[Fit, float]:
    """Return the law with the least cross-validated relative error, and its errors' power."""
    if len(samples) < MIN_HINGED:
        return fit_straight, 1.0
    choices: list[tuple[Fit, float]] = []
    for power in _POWERS:
        choices.append((partial(fit_straight, power=power), power))
        for share in _SAMPLES_A_HINGE:
            hinges = min(max(2, len(samples) // share), _MAX_HINGES)
            choices.append((partial(fit_hinged, hinges=hinges, power=power), power))
    errors = [_validated(samples, fit) for fit, _ in choices]
    return choices[int(np.argmin(errors))]


def _validated(samples: Samples, fit: Fit) -> float:
    errors = []
    for seed in range(_ROUNDS if len(samples) < _FEW else 1):
        fold = np.random.default_rng(seed).permutation(len(samples)) % _FOLDS
        for index in range(_FOLDS):
            held = samples.take(fold == index)
            predicted = fit(samples.take(fold != index)).seconds(held.batch, held.tokens)
            errors.append(np.abs(predicted / held.seconds - 1.0))
    return float(np.concatenate(errors).mean())


def _growth(samples: Samples, fit: Fit) -> float:
    """Return the deviation gained an octave outside, tried on the largest quarter of the shapes."""
    order = np.argsort(samples.batch * samples.tokens, kind="stable")
    kept = samples.take(order[: 3 * len(order) // 4])
    if len(kept) < MIN_HINGED:
        return _BLIND_GROWTH
    held = samples.take(order[3 * len(order) // 4 :])
    box = Box.around(rows_of(samples.phase, kept.batch, kept.tokens), kept.tokens)
    rows = rows_of(samples.phase, held.batch, held.tokens).tolist()
    shapes = zip(rows, held.tokens.tolist(), strict=True)
    octaves = np.array([box.octaves_outside(*shape) for shape in shapes])
    errors = np.log(fit(kept).seconds(held.batch, held.tokens) / held.seconds)
    outside = octaves > 0
    if not outside.any():
        return _BLIND_GROWTH
    slopes = errors[outside] / np.maximum(octaves[outside], 1.0)
    return max(_LEAST_GROWTH, float(np.sqrt((slopes**2).mean())))


def _nodes(sizes: Array, tiles: Sequence[int] = ()) -> list[float]:
    """Return a grid from 1 past the largest size: measured sizes, steps between, tiles' edges."""
    low, high = float(sizes.min()), float(sizes.max())
    measured = np.unique(sizes)
    if len(measured) > _MAX_NODES:
        measured = measured[np.linspace(0, len(measured) - 1, _MAX_NODES).astype(int)]
    parts = [measured, _spread(low, high, _STEP_OCTAVES)]
    parts += [_spread(1.0, low, 2 * _STEP_OCTAVES)]
    parts += [_spread(high, high * _HEADROOM, 2 * _STEP_OCTAVES)]
    for tile in tiles:
        edges = np.arange(tile, min(high, _MAX_TILES * tile) + 1, tile)
        parts += [edges, edges + 1.0]
    grid = np.unique(np.concatenate(parts))
    apart = np.concatenate([[True], np.diff(np.log(grid)) > _LEAST_GAP])
    nodes: list[float] = grid[apart].tolist()
    return nodes


def _spread(low: float, high: float, step_octaves: float) -> Array:
    """Return sizes from ``low`` to ``high``, evenly in octaves, at most a step apart."""
    count = 2 + int(max(0.0, log2(high / low)) / step_octaves)
    result: Array = np.geomspace(low, high, count)
    return result


def _place(nodes: list[float], size: float) -> tuple[int, float]:
    """Return the node below ``size`` and how far, in logarithms, it lies to the next one."""
    index = min(max(bisect_right(nodes, size) - 1, 0), len(nodes) - 2)
    low, high = nodes[index], nodes[index + 1]
    return index, min(max(log(size / low) / log(high / low), 0.0), 1.0)
