"""The cores and vector extensions of this machine, in the terms of a cluster file."""

from __future__ import annotations

import os
from pathlib import Path

from llmpq.spec.cluster import CPU_ISAS

CGROUPS = Path("/sys/fs/cgroup")


def available_cores() -> tuple[int, ...]:
    """Return the numbers of the CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_isas() -> tuple[str, ...]:
    """Return the vector extensions of this CPU that a worker can be limited to, oldest first."""
    flags = set(_cpuinfo("flags").split())
    needed = {"sse4": "sse4_1", "avx2": "avx2", "avx512": "avx512f"}
    return tuple(isa for isa in CPU_ISAS if needed[isa] in flags)


def cpu_quota(processes: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the CPU quota of this process in cores, ``None`` for no limit.

    Containers and ``scripts/hetbox`` set such a quota (control groups, version 1 or 2).
    """
    if not processes.exists():
        return None
    quotas = []
    for line in processes.read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == "" or "cpu" in names.split(","):
            quotas += [quota for quota in _quotas(names, path) if quota is not None]
    return min(quotas, default=None)


def _quotas(names: str, path: str) -> list[float | None]:
    """Return the quotas of a control group and of its parents."""
    root = CGROUPS if names == "" else CGROUPS / names
    group = root / path.strip("/")
    return [_quota(one) for one in (group, *group.parents) if one.is_relative_to(root)]


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
    return _cpuinfo("model name") or os.uname().machine


def _cpuinfo(field: str) -> str:
    """Return a field of the first processor, empty where it is not stated."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((one.partition(":")[2].strip() for one in lines if one.startswith(field)), "")
