"""The cores and vector extensions of this machine, in the terms of a cluster file."""

from __future__ import annotations

import os
from pathlib import Path

from llmpq.spec.cluster import CPU_ISAS

CGROUPS = Path("/sys/fs/cgroup")
INSTRUCTION_SETS = {
    "amx": ("amx_tile", "amx_int8", "amx_bf16", "avx512_bf16", "avx512_vnni"),
    "avx512_bf16": ("avx512_bf16", "avx512_vnni"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx2_vnni": ("avx_vnni", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "baseline": (),
}
"""Flags of the processor that a set of kernels needs, by its name in ``llmpq.kernels.cpu.native``;
the newest first."""
_NEWEST = {"avx512": "avx512", "avx2": "avx2", "sse4": "baseline"}
"""Instruction set of a worker that is limited to a vector extension."""


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


def instruction_set(cpu_isa: str | None = None, cpuinfo: str | None = None) -> str:
    """Return the key of ``INSTRUCTION_SETS`` that a worker of this host computes with.

    Args:
        cpu_isa: that limits it (``spec.cluster.CPU_ISAS``), ``None`` for all that there is.
        cpuinfo: text of ``/proc/cpuinfo``, by default this host's.
    """
    flags = set(_cpuinfo("flags", cpuinfo).split())
    names = list(INSTRUCTION_SETS)
    allowed = names[names.index(_NEWEST[cpu_isa]) if cpu_isa else 0 :]
    return next(name for name in allowed if flags.issuperset(INSTRUCTION_SETS[name]))


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


def _cpuinfo(field: str, text: str | None = None) -> str:
    """Return a field of the first processor, empty where it is not stated."""
    file = Path("/proc/cpuinfo")
    if text is None:
        text = file.read_text() if file.exists() else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in pairs if name.strip() == field), "")
