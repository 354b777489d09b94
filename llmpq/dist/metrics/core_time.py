"""The share of a thread's CPU time that other programs took. Needs no torch.

Linux counts for every thread how long it ran and how long it was ready to run while another thread
had the core (``/proc/PID/task/TID/schedstat``), and for every core what the hypervisor gave to
other machines (``steal`` in ``/proc/stat``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.05
"""Share of a thread's time taken by others from which seconds are not comparable."""
PROVENANCE_KEY = "cpu_taken"
_TASKS = Path("/proc/self/task")
_STAT = Path("/proc/stat")
_STEAL = 7
"""Column of ``/proc/stat`` after the name of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTime:
    """Seconds of a thread since it started.

    Attributes:
        ran_s: it ran.
        taken_s: it was ready to run, and another program or another machine had its core.
    """

    ran_s: float
    taken_s: float


def core_time(thread: int, tasks: Path = _TASKS, stat: Path = _STAT) -> CoreTime | None:
    """Return the times of a thread of this process, ``None`` where the kernel has none."""
    try:
        ran, taken, _ = (tasks / str(thread) / "schedstat").read_text(encoding="ascii").split()
        stolen_s = _stolen_s(stat, os.sched_getaffinity(thread))
    except (OSError, ValueError, AttributeError):
        return None
    return CoreTime(ran_s=int(ran) / 1e9, taken_s=int(taken) / 1e9 + stolen_s)


def _stolen_s(stat: Path, cores: set[int]) -> float:
    """Return the seconds that the hypervisor took, in the mean over the cores."""
    names = {f"cpu{core}" for core in cores}
    rows = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
    ticks = sum(int(row[1 + _STEAL]) for row in rows if row and row[0] in names)
    return ticks / os.sysconf("SC_CLK_TCK") / len(cores)


class TakenShare:
    """Measures, from its creation on, how much of the calling thread's time others take.

    Args:
        read: returns the times of a thread.
    """

    def __init__(self, read: Callable[[int], CoreTime | None] = core_time) -> None:
        self._read = read
        self._thread = threading.get_native_id()
        self._start = read(self._thread)

    def share(self) -> float | None:
        """Return the share so far of the time that the thread wanted, ``None`` if unknown."""
        end = self._read(self._thread)
        if self._start is None or end is None:
            return None
        ran_s, taken_s = end.ran_s - self._start.ran_s, end.taken_s - self._start.taken_s
        return taken_s / (ran_s + taken_s) if ran_s + taken_s > 0 else 0.0


def is_busy(share: float | None) -> bool:
    """Return whether others took so much that seconds are not comparable."""
    return share is not None and share >= BUSY_SHARE


def busy_text(shares: Mapping[str, float | None], when: str = "") -> str:
    """Return a message of what others took, by the name of a rank; a single one needs no name."""
    known = [f"{name} {share:.0%}".strip() for name, share in shares.items() if share is not None]
    return f"{f'CPU busy with other programs {when}'.strip()}: {', '.join(known) or 'unknown'}"


def provenance_line(share: float) -> tuple[str, str]:
    """Return the provenance line of a measured table."""
    return PROVENANCE_KEY, f"{share:.3f} of the timing thread's time, by other programs"


def share_in(provenance: Mapping[str, str]) -> float | None:
    """Return the share that a table's provenance states, ``None`` if it states none."""
    stated = provenance.get(PROVENANCE_KEY)
    return None if stated is None else float(stated.split()[0])
