"""SimReport: what happened in a simulated run, and the figures people ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmpq.batching import RequestRecord, percentile, summarise
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One stage at work on one micro-batch.

    Attributes:
        stage: its rank.
        phase: prefill or decode.
        micro_batch: number of the micro-batch.
        rows: its sequences.
        start_s, end_s: seconds of the simulated clock.
    """

    stage: int
    phase: Phase
    micro_batch: int
    rows: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReport:
    """What a run took.

    Attributes:
        requests: one record each, in order of their numbers.
        makespan_s: from the first arrival to the last token.
        work_s: for every stage the seconds it worked, in either phase.
        activities: every block of work when they were asked for, else none.
        micro_batches: how many were sent off.
    """

    requests: tuple[RequestRecord, ...]
    makespan_s: float
    work_s: tuple[dict[Phase, float], ...]
    micro_batches: int
    activities: tuple[Activity, ...] = ()

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds each stage worked."""
        return tuple(sum(work.values()) for work in self.work_s)

    @property
    def generated_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(record.new_tokens for record in self.requests)

    @property
    def throughput_tokens_per_s(self) -> float:
        """Generated tokens a second of the makespan."""
        return self.generated_tokens / self.makespan_s if self.makespan_s > 0 else 0.0

    @property
    def throughput_requests_per_s(self) -> float:
        """Finished requests a second of the makespan."""
        return len(self.requests) / self.makespan_s if self.makespan_s > 0 else 0.0

    @property
    def busy_fractions(self) -> tuple[float, ...]:
        """Share of the makespan in which each stage worked."""
        if self.makespan_s <= 0:
            return tuple(0.0 for _ in self.busy_s)
        return tuple(busy_s / self.makespan_s for busy_s in self.busy_s)

    def latency_percentile_s(self, percent: float) -> float:
        """Return the latency that so many percent of the requests do not exceed."""
        return percentile([record.latency_s for record in self.requests], percent)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as the command prints them."""
        return {
            "requests": len(self.requests),
            "generated_tokens": self.generated_tokens,
            "makespan_s": self.makespan_s,
            "micro_batches": self.micro_batches,
            "throughput_tokens_per_s": self.throughput_tokens_per_s,
            "throughput_requests_per_s": self.throughput_requests_per_s,
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
