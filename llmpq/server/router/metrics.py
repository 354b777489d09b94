"""Prometheus metrics of the router and of its replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from llmpq.server.metrics import CONTENT_TYPE
from llmpq.server.router.backend import Backend

OUTCOMES = ("answered", "busy", "lost")


class RouterMetrics:
    """Prometheus metrics of one router: attempts by replica and outcome, and retries.

    Args:
        backends: the replicas; their statistics are read at each scrape.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_BackendCollector(backends))
        self._requests = Counter(
            "llmpq_router_requests",
            "Requests sent to a replica, by what came of them",
            ("replica", "outcome"),
            registry=self._registry,
        )
        self.retries = Counter(
            "llmpq_router_retries",
            "Requests sent to another replica",
            registry=self._registry,
        )
        for backend in backends:
            for outcome in OUTCOMES:
                self._requests.labels(backend.url, outcome)

    def count(self, backend: Backend, outcome: str) -> None:
        """Count a request that was sent."""
        self._requests.labels(backend.url, outcome).inc()

    def response(self) -> Response:
        """Return all metrics in Prometheus's text format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE)


class _BackendCollector(Collector):
    """Reads the replicas at each scrape."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    def collect(self) -> Iterator[Metric]:
        """Yield one gauge for each statistic."""
        gauges = {
            "llmpq_router_replica_ready": ("Whether it takes requests", _ready),
            "llmpq_router_outstanding": ("Requests that have not ended", _outstanding),
            "llmpq_router_queued_tokens": ("Prompt tokens to compute", _queued),
            "llmpq_router_kv_cache_usage_perc": ("Share of the KV tokens in use", _usage),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(name, text, labels=("replica",))
            for backend in self._backends:
                family.add_metric((backend.url,), value(backend))
            yield family


def _ready(backend: Backend) -> float:
    return float(backend.is_ready)


def _outstanding(backend: Backend) -> float:
    return float(backend.outstanding)


def _queued(backend: Backend) -> float:
    return float(backend.view().queued_tokens)


def _usage(backend: Backend) -> float:
    return backend.kv_cache_usage
