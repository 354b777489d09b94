"""One replica as the router sees it: its address, its statistics, and whether it answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.routing import (
    LoadBalancer,
    Replica,
    ReplicaCapacity,
    ReplicaStats,
    ReplicaView,
    RoutedRequest,
    WorkloadMeans,
)
from llmpq.server.metrics import Totals

POLL_TIMEOUT_S = 2.0
LOST_AFTER_S = 5.0
"""Seconds without an answer to polls after which the requests of a replica are given up."""
FAILURES = 2
"""Polls in a row without an answer after which a replica gets no new requests."""
BREAKER_FAILURES = 3
"""Requests in a row that a replica failed, after which others are preferred for a while."""
BREAKER_S = 1.0
MAX_BREAKER_S = 30.0
"""How long; twice as long after each request that fails again."""
MAX_STATS_BYTES = 1 << 20
KV_TOKENS = 1 << 16
TOKEN_BUDGET = 2048
"""What is assumed of a replica that does not report its KV tokens or token budget."""
_METRIC = re.compile(r"^(vllm:\w+)\{([^}]*)\} (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="(\d+)"')

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a poll has found.

    Attributes:
        stats: of the replica.
        capacity: of the replica.
        totals: likewise.
    """

    stats: ReplicaStats
    capacity: ReplicaCapacity
    totals: Totals


class KnownReplica:
    """What a router knows of a replica, whatever carries its requests.

    Args:
        number: of the replica, from 0.
        is_ready: whether it takes requests before anything was reported.

    Attributes:
        number: likewise.
        is_ready: whether it takes requests.
        totals: answers that it has made.
        load: its statistics, and the requests sent since.
    """

    def __init__(self, number: int, *, is_ready: bool) -> None:
        self.number = number
        self.is_ready = is_ready
        self.totals = Totals()
        self.load = Replica(ReplicaCapacity(kv_tokens=KV_TOKENS, token_budget=TOKEN_BUDGET))

    def view(self) -> ReplicaView:
        """Return what a balancer reads."""
        return self.load.view()

    def take(self, report: Report | None, asked_s: float) -> None:
        """Take what a replica reports; ``None`` if it takes no requests.

        Args:
            report: as answered.
            asked_s: when it was asked for.
        """
        self.is_ready = report is not None
        if report is not None:
            self.totals = report.totals
            self.load.capacity = report.capacity
            self.load.update(report.stats, asked_s)


class Backend(KnownReplica):
    """A replica behind the router.

    Args:
        number: of the replica, from 0.
        url: its address, ``http://HOST:PORT``.
        session: connections of the router.
        clock: seconds.

    Raises:
        SpecError: the address is not one of HTTP.
    """

    def __init__(
        self,
        number: int,
        url: str,
        session: aiohttp.ClientSession,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise SpecError(f"--replica: found {url}, expected http://HOST:PORT")
        super().__init__(number, is_ready=False)
        self.url = url.rstrip("/")
        self.failures = 0
        self._session = session
        self._attempts: set[asyncio.Timeout] = set()
        self._clock = clock
        self._polled_s = clock()  # end of the last poll
        self._silent_s = 0.0  # of polls since the last answer
        self._breaker = _Breaker()
        self._has_load = True

    @property
    def outstanding(self) -> int:
        """Requests that were sent and have not ended."""
        return self.load.outstanding

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV memory in use at the last poll, 0 to 1."""
        return self.load.kv_cache_usage

    @property
    def is_preferred(self) -> bool:
        """Whether it takes requests, and has not failed the last ones."""
        return self.is_ready and not self._breaker.is_open(self._clock())

    def count(self, *, has_failed: bool) -> None:
        """Take the outcome of a request that was sent."""
        self._breaker.count(self._clock(), has_failed=has_failed)

    @contextlib.contextmanager
    def attempt(self, request: RoutedRequest, limit: asyncio.Timeout) -> Iterator[None]:
        """Count a request while it is sent and answered.

        Args:
            request: as the balancer knows it.
            limit: expires when the replica is lost.
        """
        self.load.route(request, self._clock())
        self._attempts.add(limit)
        try:
            yield
        finally:
            self._attempts.discard(limit)
            self.load.finish()

    def fail(self) -> None:
        """Take the replica out until it answers a poll."""
        if self.is_ready:
            logger.warning("replica %d (%s) does not answer", self.number, self.url)
        self.is_ready = False

    async def poll(self) -> None:
        """Read the statistics once."""
        asked_s = self._clock()
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                report = await self._read()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self.failures += 1
            if isinstance(error, aiohttp.ClientConnectorError) or self.failures >= FAILURES:
                self.fail()
            # A pause of this process is no silence of the replica: a poll counts up to its limit.
            self._silent_s += min(self._pass_time(), POLL_TIMEOUT_S)
            if self._silent_s > LOST_AFTER_S:
                self.give_up()
            return
        self.failures = 0
        self._silent_s = 0.0
        self._pass_time()
        if report is not None and not self.is_ready:
            logger.info("replica %d (%s) answers", self.number, self.url)
        self.take(report, asked_s)

    def _pass_time(self) -> float:
        """Return the seconds since the end of the poll before, and begin anew."""
        before_s, self._polled_s = self._polled_s, self._clock()
        return self._polled_s - before_s

    def give_up(self) -> None:
        """End all requests that the replica has: those without an answer go to another one."""
        now_s = asyncio.get_running_loop().time()
        for limit in self._attempts:
            if not limit.expired():
                limit.reschedule(now_s)

    async def _read(self) -> Report | None:
        """Return what the replica reports; ``None`` if it takes no requests.

        Raises:
            ValueError: the answer is not what was expected.
        """
        if self._has_load:
            status, body = await self._get("/load")
            found = load_json(body) if status == 200 else {}
            if "queued_tokens" in found:
                return report_of_load(found)
            self._has_load = False
        status, _ = await self._get("/health")
        if status != 200:
            return None
        _, body = await self._get("/metrics")
        return report_of_metrics(body.decode("utf-8", "replace"))

    async def _get(self, path: str) -> tuple[int, bytes]:
        async with self._session.get(self.url + path) as answer:
            body = await answer.content.read(MAX_STATS_BYTES)
            return answer.status, body


class _Breaker:
    """Says when a replica that failed requests in a row gets another one."""

    def __init__(self) -> None:
        self._failures = 0
        self._open_until_s = -math.inf

    def is_open(self, now_s: float) -> bool:
        """Return whether other replicas are preferred."""
        return now_s < self._open_until_s

    def count(self, now_s: float, *, has_failed: bool) -> None:
        """Take the outcome of a request."""
        self._failures = self._failures + 1 if has_failed else 0
        over = self._failures - BREAKER_FAILURES
        if over >= 0:
            self._open_until_s = now_s + min(BREAKER_S * 2.0 ** min(over, 10), MAX_BREAKER_S)
        else:
            self._open_until_s = -math.inf


def load_json(body: bytes) -> Mapping[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: it is not one.
    """
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("expected an object")
    return found


def ranked(
    balancer: LoadBalancer,
    request: RoutedRequest,
    candidates: Iterable[KnownReplica],
    everyone: Iterable[KnownReplica],
) -> list[int]:
    """Return the numbers of some replicas for a request, the best one first.

    Args:
        balancer: scores them.
        request: as it reads it.
        candidates: that may take the request.
        everyone: whose answers have the mean lengths.
    """
    views = {one.number: one.view() for one in candidates}
    return balancer.rank(request, views, means_of(everyone)) if views else []


def means_of(replicas: Iterable[KnownReplica]) -> WorkloadMeans:
    """Return the mean lengths of all answers of some replicas."""
    totals = [one.totals for one in replicas]
    answers = sum(one.answers for one in totals)
    if not answers:
        return WorkloadMeans()
    return WorkloadMeans(
        prompt_tokens=sum(one.prompt_tokens for one in totals) / answers,
        new_tokens=sum(one.new_tokens for one in totals) / answers,
    )


def report_of_load(found: Mapping[str, Any]) -> Report | None:
    """Return what llmpq-serve reports under ``/load``; ``None`` while it takes no requests.

    Raises:
        ValueError: a field is missing or is not a number.
    """
    if not found.get("is_ready"):
        return None
    names = ("queued_tokens", "waiting_tokens", "free_kv_tokens", "running", "waiting")
    limits = ("kv_tokens", "token_budget")
    numbers = {name: found.get(name) for name in (*names, *limits, *Totals._fields)}
    seconds = {name: found.get(name) for name in ("prefill_step_s", "decode_step_s")}
    for name, value in {**numbers, **seconds}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            raise ValueError(f"field '{name}': expected a number")
    counts = {name: int(value) for name, value in numbers.items() if value is not None}
    try:
        capacity = ReplicaCapacity(
            kv_tokens=counts["kv_tokens"],
            token_budget=counts["token_budget"],
            prefill_step_s=float(found["prefill_step_s"]),
            decode_step_s=float(found["decode_step_s"]),
        )
    except SpecError as error:
        raise ValueError(str(error)) from None
    return Report(
        stats=ReplicaStats(
            queued_tokens=counts["queued_tokens"],
            waiting_tokens=counts["waiting_tokens"],
            free_tokens=counts["free_kv_tokens"],
            running=counts["running"],
            waiting=counts["waiting"],
        ),
        capacity=capacity,
        totals=Totals(*(counts[name] for name in Totals._fields)),
    )


def report_of_metrics(text: str) -> Report:
    """Return what a server under vLLM's metric names reports.

    vLLM has no metric of queued prompt tokens: they are those that the router sent since.

    Raises:
        ValueError: a gauge is missing.
    """
    values: dict[str, float] = {}
    blocks: dict[str, int] = {}
    for name, labels, value in _METRIC.findall(text):
        values[name] = values.get(name, 0.0) + float(value)
        if name == "vllm:cache_config_info":
            blocks = {key: int(number) for key, number in _LABEL.findall(labels)}
    running, waiting = (
        values.get("vllm:num_requests_running"),
        values.get("vllm:num_requests_waiting"),
    )
    if running is None or waiting is None:
        raise ValueError("expected vllm:num_requests_running and vllm:num_requests_waiting")
    kv_tokens = blocks.get("num_gpu_blocks", 0) * blocks.get("block_size", 0) or KV_TOKENS
    usage = values.get("vllm:kv_cache_usage_perc", 0.0)
    prompt, new = (
        values.get(f"vllm:{name}_tokens_total", 0.0) for name in ("prompt", "generation")
    )
    return Report(
        stats=ReplicaStats(
            free_tokens=int(kv_tokens * (1.0 - usage)), running=int(running), waiting=int(waiting)
        ),
        capacity=ReplicaCapacity(kv_tokens=kv_tokens, token_budget=TOKEN_BUDGET),
        totals=Totals(int(prompt), int(new), int(values.get("vllm:request_success_total", 0.0))),
    )
