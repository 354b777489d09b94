"""Fleet: replicas of a model on parts of one cluster, each with a strategy file of its own."""

from __future__ import annotations

from collections import Counter
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


def read_fleet(path: str | Path) -> Fleet:
    """Read a fleet file; ``SpecError`` names the file and the field."""
    return from_json(Fleet, read_fields(path, "fleet"))


def write_fleet(path: str | Path, fleet: Fleet) -> None:
    """Write a fleet file atomically."""
    write_text(path, dump_json(to_json(fleet)))
