"""Parts of a cluster: how many devices of each pool belong to a replica.

A pool is a group of equal devices of one node. Parts are equal up to symmetry when they differ only
in which nodes of the same links their devices are on; equal parts have equal plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from llmpq.spec.cluster import Cluster
from llmpq.spec.codec import to_json
from llmpq.spec.fields import digest_of

MAX_PARTS = 1024
"""Parts that are enumerated; of larger clusters, those with the fewest devices."""

Counts = tuple[int, ...]
"""Devices of a part, by pool."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Counts of the equal devices of every node of a cluster.

    Attributes:
        cluster: the cluster.
        counts: devices of each pool.
        nodes: node of each pool, an index.
    """

    cluster: Cluster
    counts: Counts
    nodes: tuple[int, ...]

    @classmethod
    def of(cls, cluster: Cluster) -> Pools:
        """Return the pools of a cluster, in file order."""
        found = [
            (group.count, place)
            for place, node in enumerate(cluster.nodes)
            for group in node.devices
        ]
        return cls(cluster, tuple(count for count, _ in found), tuple(place for _, place in found))

    def parts(self) -> tuple[tuple[Counts, ...], bool]:
        """Return the parts with at least one device, and whether these are all."""
        if prod(count + 1 for count in self.counts) - 1 <= MAX_PARTS:
            every = product(*(range(count + 1) for count in self.counts))
            return tuple(counts for counts in every if any(counts)), True
        found: list[Counts] = []
        for size in range(1, sum(self.counts) + 1):
            own = list(_of_size(self.counts, size))
            if len(found) + len(own) > MAX_PARTS:
                break
            found += own
        # Single pools of any size, and the whole.
        for pool, count in enumerate(self.counts):
            found += [
                tuple(size if place == pool else 0 for place in range(len(self.counts)))
                for size in range(1, count + 1)
            ]
        return tuple(dict.fromkeys([*found, self.counts])), False

    def cluster_of(self, counts: Counts) -> Cluster:
        """Return the part as a cluster of its own."""
        nodes = []
        pool = 0
        for node in self.cluster.nodes:
            own = counts[pool : pool + len(node.devices)]
            pool += len(node.devices)
            groups = tuple(
                replace(group, count=count)
                for group, count in zip(node.devices, own, strict=True)
                if count
            )
            if groups:
                nodes.append(replace(node, devices=groups))
        names = {node.name for node in nodes}
        links = tuple(link for link in self.cluster.links if set(link.between) <= names)
        return replace(self.cluster, nodes=tuple(nodes), links=links)

    def key(self, counts: Counts) -> str:
        """Return a digest that is the same for parts that are equal up to symmetry."""
        part = self.cluster_of(counts)
        linked = {name for link in part.links for name in link.between}
        nodes = [node if node.name in linked else replace(node, name="node") for node in part.nodes]
        texts = sorted(digest_of(to_json(node)) for node in nodes)
        return digest_of([*texts, [to_json(link) for link in part.links]])

    def names(self) -> list[str]:
        """Return node and device type of each pool."""
        return [
            f"{node.name}/{group.type}" for node in self.cluster.nodes for group in node.devices
        ]

    def of_nodes(self) -> list[Counts]:
        """Return one part for each node."""
        return self._by([str(place) for place in self.nodes])

    def of_types(self) -> list[Counts]:
        """Return one part for each device type."""
        return self._by([group.type for node in self.cluster.nodes for group in node.devices])

    def of_devices(self) -> list[Counts]:
        """Return one part for each device."""
        return [
            tuple(int(place == pool) for place in range(len(self.counts)))
            for pool, count in enumerate(self.counts)
            for _ in range(count)
        ]

    def members(self) -> list[list[int]]:
        """Return the devices of each pool, indices into the cluster's."""
        first, found = 0, []
        for count in self.counts:
            found.append(list(range(first, first + count)))
            first += count
        return found

    def _by(self, labels: Sequence[str]) -> list[Counts]:
        return [
            tuple(
                count if own == label else 0 for count, own in zip(self.counts, labels, strict=True)
            )
            for label in dict.fromkeys(labels)
        ]


def _of_size(counts: Counts, size: int) -> Iterator[Counts]:
    """Yield the parts with ``size`` devices."""
    if not counts:
        if not size:
            yield ()
        return
    for own in range(min(counts[0], size) + 1):
        for rest in _of_size(counts[1:], size - own):
            yield own, *rest
