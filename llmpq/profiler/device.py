"""What this machine is: its cores and vector extensions, as a cluster file would say it."""

from __future__ import annotations

import os
from pathlib import Path

from llmpq.spec.cluster import CPU_ISAS


def available_cores() -> tuple[int, ...]:
    """Return the numbers of the CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_isas() -> tuple[str, ...]:
    """Return the vector extensions of this CPU that a worker can be limited to, oldest first."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ()
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    needed = {"sse4": "sse4_1", "avx2": "avx2", "avx512": "avx512f"}
    return tuple(isa for isa in CPU_ISAS if needed[isa] in flags)


def cpu_name() -> str:
    """Return the processor's name for provenance."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine
