"""Fleet: replicas of a model on parts of one cluster, each with a strategy file of its own."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster
from llmpq.spec.codec import Rule, from_json, to_json
from llmpq.spec.fields import SCHEMA, dump_json, read_fields, write_text
from llmpq.spec.plan import Plan, Status, read_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """Strategy file, devices and speed of one replica of a fleet file.

    Attributes:
        strategy: its strategy file, relative to the fleet file.
        devices: labels of its devices in the fleet's cluster, in the order of the plan's cluster.
        requests_per_s: batch of the plan over its predicted latency.
        arrivals_per_s: share of the arrivals that the fleet was planned for.
    """

    strategy: str
    devices: Annotated[tuple[str, ...], Rule(minimum=1)]
    requests_per_s: float
    arrivals_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCut:
    """Another way to cut the cluster.

    Attributes:
        requests_per_s: 0 where no part holds the model, ``None`` where it was not planned in time.
        ttft_s: mean time to first token; ``None`` where it does not answer all arrivals.
    """

    name: str
    replicas: int
    requests_per_s: Annotated[float | None, Rule(null=True)] = None
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All replicas; what a fleet file holds.

    Attributes:
        model: its name.
        cluster: the whole cluster.
        quality_budget: largest degradation of any replica; ``None`` for no limit.
        requests_per_s: of all replicas together.
        bound: no fleet makes more.
        status: ``optimal`` when proven.
        others: other ways to cut the cluster.
        ttft_s: mean time to first token, which a fleet for a rate of arrivals was chosen for.
        ttft_bound_s: no fleet has less.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    model: str
    replicas: Annotated[tuple[FleetMember, ...], Rule(minimum=1)]
    requests_per_s: float
    bound: float
    status: Status
    quality_budget: float | None = None
    others: Annotated[tuple[OtherCut, ...], Rule(optional=True)] = ()
    ttft_s: float | None = None
    ttft_bound_s: float | None = None
    cluster: Cluster

    def __post_init__(self) -> None:
        known = {device.label for device in self.cluster.devices}
        taken = Counter(name for replica in self.replicas for name in replica.devices)
        for name, count in taken.items():
            if name not in known:
                raise SpecError(
                    f"fleet: field 'replicas': found device '{name}', expected one of the "
                    f"cluster's: {', '.join(sorted(known))}"
                )
            if count > 1:
                raise SpecError(
                    f"fleet: field 'replicas': found device '{name}' {count} times, expected once"
                )

    @property
    def idle(self) -> tuple[str, ...]:
        """Labels of the devices that no replica uses."""
        taken = {name for replica in self.replicas for name in replica.devices}
        return tuple(d.label for d in self.cluster.devices if d.label not in taken)

    def plans(self, path: str | Path) -> tuple[Plan, ...]:
        """Read the strategy files of a fleet file.

        Raises:
            SpecError: one cannot be read, is for another model, or has other devices.
        """
        found = []
        types = {device.label: device.type for device in self.cluster.devices}
        for number, replica in enumerate(self.replicas):
            file = Path(path).parent / replica.strategy
            plan = read_plan(file)
            where = f"{path}: field 'replicas[{number}]"
            if plan.model.name != self.model:
                raise SpecError(
                    f"{where}.strategy': found {file} of model '{plan.model.name}', expected "
                    f"'{self.model}'"
                )
            own = [types[name] for name in replica.devices]
            planned = [device.type for device in plan.cluster.devices]
            if own != planned:
                raise SpecError(
                    f"{where}.devices': found {', '.join(own)}, expected those of {file}: "
                    f"{', '.join(planned)}"
                )
            found.append(plan)
        return tuple(found)


def seconds_of_requests(plans: Sequence[Plan], number: int) -> float:
    """Return the predicted seconds in which replicas answer so many requests.

    Each takes a full batch of its plan whenever it has answered one.
    """
    each = [(plan.estimate.latency_s, plan.workload.batch) for plan in plans]
    rate = sum(batch / latency_s for latency_s, batch in each)
    # All batches that end well before the last one, and the rest in the order in which they end.
    early_s = number / rate - 2 * max(latency_s for latency_s, _ in each)
    done = [max(0, int(early_s / latency_s)) for latency_s, _ in each]
    left = number - sum(count * batch for count, (_, batch) in zip(done, each, strict=True))
    ends = [
        ((count + 1) * latency_s, place)
        for place, (count, (latency_s, _)) in enumerate(zip(done, each, strict=True))
    ]
    heapq.heapify(ends)
    while True:
        end_s, place = ends[0]
        latency_s, batch = each[place]
        left -= batch
        if left <= 0:
            return end_s
        heapq.heapreplace(ends, (end_s + latency_s, place))


def read_fleet(path: str | Path) -> Fleet:
    """Read a fleet file; ``SpecError`` names the file and the field."""
    return from_json(Fleet, read_fields(path, "fleet"))


def write_fleet(path: str | Path, fleet: Fleet) -> None:
    """Write a fleet file atomically."""
    write_text(path, dump_json(to_json(fleet)))
