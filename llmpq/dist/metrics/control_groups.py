"""Memory of this host, and limits of this process by its control groups (versions 1 and 2)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from llmpq.errors import SpecError
from llmpq.units import KIB

T = TypeVar("T")
MemoryName = Literal["MemTotal", "MemAvailable"]

CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
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
    whole = memory_of_host("MemAvailable", meminfo)
    return min([whole, *group_values("memory", _left_bytes, processes)])


def memory_of_host(name: MemoryName, meminfo: str | None = None) -> int:
    """Return a field of ``/proc/meminfo`` in bytes, on other systems what comes closest.

    Windows states both; macOS the memory alone, of which it can free nearly all.

    Args:
        name: of the field.
        meminfo: its text, by default this host's.
    """
    if meminfo is None and MEMINFO.exists():
        meminfo = MEMINFO.read_text(encoding="ascii")
    lines = [line.split() for line in (meminfo or "").splitlines() if line.startswith(f"{name}:")]
    if lines:
        return KIB * int(lines[0][1])
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _memory_of_windows(name)


class _MemoryStatus(ctypes.Structure):
    """``MEMORYSTATUSEX`` of Windows."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def _memory_of_windows(name: MemoryName) -> int:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    kernel = getattr(ctypes, "windll").kernel32  # noqa: B009  other systems have no such name
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise SpecError("memory of this host: Windows does not state it")
    return int(status.total if name == "MemTotal" else status.available)


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
