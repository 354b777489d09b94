"""Admission: how much may wait, and the answer to what comes on top.

The server counts what it has handed to the engine, so that a decision takes no time and needs no
answer of the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.options.server import AdmissionOptions
from llmpq.server.errors import ApiError
from llmpq.spec.plan import Plan

CORRECTION = 0.1
"""Share of a measured time to the first token in the limit that is computed from it."""
LARGEST_CORRECTION = 4.0
"""The limit is at most so many times the forecast."""
MISSED_SHARE = 0.5
"""The log says once that the limit is below this share of the forecast."""

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits(AdmissionOptions):
    """Limits on what the server hands to the engine, and forecasts of its plan.

    Where there is a ``ttft_bound_s``, ``max_num_queued_tokens`` is the forecast for it; the limit
    follows what is measured.

    Attributes:
        prefill_tokens_per_s: forecast of the plan, for ``Retry-After`` and routers.
        decode_step_s: forecast of the seconds of a decode round, for routers.
    """

    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None


class RequestAdmission:
    """Counts answers and prompt tokens under way, and refuses new requests above the limits.

    Attributes:
        is_draining: whether all new requests are refused.
        num_choices: answers that wait or run.
        queued_tokens: prompt tokens that have not been computed.
        max_queued_tokens: their limit now, ``None`` for any number.
        rejections: refused requests by reason.
        limits: as given.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.is_draining = False
        self.num_choices = 0
        self.queued_tokens = 0
        self.max_queued_tokens: float | None = limits.max_num_queued_tokens
        self._is_missed = False
        self.rejections = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}

    def check_open(self) -> None:
        """Check what needs no look at the request.

        Raises:
            ApiError: the server drains, or is full already.
        """
        if self.is_draining:
            raise ApiError(503, "The server is shutting down.", retry_after_s=1)
        limits = self.limits
        if _reaches(self.num_choices, limits.max_num_queued_reqs):
            self._refuse("max_num_queued_reqs")
        if _reaches(self.queued_tokens, self.max_queued_tokens):
            self._refuse("max_num_queued_tokens")

    def admit(self, num_choices: int, prompt_tokens: int) -> Ticket:
        """Count a request; leaving the ticket's context ends it.

        Args:
            num_choices: its answers.
            prompt_tokens: of all its answers.

        Raises:
            ApiError: it does not fit below the limits now. One that is alone always fits.
        """
        self.check_open()
        limits = self.limits
        if self.num_choices and _exceeds(
            self.num_choices + num_choices, limits.max_num_queued_reqs
        ):
            self._refuse("max_num_queued_reqs")
        if self.queued_tokens and _exceeds(
            self.queued_tokens + prompt_tokens, self.max_queued_tokens
        ):
            self._refuse("max_num_queued_tokens")
        return Ticket(self, num_choices, prompt_tokens)

    def measure(self, queued_tokens: int, waited_s: float) -> None:
        """Correct the limit of queued tokens by a measured time to the first token.

        Only a time that is too long, or one of an answer behind about half of the limit, says
        anything of the limit.

        Args:
            queued_tokens: that the answer found on arrival, those of its own prompt included.
            waited_s: seconds from its arrival to its first token.
        """
        bound_s, limit = self.limits.ttft_bound_s, self.max_queued_tokens
        forecast = self.limits.max_num_queued_tokens
        if bound_s is None or limit is None or forecast is None or waited_s <= 0:
            return
        if waited_s <= bound_s and queued_tokens < limit / 2:
            return
        right = queued_tokens * bound_s / waited_s
        corrected = limit + CORRECTION * (right - limit)
        self.max_queued_tokens = min(max(corrected, 1.0), LARGEST_CORRECTION * forecast)
        if self.max_queued_tokens < MISSED_SHARE * forecast and not self._is_missed:
            self._is_missed = True
            logger.warning(
                "--ttft_bound: prompts take longer than the plan forecasts; %d prompt tokens may "
                "wait instead of %d",
                self.max_queued_tokens,
                forecast,
            )

    def _refuse(self, reason: str) -> None:
        self.rejections[reason] += 1
        rate = self.limits.prefill_tokens_per_s
        wait_s = 1.0 if rate is None else self.queued_tokens / rate
        raise ApiError(
            503,
            "The server is currently busy and has reached its limit of queued "
            f"{'requests' if reason == 'max_num_queued_reqs' else 'tokens'}. "
            "Please try again later or on a different instance.",
            retry_after_s=max(1, math.ceil(min(wait_s, 3600.0))),
        )


class Ticket:
    """A counted request; a context that ends with it."""

    def __init__(self, admission: RequestAdmission, num_choices: int, prompt_tokens: int) -> None:
        self._admission = admission
        self._found_tokens = admission.queued_tokens
        self._num_choices = num_choices
        self._queued_tokens = prompt_tokens
        admission.num_choices += num_choices
        admission.queued_tokens += prompt_tokens

    def measure(self, ahead_tokens: int, waited_s: float) -> None:
        """Take the time to the first token of an answer.

        Args:
            ahead_tokens: prompt tokens of the request up to this answer's.
            waited_s: from the arrival of the request.
        """
        self._admission.measure(self._found_tokens + ahead_tokens, waited_s)

    def computed(self, prompt_tokens: int) -> None:
        """Count prompt tokens as computed."""
        self._queued_tokens -= prompt_tokens
        self._admission.queued_tokens -= prompt_tokens

    def finish_one(self) -> None:
        """Count one answer as ended."""
        self._num_choices -= 1
        self._admission.num_choices -= 1

    def __enter__(self) -> Ticket:
        """Return itself; the request is counted since construction."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop counting what has not ended by itself."""
        self._admission.num_choices -= self._num_choices
        self._admission.queued_tokens -= self._queued_tokens
        self._num_choices = self._queued_tokens = 0


def prefill_tokens_per_s(plan: Plan) -> float:
    """Return how many prompt tokens a second the plan's own cost model forecasts.

    In steady state the slowest stage gives the rate: a micro-batch of prompts passes it in the
    forecast time, computing and sending overlapped.
    """
    slowest_s = max(_prefill_times(plan))
    return plan.micro_batching.prefill * plan.workload.prompt_tokens / slowest_s


def queued_tokens_for(plan: Plan, ttft_bound_s: float) -> int:
    """Return how many prompt tokens may wait so that the last of them meets a bound.

    A prompt that arrives last waits for the slowest stage to compute all tokens before it, and then
    passes the other stages.

    Args:
        plan: with forecast times.
        ttft_bound_s: longest time to the first token, in seconds.

    Raises:
        SpecError: one prompt alone takes longer than the bound.
    """
    times = _prefill_times(plan)
    pass_s = sum(times) - max(times)
    tokens = (ttft_bound_s - pass_s) * prefill_tokens_per_s(plan)
    if not plan.workload.prompt_tokens <= tokens < math.inf:
        least_s = pass_s + plan.workload.prompt_tokens / prefill_tokens_per_s(plan)
        raise SpecError(
            f"--ttft_bound: found {ttft_bound_s:g} s, expected at least the {least_s:.3g} s that "
            f"the plan forecasts for one prompt of {plan.workload.prompt_tokens} tokens"
        )
    return int(tokens)


def token_budget_for(plan: Plan, itl_bound_s: float) -> int:
    """Return the largest token budget of a step that keeps the time between tokens in a bound.

    The plan forecasts a step of its decode micro-batch at each stage; every further token takes its
    share of a prefill micro-batch. A sequence is in one step at a time, and a step waits for the
    slowest stage at every stage, so a token takes as many times that stage as there are stages.
    The budget is at most the step that the plan has memory for.

    Args:
        plan: with forecast times.
        itl_bound_s: longest time between the tokens of an answer, in seconds.

    Raises:
        SpecError: the decode micro-batch alone takes longer than the bound.
    """
    sizes, stages = plan.micro_batching, plan.estimate.stages
    prefill_tokens = sizes.prefill * plan.workload.prompt_tokens
    decode_times = [max(stage.decode_s, stage.send_decode_s) for stage in stages]
    step_s = itl_bound_s / len(stages)
    if not max(decode_times) <= step_s < math.inf:
        raise SpecError(
            f"--itl_bound: found {itl_bound_s:g} s, expected at least the "
            f"{len(stages) * max(decode_times):.3g} s that the plan forecasts for a token of "
            f"{sizes.decode} sequences"
        )
    spare = min(
        (step_s - decode_s) * prefill_tokens / prefill_s
        for decode_s, prefill_s in zip(decode_times, _prefill_times(plan), strict=True)
    )
    return min(sizes.decode + int(spare), max(prefill_tokens, sizes.decode))


def _prefill_times(plan: Plan) -> list[float]:
    """Return the seconds of a prefill micro-batch at each stage."""
    return [max(stage.prefill_s, stage.send_prefill_s) for stage in plan.estimate.stages]


def _reaches(value: int, limit: float | None) -> bool:
    return limit is not None and value >= limit


def _exceeds(value: int, limit: float | None) -> bool:
    return limit is not None and value > limit
