"""Latency: seconds of one model's layers on one type of device, from a measured table.

The law ``hinged``, the default, is that of ``llmpq.costmodel.tables.law`` without outliers, kept
between the measured shapes around the asked one. ``paper`` is the regression of LLM-PQ by plain
least squares, for comparison; ``features`` has its features with non-negative coefficients fitted
to relative errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import hypot, inf, log, sqrt
from typing import Literal

import numpy as np

from llmpq.costmodel.base import Estimate, LatencyModel
from llmpq.costmodel.tables.law import (
    MIN_TESTED,
    Samples,
    fit_without_outliers,
    gather,
    paper_features,
)
from llmpq.costmodel.tables.nnls import Array, fit_relative
from llmpq.errors import ProfileMissError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import MASTER_BITS, LatencySample, LatencyTable, master_bits

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
