"""Work on what clients send, in child processes with limits of processor time and memory.

A job above a limit ends its child process and nothing else. The limit of time counts the time of
the processor, so that it does not depend on what else the machine does. Needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.dist.launch.signals import ending_with_this_process
from llmpq.errors import SpecError, StageError
from llmpq.units import format_bytes

if sys.platform != "win32":
    import resource

MEMORY = "memory"
NICENESS = 5
"""Of the children: the ranks, which serve other clients, have three times their share of a core."""
SILENCE_S = 600.0
"""A child that gives no answer for so long, whatever its processor time, is ended."""
_ENVIRONMENT = {
    # One thread: its time is that of the job, and no thread reserves address space of its own.
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
}

Handle = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """What one job of a child process may take.

    Attributes:
        cpu_s: processor time, in seconds; the kernel counts whole ones.
        memory_bytes: memory besides that of the child at its start.
    """

    cpu_s: float
    memory_bytes: int = 512 << 20


class JobLimitError(SpecError):
    """A job took more than its limit; the message is the limit."""


@dataclass(slots=True)
class _Job:
    """A job, the child that does it, and whether its caller has gone away."""

    line: bytes
    child: subprocess.Popen[bytes] | None = None
    is_abandoned: bool = False


class LimitedProcesses:
    """Child processes that do jobs, started when they are needed and again after each that ended.

    Args:
        module: whose ``main`` calls :func:`serve_jobs`.
        setup: JSON value for the module's ``load``.
        limits: of each job.
        count: most jobs at once; the others wait.
    """

    def __init__(self, module: str, setup: object, limits: JobLimits, *, count: int = 2) -> None:
        self.limits = limits
        self._setup = _line(setup)
        self._words = [
            sys.executable, "-P", "-m", module, str(limits.cpu_s), str(limits.memory_bytes),
        ]  # fmt: skip
        # A child ends with the thread that starts it, and these threads live as long as the pool.
        self._threads = ThreadPoolExecutor(count, "llmpq jobs")
        self._idle: deque[subprocess.Popen[bytes]] = deque()
        self._lock = threading.Lock()  # of the children of jobs
        self._is_closed = False

    async def run(self, job: object) -> Any:
        """Return the result of a job; a caller that is cancelled ends its child.

        Raises:
            JobLimitError: the job took more than a limit.
            StageError: the child failed, or did not start.
        """
        current = _Job(_line(job))
        future = self._threads.submit(self._run, current)
        try:
            async with asyncio.timeout(SILENCE_S):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise JobLimitError(f"more than {SILENCE_S:g} s") from None
        finally:
            with self._lock:
                current.is_abandoned = True
                if current.child is not None:
                    current.child.kill()

    def warm(self) -> None:
        """Start a child, so that the first job does not wait for it."""
        self._threads.submit(lambda: self._keep(self._start()))

    def close(self) -> None:
        """End the children that are idle, and the others after their job; no job follows."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while (child := self._take_idle()) is not None:
            _end(child)

    def _run(self, job: _Job) -> Any:
        child = self._take_idle() or self._start()
        with self._lock:
            job.child = child
            if job.is_abandoned:
                child.kill()
        answer = _ask(child, job.line)
        with self._lock:
            job.child = None
            is_done = answer is not None and not job.is_abandoned
        if answer is None:
            raise self._error_of(_end(child))
        if not is_done:
            _end(child)
            raise StageError("a job was abandoned")
        self._keep(child)
        found = json.loads(answer)
        if found["limit"] is not None:
            raise JobLimitError(self._memory_limit())
        if found["error"] is not None:
            raise StageError(f"a child process failed: {found['error']}")
        return found["value"]

    def _keep(self, child: subprocess.Popen[bytes]) -> None:
        self._idle.append(child)
        if self._is_closed:
            self.close()

    def _take_idle(self) -> subprocess.Popen[bytes] | None:
        try:
            return self._idle.pop()  # by several threads
        except IndexError:
            return None

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            ending_with_this_process(self._words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a library may write parts of the job
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # Ctrl-C is for the server
        )
        _yield_to_ranks(child.pid)
        if _ask(child, self._setup) is None:
            raise StageError(f"a child process did not start: status {_end(child)}")
        return child

    def _error_of(self, status: int) -> Exception:
        if status == -signal.SIGXCPU:
            return JobLimitError(f"more than {self.limits.cpu_s:g} s of processor time")
        if status == -signal.SIGABRT:  # what libraries do without memory
            return JobLimitError(self._memory_limit())
        return StageError(f"a child process ended with status {status}")

    def _memory_limit(self) -> str:
        return f"more than {format_bytes(self.limits.memory_bytes)} of memory"


def _yield_to_ranks(pid: int) -> None:
    """Lower the priority of a child from its start, so that its imports are included."""
    with contextlib.suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    with contextlib.suppress(OSError):  # where sessions have equal shares, whatever their processes
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS), encoding="ascii")


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _ask(child: subprocess.Popen[bytes], line: bytes) -> bytes | None:
    """Return the answer of a child, ``None`` if it has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
        answer = child.stdout.readline()
    except (OSError, ValueError):
        return None
    return answer if answer.endswith(b"\n") else None


def _end(child: subprocess.Popen[bytes]) -> int:
    """End a child, and return its status: its own where it has ended by itself."""
    child.kill()
    status = child.wait()
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):  # what was not written is lost with the child
            stream.close()
    return status


def serve_jobs(load: Callable[[Any], Handle]) -> None:
    """Do the jobs of standard input, one a line, and write each result to standard output.

    The limits are the arguments of the program.

    Args:
        load: takes the setup and returns the function that does a job; without limits.
    """
    cpu_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    source, target = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handle = load(json.loads(source.readline()))
    target.write(_line({}))
    target.flush()
    _limit_memory(memory_bytes)
    for line in source:
        target.write(_line(_answer(handle, line, cpu_s)))
        target.flush()


def _answer(handle: Handle, line: bytes, cpu_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"value": None, "limit": None, "error": None}
    end_s = math.ceil(time.process_time() + cpu_s)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (end_s, hard))
    try:
        found["value"] = handle(json.loads(line))
    except MemoryError:
        found["limit"] = MEMORY
    except BaseException as error:  # a panic of a library in Rust is no Exception
        found["error"] = type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    return found


def _limit_memory(size: int) -> None:
    """Let this process take ``size`` bytes more; only Linux tells how many it has."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    limit = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
