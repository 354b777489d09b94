"""Fidelity: relative errors of a latency model on samples it has not seen.

The hold-out is another table, or a seeded share of the *shapes* of the same one: all bitwidths of a
shape go together, so that no model is asked for a shape that it has learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmpq.costmodel.tables.latency import LawName, RegressionLatencyModel
from llmpq.errors import SpecError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

HELD_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """Absolute relative errors of one phase, as shares of the measured seconds."""

    mean: float
    median: float
    p95: float
    points: int


def split_shapes(table: LatencyTable, seed: int = 0) -> tuple[LatencyTable, LatencyTable]:
    """Return the table without, and with only, a seeded share of each phase's shapes.

    Raises:
        SpecError: a phase has fewer than two shapes, which cannot be parted.
    """
    rng = np.random.default_rng(seed)
    held: set[tuple[Phase, int, int]] = set()
    for phase in dict.fromkeys(one.phase for one in table.samples):
        shapes = sorted({(one.batch, one.tokens) for one in table.samples if one.phase is phase})
        if len(shapes) < 2:
            raise SpecError(
                f"hold-out: found {len(shapes)} shape of {phase.value}, expected at least two"
            )
        count = min(max(1, round(HELD_SHARE * len(shapes))), len(shapes) - 1)
        chosen = rng.permutation(len(shapes))[:count]
        held |= {(phase, *shapes[index]) for index in chosen}
    parts: tuple[list[LatencySample], list[LatencySample]] = ([], [])
    for one in table.samples:
        parts[(one.phase, one.batch, one.tokens) in held].append(one)
    kept, left = (LatencyTable(samples=tuple(part), provenance=table.provenance) for part in parts)
    return kept, left


def summarise(errors: Sequence[float]) -> ErrorReport:
    """Return the figures of at least one error."""
    return ErrorReport(
        mean=float(np.mean(errors)),
        median=float(np.median(errors)),
        p95=float(np.percentile(errors, 95)),
        points=len(errors),
    )


def fidelity(
    table: LatencyTable,
    held: LatencyTable | None = None,
    *,
    seed: int = 0,
    law: LawName = "hinged",
) -> dict[Phase, ErrorReport]:
    """Fit a table and report the errors on a hold-out, the decoder layers only.

    Without ``held`` a seeded share of ``table`` is held back.

    Raises:
        ProfileMissError: the hold-out has a phase or bitwidth the table lacks.
    """
    if held is None:
        table, held = split_shapes(table, seed)
    model = RegressionLatencyModel(table, law)

    reports = {}
    for phase in Phase:
        asked = [one for one in held.samples if one.phase is phase and one.bits > 0]
        if asked:
            forecasts = (model.seconds(phase, one.bits, one.batch, one.tokens) for one in asked)
            pairs = zip(forecasts, asked, strict=True)
            reports[phase] = summarise([abs(found / one.seconds - 1.0) for found, one in pairs])
    return reports
