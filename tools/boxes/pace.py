"""Slower devices: processes that may compute in a part of every four milliseconds only.

A quota of the kernel limits an average: a worker that waits for its neighbours half of the time
computes at full speed in the other half, so a stage of a pipeline is not slowed at all. A slower
device is slow whenever it computes. So a pacer stops and continues the processes of a group, at
real-time priority, and those that share a core in turn: measured in ``docs/tutorials/one-host.md``.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

PERIOD_S = 0.004
REFRESH_S = 0.05
"""How often a group is asked for its processes."""
_PRIORITY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When a group computes: from ``begin`` to ``end``, as shares of every period.

    Attributes:
        begin, end: in [0, 1].
        pids: tells the processes of the group.
    """

    begin: float
    end: float
    pids: Callable[[], list[int]]


@contextlib.contextmanager
def paced(paces: Sequence[Pace]) -> Iterator[None]:
    """Hold groups to their pace while the context is open."""
    if not paces:
        yield
        return
    pacer = _fork(lambda: keep_pace(paces))
    try:
        yield
    finally:
        os.kill(pacer, signal.SIGKILL)
        os.waitpid(pacer, 0)
        for pace in paces:
            _send(pace.pids(), signal.SIGCONT)


def _fork(work: Callable[[], None]) -> int:
    """Do some work in a process of its own, which ends with this one; return its number."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # the janitor of the groups does the rest
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        work()
        os._exit(1)
    return pid


def keep_pace(paces: Sequence[Pace]) -> None:
    """Stop and continue for ever."""
    with contextlib.suppress(OSError):  # without the right to it, it is less exact
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    start = time.monotonic()
    events = [
        (start + share * PERIOD_S, number, sign)
        for number, pace in enumerate(paces)
        for share, sign in ((pace.begin, signal.SIGCONT), (pace.end, signal.SIGSTOP))
    ]
    heapq.heapify(events)
    known: list[list[int]] = [[] for _ in paces]
    refresh = start
    while True:
        due, number, sign = heapq.heappop(events)
        now = time.monotonic()
        if now >= refresh:
            known, refresh = [pace.pids() for pace in paces], now + REFRESH_S
        if due > now:
            time.sleep(due - now)
        _send(known[number], sign)
        # After a pause of our own, periods are left out rather than hurried through.
        late = max(0, int((time.monotonic() - due) / PERIOD_S))
        heapq.heappush(events, (due + (1 + late) * PERIOD_S, number, sign))


def _send(pids: list[int], sign: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)
