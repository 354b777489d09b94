"""Signals: those that ask a run to end, and the one that ends what a killed process started.

Signals ask the launcher, a file in its private folder asks the master. The first SIGTERM or Ctrl-C
drains: running requests are finished, the others stay unserved. The second one ends everything at
once.

The kernel ends a program with the process that started it. That holds from the first moment, also
before the program has loaded a library, because the setting survives ``exec``.

A killed launcher cannot remove its private folder nor end its ranks, which ask the kernel to end
with it only once their libraries are loaded. So a small process, in a session of its own, waits for
the end of a pipe that only the launcher holds open. It then ends every process that was started
with a file of that folder, and removes the folder.

``python -I -S signals.py PARENT_PID PROGRAM ARGUMENT ...`` runs a program until its parent ends;
``python -I -S signals.py FOLDER`` cleans up, with the pipe as standard input. Needs the standard
library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CHECK_INTERVAL_S = 0.02
"""How often the master looks for the file."""
PR_SET_PDEATHSIG = 1
_PF_EXITING = 4
"""Flag of a task of Linux that is ending (``include/linux/sched.h``)."""
GRACE_S = 1.0
"""Ranks that end with the launcher may still be writing."""


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


def ending_with_this_process(words: Sequence[str]) -> list[str]:
    """Return the command that runs ``words`` until this process ends, however that happens.

    The thread that starts the command must live as long as this process: the kernel sends the
    signal when that thread ends. Only Linux sends it.
    """
    if not sys.platform.startswith("linux"):
        return list(words)
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), *words]


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def is_ending(pid: int) -> bool:
    """Return whether a process has ended or is about to: its sockets close before it is gone.

    Only Linux says so; ``False`` elsewhere.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    state, *fields = text.rpartition(")")[2].split()  # the name before may have any character
    return state in "ZX" or bool(int(fields[5]) & _PF_EXITING)


@contextlib.contextmanager
def clean_up_if_killed(folder: Path, *others: Path) -> Iterator[None]:
    """Remove ``folder`` and ``others`` and end its ranks if this process is killed inside."""
    names = map(str, (folder, *others))
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), *names]
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


def clean_up(folders: Sequence[Path]) -> None:
    """Wait for the end of standard input, then end the first folder's ranks and remove all."""
    sys.stdin.buffer.read()
    end_ranks(folders[0])
    deadline = time.monotonic() + GRACE_S
    for folder in folders:
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
    if Path(sys.argv[1]).is_absolute():
        clean_up([Path(name) for name in sys.argv[1:]])
    else:
        end_with(int(sys.argv[1]))
        os.execvp(sys.argv[2], sys.argv[2:])
