"""Clusters: devices, their hosts, and the links between them.

A cluster file has the devices of every host and what differs from the catalogue. The figures of a
device type (peak rates, efficiencies) are the catalogue's, or those of the file's ``device_types``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from llmpq.errors import SpecError
from llmpq.spec.devices.figures import DeviceEntry, DeviceSpec, check_unique
from llmpq.spec.fields import SCHEMA, Rule, from_json, read_fields
from llmpq.spec.precision import Dtype
from llmpq.units import format_bytes

CPU_ISAS = ("sse4", "avx2", "avx512")
"""Vector extensions a CPU worker can be limited to, oldest first."""

INSTRUCTION_SETS = {
    "amx": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "avx512_vnni": "AVX512-VNNI",
    "avx512": "AVX-512",
    "avx2_vnni": "AVX-VNNI",
    "avx2": "AVX2",
    "baseline": "SSE",
}
"""What a CPU has, as ``llmpq.kernels.cpu.native`` names it, and its usual name; newest first."""
BF16_SETS = ("amx", "avx512_bf16")
"""Those that multiply pairs of bfloat16; on others numbers are widened to float32 first."""
_NEWEST = {"avx512": "avx512", "avx2": "avx2", "sse4": "baseline"}
"""Instruction set of a worker that is limited to a vector extension."""


def limited_set(instruction_set: str | None, cpu_isa: str | None) -> str | None:
    """Return what a CPU worker computes with: what its processor has, up to its limit.

    ``None`` where neither is stated.
    """
    order = list(INSTRUCTION_SETS)
    stated = [name for name in (instruction_set, _NEWEST.get(cpu_isa or "")) if name]
    return max(stated, key=order.index, default=None)


MIN_CPU_SHARE = 0.01
MAX_DEVICES = 1024
MAX_MEMBERS = 64
MAX_HOST_THREADS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHost:
    """The part of a node that computes routed experts beside a device.

    Attributes:
        type: name of its CPU in the cluster's ``device_types`` or the catalogue.
        threads: that compute experts, on cores of their own.
        memory_bytes: for experts.
        instruction_set: newest that its processor has.
    """

    type: str
    threads: Annotated[int, Rule(minimum=1, maximum=MAX_HOST_THREADS)]
    memory_bytes: Annotated[int, Rule(minimum=1)]
    instruction_set: Annotated[str | None, Rule(choices=tuple(INSTRUCTION_SETS))] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Equal devices of one node, as a cluster file lists them.

    Attributes:
        type: name of the device in the cluster's ``device_types`` or the catalogue.
        memory_bytes: memory, instead of the catalogue's.
        profile: path of a measured latency table, or of a folder with one for each model, relative
            to the cluster file.
        threads: CPU threads of a worker on it.
        cpu_isa: newest vector extension that a CPU worker may use.
        instruction_set: newest that its processor has; ``llmpq-algo`` states its own host's.
        cpu_share: share of its threads' time that a CPU worker gets, less than 1 under a quota.
        tensor_parallel: devices that share every layer of a stage; ``count`` then counts such
            teams, and ``memory_bytes`` is of one member. Planned and simulated, not run.
        dtype: number format in which it computes; ``None``: the run's, or the nearest it has.
        disk_bytes_per_s: at which a CPU worker reads weights from its disk, beside the other
            workers of its node; ``None``: its share of what its type has.
        host: of each of them, for routed experts in its memory; ``None`` for none.
    """

    type: str
    count: Annotated[int, Rule(minimum=1, maximum=MAX_DEVICES)]
    memory_bytes: Annotated[int | None, Rule(minimum=1)] = None
    profile: str | None = None
    threads: Annotated[int | None, Rule(minimum=1, maximum=4096)] = None
    cpu_isa: Annotated[str | None, Rule(choices=CPU_ISAS)] = None
    instruction_set: Annotated[str | None, Rule(choices=tuple(INSTRUCTION_SETS))] = None
    cpu_share: Annotated[float | None, Rule(minimum=MIN_CPU_SHARE, maximum=1)] = None
    tensor_parallel: Annotated[int | None, Rule(minimum=2, maximum=MAX_MEMBERS)] = None
    dtype: Dtype | None = None
    disk_bytes_per_s: Annotated[float | None, Rule(minimum=1)] = None
    host: DeviceHost | None = None

    @property
    def members(self) -> int:
        """Devices that share every layer, 1 without tensor parallelism."""
        return self.tensor_parallel or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host and its devices.

    Attributes:
        name: of the host, unique in the cluster.
        cores: CPU cores that its CPU workers and the hosts of its devices share, ``None`` when each
            has its own. With more threads than cores, those that compute at once slow each other
            down.
    """

    name: str
    devices: Annotated[tuple[DeviceGroup, ...], Rule(minimum=1)]
    cores: Annotated[int | None, Rule(minimum=1, maximum=4096)] = None

    @property
    def worker_threads(self) -> int:
        """Threads of all its workers that say how many they have."""
        return sum(group.count * (group.threads or 0) for group in self.devices)

    @property
    def host_threads(self) -> int:
        """Threads that compute experts for its devices."""
        return sum(group.count * group.host.threads for group in self.devices if group.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A link between two nodes, or inside one (equal names), in both directions."""

    between: tuple[str, str]
    bytes_per_s: Annotated[float, Rule(minimum=1)]
    latency_s: float


DEFAULT_NETWORK = LinkSpec(between=("*", "*"), bytes_per_s=1.25e9, latency_s=50e-6)
"""Default link between two nodes: 10 Gbit/s Ethernet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(DeviceGroup):
    """One device of a cluster: a group of one, and its place.

    Attributes:
        group: index of its group in the cluster; equal devices of one node are interchangeable.
        local_index: number within the group.
        ordinal: number among the devices of its type on its node.
    """

    node: str
    group: int
    local_index: int
    ordinal: int

    @property
    def label(self) -> str:
        """A name for messages, unique in the cluster: ``node/type#0``."""
        return f"{self.node}/{self.type}#{self.ordinal}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All nodes and links. Devices are numbered in file order.

    ``device_types`` describes types that the catalogue lacks, or replaces its figures.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    name: str
    nodes: tuple[Node, ...]
    links: Annotated[tuple[LinkSpec, ...], Rule(optional=True)] = ()
    device_types: tuple[DeviceEntry, ...] | None = None

    def __post_init__(self) -> None:
        check_unique("device_types", self.device_types or ())
        names = [node.name for node in self.nodes]
        if not names:
            raise SpecError(f"cluster {self.name}: found no nodes, expected at least one")
        if len(set(names)) != len(names):
            raise SpecError(f"cluster {self.name}: found two nodes of one name, expected unique")
        if self.num_devices > MAX_DEVICES:
            raise SpecError(f"cluster {self.name}: more than {MAX_DEVICES} devices")
        for link in self.links:
            for end in link.between:
                if end not in names:
                    raise SpecError(
                        f"cluster {self.name}: link between {link.between}: "
                        f"found unknown node '{end}', expected one of {names}"
                    )

    @property
    def num_devices(self) -> int:
        """The number of single devices."""
        return sum(group.count for node in self.nodes for group in node.devices)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every single device, in file order."""
        found: list[Device] = []
        groups = [(node.name, group) for node in self.nodes for group in node.devices]
        for index, (node, group) in enumerate(groups):
            before = sum(
                other.count
                for name, other in groups[:index]
                if (name, other.type) == (node, group.type)
            )
            options = {name: getattr(group, name) for name in DeviceGroup.__slots__} | {"count": 1}
            found += [
                Device(node=node, group=index, local_index=i, ordinal=before + i, **options)
                for i in range(group.count)
            ]
        return tuple(found)

    @property
    def used_types(self) -> set[str]:
        """Types of its devices, and of what computes experts beside them."""
        groups = [group for node in self.nodes for group in node.devices]
        return {group.type for group in groups} | {
            group.host.type for group in groups if group.host is not None
        }

    def node_of(self, device: Device) -> Node:
        """Return the host of a device."""
        return next(node for node in self.nodes if node.name == device.node)

    def link(self, first: Device, second: Device, own: DeviceSpec | None = None) -> LinkSpec:
        """Return the link between two devices; ``own`` has the figures of the first of them."""
        for link in self.links:
            if set(link.between) == {first.node, second.node}:
                return link
        if first.node != second.node or own is None:
            return replace(DEFAULT_NETWORK, between=(first.node, second.node))
        return LinkSpec(
            between=(first.node, first.node),
            bytes_per_s=own.link_bytes_per_s,
            latency_s=own.link_latency_s,
        )


def host_text(device: DeviceGroup) -> str:
    """Return threads, instruction set and memory of a CPU worker, ``""`` where none is stated."""
    used = limited_set(device.instruction_set, device.cpu_isa)
    parts = [
        None if device.threads is None else f"{device.threads} thread{'s' * (device.threads > 1)}",
        None if used is None else INSTRUCTION_SETS[used],
        None if device.memory_bytes is None else format_bytes(device.memory_bytes),
    ]
    return ", ".join(part for part in parts if part)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file; relative ``profile`` paths are resolved against its folder."""
    path = Path(path)
    cluster = from_json(Cluster, read_fields(path, "cluster"))

    def placed(group: DeviceGroup) -> DeviceGroup:
        profile = None if group.profile is None else str(path.parent / group.profile)
        return replace(group, profile=profile)

    nodes = (replace(node, devices=tuple(map(placed, node.devices))) for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def cluster_of_types(types: Mapping[str, int]) -> Cluster:
    """Build the paper's form of cluster: one node for each device type."""
    nodes = tuple(
        Node(name=f"node{index}", devices=(DeviceGroup(type=device, count=count),))
        for index, (device, count) in enumerate(types.items())
    )
    return Cluster(name=types_label(nodes), nodes=nodes)


def types_label(nodes: Sequence[Node]) -> str:
    """Return the name of a cluster that has no other: its types and how many there are."""
    groups = (group for node in nodes for group in node.devices)
    return "-".join(f"{group.type}x{group.count}" for group in groups).lower()


def cluster_of_lists(names: Sequence[str], numbers: Sequence[int]) -> Cluster:
    """Build the paper's form of cluster from ``--device_names`` and ``--device_numbers``.

    Raises:
        SpecError: no types, a type twice, or not one number of at least 1 for each.
    """
    if not names or len(names) != len(numbers) or len(set(names)) != len(names):
        raise SpecError(
            f"device_names, device_numbers: found {list(names)} and {list(numbers)}, expected a "
            "cluster, or each type once and a number, one for each"
        )
    if min(numbers) < 1:
        raise SpecError(f"device_numbers: found {min(numbers)}, expected at least 1")
    return cluster_of_types(dict(zip(names, numbers, strict=True)))


def with_tensor_parallel(cluster: Cluster, degree: int) -> Cluster:
    """Return a cluster whose devices share layers in teams of ``degree``.

    Groups that do not divide into such teams, have a measured table, set threads or share layers
    already stay as they are.

    Raises:
        SpecError: no group can share layers.
    """
    teams = 0
    nodes = []
    for node in cluster.nodes:
        groups = []
        for group in node.devices:
            fits = group.count % degree == 0 and group.members == 1
            if fits and group.profile is None and group.threads is None:
                count = group.count // degree
                teams += count
                groups.append(replace(group, count=count, tensor_parallel=degree))
            else:
                groups.append(group)
        nodes.append(replace(node, devices=tuple(groups)))
    if not teams:
        raise SpecError(
            f"cluster {cluster.name}: found no devices of one group that divide into teams of "
            f"{degree}, expected some to share layers"
        )
    return replace(cluster, nodes=tuple(nodes))
