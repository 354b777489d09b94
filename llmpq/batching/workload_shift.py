"""Detect that answer lengths differ from those of the schedule, and adjust the schedule.

RRA encodes ``B_E`` requests every ``N_D`` iterations. Its decoding batch stays at ``B_D`` if an
answer lasts for ``B_D / B_E`` of these phases. For other lengths another ``N_D`` restores that
number (ExeGPT, Sec. 7.6); batch sizes, and so the seconds of an iteration, do not change. WAA has
``N_D = 1`` and depends on the mean answer; other lengths need another plan.
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
from llmpq.spec.plan import Schedule

MIN_CHANGE = 0.1
"""Smallest relative change that counts as a shift."""
MIN_STANDARD_ERRORS = 3.0
"""Standard errors that the change must exceed as well."""
GROUP_REQUESTS = 64
"""Consecutive requests that are evaluated together, when the last of them has finished."""
MAX_GROUPS = 8
"""Number of groups, the newest, that are compared with the schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShift:
    """Planned and observed answer lengths; ``None`` where the schedule has none.

    Attributes:
        expected_phases, observed_phases: phases that an answer lasts.
        error: relative standard error of ``observed_phases``.
        expected_mean, observed_mean: mean tokens of an answer.
        expected_longest, observed_longest: tokens of the 99th percentile.
        suggested: the schedule with the ``N_D`` that restores the phases; ``None`` for WAA.
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
        """Relative change of the phases, and so of the decoding batch."""
        return self.observed_phases / self.expected_phases - 1

    @property
    def is_notable(self) -> bool:
        """Whether the change is large and statistically significant."""
        return abs(self.change) > max(MIN_CHANGE, MIN_STANDARD_ERRORS * self.error)

    def to_json(self, adjusted: Sequence[int]) -> dict[str, Any]:
        """Return the JSON object; ``adjusted`` lists the ``N_D`` that the run changed to."""
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


def compare_lengths(schedule: Schedule, new_tokens: Sequence[int]) -> WorkloadShift | None:
    """Compare the tokens of answers with a schedule; ``None`` if it does not depend on lengths.

    Raises:
        SpecError: there are no answers.
    """
    expected = _expected_phases(schedule)
    if expected is None:
        return None
    if not new_tokens:
        raise SpecError("workload shift: found no answers, expected at least one")
    phases = _phases(new_tokens, schedule.decode_iterations or 1)
    longest = sorted(new_tokens)[math.ceil(0.99 * len(new_tokens)) - 1]
    estimate = schedule.estimate
    return WorkloadShift(
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
        # Prefill makes the first token.
        return schedule.mean_new_tokens - 1 or None
    return None


def _phases(new_tokens: Sequence[int], iterations: int) -> list[int]:
    return [-(-(tokens - 1) // iterations) for tokens in new_tokens]


def _error(phases: Sequence[int]) -> float:
    """Return the relative standard error of the mean."""
    mean = fmean(phases)
    if len(phases) < 2 or not mean:
        return 0.0
    return stdev(phases) / math.sqrt(len(phases)) / mean


def _iterations(new_tokens: Sequence[int], phases: float) -> int:
    """Return the ``N_D`` with the nearest number of phases, by bisection."""

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


class LengthMonitor:
    """Compares the lengths of finished answers with the schedule, which must depend on lengths.

    Consecutive requests form a group. When all requests of a group have finished, the newest groups
    are compared with the schedule. (Answers in the order of completion would be biased: short ones
    finish first.) ``on_shift`` is called for the first shift, and for each shift after an
    adjustment of ``policy``.
    """

    def __init__(
        self,
        schedule: Schedule,
        on_shift: Callable[[WorkloadShift], None] | None = None,
        policy: RraPolicy | None = None,
        group_requests: int = GROUP_REQUESTS,
    ) -> None:
        self._schedule = schedule
        self._group_requests = group_requests
        self._on_shift = on_shift
        self._policy = policy
        self._begun = 0
        self._group_of: dict[int, int] = {}  # of unfinished requests
        self._filling: dict[int, list[int]] = {}  # group -> finished lengths
        self._complete_groups: deque[list[int]] = deque(maxlen=MAX_GROUPS)
        self.observed: list[int] = []  # tokens of finished answers, in order of completion
        self.shifts: tuple[WorkloadShift, ...] = ()

    @property
    def adjusted(self) -> tuple[int, ...]:
        """The ``N_D`` that the policy was adjusted to, in order."""
        if self._policy is None:
            return ()
        schedules = (shift.suggested for shift in self.shifts)
        return tuple(one.decode_iterations or 1 for one in schedules if one is not None)

    def started(self, requests: Sequence[int]) -> None:
        """Record requests that started, in order."""
        for request in requests:
            self._group_of[request] = self._begun // self._group_requests
            self._begun += 1

    def finished(self, request: int, new_tokens: int) -> None:
        """Record a finished answer; compare when its group is complete."""
        self.observed.append(new_tokens)
        group = self._group_of.pop(request)
        answers = self._filling.setdefault(group, [])
        answers.append(new_tokens)
        if len(answers) == self._group_requests:
            self._complete_groups.append(self._filling.pop(group))
            self._compare()

    def _compare(self) -> None:
        if self.shifts and self._policy is None:
            return  # already reported, and nothing was adjusted
        shift = compare_lengths(self._schedule, list(chain(*self._complete_groups)))
        if shift is None or not shift.is_notable:
            return
        if self._policy is not None and shift.suggested is not None:
            iterations = shift.suggested.decode_iterations
            if iterations == self._schedule.decode_iterations:
                return  # no better frequency exists
            assert iterations is not None
            self._policy.adjust(iterations)
            self._schedule = replace(self._schedule, decode_iterations=iterations)
        self.shifts += (shift,)
        if self._on_shift is not None:
            self._on_shift(shift)


def make_length_monitor(
    schedule: Schedule,
    policy: BatchingPolicy,
    *,
    replans: bool,
    on_shift: Callable[[WorkloadShift], None] | None = None,
    group_requests: int = GROUP_REQUESTS,
) -> LengthMonitor | None:
    """Return the monitor of a run, ``None`` if the schedule does not depend on lengths.

    With ``replans``, an RRA policy is adjusted in place.
    """
    if _expected_phases(schedule) is None:
        return None
    adjusted = policy if replans and isinstance(policy, RraPolicy) else None
    return LengthMonitor(schedule, on_shift, adjusted, group_requests)


def describe_shift(shift: WorkloadShift) -> str:
    """Return the text of a message about a shift."""
    mean = "" if shift.expected_mean is None else f" instead of {shift.expected_mean:.1f}"
    text = (
        f"answers have {shift.observed_mean:.1f} tokens on average{mean} and stay for "
        f"{shift.observed_phases:.2f} encodings, the schedule is for {shift.expected_phases:.2f} "
        f"({shift.change:+.0%})"
    )
    if shift.expected_longest is not None:
        text += (
            f"; the 99th percentile has {shift.observed_longest} tokens instead of "
            f"{shift.expected_longest}"
        )
    return text
