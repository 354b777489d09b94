"""EngineReport: what a simulated engine served; the rate that it can serve within a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.batching import RequestRecord, percentile

PERCENTILES = (50, 95, 99)
_STEP = 1.25
_TOLERANCE = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Results of a simulation.

    Attributes:
        requests: one record for each finished request, in order of arrival.
        steps: number of steps.
        step_tokens: tokens of all steps, recomputed ones included.
        busy_s: busy seconds of each stage.
        preemptions: number of preempted sequences.
        prefix_cache_queries: prompt tokens of admitted requests.
        prefix_cache_hits: those of them found in the cache.
        draft_tokens: draft tokens of all steps.
        accepted_tokens: those of them that became tokens of an answer.
    """

    requests: tuple[RequestRecord, ...]
    steps: int
    step_tokens: int
    busy_s: tuple[float, ...]
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token; 0 without requests."""
        if not self.requests:
            return 0.0
        start_s = min(record.arrival_s for record in self.requests)
        return max(record.end_s for record in self.requests) - start_s

    @property
    def preemption_rate(self) -> float:
        """Preemptions for each request."""
        return self.preemptions / max(1, len(self.requests))

    @property
    def time_to_first_token_s(self) -> list[float]:
        """TTFT of every request."""
        return [record.time_to_first_token_s for record in self.requests]

    @property
    def normalized_ttft_s(self) -> list[float]:
        """TTFT of every request divided by its prompt tokens (LARRY, Sec. 5)."""
        return [record.time_to_first_token_s / record.prompt_tokens for record in self.requests]

    @property
    def total_generation_time_s(self) -> list[float]:
        """TGT of every request: from arrival to the last token (LARRY, Sec. 5)."""
        return [record.latency_s for record in self.requests]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as the command prints them."""
        seconds, tokens = self.makespan_s, sum(item.new_tokens for item in self.requests)
        rates = 1.0 / seconds if seconds > 0 else 0.0
        per_token = [item.time_per_token_s for item in self.requests if item.new_tokens > 1]
        return {
            "requests": len(self.requests),
            "generated_tokens": tokens,
            "makespan_s": seconds,
            "throughput_tokens_per_s": tokens * rates,
            "throughput_requests_per_s": len(self.requests) * rates,
            "time_to_first_token_s": summary(self.time_to_first_token_s),
            "normalized_ttft_s": summary(self.normalized_ttft_s),
            "total_generation_time_s": summary(self.total_generation_time_s),
            "time_per_token_s": summary(per_token),
            "preemptions": self.preemptions,
            "preemption_rate": self.preemption_rate,
            "prefix_cache_hit_rate": self.prefix_cache_hits / max(1, self.prefix_cache_queries),
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "steps": self.steps,
            "tokens_per_step": self.step_tokens / max(1, self.steps),
            "busy_fractions": [busy_s * rates for busy_s in self.busy_s],
        }


def merged(reports: Sequence[EngineReport]) -> EngineReport:
    """Return the results of several engines as one; stages follow each other."""
    requests = (record for report in reports for record in report.requests)
    return EngineReport(
        requests=tuple(sorted(requests, key=lambda record: (record.arrival_s, record.request))),
        steps=sum(report.steps for report in reports),
        step_tokens=sum(report.step_tokens for report in reports),
        busy_s=tuple(seconds for report in reports for seconds in report.busy_s),
        preemptions=sum(report.preemptions for report in reports),
        prefix_cache_queries=sum(report.prefix_cache_queries for report in reports),
        prefix_cache_hits=sum(report.prefix_cache_hits for report in reports),
        draft_tokens=sum(report.draft_tokens for report in reports),
        accepted_tokens=sum(report.accepted_tokens for report in reports),
    )


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return mean, p50, p95 and p99; empty without values."""
    if not values:
        return {}
    found = {"mean": sum(values) / len(values)}
    return found | {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}


def capacity(
    ttft_p95_s: Callable[[float], float], bound_s: float, *, start: float = 1.0
) -> float | None:
    """Return the largest rate at which the 95th percentile of TTFT is within a bound.

    The percentile is taken as increasing with the rate; the result is within 2 %.

    Args:
        ttft_p95_s: simulates at a rate or rate scale.
        bound_s: seconds.
        start: first rate to try, above 0.

    Returns:
        ``None`` if the bound is not kept at a thousandth of ``start``, or kept at a thousand times.
    """
    low = high = start
    if ttft_p95_s(start) <= bound_s:
        while ttft_p95_s(high := low * _STEP) <= bound_s:
            low = high
            if low > start * 1000.0:
                return None
    else:
        while ttft_p95_s(low := high / _STEP) > bound_s:
            high = low
            if high < start / 1000.0:
                return None
    while high / low > _TOLERANCE:
        middle = (low * high) ** 0.5
        if ttft_p95_s(middle) <= bound_s:
            low = middle
        else:
            high = middle
    return low
