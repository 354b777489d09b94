"""Run a program that the kernel ends with the process that started it.

The signal survives ``exec``, so that it holds from the first moment, also before the program has
loaded a library.

``python -I -S end_with_parent.py PARENT_PID PROGRAM ARGUMENT ...``. Needs the standard library
only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


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


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
