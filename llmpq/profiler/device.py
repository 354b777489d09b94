"""The cores, memory and vector extensions of this machine, in the terms of a cluster file."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from llmpq.dist.launch.process_environment import cpuinfo, usable_isas
from llmpq.dist.metrics.control_groups import (
    PROCESSES,
    available_memory_bytes,
    group_values,
    memory_of_host,
)
from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node, limited_set
from llmpq.units import GIB, MIB

_log = get_logger(__name__)

RESERVED_SHARE = 8
"""One of so many bytes that are available on this host is left to others, at most 1 GiB."""
_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits")
_GPU_TIMEOUT_S = 20.0

_FLAGS = {
    "amx": ("amx_tile", "amx_int8", "amx_bf16", "avx512_bf16", "avx512_vnni"),
    "avx512_bf16": ("avx512_bf16", "avx512_vnni"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx2_vnni": ("avx_vnni", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "baseline": (),
}
"""Flags of the processor that each of ``spec.cluster.INSTRUCTION_SETS`` needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCpu:
    """What the CPU workers of this host share.

    Attributes:
        cores: that this process may use.
        memory_bytes: of the host, or of the control group where that has less.
        instruction_set: key of ``spec.cluster.INSTRUCTION_SETS``.
    """

    cores: int
    memory_bytes: int
    instruction_set: str


def host_cpu() -> HostCpu:
    """Return what this host has."""
    return HostCpu(
        cores=len(available_cores()),
        memory_bytes=host_memory_bytes(),
        instruction_set=instruction_set(),
    )


def host_cluster(gpus: Sequence[tuple[str, int]] | None = None) -> Cluster:
    """Return the devices of this host with the memory that is free on them.

    Args:
        gpus: driver's name and free bytes of each GPU, by default those that the driver lists, if
            torch can use them. One that the catalogue does not know is left out with a warning.
    """
    host, free = host_cpu(), available_memory_bytes()
    groups = []
    for name, free_bytes in nvidia_gpus() if gpus is None else gpus:
        try:
            spec = catalog.device(catalog.device_type(name))
        except SpecError as error:
            _log.warning("%s", error)
            continue
        usable = max(0, free_bytes - spec.reserve_bytes)
        groups.append(DeviceGroup(type=spec.type, count=1, memory_bytes=usable))
    groups.append(
        DeviceGroup(
            type="cpu",
            count=1,
            threads=host.cores,
            memory_bytes=free - min(GIB, free // RESERVED_SHARE),
            instruction_set=host.instruction_set,
        )
    )
    return Cluster(name="this host", nodes=(Node(name="here", devices=tuple(groups)),))


def nvidia_gpus() -> list[tuple[str, int]]:
    """Return the driver's name and the free bytes of every GPU that torch can use."""
    try:
        is_cpu_build = "+cpu" in metadata.version("torch")
    except metadata.PackageNotFoundError:
        is_cpu_build = False
    if is_cpu_build or shutil.which(_GPU_QUERY[0]) is None:
        return []
    try:
        done = subprocess.run(
            _GPU_QUERY, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("%s: %s; GPUs are left out", _GPU_QUERY[0], error)
        return []
    rows = [line.rpartition(",") for line in done.stdout.splitlines() if line.strip()]
    return [(name.strip(), int(free) * MIB) for name, _, free in rows]


def with_host_cpu(cluster: Cluster, host: HostCpu, *, has_tables: bool = False) -> Cluster:
    """Return a cluster whose ``cpu`` devices have what they do not state from this host.

    The workers of a node share its cores and memory; more of them than cores slow each other down.
    Threads that tables were measured with, which a group names or ``has_tables`` says, stay open.
    """
    if "cpu" in {entry.type for entry in cluster.device_types or ()}:
        return cluster

    def stated(node: Node, group: DeviceGroup) -> DeviceGroup:
        if group.type != "cpu":
            return group
        workers = sum(one.count for one in node.devices if one.type == "cpu")
        is_open = has_tables or group.profile is not None
        own = max(1, (node.cores or host.cores) // workers)
        return replace(
            group,
            threads=group.threads or (None if is_open else own),
            memory_bytes=group.memory_bytes or host.memory_bytes // workers,
            instruction_set=group.instruction_set or host.instruction_set,
        )

    def crowded(node: Node) -> Node:
        found = replace(node, devices=tuple(stated(node, group) for group in node.devices))
        # Only threads that were counted here are known to be on this host's cores.
        is_counted = found.worker_threads > node.worker_threads
        if node.cores is None and is_counted and found.worker_threads > host.cores:
            found = replace(found, cores=host.cores)
        return found

    return replace(cluster, nodes=tuple(map(crowded, cluster.nodes)))


def available_cores() -> tuple[int, ...]:
    """Return the numbers of the CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_isas() -> tuple[str, ...]:
    """Return the vector extensions of this CPU that a worker can be limited to, oldest first."""
    return usable_isas({})


def instruction_set(cpu_isa: str | None = None, text: str | None = None) -> str:
    """Return the key of ``spec.cluster.INSTRUCTION_SETS`` that a worker of this host computes with.

    Args:
        cpu_isa: that limits it (``spec.cluster.CPU_ISAS``), ``None`` for all that there is.
        text: of ``/proc/cpuinfo``, by default this host's.
    """
    flags = set(cpuinfo("flags", text).split())
    names = list(_FLAGS)
    allowed = names[names.index(limited_set(None, cpu_isa) or names[0]) :]
    return next(name for name in allowed if flags.issuperset(_FLAGS[name]))


def host_memory_bytes(meminfo: str | None = None, processes: Path = PROCESSES) -> int:
    """Return the memory of this host, or the limit of its control group if that is less.

    Args:
        meminfo: text of ``/proc/meminfo``, by default this host's.
        processes: file with the control groups of this process.
    """
    whole = memory_of_host("MemTotal", meminfo)
    return min([whole, *group_values("memory", _memory_limit, processes)])


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (group / name).read_text().strip()
        except OSError:
            continue  # another version, or not visible from here
        return int(text) if text.isdigit() else None
    return None


def cpu_quota(processes: Path = PROCESSES) -> float | None:
    """Return the CPU quota of this process in cores, ``None`` for no limit.

    Containers and ``tools/hetbox`` set such a quota (control groups, version 1 or 2).
    """
    return min(group_values("cpu", _quota, processes), default=None)


def _quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except OSError:
        return None  # the files of the group are not visible from here


def cpu_name() -> str:
    """Return the processor's name for provenance."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(field: str) -> str:
    """Return a field of the first processor, empty where it is not stated."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((one.partition(":")[2].strip() for one in lines if one.startswith(field)), "")
