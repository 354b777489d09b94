"""Two levels of speed: a core of its own, and one whose other hardware thread works for others.

A host gives a virtual core half of a physical one whenever it needs the other half: for seconds or
minutes, unseen by ``top``. There the interpreter then takes 1.85
times as long, a decode step 1.4 to 1.6 times, a long prefill 1.25 times, and there is nothing in
between. Medians over such timings are of either level, as it happens. So a loop that tells the
level is timed before and after each trial, how much slower each kind of trial is on the disturbed
level is estimated from trials met on both, and every timing is brought to the calm level. Few rows
suffer most (two by half, sixteen by a fifth), so that is estimated by rows.

This module refuses to time anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import log
from operator import itemgetter
from statistics import median

from llmpq.profiler.bench import MASTER_BITS, Timing, Trial
from llmpq.profiler.reference import DISTURBED
from llmpq.spec.precision import Phase

CALM_SHARE = 0.05
"""The loop's calm time is the quantile of this share."""
_LEAST_TRIALS = 3
"""Trials timed on both levels, from which on their ratio is trusted."""
_NEAREST = 9
"""Trials, the nearest by rows, whose median ratio counts: one by itself is a tenth off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A timing, and the loop's seconds around it.

    Attributes:
        timing: of the trial.
        before_s: of the loop just before it.
        after_s: of the loop just behind it.
    """

    timing: Timing
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long something takes on a disturbed core.

    Attributes:
        by_rows: rows of a micro-batch and the factor at them, rows ascending; empty is 1.
    """

    by_rows: tuple[tuple[int, float], ...] = ()

    def at(self, rows: int) -> float:
        """Return the factor at a number of rows, interpolated by its logarithm."""
        above = bisect_left(self.by_rows, rows, key=itemgetter(0))
        near = self.by_rows[max(0, above - 1) : above + 1]
        if len(near) < 2 or near[1][0] == rows:
            return near[-1][1] if near else 1.0
        (low, low_factor), (high, high_factor) = near
        share = log(rows / low) / log(high / low)
        return low_factor + share * (high_factor - low_factor)

    @property
    def middle(self) -> float:
        """Its median over the rows."""
        return median(factor for _, factor in self.by_rows) if self.by_rows else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Timings brought to the calm level.

    Attributes:
        calm_s: the loop's time on it.
        times: seconds of each trial, as on the calm level.
        slowdowns: of the trials of a phase and bitwidth.
        disturbed_share: of the timings; half of one during which the level changed.
    """

    calm_s: float
    times: Mapping[Trial, Sequence[float]]
    slowdowns: Mapping[tuple[Phase, int], Slowdown]
    disturbed_share: float

    def factor(self, phase: Phase) -> float:
        """Return how many times as long layers take in a phase when disturbed."""
        own = [
            slowdown.middle
            for (of, bits), slowdown in self.slowdowns.items()
            if of is phase and bits != MASTER_BITS
        ]
        return median(own) if own else 1.0

    def level(self, trial: Trial) -> float:
        """Return how many times the calm level's time a trial took in the mean."""
        slowdown = self.slowdowns.get((trial.shape.phase, trial.bits), Slowdown())
        return 1.0 + (slowdown.at(trial.shape.rows) - 1.0) * self.disturbed_share


def levels_of(timed: Sequence[Timed]) -> Levels:
    """Tell the levels apart and bring every timing to the calm one.

    A timing during which the level changed is left out, unless its trial has no other.
    """
    loops = sorted(chain.from_iterable((one.before_s, one.after_s) for one in timed))
    calm_s = loops[int(CALM_SHARE * len(loops))] if loops else 0.0
    by_trial: dict[Trial, tuple[list[float], list[float], list[float]]] = {}
    for one in timed:
        place = sum(loop_s > DISTURBED * calm_s for loop_s in (one.before_s, one.after_s))
        calm_mixed_disturbed = by_trial.setdefault(one.timing.trial, ([], [], []))
        calm_mixed_disturbed[place].append(one.timing.seconds)
    slowdowns = _slowdowns(by_trial)
    times = {}
    for trial, (calm, mixed, disturbed) in by_trial.items():
        factor = slowdowns[trial.shape.phase, trial.bits].at(trial.shape.rows)
        levelled = [*calm, *(seconds / factor for seconds in disturbed)]
        times[trial] = levelled or [2.0 * seconds / (1.0 + factor) for seconds in mixed]
    halves = sum(len(mixed) + 2 * len(slow) for _, mixed, slow in by_trial.values())
    share = 0.5 * halves / max(1, len(timed))
    return Levels(calm_s=calm_s, times=times, slowdowns=slowdowns, disturbed_share=share)


def _slowdowns(
    by_trial: Mapping[Trial, tuple[Sequence[float], Sequence[float], Sequence[float]]],
) -> dict[tuple[Phase, int], Slowdown]:
    """Return the slowdown of every phase and bitwidth: of its own trials, else of its phase's."""
    ratios: dict[tuple[Phase, int], list[tuple[int, float]]] = {}
    rows: dict[tuple[Phase, int], set[int]] = {}
    for trial, (calm, _, disturbed) in by_trial.items():
        kind = trial.shape.phase, trial.bits
        rows.setdefault(kind, set()).add(trial.shape.rows)
        own = ratios.setdefault(kind, [])
        if calm and disturbed:
            own.append((trial.shape.rows, median(disturbed) / median(calm)))
    found = {}
    for (phase, bits), own in ratios.items():
        of_phase = [one for (of, _), all_own in ratios.items() if of is phase for one in all_own]
        trusted = next((some for some in (own, of_phase) if len(some) >= _LEAST_TRIALS), [])
        found[phase, bits] = Slowdown(
            tuple((count, _factor_near(count, trusted)) for count in sorted(rows[phase, bits]))
        )
    return found


def _factor_near(rows: int, ratios: Sequence[tuple[int, float]]) -> float:
    """Return the median ratio of the trials nearest by rows, at least 1; 1 where there is none."""
    near = sorted(ratios, key=lambda one: abs(log(one[0] / rows)))[:_NEAREST]
    return max(1.0, median(ratio for _, ratio in near)) if near else 1.0
