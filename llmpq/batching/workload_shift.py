"""Whether requests are still those a schedule was made for, and the frequency that would suit them.

RRA keeps its decoding batch by encoding ``B_E`` requests every ``N_D`` iterations, which suits
answers that stay for ``B_D / B_E`` such phases. Other lengths are answered with another ``N_D``
(ExeGPT, Sec. 7.6): batches and with them the seconds of an iteration stay what they are. WAA is
``N_D = 1``, and suits its mean answer; others ask for other stages, so for another plan.

The watch sits in the book of requests: runtime and simulator notice the same at the same request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, stdev
from typing import Any

from llmpq.batching.base import BatchingPolicy
from llmpq.batching.policies.rra import RraPolicy
from llmpq.errors import SpecError
from llmpq.spec.schedule import Schedule

NOTABLE = 0.1
"""Relative difference from which lengths are said to have drifted."""
SURE = 3.0
"""Standard errors by which they must differ as well: a few requests are always others."""
COHORT = 64
"""Requests that are judged together, when the last of them has ended."""
COHORTS = 8
"""So many, the newest, count: older requests tell nothing of a drift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What was expected of answers and what was seen.

    Attributes:
        expected_phases: encodings an answer stays for, by the schedule.
        observed_phases: by the lengths seen.
        error: standard error of ``observed_phases``, as a share of it.
        expected_mean: tokens of the mean answer; ``None`` when the schedule does not say.
        observed_mean: of the answers seen.
        expected_longest, observed_longest: tokens of the 99th percentile; ``None`` when the
            schedule does not say.
        suggested: the schedule with the ``N_D`` that brings the phases back; ``None`` for WAA.
    """

    expected_phases: float
    observed_phases: float
    error: float
    expected_mean: float | None
    observed_mean: float
    expected_longest: int | None
    observed_longest: int
    suggested: Schedule | None

    @property
    def change(self) -> float:
        """Relative difference in phases: how far the decoding batch would be off."""
        return self.observed_phases / self.expected_phases - 1

    @property
    def is_notable(self) -> bool:
        """Whether the lengths are others than those planned for, and not by chance."""
        return abs(self.change) > max(NOTABLE, SURE * self.error)

    def to_json(self, adjusted: Sequence[int]) -> dict[str, Any]:
        """Return the JSON object; ``adjusted`` are the ``N_D`` that a run went on with."""
        suggested = self.suggested
        return {
            "expected_phases": self.expected_phases,
            "observed_phases": self.observed_phases,
            "expected_mean": self.expected_mean,
            "observed_mean": self.observed_mean,
            "expected_longest": self.expected_longest,
            "observed_longest": self.observed_longest,
            "is_notable": self.is_notable,
            "suggested_decode_iterations": None
            if suggested is None
            else suggested.decode_iterations,
            "adjusted_decode_iterations": list(adjusted),
        }


def drift_of(schedule: Schedule, new_tokens: Sequence[int]) -> Drift | None:
    """Compare observed answers with a schedule.

    Args:
        schedule: of RRA, or of WAA with its mean answer; any other answers ``None``, for it does
            not rest on lengths.
        new_tokens: of the answers seen.

    Raises:
        SpecError: no answers were seen.
    """
    expected = _expected_phases(schedule)
    if expected is None:
        return None
    if not new_tokens:
        raise SpecError("drift: found no answers, expected at least one")
    phases = _phases(new_tokens, schedule.decode_iterations or 1)
    longest = sorted(new_tokens)[math.ceil(0.99 * len(new_tokens)) - 1]
    estimate = schedule.estimate
    return Drift(
        expected_phases=expected,
        observed_phases=fmean(phases),
        error=_error(phases),
        expected_mean=schedule.mean_new_tokens,
        observed_mean=fmean(new_tokens),
        expected_longest=None if estimate is None else estimate.new_tokens,
        observed_longest=longest,
        suggested=None
        if schedule.policy == "waa"
        else replace(schedule, decode_iterations=_iterations(new_tokens, expected), estimate=None),
    )


def _expected_phases(schedule: Schedule) -> float | None:
    if schedule.policy == "rra":
        assert schedule.encode_batch is not None
        assert schedule.decode_batch is not None
        return schedule.decode_batch / schedule.encode_batch
    if schedule.policy == "waa" and schedule.mean_new_tokens is not None:
        # Prefill makes the first token; answers of one token keep nobody decoding.
        return schedule.mean_new_tokens - 1 or None
    return None


def _phases(new_tokens: Sequence[int], iterations: int) -> list[int]:
    return [-(-(tokens - 1) // iterations) for tokens in new_tokens]


def _error(phases: Sequence[int]) -> float:
    """Return the standard error of the mean, as a share of it."""
    mean = fmean(phases)
    if len(phases) < 2 or not mean:
        return 0.0
    return stdev(phases) / math.sqrt(len(phases)) / mean


def _iterations(new_tokens: Sequence[int], phases: float) -> int:
    """Return the ``N_D`` whose phases are nearest; they fall as it grows."""

    def mean(iterations: int) -> float:
        return fmean(_phases(new_tokens, iterations))

    low, high = 1, max(1, max(new_tokens) - 1)
    while low < high:
        middle = (low + high) // 2
        if mean(middle) > phases:
            low = middle + 1
        else:
            high = middle
    near = [one for one in (low - 1, low) if one >= 1]
    return min(near, key=lambda one: abs(mean(one) - phases))


class DriftWatch:
    """Judges answers as they end, in the order in which they began.

    Requests that begin one after the other form a cohort; when all of it has ended, the newest
    cohorts are compared with the schedule. Whoever takes answers as they end sees the short ones
    first, and a drift in every run.

    Args:
        schedule: what is obeyed; it must rest on lengths.
        tell: called when a drift is noticed first, and again after each adjustment.
        policy: adjusted to the lengths in place, ``None`` to leave everything as it is.
        cohort: requests that are judged together.
    """

    def __init__(
        self,
        schedule: Schedule,
        tell: Callable[[Drift], None] | None = None,
        policy: RraPolicy | None = None,
        cohort: int = COHORT,
    ) -> None:
        self._schedule = schedule
        self._cohort = cohort
        self._tell = tell
        self._policy = policy
        self._begun = 0
        self._cohort_of: dict[int, int] = {}  # of requests on their way
        self._filling: dict[int, list[int]] = {}  # cohort -> answers so far
        self._judged: deque[list[int]] = deque(maxlen=COHORTS)
        self._observed: list[int] = []
        self._drifts: list[Drift] = []

    @property
    def observed(self) -> tuple[int, ...]:
        """Tokens of every answer so far, as they ended."""
        return tuple(self._observed)

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """What was noticed and told."""
        return tuple(self._drifts)

    @property
    def adjusted(self) -> tuple[int, ...]:
        """The ``N_D`` that the policy was given, one after the other."""
        if self._policy is None:
            return ()
        schedules = (drift.suggested for drift in self._drifts)
        return tuple(one.decode_iterations or 1 for one in schedules if one is not None)

    def begin(self, requests: Sequence[int]) -> None:
        """Note that requests were given slots, in this order."""
        for request in requests:
            self._cohort_of[request] = self._begun // self._cohort
            self._begun += 1

    def ends(self, request: int, new_tokens: int) -> None:
        """Note an answer; judge its cohort when it was the last of it."""
        self._observed.append(new_tokens)
        cohort = self._cohort_of.pop(request)
        answers = self._filling.setdefault(cohort, [])
        answers.append(new_tokens)
        if len(answers) == self._cohort:
            self._judged.append(self._filling.pop(cohort))
            self._judge()

    def _judge(self) -> None:
        if self._drifts and self._policy is None:
            return  # it has been told, and nothing has changed since
        drift = drift_of(self._schedule, list(chain(*self._judged)))
        if drift is None or not drift.is_notable:
            return
        if self._policy is not None and drift.suggested is not None:
            iterations = drift.suggested.decode_iterations
            if iterations == self._schedule.decode_iterations:
                return  # no other frequency comes nearer
            assert iterations is not None
            self._policy.adjust(iterations)
            self._schedule = replace(self._schedule, decode_iterations=iterations)
        self._drifts.append(drift)
        if self._tell is not None:
            self._tell(drift)


def watch_of(
    schedule: Schedule,
    policy: BatchingPolicy,
    *,
    replans: bool,
    tell: Callable[[Drift], None] | None = None,
    cohort: int = COHORT,
) -> DriftWatch | None:
    """Return a watch of a run under this schedule, ``None`` where that rests on no lengths.

    Args:
        schedule: what is obeyed.
        policy: made of it.
        replans: adjust the policy in place, where that is possible: RRA's ``N_D``.
        tell: called when a drift is noticed.
        cohort: requests that are judged together.
    """
    if _expected_phases(schedule) is None:
        return None
    adjusted = policy if replans and isinstance(policy, RraPolicy) else None
    return DriftWatch(schedule, tell, adjusted, cohort)


def drift_words(drift: Drift) -> str:
    """Return what people are told of a drift."""
    mean = "" if drift.expected_mean is None else f" instead of {drift.expected_mean:.1f}"
    words = (
        f"answers have {drift.observed_mean:.1f} tokens on average{mean} and stay for "
        f"{drift.observed_phases:.2f} encodings, the schedule is for {drift.expected_phases:.2f} "
        f"({drift.change:+.0%})"
    )
    if drift.expected_longest is not None:
        words += (
            f"; the 99th percentile has {drift.observed_longest} tokens instead of "
            f"{drift.expected_longest}"
        )
    return words
