"""All partitions of a cluster's devices, and the plan of each part by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from llmpq.assigner import PlanRequest, make_plan
from llmpq.errors import InfeasibleError
from llmpq.spec.cluster import Cluster, Device
from llmpq.spec.plan import Plan


def plans_of(request: PlanRequest) -> Callable[[Sequence[Device], int], Plan | None]:
    """Return the plan of a set of devices with a batch; ``None`` where there is none."""
    cluster = request.cluster

    @cache
    def plan(chosen: tuple[tuple[str, int], ...], batch: int) -> Plan | None:
        counts = dict(chosen)
        nodes = []
        for node in cluster.nodes:
            groups = tuple(
                replace(group, count=counts[f"{node.name} {place}"])
                for place, group in enumerate(node.devices)
                if f"{node.name} {place}" in counts
            )
            nodes += [replace(node, devices=groups)] if groups else []
        names = {node.name for node in nodes}
        links = tuple(link for link in cluster.links if set(link.between) <= names)
        part = Cluster(name="part", nodes=tuple(nodes), links=links)
        own = replace(request, cluster=part, workload=replace(request.workload, batch=batch))
        try:
            return make_plan(own)
        except InfeasibleError:
            return None

    def of(devices: Sequence[Device], batch: int) -> Plan | None:
        first = {device.group: device for device in cluster.devices[::-1]}
        places = {
            group: sum(
                1 for other in first.values() if other.node == device.node and other.group < group
            )
            for group, device in first.items()
        }
        names = Counter(f"{device.node} {places[device.group]}" for device in devices)
        return plan(tuple(sorted(names.items())), batch)

    return of


def partitions(devices: Sequence[Device]) -> Iterator[list[list[Device]]]:
    """Yield every set of disjoint sets of devices."""
    if not devices:
        yield []
        return
    first, rest = devices[0], devices[1:]
    for found in partitions(rest):
        yield found  # left out
        yield [[first], *found]
        for place, own in enumerate(found):
            yield [*found[:place], [first, *own], *found[place + 1 :]]
