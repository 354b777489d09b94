"""What a router in Ray Serve knows of the replicas, and whom it ranks first. Needs no Ray.

Ray Serve has no place for a request that was chosen and is on its way: a request is counted when a
replica is ranked first for it, and moved when Ray sends it to another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmpq.logging import get_logger
from llmpq.routing import LoadBalancer, ReplicaView, RoutedRequest
from llmpq.server.router.backend import KnownReplica, ranked, report_of_load

RECORDED_S = "recorded_s"
"""When statistics were recorded, in seconds since the epoch, by the clock of the replica's host."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHint:
    """What the router knows of a request; the first argument of every call of a replica.

    Attributes:
        request: as a balancer reads it.
        tried: names of the replicas that have refused it.
    """

    request: RoutedRequest
    tried: tuple[str, ...] = ()


class _Entry(KnownReplica):
    """One replica with its last statistics as they came."""

    def __init__(self, number: int) -> None:
        super().__init__(number, is_ready=True)
        self.stats: Mapping[str, Any] = {}


class ReplicaTable:
    """Ranks replicas for requests.

    Args:
        balancer: scores them.
        clock: seconds since the epoch.
    """

    def __init__(self, balancer: LoadBalancer, clock: Callable[[], float] = time.time) -> None:
        self._balancer = balancer
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._requests: dict[str, str] = {}
        self._ended: dict[str, str] = {}
        self._next_number = 0

    def rank(
        self, key: str, hint: RoutingHint, stats: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        """Return the names of all replicas, the best one first, and count the request there.

        Replicas that take no requests come late, those that have refused this one last.

        Args:
            key: of the request; ranking it again moves it.
            hint: what is known of it.
            stats: the last statistics of each replica by its name, empty before the first.
        """
        self._update(stats)
        self.forget(key)
        late = {name for name, one in self._entries.items() if not one.is_ready}
        tried = set(hint.tried) & self._entries.keys()
        names = {one.number: name for name, one in self._entries.items()}
        left = [one for name, one in self._entries.items() if name not in late | tried]
        numbers = ranked(self._balancer, hint.request, left, self._entries.values())
        order = [names[number] for number in numbers]
        order += sorted(late - tried) + sorted(tried)
        if order:
            self._count(key, hint.request, order[0])
        return order

    def routed(self, key: str, request: RoutedRequest, name: str) -> None:
        """Take note of the replica that a request was sent to; Ray may do so after its end."""
        if self._ended.get(key) == name:
            self.forget(key)
        elif self._requests.get(key, name) != name and name in self._entries:
            self.forget(key)
            self._count(key, request, name)

    def finished(self, key: str, name: str) -> None:
        """Take note of the end of a request at a replica, whatever came of it."""
        if self._requests.get(key) == name:
            self.forget(key)
        elif key in self._requests:  # an earlier attempt, or the note of this one is yet to come
            self._ended[key] = name

    def forget(self, key: str) -> None:
        """Count a request no longer, as it was never sent or has ended."""
        self._ended.pop(key, None)
        name = self._requests.pop(key, None)
        if name in self._entries:
            self._entries[name].load.finish()

    def views(self) -> dict[str, ReplicaView]:
        """Return what a balancer reads of each replica."""
        return {name: one.view() for name, one in self._entries.items()}

    def _count(self, key: str, request: RoutedRequest, name: str) -> None:
        entry = self._entries[name]
        self._requests[key] = name
        entry.load.route(request, self._clock())
        self._balancer.routed(request, entry.number)

    def _update(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Take new replicas and new statistics; drop the replicas that are gone."""
        for name in self._entries.keys() - stats.keys():
            del self._entries[name]
        for name in sorted(stats):
            entry = self._entries.get(name)
            if entry is None:
                entry = self._entries[name] = _Entry(self._next_number)
                self._next_number += 1
            if stats[name] and stats[name] != entry.stats:
                entry.stats = stats[name]
                _read(name, entry)


def _read(name: str, entry: _Entry) -> None:
    """Read new statistics; malformed ones leave what was known."""
    recorded_s = entry.stats.get(RECORDED_S)
    try:
        if not isinstance(recorded_s, float):
            raise ValueError(f"field '{RECORDED_S}': expected a number")
        report = report_of_load(entry.stats)
    except ValueError as error:
        logger.warning("replica %s: malformed statistics: %s", name, error)
        return
    entry.take(report, recorded_s)
