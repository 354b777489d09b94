"""Lookup: seconds from a measured table.

By default the regression of ``llmpq.costmodel.tables.latency`` answers: a measured point answers
for itself, everything else grows with the shape. ``fitted_only`` answers with the paper's features
alone, everywhere. Never negative. A phase and bitwidth without a single sample is a
``ProfileMissError``: a table never invents what nobody measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from llmpq.costmodel.base import Estimate, LatencyModel
from llmpq.costmodel.tables.cache import Cache
from llmpq.costmodel.tables.fit import Array, fit_relative
from llmpq.costmodel.tables.latency import RegressionLatencyModel, gather
from llmpq.costmodel.tables.laws import Samples
from llmpq.errors import ProfileMissError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencyTable

MASTER_BITS = 0
"""How a table marks the master's own work."""
_OTHER_KIND_DEVIATION = 0.1
"""Added where a kind of layer that was not profiled is priced by the analytic ratio."""
_REMEMBERED = 64

Answer = Callable[[Phase, int, float, float], float]


@lru_cache(maxsize=_REMEMBERED)
def fitted(table: LatencyTable, cache: Cache | None = None) -> RegressionLatencyModel:
    """Return the regression of a table; equal tables share one, and what it has fitted so far.

    A planner builds its costs again for every question it is asked; fitting is its slowest part.
    """
    return RegressionLatencyModel(table, cache=cache)


@lru_cache(maxsize=_REMEMBERED)
def _paper_fits(table: LatencyTable) -> dict[tuple[Phase, int], _PaperFit]:
    found = dict.fromkeys((sample.phase, sample.bits) for sample in table.samples)
    return {key: _PaperFit(gather(table.select(*key))) for key in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLatencyModel:
    """Latency of one model on one type of device, from measurements.

    Attributes:
        table: the samples, of layers of kind ``profiled_kind``.
        analytic: prices the other kinds by its ratio to the profiled one, and the master's work
            where the table has none (rows of 0 bits).
        profiled_kind: the kind of layer that was measured.
        file: the table's file, for messages.
        fitted_only: answer with the paper's regression everywhere, at measured points too.
        cache: where fitted curves are kept between runs.
    """

    table: LatencyTable
    analytic: LatencyModel
    profiled_kind: int = 0
    file: str = "in memory"
    fitted_only: bool = False
    cache: Cache | None = None
    _regression: RegressionLatencyModel = field(init=False, repr=False, compare=False)
    _answer: Answer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        regression = fitted(self.table, self.cache)
        object.__setattr__(self, "_regression", regression)
        answer: Answer = regression.seconds
        if self.fitted_only:
            fits = _paper_fits(self.table)

            def answer(phase: Phase, bits: int, batch: float, tokens: float) -> float:
                return fits[phase, bits].seconds(batch, tokens)

        object.__setattr__(self, "_answer", answer)

    def prepare(self, is_late: Callable[[], bool]) -> bool:
        """Have every fit at hand; tell whether they are, before it was too late to make them."""
        return self._regression.prepare(is_late)

    @property
    def source(self) -> str:
        """Where the seconds come from."""
        return f"{'fit of ' if self.fitted_only else ''}table {self.file}"

    def layer_s(self, phase: Phase, bits: int, batch: int, tokens: float, kind: int) -> float:
        """Return the seconds of one decoder layer; see ``LatencyModel``.

        Raises:
            ProfileMissError: no sample of this phase and bitwidth.
        """
        self._require(phase, bits)
        seconds = self._answer(phase, bits, batch, tokens)
        return seconds * self._ratio(phase, bits, batch, tokens, kind)

    def layer_estimate(
        self, phase: Phase, bits: int, batch: int, tokens: float, kind: int
    ) -> Estimate:
        """Return the same with how far to trust it; see ``LatencyModel``."""
        self._require(phase, bits)
        found = self._regression.estimate(phase, bits, batch, tokens)
        deviation = found.relative_deviation
        if kind != self.profiled_kind:
            deviation = float(np.hypot(deviation, _OTHER_KIND_DEVIATION))
        return replace(
            found,
            seconds=self.layer_s(phase, bits, batch, tokens, kind),
            relative_deviation=deviation,
        )

    def master_s(self, phase: Phase, batch: int, tokens: float) -> float:
        """Return the seconds of the master's own work; see ``LatencyModel``."""
        if not self._regression.has(phase, MASTER_BITS):
            return self.analytic.master_s(phase, batch, tokens)
        return self._answer(phase, MASTER_BITS, batch, tokens)

    def _require(self, phase: Phase, bits: int) -> None:
        if not self._regression.has(phase, bits):
            known = list(self._regression.known_bits(phase))
            raise ProfileMissError(
                f"{self.file}: found no {phase.value} samples at {bits} bits, only at {known}; "
                "profile that bitwidth, or leave it out of the search"
            )

    def _ratio(self, phase: Phase, bits: int, batch: int, tokens: float, kind: int) -> float:
        if kind == self.profiled_kind:
            return 1.0
        other = self.analytic.layer_s(phase, bits, batch, tokens, kind)
        return other / self.analytic.layer_s(phase, bits, batch, tokens, self.profiled_kind)


class _PaperFit:
    """The features of LLM-PQ, Sec. 4.1, none negative and fitted to relative errors."""

    def __init__(self, samples: Samples) -> None:
        self._phase = samples.phase
        shapes = zip(samples.batch.tolist(), samples.tokens.tolist(), strict=True)
        features = np.array([self._features(batch, tokens) for batch, tokens in shapes])
        self._fit: Array = fit_relative(features, samples.seconds)

    def seconds(self, batch: float, tokens: float) -> float:
        return float(np.dot(self._fit, self._features(batch, tokens)))

    def _features(self, batch: float, tokens: float) -> tuple[float, ...]:
        """Return the features, the likeliest lone cause first."""
        if self._phase is Phase.PREFILL:
            return (batch * tokens, 1.0, batch, tokens, batch * tokens * tokens)
        return (1.0, batch, batch * tokens, tokens)
