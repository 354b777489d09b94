"""SimReport: results of a simulation, as JSON and as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.batching import RequestRecord, summarise
from llmpq.spec.precision import Phase
from llmpq.units import US


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Work of one stage on one micro-batch.

    Attributes:
        stage: rank of the stage.
        phase: prefill or decode.
        micro_batch: number of the micro-batch.
        rows: number of sequences.
        start_s, end_s: seconds of simulated time.
    """

    stage: int
    phase: Phase
    micro_batch: int
    rows: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReport:
    """Results of a simulation.

    Attributes:
        requests: one record each, in order of their numbers.
        makespan_s: from the first arrival to the last token.
        work_s: busy seconds of every stage by phase.
        activities: all activities, if they were recorded.
        micro_batches: number of dispatched micro-batches.
    """

    requests: tuple[RequestRecord, ...]
    makespan_s: float
    work_s: tuple[dict[Phase, float], ...]
    micro_batches: int
    activities: tuple[Activity, ...] = ()

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Busy seconds of each stage."""
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
        """Busy share of each stage in the makespan."""
        if self.makespan_s <= 0:
            return tuple(0.0 for _ in self.busy_s)
        return tuple(busy_s / self.makespan_s for busy_s in self.busy_s)

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
