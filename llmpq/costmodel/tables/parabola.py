"""Parabola: the paper's regression where only the rows of a step differ, bent either way.

A table of single prompts tells nothing of batches: the features of LLM-PQ, Sec. 4.1, fold into
``1``, rows and rows squared. With no coefficient below zero such a curve can only bend upwards,
while kernels that fill a device better with longer prompts bend it down. Here any sign is allowed,
as in the paper, as long as the curve is positive and grows over all that was measured; beyond, it
goes straight on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmpq.costmodel.tables.laws import Law, Samples, fit_straight, rows_of
from llmpq.costmodel.tables.nnls import Array
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParabolaLaw:
    """Seconds as ``a + b x + c x^2`` of ``x``, the rows as a share of the most measured.

    Attributes:
        phase: prefill or decode.
        low, high: the least and the most measured rows.
        coefficients: ``a``, ``b`` and ``c``.
    """

    phase: Phase
    low: float
    high: float
    coefficients: Array

    @property
    def each(self) -> float:
        """Seconds of a sequence that rows do not explain: unknown, so none."""
        return 0.0

    @property
    def grows(self) -> bool:
        """Whether it is positive and never falls between the measured ends."""
        _, slope, bend = self.coefficients.tolist()
        ends = np.array([self.low, self.high]) / self.high
        return bool((slope + 2.0 * bend * ends).min() >= 0.0 and self._inside(ends).min() > 0.0)

    def shared(self, rows: Array, tokens: Array) -> Array:
        """Return the seconds of rows ``[P]``, however many sequences they belong to."""
        del tokens  # as long as the batch never changed, rows tell all
        share = rows / self.high
        near = np.clip(share, self.low / self.high, 1.0)
        edge = self._inside(near)
        slope = self.coefficients[1] + 2.0 * self.coefficients[2] * near
        # Below the least measured the line may cross zero before the origin: not below proportion.
        result: Array = np.maximum(
            edge + slope * (share - near), np.where(share < near, edge * share / near, 0.0)
        )
        return result

    def seconds(self, batch: Array, tokens: Array) -> Array:
        """Return seconds; see ``Law``."""
        return self.shared(rows_of(self.phase, batch, tokens), tokens)

    def _inside(self, share: Array) -> Array:
        result: Array = np.stack([np.ones_like(share), share, share**2], axis=1) @ self.coefficients
        return result


def only_rows_differ(samples: Samples) -> bool:
    """Return whether every sample is a prefill of the same batch."""
    return samples.phase is Phase.PREFILL and bool((samples.batch == samples.batch[0]).all())


def fit_parabola(samples: Samples, power: float) -> Law:
    """Fit the parabola to errors weighted by ``seconds^-power``; a straight law where it falls.

    With a power of 0 it is the paper's plain least squares, whatever the clock.
    """
    rows = rows_of(samples.phase, samples.batch, samples.tokens)
    share = rows / rows.max()
    weights = samples.weights(power) if power else np.ones(len(samples))
    features = np.stack([np.ones_like(share), share, share**2], axis=1) * weights[:, None]
    fitted = np.linalg.lstsq(features, samples.seconds * weights, rcond=None)[0]
    found = ParabolaLaw(
        phase=samples.phase,
        low=float(rows.min()),
        high=float(rows.max()),
        coefficients=fitted.astype(np.float64),
    )
    return found if found.grows else fit_straight(samples, power)
