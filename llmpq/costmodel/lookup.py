"""Lookup: seconds from a measured table.

A measured point answers for itself. Inside the measured grid, linear interpolation along tokens and
then along the batch. Outside, the paper's regression features, fitted to the whole table, carry the
nearest measured edge on. Never negative. A phase and bitwidth without a single sample is a
``ProfileMissError``: a table never invents what nobody measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from llmpq.costmodel.base import LatencyModel
from llmpq.costmodel.fit import Array, fit_relative
from llmpq.errors import ProfileMissError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

MASTER_BITS = 0
"""How a table marks the master's own work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLatencyModel:
    """Latency of one model on one type of device, from measurements.

    Attributes:
        table: the samples, of layers of kind ``profiled_kind``.
        analytic: prices the other kinds by its ratio to the profiled one, and the master's work
            where the table has none (rows of 0 bits).
        profiled_kind: the kind of layer that was measured.
        file: the table's file, for messages.
        fitted_only: answer with the regression everywhere, at measured points too (the paper's
            cost model), instead of only outside the measured grid.
    """

    table: LatencyTable
    analytic: LatencyModel
    profiled_kind: int = 0
    file: str = "in memory"
    fitted_only: bool = False
    _curves: dict[tuple[Phase, int], _Curve] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = dict.fromkeys((sample.phase, sample.bits) for sample in self.table.samples)
        curves = {(phase, bits): _Curve(self.table.select(phase, bits)) for phase, bits in found}
        object.__setattr__(self, "_curves", curves)

    @property
    def source(self) -> str:
        """Where the seconds come from."""
        return f"{'fit of ' if self.fitted_only else ''}table {self.file}"

    def layer_s(self, phase: Phase, bits: int, batch: int, tokens: float, kind: int) -> float:
        """Return the seconds of one decoder layer; see ``LatencyModel``.

        Raises:
            ProfileMissError: no sample of this phase and bitwidth.
        """
        curve = self._curves.get((phase, bits))
        if curve is None:
            known = sorted(width for one, width in self._curves if one is phase and width)
            raise ProfileMissError(
                f"{self.file}: found no {phase.value} samples at {bits} bits, only at {known}; "
                "profile that bitwidth, or leave it out of the search"
            )
        seconds = self._answer(curve, batch, tokens)
        if kind == self.profiled_kind:
            return seconds
        other = self.analytic.layer_s(phase, bits, batch, tokens, kind)
        return (
            seconds * other / self.analytic.layer_s(phase, bits, batch, tokens, self.profiled_kind)
        )

    def master_s(self, phase: Phase, batch: int, tokens: float) -> float:
        """Return the seconds of the master's own work; see ``LatencyModel``."""
        curve = self._curves.get((phase, MASTER_BITS))
        if curve is None:
            return self.analytic.master_s(phase, batch, tokens)
        return self._answer(curve, batch, tokens)

    def _answer(self, curve: _Curve, batch: int, tokens: float) -> float:
        return (curve.fitted if self.fitted_only else curve.seconds)(batch, tokens)


class _Curve:
    """All samples of one phase and bitwidth, as rows of equal batch."""

    def __init__(self, samples: Sequence[LatencySample]) -> None:
        self._phase = samples[0].phase
        repeated: dict[tuple[int, int], list[float]] = {}
        for sample in samples:
            repeated.setdefault((sample.batch, sample.tokens), []).append(sample.seconds)
        points = sorted((shape, median(seconds)) for shape, seconds in repeated.items())
        self._rows: dict[int, tuple[list[int], list[float]]] = {}
        for (batch, tokens), seconds in points:
            row = self._rows.setdefault(batch, ([], []))
            row[0].append(tokens)
            row[1].append(seconds)
        features = np.array([self._features(batch, tokens) for (batch, tokens), _ in points])
        self._fit: Array = fit_relative(features, np.array([seconds for _, seconds in points]))
        self._lengths = sorted({tokens for (_, tokens), _ in points})

    def seconds(self, batch: int, tokens: float) -> float:
        """Return the seconds at a shape: measured, interpolated or carried on by the fit."""
        inside = self._inside(batch, tokens)
        if inside is not None:
            return inside
        batches = sorted(self._rows)
        edge_batch = min(max(batch, batches[0]), batches[-1])
        edge_tokens = min(max(tokens, self._lengths[0]), self._lengths[-1])
        edge = self._inside(edge_batch, edge_tokens)
        if edge is None:
            return self.fitted(batch, tokens)
        return edge * self.fitted(batch, tokens) / self.fitted(edge_batch, edge_tokens)

    def _inside(self, batch: int, tokens: float) -> float | None:
        """Interpolate between the nearest rows that cover ``tokens``; ``None`` outside."""
        covering = {
            size: value
            for size, row in self._rows.items()
            if (value := _interpolate(*row, tokens)) is not None
        }
        if batch in covering:
            return covering[batch]
        return _interpolate(list(covering), list(covering.values()), batch)

    def fitted(self, batch: int, tokens: float) -> float:
        """Return the seconds of the regression alone."""
        return float(np.dot(self._fit, self._features(batch, tokens)))

    def _features(self, batch: int, tokens: float) -> tuple[float, ...]:
        """Return the regression features of LLM-PQ, Sec. 4.1, the likeliest lone cause first."""
        if self._phase is Phase.PREFILL:
            return (batch * tokens, 1.0, batch, tokens, batch * tokens * tokens)
        return (1.0, batch, batch * tokens, tokens)


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float | None:
    if not xs or not xs[0] <= x <= xs[-1]:
        return None
    index = bisect_left(xs, x)
    if xs[index] == x:
        return ys[index]
    (left, right), (low, high) = (xs[index - 1], xs[index]), (ys[index - 1], ys[index])
    return low + (high - low) * (x - left) / (right - left)
