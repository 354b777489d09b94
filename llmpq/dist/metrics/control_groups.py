"""Control groups of this process (Linux, versions 1 and 2): limits of containers and services."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from llmpq.units import KIB

T = TypeVar("T")

CGROUPS = Path("/sys/fs/cgroup")
PROCESSES = Path("/proc/self/cgroup")
"""File with the control groups of this process."""
_CACHE = ("inactive_file", "active_file")
"""Pages of files, which the kernel gives back when memory is needed, as in ``MemAvailable``."""


def group_values(controller: str, read: Callable[[Path], T | None], processes: Path) -> list[T]:
    """Return what ``read`` finds in the control groups of a process and in their parents.

    Args:
        controller: ``memory`` or ``cpu``.
        read: from the folder of a group; ``None`` for nothing.
        processes: file with the groups of the process, as :data:`PROCESSES`.
    """
    found = []
    for line in processes.read_text().splitlines() if processes.exists() else ():
        _, names, path = line.split(":", 2)
        if names == "" or controller in names.split(","):
            root = CGROUPS if names == "" else CGROUPS / names
            group = root / path.strip("/")
            found += [read(one) for one in (group, *group.parents) if one.is_relative_to(root)]
    return [value for value in found if value is not None]


def available_memory_bytes(meminfo: str | None = None, processes: Path = PROCESSES) -> int:
    """Return the memory that this process can still have, the page cache included.

    That is what is available on this host, or in a control group where that is less.

    Args:
        meminfo: text of ``/proc/meminfo``, by default this host's.
        processes: file with the control groups of this process.
    """
    if meminfo is None:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    lines = [line.split() for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    return min([KIB * int(lines[0][1]), *group_values("memory", _left_bytes, processes)])


def _left_bytes(group: Path) -> int | None:
    """Return the limit of a group less what it uses, ``None`` for no limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            most, now = ((group / name).read_text().strip() for name in (limit, used))
        except OSError:
            continue  # another version, or not visible from here
        return int(most) - int(now) + _cache_bytes(group) if most.isdigit() else None
    return None


def _cache_bytes(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = {name: int(value) for name, value in map(str.split, lines)}
    # Version 1 counts the groups below this one under ``total_``, as its usage does.
    return sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in _CACHE)
