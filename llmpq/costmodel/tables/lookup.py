"""Lookup: seconds of one model on one type of device, from a measured table.

By default the regression of ``llmpq.costmodel.tables.latency`` answers: a measured point answers
for itself, everything else grows with the shape. With ``fitted_only`` the paper's features answer,
at measured points too. Never negative. A phase and bitwidth without a sample is a
``ProfileMissError``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import hypot

from llmpq.costmodel.base import Estimate, LatencyModel
from llmpq.costmodel.tables.latency import RegressionLatencyModel, fitted
from llmpq.errors import ProfileMissError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencyTable

MASTER_BITS = 0
"""How a table marks the master's own work."""
_OTHER_KIND_DEVIATION = 0.1
"""Added where a kind of layer that was not profiled is priced by the analytic ratio."""
_FILLED_DEVIATION = 0.13
"""Added where a bitwidth was not measured but filled by the roofline's ratio: all that were
compared with measured kernels lay within it (``docs/fidelity.md``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLatencyModel:
    """Latency of one model on one type of device, from measurements.

    Attributes:
        table: the samples, of layers of kind ``profiled_kind``.
        analytic: prices the other kinds by its ratio to the profiled one, and the master's work
            where the table has none (rows of 0 bits).
        profiled_kind: the kind of layer that was measured.
        file: the table's file, for messages.
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
        law = fitted(self.table, "features" if self.fitted_only else "hinged")
        object.__setattr__(self, "_regression", law)
        filled = frozenset(key for key, _ in self.table.provenance if key.startswith("filled_"))
        object.__setattr__(self, "_filled", filled)

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
        seconds = self._regression.seconds(phase, bits, batch, tokens)
        return seconds * self._ratio(phase, bits, batch, tokens, kind)

    def layer_estimate(
        self, phase: Phase, bits: int, batch: int, tokens: float, kind: int
    ) -> Estimate:
        """Return the same with how far to trust it; see ``LatencyModel``."""
        self._require(phase, bits)
        found = fitted(self.table).estimate(phase, bits, batch, tokens)
        return replace(
            found,
            seconds=self.layer_s(phase, bits, batch, tokens, kind),
            relative_deviation=hypot(
                found.relative_deviation,
                0.0 if kind == self.profiled_kind else _OTHER_KIND_DEVIATION,
                _FILLED_DEVIATION if f"filled_{bits}_bits" in self._filled else 0.0,
            ),
        )

    def master_s(self, phase: Phase, batch: int, tokens: float) -> float:
        """Return the seconds of the master's own work; see ``LatencyModel``."""
        if not self._regression.has(phase, MASTER_BITS):
            return self.analytic.master_s(phase, batch, tokens)
        return self._regression.seconds(phase, MASTER_BITS, batch, tokens)

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
