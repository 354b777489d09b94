"""Stopping: how a run is told to end, and how its master hears of it.

The first SIGTERM or Ctrl-C asks: requests that have begun are finished, the others go back
unserved. The second one ends everything now. Needs no torch.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOK_S = 0.02
"""How often the master looks for the sign to drain."""


def drain_file(folder: Path) -> Path:
    """Return the file whose existence tells the master to begin no further request."""
    return folder / "drain"


class DrainFlag:
    """Whether the sign to drain is there; asked at every step, it looks now and then.

    Args:
        folder: where the sign would be.
        clock: seconds from some moment on.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._sign = drain_file(folder)
        self._clock = clock
        self._look_s = clock()
        self._is_seen = False

    def __call__(self) -> bool:
        """Tell whether the sign was there at the last look, at most ``LOOK_S`` ago."""
        now_s = self._clock()
        if not self._is_seen and now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            self._is_seen = self._sign.exists()
        return self._is_seen


class StopRequest:
    """Whether the run was asked to end.

    Args:
        clock: seconds from some moment on.

    Attributes:
        by: what asked, for messages.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.by = ""
        self._clock = clock
        self._asked_s: float | None = None

    @property
    def is_asked(self) -> bool:
        """Whether anything asked."""
        return self._asked_s is not None

    def ask(self, by: str) -> None:
        """Ask; only the first time counts."""
        if self._asked_s is None:
            self.by = by
            self._asked_s = self._clock()

    def waiting_s(self) -> float:
        """Return how long ago it was asked, 0 when it was not."""
        return 0.0 if self._asked_s is None else self._clock() - self._asked_s

    @contextlib.contextmanager
    def from_signals(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C ask; the second raises ``KeyboardInterrupt``, later ones nothing.

        Whoever unwinds from the second ends the ranks and removes the private folder: that is not
        to be interrupted in turn.
        """

        def take(number: int, _: FrameType | None) -> None:
            if not self.is_asked:
                self.ask(signal.Signals(number).name)
                return
            for other in SIGNALS:
                signal.signal(other, signal.SIG_IGN)
            raise KeyboardInterrupt

        before = [(number, signal.signal(number, take)) for number in SIGNALS]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
