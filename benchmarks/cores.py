"""The cores of a shared machine: kept awake while a benchmark runs, and watched.

A host takes an idle virtual core away, and half of a busy one when it likes: for seconds a core is
on the disturbed level of ``llmpq.profiler.levels``, unseen by ``top``. So one process of the idle
class spins on every core; it yields to any work at once. What it spins is the reference loop, whose
processor time tells the level: also under work, for the idle class gets some 0.3 % of a busy core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median

from llmpq.profiler.reference import DISTURBED, reference_s

RECORD_S = 0.05
"""Between two records of a core that has nothing else to do."""
WARM_S = 3.0
"""Until the host has found a busy core its place."""


class CoreWatch:
    """What the watchers wrote down.

    Attributes:
        cores: that are watched.
    """

    def __init__(self, folder: Path, cores: Sequence[int]) -> None:
        self._folder = folder
        self.cores = tuple(cores)

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


@contextmanager
def awake_cores() -> Iterator[CoreWatch]:
    """Keep all cores of this process awake and watched, once they had time to warm up."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        watchers = [
            subprocess.Popen([sys.executable, __file__, str(core), folder]) for core in cores
        ]
        try:
            time.sleep(WARM_S)
            yield CoreWatch(Path(folder), cores)
        finally:
            for one in watchers:
                one.kill()
                one.wait()


def main(core: int, folder: Path, parent: int) -> None:
    """Spin the reference loop on a core, and write down how long it takes."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    told_s = 0.0
    with (folder / str(core)).open("w", buffering=1) as record:
        loops: list[float] = []
        while os.getppid() == parent:
            loops.append(reference_s())
            if time.monotonic() - told_s > RECORD_S:
                record.write(f"{time.time():.3f} {median(loops):.7f}\n")
                told_s, loops = time.monotonic(), []


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), os.getppid())
