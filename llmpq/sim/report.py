"""SimReport: results of a simulation, as JSON and as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.batching import RequestRecord, percentile, summarise
from llmpq.spec.precision import Phase
from llmpq.units import US

PERCENTILES = (50, 95, 99)
_STEP = 1.25
_TOLERANCE = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Work of one stage on one micro-batch.

    Attributes:
        stage: rank of the stage.
        phase: prefill or decode; ``None`` for a step of both.
        micro_batch: number of the micro-batch.
        rows: number of sequences.
        start_s, end_s: seconds of simulated time.
    """

    stage: int
    phase: Phase | None
    micro_batch: int
    rows: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReport:
    """Results of a simulation.

    Attributes:
        requests: one record for each finished request, in order of arrival.
        steps: number of dispatched steps.
        step_tokens: tokens of all steps, recomputed ones included.
        work_s: busy seconds of every stage by phase; ``None`` is that of steps of both phases.
        activities: all activities, if they were recorded.
        preemptions: number of preempted sequences.
        prefix_cache_queries: prompt tokens of admitted requests.
        prefix_cache_hits: those of them found in the cache.
        draft_tokens: draft tokens of all steps.
        accepted_tokens: those of them that became tokens of an answer.
    """

    requests: tuple[RequestRecord, ...]
    steps: int
    step_tokens: int
    work_s: tuple[Mapping[Phase | None, float], ...]
    activities: tuple[Activity, ...] = ()
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
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
    def busy_s(self) -> tuple[float, ...]:
        """Busy seconds of each stage."""
        return tuple(sum(work.values()) for work in self.work_s)

    @property
    def busy_fractions(self) -> tuple[float, ...]:
        """Busy share of each stage in the makespan."""
        return tuple(self._a_second(busy_s) for busy_s in self.busy_s)

    @property
    def generated_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(record.new_tokens for record in self.requests)

    @property
    def throughput_tokens_per_s(self) -> float:
        """Generated tokens a second of the makespan."""
        return self._a_second(self.generated_tokens)

    @property
    def throughput_requests_per_s(self) -> float:
        """Finished requests a second of the makespan."""
        return self._a_second(len(self.requests))

    def _a_second(self, count: float) -> float:
        makespan_s = self.makespan_s
        return count / makespan_s if makespan_s > 0 else 0.0

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
        """Return the figures of a policy as the command prints them."""
        return {
            **self._totals(),
            "micro_batches": self.steps,
            **summarise(self.requests),
            "stages": [
                {
                    "rank": rank,
                    "busy_s": busy_s,
                    "busy_fraction": share,
                    "bubble_fraction": 1 - share,
                }
                for rank, (busy_s, share) in enumerate(
                    zip(self.busy_s, self.busy_fractions, strict=True)
                )
            ],
        }

    def engine_json(self) -> dict[str, Any]:
        """Return the figures of an online engine as the command prints them."""
        per_token = [item.time_per_token_s for item in self.requests if item.new_tokens > 1]
        return {
            **self._totals(),
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
            "busy_fractions": list(self.busy_fractions),
        }

    def _totals(self) -> dict[str, Any]:
        return {
            "requests": len(self.requests),
            "generated_tokens": self.generated_tokens,
            "makespan_s": self.makespan_s,
            "throughput_tokens_per_s": self.throughput_tokens_per_s,
            "throughput_requests_per_s": self.throughput_requests_per_s,
        }


def merged(reports: Sequence[SimReport]) -> SimReport:
    """Return the results of several engines as one; stages follow each other."""
    requests = (record for report in reports for record in report.requests)
    return SimReport(
        requests=tuple(sorted(requests, key=lambda record: (record.arrival_s, record.request))),
        steps=sum(report.steps for report in reports),
        step_tokens=sum(report.step_tokens for report in reports),
        work_s=tuple(work for report in reports for work in report.work_s),
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


def chrome_trace(report: SimReport, names: Sequence[str]) -> str:
    """Return a Chrome trace for Perfetto or chrome://tracing, with one track per stage.

    Args:
        report: results with activities.
        names: name of each stage.
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": name}}
        for rank, name in enumerate(names)
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": block.stage,
            "name": f"{block.phase} x{block.rows}",
            "cat": str(block.phase),
            "ts": block.start_s / US,
            "dur": (block.end_s - block.start_s) / US,
            "args": {"micro_batch": block.micro_batch, "rows": block.rows},
        }
        for block in report.activities
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
