"""Stopping a run: signals ask the launcher, a file in its private folder asks the master.

The first SIGTERM or Ctrl-C drains: running requests are finished, the others stay unserved. The
second one ends everything at once. Needs no torch.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CHECK_INTERVAL_S = 0.02
"""How often the master looks for the file."""


def drain_file(folder: Path) -> Path:
    """Return the file whose existence asks the master to admit no new requests."""
    return folder / "drain"


class DrainFlag:
    """Returns whether the master should drain; looks at the file system now and then."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = drain_file(folder)
        self._clock = clock
        self._next_check_s = clock()
        self._is_set = False

    def __call__(self) -> bool:
        """Return whether the file was there at most ``CHECK_INTERVAL_S`` ago."""
        now_s = self._clock()
        if not self._is_set and now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_INTERVAL_S
            self._is_set = self._file.exists()
        return self._is_set


class StopRequest:
    """Whether a run was asked to end, and by which ``source``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = ""
        self._clock = clock
        self._requested_s: float | None = None

    @property
    def is_requested(self) -> bool:
        """Whether the run was asked to end."""
        return self._requested_s is not None

    def request(self, source: str) -> None:
        """Ask the run to end; only the first time counts."""
        if self._requested_s is None:
            self.source = source
            self._requested_s = self._clock()

    def elapsed_s(self) -> float:
        """Return the time since the request, 0 without one."""
        return 0.0 if self._requested_s is None else self._clock() - self._requested_s

    @contextlib.contextmanager
    def from_signals(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C ask; the second one raises ``KeyboardInterrupt``.

        Later ones are ignored: ending the ranks and removing the private folder must not be
        interrupted.
        """

        def handle(number: int, _: FrameType | None) -> None:
            if not self.is_requested:
                self.request(signal.Signals(number).name)
                return
            for other in SIGNALS:
                signal.signal(other, signal.SIG_IGN)
            raise KeyboardInterrupt

        before = [(number, signal.signal(number, handle)) for number in SIGNALS]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
