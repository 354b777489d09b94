"""Two levels of speed: a core of its own, and one whose other hardware thread works for others.

A host gives a virtual core half of a physical one whenever it needs the other half: for seconds or
minutes, unseen by ``top``. On the machine of ``docs/benchmarks.md`` the interpreter then takes 1.85
times as long, a decode step 1.4 to 1.6 times, a long prefill 1.25 times, and there is nothing in
between. Medians over such timings are of either level, as it happens. So a loop that tells the
level is timed before and after each trial, how much slower each kind of trial is on the disturbed
level is estimated from trials met on both, and every timing is brought to the calm level.

This module refuses to time anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

from llmpq.profiler.bench import MASTER_BITS, Timing, Trial
from llmpq.profiler.reference import DISTURBED
from llmpq.spec.precision import Phase

CALM_SHARE = 0.05
"""The loop's calm time is the quantile of this share."""
_LEAST_TRIALS = 3
"""Trials timed on both levels, from which on their ratio is trusted."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Timings brought to the calm level.

    Attributes:
        calm_s: the loop's time on it.
        times: seconds of each trial, as on the calm level.
        factors: how many times as long a trial of a phase and bitwidth takes when disturbed.
        disturbed_share: of the timings.
    """

    calm_s: float
    times: Mapping[Trial, Sequence[float]]
    factors: Mapping[tuple[Phase, int], float]
    disturbed_share: float

    def factor(self, phase: Phase) -> float:
        """Return how many times as long layers take in a phase when disturbed."""
        own = [
            factor
            for (of, bits), factor in self.factors.items()
            if of is phase and bits != MASTER_BITS
        ]
        return median(own) if own else 1.0


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
    factors = _factors(by_trial)
    times = {}
    for trial, (calm, mixed, disturbed) in by_trial.items():
        factor = factors[trial.shape.phase, trial.bits]
        levelled = [*calm, *(seconds / factor for seconds in disturbed)]
        times[trial] = levelled or [2.0 * seconds / (1.0 + factor) for seconds in mixed]
    share = sum(len(disturbed) for _, _, disturbed in by_trial.values()) / max(1, len(timed))
    return Levels(calm_s=calm_s, times=times, factors=factors, disturbed_share=share)


def _factors(
    by_trial: Mapping[Trial, tuple[Sequence[float], Sequence[float], Sequence[float]]],
) -> dict[tuple[Phase, int], float]:
    """Return the factor of every phase and bitwidth: of its own trials, else of its phase's."""
    ratios: dict[tuple[Phase, int], list[float]] = {}
    for trial, (calm, _, disturbed) in by_trial.items():
        own = ratios.setdefault((trial.shape.phase, trial.bits), [])
        if calm and disturbed:
            own.append(median(disturbed) / median(calm))
    found = {}
    for (phase, bits), own in ratios.items():
        of_phase = [one for (of, _), all_own in ratios.items() if of is phase for one in all_own]
        trusted = next((some for some in (own, of_phase) if len(some) >= _LEAST_TRIALS), [1.0])
        found[phase, bits] = max(1.0, median(trusted))
    return found
