"""The ranks of a run as processes: who they are, what they listen on, and things done to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from helpers.clocks import PATIENCE_S

from llmpq.dist.metrics.progress import Event


class At:
    """Does something once, when the run is at its ``tokens``-th token."""

    def __init__(self, tokens: int, action: Callable[[], None]) -> None:
        self.tokens = tokens
        self.action = action
        self.time_s = 0.0

    def report(self, event: Event) -> None:
        if event.kind == "tokens" and event.done >= self.tokens and not self.time_s:
            self.action()
            self.time_s = time.monotonic()

    def next(self, action: Callable[[], None]) -> None:
        """Do something else at that token of the next batch."""
        self.action, self.time_s = action, 0.0


def workers_of(parent: int) -> dict[int, int]:
    """Process ids of a launcher's workers, by rank."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            is_child = f"\nPPid:\t{parent}\n" in status.read_text()
            words = status.with_name("cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if is_child and b"llmpq.dist.launch.worker" in words:
            found[int(words[-3])] = int(status.parent.name)
    return found


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def listening_addresses(pids: list[int]) -> set[str]:
    """Local addresses, in hex, of the listening TCP sockets of processes."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = str(link.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.add(columns[1].split(":")[0])
    return found


def wait_for(look, is_good, limit_s: float = PATIENCE_S):
    end = time.monotonic() + limit_s
    while not is_good(found := look()):
        assert time.monotonic() < end, f"still {found}"
        time.sleep(0.02)
    return found
