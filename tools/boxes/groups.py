"""Control groups: one for each boxed device, with its processes and its limit of memory.

Version 1 (a hierarchy a controller) and version 2 (one hierarchy) are driven alike. The groups of a
run are removed with everything in them when the run ends; a small process of its own does so even
when the run is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "llmpq-box"
_EMPTY_S = 2.0
"""How long killed processes may take to leave their group."""


class Group:
    """A control group with a limit of memory; made at once.

    Args:
        name: of the directory, unique on this host.

    Raises:
        OSError: no control groups here, or no right to make one.
    """

    def __init__(self, name: str) -> None:
        self.is_v2 = (ROOT / "cgroup.controllers").exists()
        self._folder = (ROOT if self.is_v2 else ROOT / "memory") / name
        self._folder.mkdir()

    def limit_memory(self, size: int) -> None:
        """Have the kernel end a process when the group holds more."""
        name = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        (self._folder / name).write_text(str(size))

    def take(self, pid: int) -> None:
        """Move a process into the group."""
        with contextlib.suppress(ProcessLookupError):
            (self._folder / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        """Return the processes in it."""
        with contextlib.suppress(OSError):
            return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]
        return []

    @property
    def killed_for_memory(self) -> int:
        """Processes that the kernel ended because the group was full."""
        name = "memory.events" if self.is_v2 else "memory.oom_control"
        lines = (self._folder / name).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def remove(self) -> None:
        """End whatever is in the group, and the group."""
        _remove(self._folder)


@contextlib.contextmanager
def groups(count: int) -> Iterator[list[Group]]:
    """Make groups that do not outlive the context, nor this process if it is killed in it."""
    prefix = f"{PREFIX}-{os.getpid()}-"
    reader, writer = os.pipe()
    janitor = os.fork()
    if janitor == 0:
        os.setsid()
        os.close(writer)
        os.read(reader, 1)
        remove_all(prefix)
        os._exit(0)
    os.close(reader)
    found: list[Group] = []
    try:
        found += [Group(f"{prefix}{number}") for number in range(count)]
        yield found
    finally:
        for group in found:
            group.remove()
        os.close(writer)
        os.waitpid(janitor, 0)


def remove_all(prefix: str = PREFIX) -> list[str]:
    """Remove every group of that name, with what is in it; return their names."""
    found = [
        folder for root in (ROOT, ROOT / "cpu", ROOT / "memory") for folder in _of(root, prefix)
    ]
    for folder in found:
        _remove(folder)
    return sorted({folder.name for folder in found})


def _of(root: Path, prefix: str) -> list[Path]:
    return [folder for folder in root.glob(f"{prefix}*") if folder.is_dir()]


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _EMPTY_S
    while folder.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            folder.rmdir()
            return
        time.sleep(0.01)
