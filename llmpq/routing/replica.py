"""What a router knows of a replica: its limits, its last statistics, and what it was sent since.

A router reads the statistics of each replica several times a second. In between it adds the
requests that it routed itself (SAL; GPU Half-Empty or Half-Full, Sec. 4.2).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from llmpq.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """What a balancer reads of a request.

    Attributes:
        prompt_tokens: length of the prompt, at least 1; a router may estimate it.
        prefix: hashes of the prompt's blocks, each over everything up to its end.
    """

    prompt_tokens: int
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCapacity:
    """Limits and speed of a replica.

    Attributes:
        kv_tokens: tokens that its KV blocks hold.
        token_budget: prompt tokens of one step.
        prefill_step_s: seconds of a step with ``token_budget`` prompt tokens.
        decode_step_s: seconds in which each running sequence makes a token while memory is full.
    """

    kv_tokens: int
    token_budget: int
    prefill_step_s: float = 1.0
    decode_step_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "token_budget", "prefill_step_s", "decode_step_s"):
            if not getattr(self, name) > 0:
                raise SpecError(
                    f"replica: field '{name}': found {getattr(self, name)}, expected more than 0"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """Statistics of a replica at one time.

    Attributes:
        queued_tokens: prompt tokens that have not been computed, chunks of running prompts too.
        waiting_tokens: prompt tokens of the requests without KV blocks.
        free_tokens: tokens that its free KV blocks hold.
        running: sequences that have blocks.
        waiting: requests in its queue.
    """

    queued_tokens: int = 0
    waiting_tokens: int = 0
    free_tokens: int = 0
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadMeans:
    """Mean lengths of the requests so far, in tokens."""

    prompt_tokens: float = 512.0
    new_tokens: float = 128.0


class ReplicaView(NamedTuple):
    """What a balancer reads of a replica: the last statistics and what was routed since.

    Attributes:
        capacity: of the replica.
        queued_tokens: prompt tokens to compute.
        free_tokens: tokens of free KV blocks less the prompts without blocks; negative under
            pressure.
        requests: running and waiting ones.
        outstanding: requests that this router sent and that have not ended.
    """

    capacity: ReplicaCapacity
    queued_tokens: int
    free_tokens: int
    requests: int
    outstanding: int


class Replica:
    """Tracks the statistics of a replica and the requests sent to it since.

    Args:
        capacity: of the replica.

    Attributes:
        capacity: likewise.
        outstanding: requests that were routed and have not ended.
    """

    def __init__(self, capacity: ReplicaCapacity) -> None:
        self.capacity = capacity
        self._stats = ReplicaStats(free_tokens=capacity.kv_tokens)
        self._since: deque[tuple[float, int]] = deque()
        self._since_tokens = 0
        self.outstanding = 0

    def update(self, stats: ReplicaStats, asked_s: float) -> None:
        """Take new statistics.

        Args:
            stats: as answered.
            asked_s: when they were asked for; requests routed later are not in them.
        """
        self._stats = stats
        while self._since and self._since[0][0] < asked_s:
            self._since_tokens -= self._since.popleft()[1]

    def route(self, request: RoutedRequest, now_s: float) -> None:
        """Count a request that is sent to the replica."""
        self._since.append((now_s, request.prompt_tokens))
        self._since_tokens += request.prompt_tokens
        self.outstanding += 1

    def finish(self) -> None:
        """Count the end of a request, answered or not."""
        self.outstanding -= 1

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV memory that was in use, 0 to 1."""
        free = min(self.capacity.kv_tokens, max(0, self._stats.free_tokens))
        return 1.0 - free / self.capacity.kv_tokens

    def view(self) -> ReplicaView:
        """Return the statistics with what was routed since."""
        queued = self._stats.queued_tokens + self._since_tokens
        # The blocks of a running prompt are not free any more, computed or not.
        without_blocks = self._stats.waiting_tokens + self._since_tokens
        return ReplicaView(
            capacity=self.capacity,
            queued_tokens=queued,
            free_tokens=self._stats.free_tokens - without_blocks,
            requests=self._stats.running + self._stats.waiting + len(self._since),
            outstanding=self.outstanding,
        )
