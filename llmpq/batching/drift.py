"""Drift: answer lengths that differ from those of the schedule, and the adjusted schedule.

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
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from llmpq.batching.policies.rra import RraPolicy
from llmpq.batching.policy_scheduler import BatchingPolicy
from llmpq.errors import SpecError
from llmpq.spec.plan import Schedule

MIN_CHANGE = 0.1
"""Smallest relative change that counts as a drift."""
MIN_STANDARD_ERRORS = 3.0
"""Standard errors that the change must exceed as well."""
GROUP_REQUESTS = 64
"""Consecutive requests that are evaluated together, when the last of them has finished."""
MAX_GROUPS = 8
"""Number of groups, the newest, that are compared with the schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Observed answer lengths beside those that a schedule is for.

    Attributes:
        schedule: that depends on lengths.
        observed_phases: phases that an answer lasts.
        error: relative standard error of ``observed_phases``.
        observed_mean: mean tokens of an answer.
        observed_longest: tokens of the 99th percentile.
        suggested: the schedule with the ``N_D`` that restores the phases; ``None`` for WAA.
    """

    schedule: Schedule
    observed_phases: float
    error: float
    observed_mean: float
    observed_longest: int
    suggested: Schedule | None

    @classmethod
    def of(cls, schedule: Schedule, new_tokens: Sequence[int]) -> Drift | None:
        """Compare the tokens of answers with a schedule; ``None`` if it depends on no lengths.

        Raises:
            SpecError: there are no answers.
        """
        expected = _expected_phases(schedule)
        if expected is None:
            return None
        if not new_tokens:
            raise SpecError("drift: found no answers, expected at least one")
        phases = _phases(new_tokens, schedule.decode_iterations or 1)
        suggested = None
        if schedule.policy != "waa":
            iterations = _iterations(new_tokens, expected)
            suggested = replace(schedule, decode_iterations=iterations, estimate=None)
        return cls(
            schedule=schedule,
            observed_phases=fmean(phases),
            error=_error(phases),
            observed_mean=fmean(new_tokens),
            observed_longest=sorted(new_tokens)[math.ceil(0.99 * len(new_tokens)) - 1],
            suggested=suggested,
        )

    @property
    def expected_phases(self) -> float:
        """Phases that an answer of the schedule lasts."""
        expected = _expected_phases(self.schedule)
        assert expected is not None
        return expected

    @property
    def expected_longest(self) -> int | None:
        """Tokens of the schedule's 99th percentile, if they are known."""
        estimate = self.schedule.estimate
        return None if estimate is None else estimate.new_tokens

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
            "expected_mean": self.schedule.mean_new_tokens,
            "observed_mean": self.observed_mean,
            "expected_longest": self.expected_longest,
            "observed_longest": self.observed_longest,
            "is_notable": self.is_notable,
            "suggested_decode_iterations": None
            if suggested is None
            else suggested.decode_iterations,
            "adjusted_decode_iterations": list(adjusted),
        }

    def text(
        self, *, replans: bool, adjusted: Sequence[int] = (), lengths: Path | None = None
    ) -> str:
        """Return what was observed, what the run does, and what else helps.

        Args:
            replans: whether the run adjusts the schedule.
            adjusted: the ``N_D`` that a finished run changed to.
            lengths: file that has the observed lengths.
        """
        if adjusted:
            does = f"went on with {', '.join(map(str, adjusted))} decode iterations"
        elif self.suggested is not None:
            verb = "going on with" if replans else "--replan would take"
            does = f"{verb} {self.suggested.decode_iterations} decode iterations"
        else:
            does = "other stages would suit them"
        return (
            f"{self._observed_text()}; {does}; a latency bound is kept only by a new search: "
            f"llmpq-algo --policy {self.schedule.policy} --lengths {lengths or 'FILE'}"
        )

    def _observed_text(self) -> str:
        mean, longest = self.schedule.mean_new_tokens, self.expected_longest
        instead = "" if mean is None else f" instead of {mean:.1f}"
        text = (
            f"answers have {self.observed_mean:.1f} tokens on average{instead} and stay for "
            f"{self.observed_phases:.2f} encodings, the schedule is for "
            f"{self.expected_phases:.2f} ({self.change:+.0%})"
        )
        if longest is not None:
            text += f"; the 99th percentile has {self.observed_longest} tokens instead of {longest}"
        return text


class DriftMonitor:
    """Looks for drift in the answers of a run, and adjusts the policy where it is one.

    Consecutive requests form a group. When all requests of a group have finished, the newest groups
    are compared with the schedule. (Answers in the order of completion would be biased: short ones
    finish first.)

    Args:
        schedule: that depends on lengths.
        policy: to adjust, ``None`` for none.
        on_drift: called for the first drift, and for each drift after an adjustment.
        group_requests: of a group.

    Attributes:
        observed: tokens of finished answers, in order of completion.
        drifts: that were found.
    """

    def __init__(
        self,
        schedule: Schedule,
        policy: RraPolicy | None = None,
        on_drift: Callable[[Drift], None] | None = None,
        group_requests: int = GROUP_REQUESTS,
    ) -> None:
        self._schedule = schedule
        self._group_requests = group_requests
        self._on_drift = on_drift
        self._policy = policy
        self._begun = 0
        self._group_of: dict[int, int] = {}  # of unfinished requests
        self._filling: dict[int, list[int]] = {}  # group -> finished lengths
        self._complete_groups: deque[list[int]] = deque(maxlen=MAX_GROUPS)
        self.observed: list[int] = []
        self.drifts: tuple[Drift, ...] = ()

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        policy: BatchingPolicy,
        *,
        replans: bool,
        on_drift: Callable[[Drift], None] | None = None,
        group_requests: int = GROUP_REQUESTS,
    ) -> DriftMonitor | None:
        """Return the monitor of a run, ``None`` if the schedule does not depend on lengths.

        With ``replans``, an RRA policy is adjusted in place.
        """
        if _expected_phases(schedule) is None:
            return None
        adjusted = policy if replans and isinstance(policy, RraPolicy) else None
        return cls(schedule, adjusted, on_drift, group_requests)

    @property
    def adjusted(self) -> tuple[int, ...]:
        """The ``N_D`` that the policy was adjusted to, in order."""
        if self._policy is None:
            return ()
        schedules = (drift.suggested for drift in self.drifts)
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
        if self.drifts and self._policy is None:
            return  # already reported, and nothing was adjusted
        drift = Drift.of(self._schedule, list(chain(*self._complete_groups)))
        if drift is None or not drift.is_notable:
            return
        if self._policy is not None and drift.suggested is not None:
            iterations = drift.suggested.decode_iterations
            if iterations == self._schedule.decode_iterations:
                return  # no better frequency exists
            assert iterations is not None
            self._policy.adjust(iterations)
            self._schedule = replace(self._schedule, decode_iterations=iterations)
        self.drifts += (drift,)
        if self._on_drift is not None:
            self._on_drift(drift)


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
