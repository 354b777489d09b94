"""Load balancers: which replica takes a request.

Each balancer scores the replicas; the lowest score is best, and equal scores go to the replica with
fewer used KV tokens, then to the one with the lower index. A router that cannot reach the best one
takes the next.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Protocol

from llmpq.errors import SpecError
from llmpq.routing.replica import ReplicaView, RoutedRequest, WorkloadMeans

PREFIXES = 65_536
"""Blocks that prefix affinity remembers for each replica."""
IMBALANCE_REQUESTS = 8
IMBALANCE_RATIO = 1.5
"""Prefix affinity gives way when one replica has this many requests more than another, and this
many times as many."""

Replicas = Mapping[int, ReplicaView]
"""The replicas that can take a request, by their numbers."""
Scores = Callable[[RoutedRequest, Iterable[ReplicaView], WorkloadMeans], Sequence[float]]


class LoadBalancer(Protocol):
    """Chooses a replica for each request."""

    def rank(self, request: RoutedRequest, replicas: Replicas, means: WorkloadMeans) -> list[int]:
        """Return the numbers of the replicas, the best one first."""
        ...

    def routed(self, request: RoutedRequest, number: int) -> None:
        """Take note of the replica that a request went to."""
        ...


class _Scored:
    """A balancer without a memory."""

    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def rank(self, request: RoutedRequest, replicas: Replicas, means: WorkloadMeans) -> list[int]:
        """Return the numbers of the replicas, the best one first."""
        return _by_score(self._scores(request, replicas.values(), means), replicas)

    def routed(self, request: RoutedRequest, number: int) -> None:
        """Take no note."""


def _by_score(scores: Sequence[float], replicas: Replicas) -> list[int]:
    keys = [
        (score, item.capacity.kv_tokens - item.free_tokens, number)
        for score, (number, item) in zip(scores, replicas.items(), strict=True)
    ]
    return [number for *_, number in sorted(keys)]


def least_loaded(
    request: RoutedRequest,  # noqa: ARG001
    replicas: Iterable[ReplicaView],
    means: WorkloadMeans,  # noqa: ARG001
) -> list[float]:
    """Score by the requests that have not ended."""
    return [float(item.outstanding) for item in replicas]


def lmetric(
    request: RoutedRequest,
    replicas: Iterable[ReplicaView],
    means: WorkloadMeans,  # noqa: ARG001
) -> list[float]:
    """Score by queued prompt tokens times requests, this one included (LMetric)."""
    return [
        float(item.queued_tokens + request.prompt_tokens) * (item.requests + 1) for item in replicas
    ]


def sal(
    request: RoutedRequest, replicas: Iterable[ReplicaView], means: WorkloadMeans
) -> list[float]:
    """Score by the steps until the request has memory, or all queued prompts are computed (SAL).

    The paper's Equation 2 is missing from its public text. This reconstruction agrees with what
    the text says about its terms, but not with all of its results (docs/evidence/sal.md):
    ``max(max(0, m - free) / R, (queued + m) / T)`` for a prompt of ``m`` tokens, the token budget
    ``T`` and ``R`` tokens freed in a step (:func:`freed_tokens`).
    """
    return [max(_steps(request, item, means)) for item in replicas]


def sal_seconds(
    request: RoutedRequest, replicas: Iterable[ReplicaView], means: WorkloadMeans
) -> list[float]:
    """Score by the seconds of SAL's wait times the requests, this one included.

    Seconds tell replicas of different speed apart. The requests stand for the time that a request
    takes from all others, as in :func:`lmetric`. This is not in the paper, whose replicas are
    equal.
    """
    scores = []
    for item in replicas:
        memory, compute = _steps(request, item, means)
        capacity = item.capacity
        wait_s = max(memory * capacity.decode_step_s, compute * capacity.prefill_step_s)
        scores.append(wait_s * (item.requests + 1))
    return scores


def _steps(
    request: RoutedRequest, replica: ReplicaView, means: WorkloadMeans
) -> tuple[float, float]:
    """Return the steps to wait for memory, and those to compute the queued prompts."""
    missing = max(0, request.prompt_tokens - replica.free_tokens)
    compute = (replica.queued_tokens + request.prompt_tokens) / replica.capacity.token_budget
    return missing / freed_tokens(replica.capacity.kv_tokens, means), compute


def freed_tokens(kv_tokens: int, means: WorkloadMeans) -> float:
    """Return the KV tokens that are freed in a step while memory is full (SAL's ``R``).

    With mean prompts ``I`` and answers ``O``, ``kv_tokens / (I + O / 2)`` sequences run; each one
    leaves after ``O`` steps and frees ``I + O`` tokens.
    """
    prompt, new = means.prompt_tokens, max(1.0, means.new_tokens)
    return kv_tokens / (prompt + new / 2) * (prompt + new) / new


class _Random:
    """Takes a replica at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def rank(
        self,
        request: RoutedRequest,  # noqa: ARG002
        replicas: Replicas,
        means: WorkloadMeans,  # noqa: ARG002
    ) -> list[int]:
        """Return the numbers of the replicas in a random order."""
        return self._random.sample(list(replicas), len(replicas))

    def routed(self, request: RoutedRequest, number: int) -> None:
        """Take no note."""


class _PowerOfTwoChoices(_Random):
    """Takes the less loaded of two replicas at random (Mitzenmacher, 2001)."""

    def rank(self, request: RoutedRequest, replicas: Replicas, means: WorkloadMeans) -> list[int]:
        """Return the numbers of the replicas, the better of the two first."""
        order = super().rank(request, replicas, means)
        return sorted(order[:2], key=lambda number: replicas[number].outstanding) + order[2:]


class _RoundRobin:
    """Takes the replicas in turn."""

    def __init__(self) -> None:
        self._last = -1

    def rank(
        self,
        request: RoutedRequest,  # noqa: ARG002
        replicas: Replicas,
        means: WorkloadMeans,  # noqa: ARG002
    ) -> list[int]:
        """Return the numbers of the replicas, the one after the last first."""
        return sorted(replicas, key=lambda number: (number <= self._last, number))

    def routed(self, request: RoutedRequest, number: int) -> None:  # noqa: ARG002
        """Go on from this replica."""
        self._last = number


class _PrefixAffinity:
    """Takes the replica that has seen the longest prefix of the prompt, unless it is overloaded."""

    def __init__(self) -> None:
        self._seen: dict[int, OrderedDict[int, None]] = {}

    def rank(self, request: RoutedRequest, replicas: Replicas, means: WorkloadMeans) -> list[int]:
        """Return the numbers of the replicas, the one with the longest known prefix first."""
        loads = least_loaded(request, replicas.values(), means)
        low, high = min(loads), max(loads)
        if high - low > IMBALANCE_REQUESTS and high > IMBALANCE_RATIO * low:
            return _by_score(loads, replicas)
        block = 1.0 + high  # a known block counts more than any load
        known = [self._known(number, request.prefix) for number in replicas]
        return _by_score(
            [load - block * count for load, count in zip(loads, known, strict=True)], replicas
        )

    def routed(self, request: RoutedRequest, number: int) -> None:
        """Remember the prefix."""
        seen = self._seen.setdefault(number, OrderedDict())
        for block in request.prefix:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > PREFIXES:
            seen.popitem(last=False)

    def _known(self, number: int, prefix: Sequence[int]) -> int:
        seen: Container[int] = self._seen.get(number, ())
        for count, block in enumerate(prefix):
            if block not in seen:
                return count
        return len(prefix)


_MAKERS: dict[str, Callable[[int], LoadBalancer]] = {
    "random": _Random,
    "round_robin": lambda _: _RoundRobin(),
    "p2c": _PowerOfTwoChoices,
    "least_loaded": lambda _: _Scored(least_loaded),
    "lmetric": lambda _: _Scored(lmetric),
    "prefix": lambda _: _PrefixAffinity(),
    "sal": lambda _: _Scored(sal),
    "sal_seconds": lambda _: _Scored(sal_seconds),
}
BALANCERS = tuple(_MAKERS)


def load_balancer(name: str, *, seed: int = 0) -> LoadBalancer:
    """Return a balancer.

    Args:
        name: ``random``, ``round_robin``, ``p2c`` (power of two choices), ``least_loaded``,
            ``lmetric``, ``prefix`` (prefix affinity), ``sal`` or ``sal_seconds`` (SAL for replicas
            of different speed).
        seed: of the random ones.

    Raises:
        SpecError: the name is unknown.
    """
    if name not in _MAKERS:
        raise SpecError(f"balancer: found '{name}', expected one of {', '.join(BALANCERS)}")
    return _MAKERS[name](seed)
