"""Devices in boxes: which cores, how much of their time, and how much memory each may have."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from llmpq.errors import SpecError
from llmpq.spec.cluster import Device
from tools.boxes.groups import Group

_EPSILON = 1e-9
RANK_NAME = "llmpq-rank-"
"""What ``llmpq.dist.launch.worker`` calls its process, followed by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a boxed device gets of this host.

    Attributes:
        label: the device's.
        cores: its threads', by number.
        share: of those cores' time, in (0, 1].
        begin: where in every period its time begins, so that devices of one core take turns.
        memory_bytes: limit, ``None`` for none.
    """

    label: str
    cores: tuple[int, ...]
    share: float
    begin: float
    memory_bytes: int | None

    def __str__(self) -> str:
        """Say it as a person would."""
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / 1e6:.0f} MB"
        cores = ", ".join(map(str, self.cores))
        return f"{self.label}: {self.share:.0%} of core {cores}{memory}"


def spaces_of(devices: list[Device], cores: list[int]) -> list[Space]:
    """Give every device cores of this host, the most demanding first; cores may be shared.

    Raises:
        SpecError: a device that is no CPU, or more asked for than there is.
    """
    free = dict.fromkeys(cores, 1.0)
    given: dict[int, Space] = {}
    for number in sorted(range(len(devices)), key=lambda one: -(devices[one].cpu_share or 1.0)):
        device = devices[number]
        if device.type != "cpu":
            raise SpecError(f"{device.label}: found type '{device.type}', expected cpu in a box")
        share, threads = device.cpu_share or 1.0, device.threads or 1
        roomy = sorted(
            (core for core in cores if free[core] >= share - _EPSILON), key=lambda core: free[core]
        )
        if len(roomy) < threads:
            raise SpecError(
                f"{device.label}: found {threads} threads of {share:.0%} of a core, expected at "
                f"most what is left of {len(cores)} cores: "
                + ", ".join(f"{left:.0%}" for left in free.values())
            )
        begin = 1.0 - min(free[core] for core in roomy[:threads])
        for core in roomy[:threads]:
            free[core] = 1.0 - begin - share
        given[number] = Space(
            label=device.label,
            cores=tuple(roomy[:threads]),
            share=share,
            begin=begin,
            memory_bytes=device.memory_bytes,
        )
    return [given[number] for number in range(len(devices))]


class Box:
    """A group, and the processes that were put into it."""

    def __init__(self, space: Space, group: Group) -> None:
        self.space = space
        self.group = group
        self.has_been_used = False
        self._full: set[int] = set()  # processes that were ended for it
        if space.memory_bytes is not None:
            group.limit_memory(space.memory_bytes)

    def take(self, pid: int) -> None:
        """Put a process in; what it starts later comes along."""
        self.has_been_used = True
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(pid, self.space.cores)
            self.group.take(pid)

    def hold(self) -> None:
        """End a process whose resident memory has ever been more than the device's.

        The kernel's own limit leaves out pages of libraries, counted for the process that read them
        first and would give back before it kills; a device has them resident like everything else.
        The kernel's mark of the peak misses nothing between two looks.
        """
        limit = self.space.memory_bytes
        for pid in self.group.pids() if limit is not None else ():
            if peak_resident_bytes(pid) > (limit or 0):
                self._full.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @property
    def killed_for_memory(self) -> int:
        """Processes that were ended because the device was full."""
        return len(self._full) + self.group.killed_for_memory


def peak_resident_bytes(pid: int) -> int:
    """Return the most memory a process has had resident; 0 when it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def rank_of(pid: int) -> int | None:
    """Return the rank of a worker of ``llmpq-dist``, ``None`` of another process."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"llmpq.dist.launch.worker" in words:
            return int(words[words.index(b"llmpq.dist.launch.worker") + 2])
    return None


def has_begun(pid: int) -> bool:
    """Say whether a worker has read its libraries, and calls itself a rank."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith(RANK_NAME)
    return False


def children_of(parents: set[int]) -> list[int]:
    """Return the processes that these have started themselves.

    A kernel that keeps lists of children is asked for them: reading about every process of a host
    takes milliseconds, which are missing where all cores belong to devices.
    """
    lists = [file for pid in parents for file in Path(f"/proc/{pid}/task").glob("*/children")]
    if not lists and not Path("/proc/thread-self/children").exists():
        return _children_among_all(parents)
    found: list[int] = []
    for file in lists:
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def _children_among_all(parents: set[int]) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name, in brackets, may hold anything; state and parent follow it.
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) in parents:
                found.append(int(folder.name))
    return found
