"""SimReport: what happened in a simulated run, and the figures people ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.spec.precision import Phase

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request's life, in seconds of the simulated clock.

    Attributes:
        request: its number.
        prompt_tokens, new_tokens: its lengths.
        arrival_s: when it came.
        first_token_s, end_s: when its first and its last token were known.
    """

    request: int
    prompt_tokens: int
    new_tokens: int
    arrival_s: float
    first_token_s: float
    end_s: float

    @property
    def latency_s(self) -> float:
        """From arrival to the last token."""
        return self.end_s - self.arrival_s

    @property
    def time_to_first_token_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def time_per_token_s(self) -> float:
        """Mean seconds between two tokens after the first; 0 for an answer of one."""
        return (self.end_s - self.first_token_s) / max(1, self.new_tokens - 1)


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
            "latency_s": _summary([record.latency_s for record in self.requests]),
            "time_to_first_token_s": _summary(
                [record.time_to_first_token_s for record in self.requests]
            ),
            "time_per_token_s": _summary([record.time_per_token_s for record in self.requests]),
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


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` percent do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def _summary(values: Sequence[float]) -> dict[str, float]:
    found = {"mean": sum(values) / len(values)}
    return found | {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
