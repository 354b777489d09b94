"""Whether requests are still those a schedule was made for, and the frequency that would suit them.

RRA keeps its decoding batch by encoding ``B_E`` requests every ``N_D`` iterations, which suits
answers that stay for ``B_D / B_E`` such phases. Other lengths are answered with another ``N_D``
(ExeGPT, Sec. 7.6): batches and with them the seconds of an iteration stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from llmpq.errors import SpecError
from llmpq.spec.schedule import Schedule

NOTABLE = 0.1
"""Relative difference from which lengths are said to have drifted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What was expected of answers and what was seen.

    Attributes:
        expected_phases: encodings an answer stays for, by the schedule's batches.
        observed_phases: by the lengths seen.
        expected_longest, observed_longest: tokens of the 99th percentile; ``None`` when the
            schedule does not say.
        suggested: the schedule with the ``N_D`` that brings the phases back.
    """

    expected_phases: float
    observed_phases: float
    expected_longest: int | None
    observed_longest: int
    suggested: Schedule

    @property
    def change(self) -> float:
        """Relative difference in phases: how far the decoding batch would be off."""
        return self.observed_phases / self.expected_phases - 1

    @property
    def is_notable(self) -> bool:
        """Whether the lengths are others than those planned for."""
        return abs(self.change) > NOTABLE


def drift_of(schedule: Schedule, new_tokens: Sequence[int]) -> Drift | None:
    """Compare observed answers with a schedule.

    Args:
        schedule: of RRA; any other answers ``None``, for it does not rest on lengths.
        new_tokens: of the answers seen.

    Raises:
        SpecError: no answers were seen.
    """
    if schedule.policy != "rra":
        return None
    if not new_tokens:
        raise SpecError("drift: found no answers, expected at least one")
    assert schedule.encode_batch is not None
    assert schedule.decode_batch is not None
    assert schedule.decode_iterations is not None
    expected = schedule.decode_batch / schedule.encode_batch
    longest = sorted(new_tokens)[math.ceil(0.99 * len(new_tokens)) - 1]
    estimate = schedule.estimate
    return Drift(
        expected_phases=expected,
        observed_phases=_phases(new_tokens, schedule.decode_iterations),
        expected_longest=None if estimate is None else estimate.new_tokens,
        observed_longest=longest,
        suggested=replace(
            schedule, decode_iterations=_iterations(new_tokens, expected), estimate=None
        ),
    )


def _phases(new_tokens: Sequence[int], iterations: int) -> float:
    return fmean(-(-(tokens - 1) // iterations) for tokens in new_tokens)


def _iterations(new_tokens: Sequence[int], phases: float) -> int:
    """Return the ``N_D`` whose phases are nearest; they fall as it grows."""
    low, high = 1, max(1, max(new_tokens) - 1)
    while low < high:
        middle = (low + high) // 2
        if _phases(new_tokens, middle) > phases:
            low = middle + 1
        else:
            high = middle
    near = [one for one in (low - 1, low) if one >= 1]
    return min(near, key=lambda one: abs(_phases(new_tokens, one) - phases))
