"""Health: one small file that says how a run is, for whoever looks after it.

``{"state", "is_healthy", "restarts", "tokens", "expected_tokens", "cause", "pid", "time"}``. It is
replaced whole, at every change and once a second: a ``time`` that stands still means that the
launcher itself hangs or was killed. Needs no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from llmpq.spec.fields import dump_json, write_text

State = Literal["starting", "serving", "draining", "restarting", "done", "stopped", "failed"]
BEAT_S = 1.0
"""How often the file is renewed while nothing changes."""


class Health:
    """How a run is.

    Args:
        path: where to say it; ``None`` for nowhere.
        clock: seconds since the epoch.

    Attributes:
        state: ``serving`` is the only one in which requests make progress, ``draining`` those that
            have begun.
        restarts: how many times all ranks were started anew.
        tokens: made since the last start, of ``expected``.
        cause: what ended the ranks last, empty before anything did.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.state: State = "starting"
        self.restarts = 0
        self.tokens = 0
        self.expected = 0
        self.cause = ""
        self._path = path
        self._clock = clock
        self._told_s = 0.0

    def enter(self, state: State) -> None:
        """Change the state and say so at once."""
        if state != self.state or not self._told_s:
            self.state = state
            self._tell()

    def beat(self) -> None:
        """Say that nothing changed, when it is time to."""
        if self._clock() - self._told_s >= BEAT_S:
            self._tell()

    def _tell(self) -> None:
        self._told_s = self._clock()
        if self._path is None:
            return
        fields = {
            "state": self.state,
            "is_healthy": self.state in ("serving", "done"),
            "restarts": self.restarts,
            "tokens": self.tokens,
            "expected_tokens": self.expected,
            "cause": self.cause,
            "pid": os.getpid(),
            "time": self._told_s,
        }
        write_text(self._path, dump_json(fields))
