"""Health file: the state of a run, for monitoring.

``{"state", "is_healthy", "restarts", "tokens", "expected_tokens", "cause", "pid", "time"}``. The
file is replaced as a whole at every change and once a second: an old ``time`` means that the
launcher hangs or was killed. Needs no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from llmpq.spec.fields import dump_json, write_text

State = Literal["starting", "serving", "draining", "restarting", "done", "stopped", "failed"]
HEARTBEAT_S = 1.0
"""How often the file is written while nothing changes."""


class Health:
    """The state of a run.

    Args:
        path: of the health file; ``None`` for none.
        clock: seconds since the epoch.

    Attributes:
        state: requests make progress while ``serving``; while ``draining``, running ones do.
        restarts: number of restarts of all ranks.
        tokens: generated since the last start.
        expected: tokens of all requests.
        cause: the last error that ended the ranks, empty before the first.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.state: State = "starting"
        self.restarts = 0
        self.tokens = 0
        self.expected = 0
        self.cause = ""
        self._path = path
        self._clock = clock
        self._written_s = 0.0

    def set_state(self, state: State) -> None:
        """Change the state and write the file."""
        if state != self.state or not self._written_s:
            self.state = state
            self._write()

    def heartbeat(self) -> None:
        """Write the file if it is older than ``HEARTBEAT_S``."""
        if self._clock() - self._written_s >= HEARTBEAT_S:
            self._write()

    def _write(self) -> None:
        self._written_s = self._clock()
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
            "time": self._written_s,
        }
        write_text(self._path, dump_json(fields))
