"""The cores of a shared machine: kept awake while a benchmark runs, and watched.

A host takes an idle virtual core away, and half of a busy one when it likes: for seconds a core is
on the disturbed level of ``llmpq.profiler.levels``, unseen by ``top``. So a process of the idle
class spins on every core, which yields to any work at once; and another one looks 40 times a second
how long the reference loop takes there, for 0.8 % of a calm core.

Workers that outnumber the cores are not pinned, and a core that spins never looks for work that
waits at another. So for their runs the spinning ones rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

from llmpq.profiler.reference import DISTURBED, reference_s

LOOK_S = 0.025
WARM_S = 3.0
"""Until the host has found a busy core its place."""


class CoreWatch:
    """What the watchers wrote down.

    Attributes:
        cores: that are watched.
    """

    def __init__(
        self, folder: Path, cores: Sequence[int], spinners: Sequence[subprocess.Popen[bytes]]
    ) -> None:
        self._folder = folder
        self._spinners = tuple(spinners)
        self.cores = tuple(cores)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Let cores fall idle where there is no work, for as long as this context lasts."""
        for one in self._spinners:
            one.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for one in self._spinners:
                one.send_signal(signal.SIGCONT)
            time.sleep(WARM_S)

    def loops_s(self, begin_s: float, end_s: float, cores: Sequence[int]) -> list[list[float]]:
        """Return the loop's seconds of each core in a span of ``time.time()``."""
        return [
            [loop_s for at_s, loop_s in self._records(core) if begin_s <= at_s <= end_s]
            for core in cores
        ]

    def calm_s(self) -> float:
        """Return the loop's time on the calm level, as far as it was seen."""
        loops = sorted(loop_s for core in self.cores for _, loop_s in self._records(core))
        return loops[len(loops) // 20]

    def _records(self, core: int) -> list[tuple[float, float]]:
        lines = (self._folder / str(core)).read_text().splitlines(keepends=True)
        whole = (line.split() for line in lines if line.endswith("\n"))
        return [(float(at_s), float(loop_s)) for at_s, loop_s in whole]


def disturbed_share(loops_s: Sequence[Sequence[float]], calm_s: float) -> float:
    """Return the share of the time that cores were disturbed, in the mean; ``nan`` if unknown.

    Args:
        loops_s: of each core, what ``CoreWatch.loops_s`` returns.
        calm_s: the loop's time on the calm level.
    """
    shares = [mean(one > DISTURBED * calm_s for one in own) for own in loops_s if own]
    return mean(shares) if shares else float("nan")


def state_shares(
    loops_s: Sequence[Sequence[float]], calm_s: float
) -> dict[tuple[bool, ...], float]:
    """Return in which share of the time which cores were disturbed together.

    Args:
        loops_s: of each core, what ``CoreWatch.loops_s`` returns: looks at about the same moments.
        calm_s: the loop's time on the calm level.
    """
    looks = min(map(len, loops_s))
    states = Counter(
        tuple(own[look * len(own) // looks] > DISTURBED * calm_s for own in loops_s)
        for look in range(looks)
    )
    return {state: count / looks for state, count in states.items()}


@contextmanager
def awake_cores() -> Iterator[CoreWatch]:
    """Keep all cores of this process awake and watched, once they had time to warm up."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:

        def started(what: str) -> list[subprocess.Popen[bytes]]:
            return [
                subprocess.Popen([sys.executable, __file__, what, str(core), folder])
                for core in cores
            ]

        spinners, watchers = started("spin"), started("watch")
        try:
            time.sleep(WARM_S)
            yield CoreWatch(Path(folder), cores, spinners)
        finally:
            for one in (*spinners, *watchers):
                one.kill()
                one.wait()


def spin(parent: int) -> None:
    """Keep this core awake, and be in nobody's way."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


def watch(parent: int, record: Path) -> None:
    """Look now and then how long the loop takes, and write it down."""
    with record.open("w", buffering=1) as lines:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
            lines.write(f"{time.time():.3f} {reference_s():.7f}\n")


def main(what: str, core: int, folder: Path) -> None:
    """Be a spinner or a watcher for as long as the parent lives."""
    parent = os.getppid()
    os.sched_setaffinity(0, {core})
    if what == "spin":
        spin(parent)
    else:
        watch(parent, folder / str(core))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
