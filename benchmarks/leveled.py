"""Latency tables as on cores that are disturbed for a share of the time.

What ``llmpq-profile layer`` tells of a core's two levels of speed (``llmpq.profiler.levels``)
brings a table to the calm one, or to the levels that cores had in a run (``cores.CoreWatch``).
"""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencyTable


def at_share(table: LatencyTable, share: float) -> LatencyTable:
    """Return a table as on cores that are disturbed for a share of the time.

    Args:
        table: of the calm level; or of any, then with the negative of its own share.
        share: in [0, 1], or in [-1, 0] to bring a table to the calm level.
    """
    factors = by_phase(table, "disturbed")
    level = {phase: 1 + (factors[phase] - 1) * abs(share) for phase in Phase}
    if share < 0:
        level = {phase: 1 / value for phase, value in level.items()}
    stage_s = by_phase(table, "stage_s")
    told = {"stage_s": words_of({phase: level[phase] * stage_s[phase] for phase in Phase})}
    return LatencyTable(
        samples=tuple(
            replace(one, seconds=level[one.phase] * one.seconds) for one in table.samples
        ),
        provenance=tuple((key, told.get(key, value)) for key, value in table.provenance),
    )


def share_of(table: LatencyTable) -> float:
    """Return the share of a table's timings that were made on disturbed cores."""
    return float(dict(table.provenance)["disturbed share"].partition("%")[0]) / 100


def by_phase(table: LatencyTable, key: str) -> dict[Phase, float]:
    """Read a line of a table that has a number for each phase."""
    words = dict(table.provenance)[key].split()
    return {Phase(name): float(v) for name, v in zip(words[::2], words[1::2], strict=True)}


def words_of(values: dict[Phase, float]) -> str:
    """Write such a line."""
    return " ".join(f"{phase.value} {values[phase]!r}" for phase in Phase)
