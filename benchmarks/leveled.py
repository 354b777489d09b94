"""Latency tables as on cores that are disturbed for a share of the time.

What ``llmpq-profile layer`` tells of a core's two levels of speed (``llmpq.profiler.levels``)
brings a table to the calm one, or to the levels that cores had in a run (``cores.CoreWatch``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmpq.profiler.levels import Slowdown
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

State = tuple[bool, ...]
"""Which cores are disturbed."""
Figures = dict[str, float]


def at_share(table: LatencyTable, share: float) -> LatencyTable:
    """Return a table as on cores that are disturbed for a share of the time.

    Args:
        table: of the calm level; or of any, then with the negative of its own share.
        share: in [0, 1], or in [-1, 0] to bring a table to the calm level.
    """
    slow = by_phase(table, "disturbed")
    stage_s = by_phase(table, "stage_s")
    levels = {phase: level(slow[phase], share) for phase in Phase}
    told = {"stage_s": words_of({phase: levels[phase] * stage_s[phase] for phase in Phase})}
    kinds = {(one.phase, one.bits) for one in table.samples}
    slowdowns = {kind: slowdown_of(table, *kind) for kind in kinds}

    def factor(one: LatencySample) -> float:
        return slowdowns[one.phase, one.bits].at(rows_of(one.phase, one.batch, one.tokens))

    return LatencyTable(
        samples=tuple(
            replace(one, seconds=level(factor(one), share) * one.seconds) for one in table.samples
        ),
        provenance=tuple((key, told.get(key, value)) for key, value in table.provenance),
    )


def level(factor: float, share: float) -> float:
    """Return how many times as long something takes that takes ``factor`` times when disturbed.

    Args:
        factor: on a core that is disturbed all the time.
        share: as in ``at_share``.
    """
    found = 1.0 + (factor - 1.0) * abs(share)
    return 1.0 / found if share < 0 else found


def busy_level(factor: float, time_share: float) -> float:
    """Return how many times as long steps take in the mean on a core that is always busy.

    In disturbed time there are fewer of them.

    Args:
        factor: of a step on a core that is disturbed all the time.
        time_share: in which it is.
    """
    return 1.0 / (1.0 - time_share + time_share / factor)


def mixed(by_state: Mapping[State, Mapping[str, float]], shares: Mapping[State, float]) -> Figures:
    """Return what a run makes of states of its cores that last longer than its steps do.

    Rates (``..._per_s``) add up, times as the rates of which they are the inverse.

    Args:
        by_state: what it would make of each alone.
        shares: of the time.
    """

    def mean(key: str) -> float:
        if key.endswith("_per_s"):
            return sum(share * by_state[state][key] for state, share in shares.items())
        return 1.0 / sum(share / by_state[state][key] for state, share in shares.items())

    return {key: mean(key) for key in next(iter(by_state.values()))}


def slowdown_of(table: LatencyTable, phase: Phase, bits: int) -> Slowdown:
    """Return what a table says of disturbed cores in a phase at a bitwidth, 0 for the master."""
    words = dict(table.provenance)[slowdown_key(phase, bits)].split()
    return Slowdown(tuple((int(r), float(f)) for r, f in zip(words[::2], words[1::2], strict=True)))


def slowdown_key(phase: Phase, bits: int) -> str:
    """Return the name of the line that says so."""
    return f"disturbed {phase.value} {bits or 'master'}"


def slowdown_words(slowdown: Slowdown) -> str:
    """Write such a line."""
    return " ".join(f"{rows} {factor:.3f}" for rows, factor in slowdown.by_rows)


def rows_of(phase: Phase, batch: int, tokens: float) -> int:
    """Return the rows of the matrix products of a micro-batch."""
    return round(batch * tokens) if phase is Phase.PREFILL else batch


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
