"""Cleanup after a launcher that was killed.

A killed launcher cannot remove its private folder nor end its ranks, which ask the kernel to end
with it only once their libraries are loaded. So a small process, in a session of its own, waits for
the end of a pipe that only the launcher holds open. It then ends every process that was started
with a file of that folder, and removes the folder.

``python -I -S orphan_cleanup.py FOLDER``, with the pipe as standard input. Needs the standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_S = 1.0
"""Ranks that end with the launcher may still be writing."""


@contextlib.contextmanager
def clean_up_if_killed(folder: Path) -> Iterator[None]:
    """Remove ``folder`` and end its ranks if this process is killed inside the context."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(folder)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as cleaner:
        try:
            yield
        finally:
            cleaner.kill()  # the caller removes its folder


def main(folder: Path) -> None:
    """Wait for the end of standard input, then remove the folder."""
    sys.stdin.buffer.read()
    end_ranks(folder)
    deadline = time.monotonic() + GRACE_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(GRACE_S / 10)
    shutil.rmtree(folder, ignore_errors=True)


def end_ranks(folder: Path) -> None:
    """Kill the processes whose command names the folder's job."""
    job = str(folder / "job.json").encode()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if job in command.read_bytes().split(b"\0"):
                os.kill(int(command.parent.name), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
