"""RequestRecord: arrival, start and end of a request, in runs and in simulations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 95, 99)

Summary = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Times of one request, in seconds of the run's clock.

    Attributes:
        request: number, in order of arrival.
        prompt_tokens, new_tokens: lengths of prompt and answer.
        arrival_s: arrival.
        start_s: dispatch of the prompt.
        first_token_s, end_s: completion of the first and of the last token.
    """

    request: int
    prompt_tokens: int
    new_tokens: int
    arrival_s: float
    start_s: float
    first_token_s: float
    end_s: float

    @property
    def latency_s(self) -> float:
        """From arrival to the last token."""
        return self.end_s - self.arrival_s

    @property
    def service_s(self) -> float:
        """From the start of the prefill to the last token, as bounded by ExeGPT."""
        return self.end_s - self.start_s

    @property
    def time_to_first_token_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def time_per_token_s(self) -> float:
        """Mean seconds between two tokens; 0 for an answer of one token."""
        return (self.end_s - self.first_token_s) / max(1, self.new_tokens - 1)


def summarise(records: Sequence[RequestRecord]) -> Summary:
    """Return mean and percentiles of latencies by name; empty without records."""
    if not records:
        return {}
    return {
        "latency_s": _summary([record.latency_s for record in records]),
        "service_s": _summary([record.service_s for record in records]),
        "time_to_first_token_s": _summary([record.time_to_first_token_s for record in records]),
        "time_per_token_s": _summary([record.time_per_token_s for record in records]),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` percent of values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def _summary(values: Sequence[float]) -> dict[str, float]:
    found = {"mean": sum(values) / len(values)}
    return found | {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
