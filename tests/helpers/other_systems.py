"""Run ``llmpq`` as on a system that lacks what only Linux has.

    python other_systems.py SYSTEM [WORD ...]

``darwin`` and ``win32`` lack modules and functions of ``os``, ``signal`` and ``socket``; here they
are taken away before llmpq is imported, and ``sys.platform`` says so. Paths and consoles stay those
of this host.
"""

from __future__ import annotations

import asyncio  # noqa: F401  the standard library chooses by system when it is imported
import concurrent.futures.process  # noqa: F401
import ctypes.util
import importlib
import importlib.abc
import json  # noqa: F401
import logging.handlers  # noqa: F401
import multiprocessing.connection  # noqa: F401
import os
import platform  # noqa: F401
import shutil  # noqa: F401
import signal
import socket
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import time
import zoneinfo  # noqa: F401
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np  # noqa: F401

DARWIN_MODULES = ("spwd", "ossaudiodev")
WINDOWS_MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog",
                   "termios", "tty", *DARWIN_MODULES)  # fmt: skip
DARWIN_LACKS = {
    os: ("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fadvise", "O_DIRECT",
         "pidfd_open", "eventfd", "O_TMPFILE", "copy_file_range"),
    time: ("CLOCK_BOOTTIME",),
}  # fmt: skip
WINDOWS_LACKS = {
    os: (*DARWIN_LACKS[os], "getuid", "geteuid", "getgid", "getegid", "uname", "statvfs",
         "ST_NOEXEC", "fork", "killpg", "setsid", "getpgid", "sysconf", "O_DIRECTORY", "O_CLOEXEC",
         "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "mkfifo", "getloadavg", "set_blocking",
         "wait4", "pread", "pwrite", "posix_fallocate"),
    signal: ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGPIPE", "SIGALRM",
             "SIGCHLD", "setitimer", "alarm", "pthread_sigmask", "pause", "sigwait"),
    socket: ("AF_UNIX", "SCM_RIGHTS", "SO_PEERCRED"),
    time: ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC", "clock_gettime"),
}  # fmt: skip
LACKS = {"darwin": (DARWIN_MODULES, DARWIN_LACKS), "win32": (WINDOWS_MODULES, WINDOWS_LACKS)}


class Missing(importlib.abc.MetaPathFinder):
    """Finds no module of some names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: object) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"No module named {name!r} on this system", name=name)


def pretend(system: str) -> None:
    """Take away what the system lacks."""
    modules, lacks = LACKS[system]
    for name in modules:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Missing(modules))
    for module, names in lacks.items():
        for name in filter(partial(hasattr, module), names):
            delattr(module, name)
    hide_linux_files()
    if system == "win32":
        ctypes.windll = SimpleNamespace(
            kernel32=SimpleNamespace(GlobalMemoryStatusEx=memory_status)
        )
    sys.platform = system


def memory_status(reference) -> int:
    """Say as Windows does that there are 16 GiB, 12 of them free."""
    status = reference._obj
    assert status.length == ctypes.sizeof(status) == 64
    status.total, status.available = 16 << 30, 12 << 30
    return 1


def hide_linux_files() -> None:
    """Let no file of ``/proc`` and ``/sys`` exist."""
    inner_open, inner_exists, inner_is_file = Path.open, Path.exists, Path.is_file

    def is_hidden(path: Path) -> bool:
        return path.as_posix().startswith(("/proc/", "/sys/"))

    def opened(path: Path, *words, **options):
        if is_hidden(path):
            raise FileNotFoundError(2, "No such file", str(path))
        return inner_open(path, *words, **options)

    Path.open = opened
    Path.exists = lambda path, **options: not is_hidden(path) and inner_exists(path, **options)
    Path.is_file = lambda path, **options: not is_hidden(path) and inner_is_file(path, **options)


def main() -> None:
    _, system, *words = sys.argv
    pretend(system)
    sys.argv = ["llmpq", *words]
    sys.exit(importlib.import_module("llmpq.cli.front.program").main())


if __name__ == "__main__":
    main()
