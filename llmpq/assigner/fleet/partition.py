"""Parts of a cluster: how many devices of each pool belong to a replica.

A pool is a group of equal devices of one node. Parts are equal up to symmetry when they differ only
in which nodes of the same links their devices are on; equal parts have equal plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from math import prod

import numpy as np

from llmpq.assigner.objective import FloatArray
from llmpq.spec.cluster import Cluster
from llmpq.spec.fields import digest_of, to_json

MAX_PARTS = 1024
"""Parts that are considered; of clusters with more, some."""
MAX_OF_TYPES = 256
"""Parts of a large cluster without some device types that are all considered."""
MAX_TYPES = 5
"""Device types of which each combination is considered by itself."""

DeviceCounts = tuple[int, ...]
"""Devices of a part, by pool."""


@dataclass(frozen=True, slots=True)
class DevicePools:
    """Counts of the equal devices of every node of a cluster.

    Attributes:
        cluster: the cluster.
        counts: devices of each pool.
        nodes: node of each pool, an index.
    """

    cluster: Cluster
    counts: DeviceCounts
    nodes: tuple[int, ...]

    @classmethod
    def of(cls, cluster: Cluster) -> DevicePools:
        """Return the pools of a cluster, in file order."""
        found = [
            (group.count, place)
            for place, node in enumerate(cluster.nodes)
            for group in node.devices
        ]
        return cls(cluster, tuple(count for count, _ in found), tuple(place for _, place in found))

    def parts(self) -> tuple[tuple[DeviceCounts, ...], bool]:
        """Return the parts with at least one device, and whether these are all.

        Of large clusters: whole pools and all their combinations, halves and quarters, all parts
        of what is left without some device types, single pools of any size, and then the parts of
        fewest devices.
        """
        every = prod(count + 1 for count in self.counts) - 1
        if every <= MAX_PARTS:
            found = product(*(range(count + 1) for count in self.counts))
            return tuple(counts for counts in found if any(counts)), True
        kept: dict[DeviceCounts, None] = {self.counts: None}
        for shares in (1, 2, 4):
            sizes = [sorted({count * n // shares for n in range(shares + 1)})
                     for count in self.counts]  # fmt: skip
            if prod(map(len, sizes)) <= MAX_PARTS // 2:
                kept |= dict.fromkeys(counts for counts in product(*sizes) if any(counts))
        for counts in self.without_types()[::-1]:
            if prod(count + 1 for count in counts) <= MAX_OF_TYPES:
                every_of = product(*(range(count + 1) for count in counts))
                kept |= dict.fromkeys(part for part in every_of if any(part))
        for pool, count in enumerate(self.counts):
            kept |= dict.fromkeys(
                tuple(size if place == pool else 0 for place in range(len(self.counts)))
                for size in range(1, count + 1)
            )
        for size in range(1, sum(self.counts) + 1):
            own = list(islice(_of_size(self.counts, size), MAX_PARTS + 1))
            if len(kept) + len(own) > MAX_PARTS:
                break
            kept |= dict.fromkeys(own)
        return tuple(kept), False

    def cluster_of(self, counts: DeviceCounts) -> Cluster:
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

    def key(self, counts: DeviceCounts) -> str:
        """Return a digest that is the same for parts that are equal up to symmetry."""
        return symmetric_key(self.cluster_of(counts))

    def in_order(self, counts: DeviceCounts) -> list[int]:
        """Return the pools of a part; those of equal parts match one by one."""
        texts = _texts(self.cluster_of(counts))
        names = [self.cluster.nodes[place].name for place in self.nodes]
        pools = [pool for pool, count in enumerate(counts) if count]
        return sorted(pools, key=lambda pool: (texts[names[pool]], self.nodes[pool], pool))

    def core_shares(self, parts: Sequence[DeviceCounts]) -> FloatArray:
        """Return ``[P, H]`` the part of the cores of each host that parts take.

        Hosts are those with a number of cores. A part with more threads than cores takes all.
        """
        groups = [group for node in self.cluster.nodes for group in node.devices]
        threads = np.array([group.threads or 0 for group in groups])
        own = np.array(parts, dtype=np.float64).reshape(len(parts), len(groups)) * threads
        shares = [
            own[:, np.array(self.nodes) == place].sum(axis=1) / node.cores
            for place, node in enumerate(self.cluster.nodes)
            if node.cores is not None
        ]
        found: FloatArray = np.minimum(1.0, np.array(shares).reshape(len(shares), len(parts)).T)
        return found

    def names(self) -> list[str]:
        """Return node and device type of each pool."""
        return [
            f"{node.name}/{group.type}" for node in self.cluster.nodes for group in node.devices
        ]

    def of_nodes(self) -> list[DeviceCounts]:
        """Return one part for each node."""
        return self._by([str(place) for place in self.nodes])

    def of_types(self) -> list[DeviceCounts]:
        """Return one part for each device type."""
        return self._by([group.type for node in self.cluster.nodes for group in node.devices])

    def of_devices(self) -> list[DeviceCounts]:
        """Return one part for each device."""
        return [
            tuple(int(place == pool) for place in range(len(self.counts)))
            for pool, count in enumerate(self.counts)
            for _ in range(count)
        ]

    def without_types(self) -> list[DeviceCounts]:
        """Return the clusters that are left without some device types, the largest first."""
        types = [group.type for node in self.cluster.nodes for group in node.devices]
        names = list(dict.fromkeys(types))
        if len(names) > MAX_TYPES:
            return []
        found = [
            tuple(
                count if own in kept else 0 for own, count in zip(types, self.counts, strict=True)
            )
            for size in range(1, len(names))
            for kept in combinations(names, size)
        ]
        return sorted(found, key=sum, reverse=True)

    def members(self) -> list[list[int]]:
        """Return the devices of each pool, indices into the cluster's."""
        first, found = 0, []
        for count in self.counts:
            found.append(list(range(first, first + count)))
            first += count
        return found

    def _by(self, labels: Sequence[str]) -> list[DeviceCounts]:
        return [
            tuple(
                count if own == label else 0 for count, own in zip(self.counts, labels, strict=True)
            )
            for label in dict.fromkeys(labels)
        ]


def common(first: DeviceCounts, second: DeviceCounts) -> DeviceCounts:
    """Return the devices that two parts have in common."""
    return tuple(map(min, first, second))


def symmetric_key(cluster: Cluster) -> str:
    """Return a digest that is the same for clusters that are equal but for names of nodes.

    Nodes of links that are not the default have their own names.
    """
    links = [to_json(link) for link in cluster.links]
    return digest_of([*sorted(_texts(cluster).values()), links])


def _texts(part: Cluster) -> dict[str, str]:
    """Return a digest of every node, by name; of a node with links, the name is part of it."""
    linked = {name for link in part.links for name in link.between}
    return {
        node.name: digest_of(to_json(node if node.name in linked else replace(node, name="node")))
        for node in part.nodes
    }


def _of_size(counts: DeviceCounts, size: int) -> Iterator[DeviceCounts]:
    """Yield the parts with ``size`` devices."""
    if not counts:
        if not size:
            yield ()
        return
    for own in range(min(counts[0], size) + 1):
        for rest in _of_size(counts[1:], size - own):
            yield own, *rest
