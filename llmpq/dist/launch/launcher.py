"""Launcher: starts the ranks of a plan on this host, and ends all of them when one fails.

The processes get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK ...) and their own thread
count, vector extensions and cores. torchrun's agent would give all ranks one environment, load
torch into the launching process and listen on every address of the host. Ranks that torchrun
starts (``llmpq-dist --no_auto``) run the same code.

Needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import llmpq
from llmpq.dist.io.job import START_TIMEOUT_S, Job, write_job
from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.dist.launch.signals import SIGNALS
from llmpq.dist.metrics.measurement import Measurement
from llmpq.dist.metrics.progress import Event
from llmpq.dist.transport.errors import (
    PeerLostError,
    error_from_status,
    peer_silent,
    stage_name,
)
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.spec.catalog import device as device_spec
from llmpq.spec.codec import from_json, to_json
from llmpq.spec.fields import Fields, dump_json, read_json, write_text
from llmpq.spec.plan import Plan

POLL_S = 0.05
GRACE_S = 1.0
"""How long the other ranks may take to write their errors, after one failed."""


class RunMonitor(Protocol):
    """Callbacks of :func:`launch` while the ranks work."""

    def on_event(self, event: Event) -> None:
        """Handle an event of a rank."""
        ...

    def check(self) -> None:
        """Called many times a second; an exception ends the run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """The error of a rank, as a file in the run's private folder.

    Attributes:
        rank: that failed.
        message: for the user.
        exit_status: of its kind of error.
        time_s: on this host's monotonic clock.
        lost_rank: the peer that it lost, if that is the whole error.
        is_permanent: whether another start would fail in the same way.
    """

    rank: int
    message: str
    exit_status: int
    time_s: float
    lost_rank: int | None = None
    is_permanent: bool = False


def write_error_record(folder: Path, record: ErrorRecord) -> None:
    """Write the error of a rank for the launcher."""
    write_text(_error_file(folder, record.rank), dump_json(to_json(record)))


def read_error_record(folder: Path, rank: int) -> ErrorRecord | None:
    """Return the error of a rank, ``None`` if it wrote none."""
    path = _error_file(folder, rank)
    if not path.is_file():
        return None
    return from_json(ErrorRecord, Fields(read_json(path), str(path)))


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def measurement_file(folder: Path) -> Path:
    """Return the file of the master's measurement."""
    return folder / "measurement.json"


def ranks_of_node(plan: Plan, node_rank: int, num_nodes: int) -> list[int]:
    """Return the ranks that run on one host.

    Args:
        plan: its stages name devices, and those their nodes.
        node_rank: number of the host, in the order of the pipeline; 0 is the master's.
        num_nodes: number of hosts; with 1, all ranks run on this host.

    Raises:
        SpecError: the plan has another number of nodes.
    """
    if num_nodes == 1:
        return list(range(len(plan.stages)))
    nodes = list(dict.fromkeys(plan.device_of(stage).node for stage in plan.stages))
    if num_nodes != len(nodes) or not 0 <= node_rank < num_nodes:
        raise SpecError(
            f"nnodes, node_rank: found {num_nodes} and {node_rank}, expected 1, or the "
            f"{len(nodes)} nodes of the plan ({', '.join(nodes)})"
        )
    return [stage.rank for stage in plan.stages if plan.device_of(stage).node == nodes[node_rank]]


def rank_environment(plan: Plan, rank: int, local_ranks: Sequence[int]) -> dict[str, str]:
    """Return the variables of one rank: torchrun's and those of the numeric libraries."""
    device = plan.device_of(plan.stages[rank])
    own = bool(_cores(plan, rank, local_ranks))
    threads = _threads(plan, rank, local_ranks)
    return cpu_environment(threads, device.cpu_isa, has_own_cores=own) | {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(plan.stages)),
        "LOCAL_RANK": str(list(local_ranks).index(rank)),
        "LOCAL_WORLD_SIZE": str(len(local_ranks)),
        # A model directory is complete; nothing is downloaded.
        "HF_HUB_OFFLINE": "1",
    }


def launch(
    job: Job, plan: Plan, ranks: Sequence[int], folder: Path, monitor: RunMonitor
) -> Measurement | None:
    """Run these ranks until they end.

    Args:
        job: what to run.
        plan: of the job.
        ranks: of this host.
        folder: private to this user and this run.
        monitor: receives the events of the ranks, and may end the run.

    Returns:
        The master's measurement, ``None`` if it runs on another host.

    Raises:
        LlmpqError: the error of the rank that failed first, or a ``StageError`` that names a rank
            that was killed or hangs. All ranks have ended when the call returns.
    """
    write_job(folder / "job.json", job)
    (folder / "job.json").chmod(0o600)
    reader, writer = os.pipe()
    workers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in ranks:
            workers[rank] = _start(job, plan, rank, ranks, folder, writer)
        os.close(writer)
        writer = -1
        followed = _WorkerMonitor(workers, reader, job.step_timeout_s + GRACE_S)
        silent = followed.run(monitor)
        if silent is not None:
            name = stage_name(plan, silent, os.uname().nodename)
            if not followed.has_started(silent):
                raise PeerLostError(
                    f"{name}: did not start within {START_TIMEOUT_S:g} s, expected its libraries "
                    "to be loaded by then; the machine may be short of memory or busy",
                    silent,
                )
            raise peer_silent(name, silent, job.step_timeout_s)
        if any(worker.poll() for worker in workers.values()):
            _wait_for_errors(workers, folder)
            raise _cause(plan, workers, folder)
    finally:
        for worker in workers.values():
            worker.kill()
        for worker in workers.values():
            worker.wait()
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    if 0 not in ranks:
        return None
    path = measurement_file(folder)
    return from_json(Measurement, Fields(read_json(path), str(path)))


def _start(
    job: Job, plan: Plan, rank: int, ranks: Sequence[int], folder: Path, events: int
) -> subprocess.Popen[bytes]:
    environment = _inherited(os.environ) | rank_environment(plan, rank, ranks)
    if job.rendezvous.file is not None:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-P", "-m", "llmpq.dist.launch.worker"]
    log_file = _log_file(folder, rank)
    log_file.touch(mode=0o600)
    with log_file.open("wb") as log, _signals_blocked():
        worker = subprocess.Popen(
            [*command, str(folder / "job.json"), str(rank), str(events)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(events,),
        )
    cores = _cores(plan, rank, ranks) if job.pins_workers else set()
    if cores:
        with contextlib.suppress(ProcessLookupError):  # its end is noticed elsewhere
            os.sched_setaffinity(worker.pid, cores)
    return worker


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM in processes that are started here: only the launcher ends ranks.

    Terminals and service managers send them to every process of a group. The blocked mask is
    inherited; afterwards the launcher's own is restored and pending signals arrive.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with this package first on the path."""
    package_parent = str(Path(llmpq.__file__).resolve().parents[1])
    paths = [package_parent, *environ.get("PYTHONPATH", "").split(os.pathsep)]
    return dict(environ) | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _threads(plan: Plan, rank: int, local_ranks: Sequence[int]) -> int:
    """Return the threads of a worker: the cluster file's, else an equal share of the cores."""
    given = plan.device_of(plan.stages[rank]).threads
    return given or max(1, len(os.sched_getaffinity(0)) // len(local_ranks))


def _cores(plan: Plan, rank: int, ranks: Sequence[int]) -> set[int]:
    """Return a CPU worker's own cores, none if there are not enough for all workers.

    The kernel then shares them: of three workers on two cores each gets two thirds of a core, while
    two pinned to one core get less than half and the other core is idle at times.
    """
    workers = [
        other
        for other in ranks
        if device_spec(plan.device_of(plan.stages[other]).type).kind == "cpu"
    ]
    threads = {other: _threads(plan, other, ranks) for other in workers}
    available = sorted(os.sched_getaffinity(0))
    if rank not in threads or sum(threads.values()) > len(available):
        return set()
    first = sum(threads[other] for other in workers[: workers.index(rank)])
    return set(available[first : first + threads[rank]])


class _WorkerMonitor:
    """Follows the workers of this host: their events, their ends, their silence."""

    def __init__(
        self, workers: Mapping[int, subprocess.Popen[bytes]], reader: int, timeout_s: float
    ) -> None:
        self._workers = workers
        self._reader = reader
        self._timeout_s = timeout_s
        self._silent_s = dict.fromkeys(workers, 0.0)
        self._allowed_s = dict.fromkeys(workers, START_TIMEOUT_S)
        self._started: set[int] = set()
        self._rest = b""

    def has_started(self, rank: int) -> bool:
        """Return whether a rank sent an event, so that its libraries are loaded."""
        return rank in self._started

    def run(self, monitor: RunMonitor) -> int | None:
        """Pass events on until all ranks have ended, or one failed or hangs.

        Returns:
            The rank that was silent for too long, ``None`` if there is none.
        """
        os.set_blocking(self._reader, False)
        last = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while True:
                codes = [worker.poll() for worker in self._workers.values()]
                self._pass_on(selector.select(POLL_S) != [], monitor)
                if any(codes) or all(code == 0 for code in codes):
                    return None
                now = time.monotonic()
                # A long step of this loop means that this process was stopped, not the workers.
                silent = self._find_silent(min(now - last, 1.0))
                if silent is not None:
                    return silent
                last = now
                monitor.check()

    def _pass_on(self, is_readable: bool, monitor: RunMonitor) -> None:
        data = os.read(self._reader, 65536) if is_readable else b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = Event.decode(line)
            self._started.add(event.rank)
            self._silent_s[event.rank] = 0.0
            self._allowed_s[event.rank] = self._timeout_s
            monitor.on_event(event)

    def _find_silent(self, elapsed_s: float) -> int | None:
        for rank, worker in self._workers.items():
            self._silent_s[rank] += elapsed_s
            if self._silent_s[rank] > self._allowed_s[rank] and worker.poll() is None:
                return rank
        return None


def _wait_for_errors(workers: Mapping[int, subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until the rank that caused the failure has ended, not only those that lost a peer."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        if any((worker.poll() or 0) < 0 for worker in workers.values()):
            return
        if any(one.lost_rank is None for one in _error_records(workers, folder)):
            return
        if all(worker.poll() is not None for worker in workers.values()):
            return
        time.sleep(POLL_S)


def _cause(plan: Plan, workers: Mapping[int, subprocess.Popen[bytes]], folder: Path) -> LlmpqError:
    """Return the first error, from which the others follow."""
    host = os.uname().nodename
    for rank, worker in workers.items():
        if (code := worker.poll() or 0) < 0:
            name = signal.Signals(-code).name
            hint = ", perhaps because memory ran out" if name == "SIGKILL" else ""
            return StageError(
                f"{stage_name(plan, rank, os.uname().nodename)}: was ended by {name}{hint}"
            )
    records = sorted(
        _error_records(workers, folder), key=lambda one: (one.lost_rank is not None, one.time_s)
    )
    if records:
        first = records[0]
        return error_from_status(first.exit_status, first.message, is_permanent=first.is_permanent)
    rank = next(rank for rank, worker in workers.items() if worker.poll())
    log = _log_file(folder, rank).read_text(encoding="utf-8", errors="replace").strip()
    status = workers[rank].poll()
    return StageError(f"{stage_name(plan, rank, host)}: exited with status {status}: {log[-1000:]}")


def _error_records(workers: Mapping[int, object], folder: Path) -> list[ErrorRecord]:
    found = (read_error_record(folder, rank) for rank in workers)
    return [one for one in found if one is not None]


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"
