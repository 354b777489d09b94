"""Janitor: removes a run's private folder when the process that made it was killed.

Ranks end with their launcher, but a launcher that is killed cannot tidy up. So a small process, in
a session of its own, waits for the end of a pipe that only the launcher holds open; ended in any
way, the launcher lets go of it, and the folder is removed if it is still there.

``python -I -S janitor.py FOLDER``, standard input being the pipe. Needs the standard library only.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_S = 1.0
"""Ranks that die with the launcher may still be writing."""


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Have ``folder`` removed should this process be killed inside the context."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(folder)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as janitor:
        try:
            yield
        finally:
            janitor.kill()  # the one who made the folder removes it


def main(folder: Path) -> None:
    """Wait for the end of standard input, then remove the folder."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + GRACE_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(GRACE_S / 10)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
