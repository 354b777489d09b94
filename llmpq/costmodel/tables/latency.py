"""Regression: seconds of one layer at any shape, fitted to a measured table.

``paper`` is the regression of LLM-PQ as it stands. ``hinged``, the default, is the blend of laws
that cross-validates best, times a small smooth correction, laid on a monotone grid, and kept
between the measured shapes around it: a measured shape answers for itself, and a larger batch or a
longer context never costs less. An answer comes with how far it lies outside what was measured and
how sure it is. It refuses to answer for a phase or bitwidth without samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import hypot, inf, log
from typing import Literal

import numpy as np

from llmpq.costmodel.base import Estimate
from llmpq.costmodel.tables.bounds import measured_bounds
from llmpq.costmodel.tables.cache import Arrays, Cache, digest
from llmpq.costmodel.tables.clock import relative_noise
from llmpq.costmodel.tables.laws import Law, Samples, fit_paper, rows_of
from llmpq.costmodel.tables.nnls import Array
from llmpq.costmodel.tables.residual import Residual, fit_residual
from llmpq.costmodel.tables.selection import (
    MIN_HINGED,
    WORK_AXES,
    Box,
    Choice,
    choose_law,
    growth_outside,
    reach,
)
from llmpq.costmodel.tables.stored import restored, stored
from llmpq.costmodel.tables.surface import Surface
from llmpq.errors import ProfileMissError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

LawName = Literal["hinged", "paper"]

_LEAST_SHARE = 1e-3
_LEAST_DEVIATION = 0.003
"""Nothing is surer than this: what one measurement differs from the next at best."""


class Curve:
    """Seconds of one phase and bitwidth; positive, growing with batch and with tokens."""

    def __init__(self, samples: Samples, known: Arrays | None = None) -> None:
        """Fit the samples, or take over what ``arrays`` told of an earlier fit of the same."""
        self._samples = samples
        self._phase = samples.phase
        rows = rows_of(samples.phase, samples.batch, samples.tokens)
        self._box = Box.around(samples)
        self._growth: tuple[float, ...] | None = None
        self._answers: dict[tuple[float, float], float] = {}
        if known is None:
            self._fit(samples, rows)
        else:
            self._choice, self._each, self._residual, self._surface, self._bounds = restored(known)

    def arrays(self) -> Arrays:
        """Return all that fitting found, for another process."""
        parts = self._choice, self._each, self._residual, self._surface, self._bounds
        return stored(*parts)

    def _fit(self, samples: Samples, rows: Array) -> None:
        self._choice, law = choose_law(samples)
        self._each = law.each
        # A law may give all its seconds to ``each``; a logarithm needs some left.
        self._least = _LEAST_SHARE * float(samples.seconds.min())
        self._residual = self._corrected(law, self._choice, rows)

        def log_seconds(rows: Array, tokens: Array) -> Array:
            values: Array = np.log(np.maximum(law.shared(rows, tokens), self._least))
            if self._residual is not None:
                values = values + self._residual.log_factor(*self._box.clamped(rows, tokens))
            return values

        self._surface = Surface(rows, samples.tokens, log_seconds, self._choice.strip)
        self._bounds = measured_bounds(samples)

    def seconds(self, batch: float, tokens: float) -> float:
        """Return the seconds at a shape, ``batch`` and ``tokens`` at least 1."""
        shape = (batch, tokens)
        if shape not in self._answers:
            least, most = self._bounds.at(batch, tokens)
            found = self._surface.seconds(self._rows_of(batch, tokens), tokens)
            self._answers[shape] = min(max(found + self._each * batch, least), most)
        return self._answers[shape]

    def estimate(self, batch: float, tokens: float) -> Estimate:
        """Return the seconds at a shape with how far to trust them."""
        rows = self._rows_of(batch, tokens)
        seconds = self.seconds(batch, tokens)
        beyond = self._box.octaves_outside(batch, tokens)
        least, most = self._bounds.at(batch, tokens)
        # Neighbours that cost nearly the same leave little room, whatever the fit is worth.
        room = log(most / least) / 2.0 if least > 0.0 else inf
        noise = 0.0 if self._residual is None else self._residual.noise_deviation
        inside = min(self._deviation_inside(rows, tokens), hypot(room, noise))
        parts = [max(_LEAST_DEVIATION, inside)]
        if any(beyond):
            grown = zip(self._growth_outside(), beyond, strict=True)
            parts += [growth * reach(octaves) for growth, octaves in grown]
        if any(beyond[:WORK_AXES]):
            parts.append(self._regime_change(batch, tokens, seconds))
        return Estimate(
            seconds=seconds,
            is_extrapolated=any(beyond),
            relative_deviation=hypot(*parts),
        )

    def _deviation_inside(self, rows: float, tokens: float) -> float:
        if self._residual is None or not self._residual.helps:
            return self._choice.deviation
        at = self._box.clamped(np.array([float(rows)]), np.array([float(tokens)]))
        return float(self._residual.deviation(*at)[0])

    def _regime_change(self, batch: float, tokens: float, seconds: float) -> float:
        """Return the deviation for a kernel that begins to cost in proportion where none looked.

        Decode waits for memory up to some batch and for arithmetic from there; a table that ends
        before cannot know. Seconds then lie between the forecast and the edge's in proportion.
        """
        most = self._samples.batch.max(), self._samples.tokens.max()
        edge = self.seconds(min(batch, most[0]), min(tokens, most[1]))
        ratio = max(1.0, batch / most[0]) * max(1.0, tokens / most[1])
        return max(0.0, log(edge * ratio / seconds)) / 2.0

    def _rows_of(self, batch: float, tokens: float) -> float:
        return batch * tokens if self._phase is Phase.PREFILL else batch

    def _growth_outside(self) -> tuple[float, ...]:
        if self._growth is None:
            self._growth = growth_outside(self._samples, self._choice.fit)
        return self._growth

    def _corrected(self, law: Law, choice: Choice, rows: Array) -> Residual | None:
        """Return the correction of a law; ``None`` from too few samples, or of the paper's own."""
        samples = self._samples
        if len(samples) < MIN_HINGED or choice.is_paper:
            return None
        shared = np.maximum(law.shared(rows, samples.tokens), self._least)
        # What one sequence costs apart is taken off, but never so much that noise is left.
        rest = np.maximum(samples.seconds - law.each * samples.batch, shared / 4.0)
        noise = (np.median(samples.seconds) / samples.seconds) ** (2.0 - 2.0 * choice.power)
        noise = noise * (samples.noise / samples.noise.min()) ** 2
        return fit_residual(rows, samples.tokens, np.log(rest / shared), noise)


class PaperCurve:
    """LLM-PQ's regression of one phase and bitwidth; may turn negative outside its samples."""

    def __init__(self, samples: Samples) -> None:
        self._law = fit_paper(samples)
        self._box = Box.around(samples)
        errors = self._law.seconds(samples.batch, samples.tokens) / samples.seconds - 1.0
        self._deviation = float(np.sqrt((errors**2).mean()))

    def seconds(self, batch: float, tokens: float) -> float:
        """Return the seconds at a shape."""
        shape = np.array([float(batch)]), np.array([float(tokens)])
        return float(self._law.seconds(*shape)[0])

    def estimate(self, batch: float, tokens: float) -> Estimate:
        """Return the seconds with the deviation of the fit from its own samples."""
        return Estimate(
            seconds=self.seconds(batch, tokens),
            is_extrapolated=any(self._box.octaves_outside(batch, tokens)),
            relative_deviation=self._deviation,
        )


class RegressionLatencyModel:
    """Every phase and bitwidth of a table; each is fitted when it is first asked for.

    ``bits`` 0 is the master's own work.
    """

    def __init__(
        self, table: LatencyTable, law: LawName = "hinged", cache: Cache | None = None
    ) -> None:
        self._law, self._cache = law, cache
        self._samples: dict[tuple[Phase, int], list[LatencySample]] = {}
        for one in table.samples:
            self._samples.setdefault((one.phase, one.bits), []).append(one)
        self._curves: dict[tuple[Phase, int], Curve | PaperCurve] = {}

    def has(self, phase: Phase, bits: int) -> bool:
        """Return whether there are samples of this phase and bitwidth."""
        return (phase, bits) in self._samples

    def known_bits(self, phase: Phase) -> tuple[int, ...]:
        """Return the bitwidths of a phase that have samples, the master's 0 apart."""
        return tuple(sorted(bits for one, bits in self._samples if one is phase and bits))

    def seconds(self, phase: Phase, bits: int, batch: float, tokens: float) -> float:
        """Return the seconds of one layer at a shape.

        Raises:
            ProfileMissError: no sample of this phase and bitwidth.
        """
        return self._curve(phase, bits).seconds(batch, tokens)

    def estimate(self, phase: Phase, bits: int, batch: float, tokens: float) -> Estimate:
        """Return the same with how far to trust it."""
        return self._curve(phase, bits).estimate(batch, tokens)

    def prepare(self, is_late: Callable[[], bool]) -> bool:
        """Have every curve at hand; tell whether they are, before it was too late to fit them.

        Curves that an earlier run kept are read however late it is: that takes no time.
        """
        for phase, bits in self._samples:
            if (phase, bits) not in self._curves and is_late():
                key = self._key(gather(self._samples[phase, bits]))
                if self._cache is None or key is None or self._cache.read(key) is None:
                    return False
            self._curve(phase, bits)
        return True

    def _curve(self, phase: Phase, bits: int) -> Curve | PaperCurve:
        if (phase, bits) not in self._curves:
            if not self.has(phase, bits):
                raise ProfileMissError(
                    f"regression: found no {phase.value} samples at {bits} bits, "
                    f"only at {list(self.known_bits(phase))}"
                )
            self._curves[phase, bits] = self._made(gather(self._samples[phase, bits]))
        return self._curves[phase, bits]

    def _made(self, samples: Samples) -> Curve | PaperCurve:
        if self._law == "paper":
            return PaperCurve(samples)
        key = self._key(samples)
        if self._cache is None or key is None:
            return Curve(samples)
        known = self._cache.read(key)
        if known is not None:
            return Curve(samples, known)
        curve = Curve(samples)
        self._cache.write(key, curve.arrays())
        return curve

    def _key(self, samples: Samples) -> str | None:
        """Return the name under which a fit is kept, ``None`` where it is not worth it."""
        if self._cache is None or len(samples) < MIN_HINGED:
            return None
        columns = (samples.batch, samples.tokens, samples.seconds)
        return digest(samples.phase.value.encode(), *(one.tobytes() for one in columns))


def gather(samples: Sequence[LatencySample]) -> Samples:
    """Return samples of one phase and bitwidth as arrays; repeated shapes by their median."""
    repeated: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        repeated.setdefault((sample.batch, sample.tokens), []).append(sample.seconds)
    shapes = sorted(repeated)
    seconds = np.array([_median(repeated[shape]) for shape in shapes])
    return Samples(
        phase=samples[0].phase,
        batch=np.array([float(batch) for batch, _ in shapes]),
        tokens=np.array([float(tokens) for _, tokens in shapes]),
        seconds=seconds,
        noise=relative_noise(seconds),
    )


def _median(seconds: Sequence[float]) -> float:
    return seconds[0] if len(seconds) == 1 else float(np.median(seconds))
