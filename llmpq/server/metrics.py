"""Prometheus metrics under vLLM 0.33's names and buckets.

What only the engine's loop knows (seconds in the queue and in prefill, tokens of an iteration) has
no metric here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmpq.dist.io.generation import EngineClient, ServingStats
from llmpq.server.admission import RequestAdmission, Ticket

LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
N_BUCKETS = (1, 2, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
LABELS = ("model_name", "engine")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def token_buckets(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50 ... up to ``largest``."""
    steps = (step * 10**power for power in range(len(str(largest)) + 1) for step in (1, 2, 5))
    return tuple(step for step in steps if step <= largest) or (1,)


class Totals(NamedTuple):
    """Tokens and answers of a server since its start."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    answers: int = 0


class ServerMetrics:
    """Prometheus metrics of one server, under the names that vLLM uses.

    Args:
        model_name: the label.
        engine: its counters are read at each scrape.
        admission: likewise.
    """

    def __init__(self, model_name: str, engine: EngineClient, admission: RequestAdmission) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._labels = (model_name, "0")
        self.totals = Totals()
        self._registry.register(_EngineCollector(self._labels, engine, admission))
        lengths = token_buckets(engine.max_model_len)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        success = Counter(
            "vllm:request_success",
            "Answers that have ended, by reason",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self.success = {reason: success.labels(*self._labels, reason) for reason in FINISH_REASONS}
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request", lengths
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens of an answer", lengths
        )
        self.request_max_num_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest answer", lengths
        )
        self.request_params_n = self._histogram(
            "request_params_n", "Answers to a prompt, n", N_BUCKETS
        )
        self.request_params_max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of a request", lengths
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Seconds to the first token", TTFT_BUCKETS
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Seconds between tokens", ITL_BUCKETS
        )
        self.time_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds between the tokens of an answer",
            ITL_BUCKETS,
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Seconds of an answer", LATENCY_BUCKETS
        )
        self.decode = self._histogram(
            "request_decode_time_seconds",
            "Seconds from the first token of an answer to the last",
            LATENCY_BUCKETS,
        )

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def observe_request(self, n: int, max_tokens: Sequence[int]) -> None:
        """Count a request that was admitted: its ``n``, and the longest answers of its prompts."""
        self.request_params_n.observe(n)
        for limit in max_tokens:
            self.request_params_max_tokens.observe(limit)

    def observers(self, lengths: Sequence[int], ticket: Ticket) -> Sequence[AnswerObserver]:
        """Return an observer for each answer of a request, whose prompts have these lengths."""
        ahead = accumulate(lengths)
        return [AnswerObserver(self, ticket, *pair) for pair in zip(lengths, ahead, strict=True)]

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"vllm:{name}", text, LABELS, registry=self._registry)
        return counter.labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", text, LABELS, registry=self._registry, buckets=buckets
        )
        return histogram.labels(*self._labels)


class AnswerObserver:
    """Times one answer, and tells the ticket of its request what is done.

    Args:
        metrics: receives the times.
        ticket: of the request.
        prompt_tokens: of the answer's prompt.
        ahead_tokens: of all prompts of the request up to this one.
    """

    def __init__(
        self, metrics: ServerMetrics, ticket: Ticket, prompt_tokens: int, ahead_tokens: int
    ) -> None:
        self._metrics = metrics
        self._ticket = ticket
        self._prompt_tokens = prompt_tokens
        self._ahead_tokens = ahead_tokens
        self._arrival_s = time.monotonic()
        self._first_s = 0.0
        self._last_s = 0.0
        self._num_tokens = 0

    def tokens(self, count: int) -> None:
        """Count new tokens; the first ones end the prompt's computation."""
        now_s = time.monotonic()
        metrics = self._metrics
        if not self._first_s:
            self._first_s = now_s
            self._ticket.measure(self._ahead_tokens, now_s - self._arrival_s)
            self._ticket.computed(self._prompt_tokens)
            metrics.prompt_tokens.inc(self._prompt_tokens)
            metrics.request_prompt_tokens.observe(self._prompt_tokens)
            metrics.ttft.observe(now_s - self._arrival_s)
        elif count:
            metrics.itl.observe((now_s - self._last_s) / count)
        self._last_s = now_s
        self._num_tokens += count
        metrics.generation_tokens.inc(count)

    def finished(self, reason: str) -> None:
        """Count the end of the answer."""
        metrics = self._metrics
        if self._first_s:
            decode_s = self._last_s - self._first_s
            metrics.decode.observe(decode_s)
            metrics.e2e.observe(time.monotonic() - self._arrival_s)
            metrics.request_generation_tokens.observe(self._num_tokens)
            metrics.request_max_num_generation_tokens.observe(self._num_tokens)
            if self._num_tokens > 1:
                metrics.time_per_token.observe(decode_s / (self._num_tokens - 1))
        else:
            self._ticket.computed(self._prompt_tokens)
        self._ticket.finish_one()
        prompt, new, answers = metrics.totals
        metrics.totals = Totals(prompt + self._prompt_tokens, new + self._num_tokens, answers + 1)
        metrics.success[reason if reason in FINISH_REASONS else "error"].inc()


class _EngineCollector(Collector):
    """Metrics that the engine and the admission count themselves."""

    def __init__(
        self, labels: tuple[str, str], engine: EngineClient, admission: RequestAdmission
    ) -> None:
        self._labels = labels
        self._engine = engine
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        stats = self._engine.stats
        for name, value, text in (
            ("num_requests_running", stats.running, "Requests that have KV blocks"),
            ("num_requests_waiting", stats.waiting, "Requests in the queue"),
            ("kv_cache_usage_perc", stats.kv_cache_usage, "Share of KV blocks in use, 0 to 1"),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, value, text in (
            ("num_preemptions", stats.num_preemptions, "Preemptions"),
            ("prefix_cache_queries", stats.prefix_cache_queries, "Prompt tokens looked up"),
            ("prefix_cache_hits", stats.prefix_cache_hits, "Prompt tokens found in the cache"),
            ("kv_offload_unread", stats.kv_offload_unread, "KV blocks whose file was missed"),
            ("spec_decode_num_drafts", stats.num_drafts, "Drafts verified"),
            ("spec_decode_num_draft_tokens", stats.num_draft_tokens, "Draft tokens verified"),
            (
                "spec_decode_num_accepted_tokens",
                stats.num_accepted_tokens,
                "Draft tokens that became tokens of an answer",
            ),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        yield from self._of_tiers(stats)
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Refused requests", labels=("model_name", "reason")
        )
        for reason, count in self._admission.rejections.items():
            rejections.add_metric((self._labels[0], reason), count)
        yield rejections
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "KV cache",
            labels=(*LABELS, "block_size", "num_gpu_blocks"),
        )
        info.add_metric((*self._labels, str(stats.block_size), str(stats.num_blocks)), 1)
        yield info

    def _of_tiers(self, stats: ServingStats) -> Iterator[Metric]:
        """Yield what is found and kept in blocks, host memory and files."""
        labels = (*LABELS, "tier")
        held = GaugeMetricFamily(
            "vllm:kv_offload_bytes", "Bytes of KV blocks kept beyond the pool", labels=labels
        )
        for tier, count in stats.kv_offload_bytes.items():
            held.add_metric((*self._labels, tier), count)
        yield held
        for name, values, text in (
            ("prefix_cache_tier_hits", stats.prefix_tier_hits, "Prompt tokens found, by tier"),
            ("kv_offload_saves", stats.kv_offload_saves, "KV blocks copied to a tier"),
            ("kv_offload_loads", stats.kv_offload_loads, "KV blocks loaded from a tier"),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
            for tier, count in values.items():
                counter.add_metric((*self._labels, tier), count)
            yield counter
