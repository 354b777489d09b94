"""Launcher: starts the ranks of a plan on this host, and ends all of them when one fails.

The processes get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK ...) and their own thread
count, vector extensions and cores. Ranks that torchrun starts (``llmpq-dist --no_auto``) run the
same code. Needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from llmpq.dist.io.job import START_TIMEOUT_S, Job, write_job
from llmpq.dist.launch.process_environment import (
    cpu_environment,
    cuda_environment,
    pin,
    python_path,
)
from llmpq.dist.launch.signals import SIGNALS
from llmpq.dist.metrics.measurement import Measurement
from llmpq.dist.metrics.progress import Event, RunProgress
from llmpq.dist.transport.errors import (
    PeerLostError,
    error_from_status,
    peer_silent,
    stage_name,
)
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.logging import get_logger
from llmpq.spec.catalog import device as device_spec
from llmpq.spec.fields import Fields, dump_json, from_json, read_json, to_json, write_text
from llmpq.spec.plan import Plan

T = TypeVar("T")
_log = get_logger(__name__)
POLL_S = 0.05
GRACE_S = 1.0
"""How long the other ranks may take to write their errors, after one failed."""
_PROBE_BYTES = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """The error of a rank, as a file in the run's private folder.

    Attributes:
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
    write_text(folder / f"error-{record.rank}.json", dump_json(to_json(record)))


def read_error_record(folder: Path, rank: int) -> ErrorRecord | None:
    """Return the error of a rank, ``None`` if it wrote none."""
    path = folder / f"error-{rank}.json"
    return _read(ErrorRecord, path) if path.is_file() else None


def _read(kind: type[T], path: Path) -> T:
    return from_json(kind, Fields(read_json(path), str(path)))


def measurement_file(folder: Path) -> Path:
    """Return the file of the master's measurement."""
    return folder / "measurement.json"


def ranks_of_node(plan: Plan, node_rank: int, num_nodes: int) -> list[int]:
    """Return the ranks of host ``node_rank``, in the order of the pipeline; 0 is the master's.

    All ranks run on a single host; several hosts are the nodes of the plan.
    """
    hosts = [plan.cluster.devices[index].node for index in plan.rank_devices]
    if num_nodes == 1:
        return list(range(len(hosts)))
    nodes = plan.nodes
    if num_nodes != len(nodes) or not 0 <= node_rank < num_nodes:
        raise SpecError(
            f"nnodes, node_rank: found {num_nodes} and {node_rank}, expected 1, or the "
            f"{len(nodes)} nodes of the plan ({', '.join(nodes)})"
        )
    return [rank for rank, node in enumerate(hosts) if node == nodes[node_rank]]


def rank_environment(
    plan: Plan,
    rank: int,
    local_ranks: Sequence[int],
    cores: Sequence[int] = (),
    store: Path | None = None,
) -> dict[str, str]:
    """Return the variables of one rank: torchrun's and those of the numeric libraries.

    Args:
        plan: of the run.
        rank: one of ``local_ranks``.
        local_ranks: those of this host.
        cores: that they share; none: all of this process.
        store: of quantized layers; compiled GPU kernels are kept beside it.
    """
    device = plan.cluster.devices[plan.rank_devices[rank]]
    cores = cores or sorted(os.sched_getaffinity(0))
    own = bool(_cores(plan, rank, local_ranks, cores))
    threads = _threads(plan, rank, local_ranks, cores)
    kind = device_spec(device.type, plan.cluster).kind
    variables = cpu_environment(threads, device.cpu_isa, has_own_cores=own)
    if kind == "cuda":
        variables |= cuda_environment(store, os.environ)
    return variables | {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(plan.rank_devices)),
        "LOCAL_RANK": str(list(local_ranks).index(rank)),
        "LOCAL_WORLD_SIZE": str(len(local_ranks)),
        # A model directory is complete; nothing is downloaded.
        "HF_HUB_OFFLINE": "1",
    }


def launch(
    job: Job,
    plan: Plan,
    ranks: Sequence[int],
    folder: Path,
    progress: RunProgress,
    check: Callable[[], None],
) -> Measurement | None:
    """Run these ranks until they end.

    Args:
        job: what to run.
        plan: of the job.
        ranks: those of this host.
        folder: private to this user and this run.
        progress: receives the events of the ranks, except signs of life.
        check: called many times a second; an exception ends the run.

    Returns:
        The master's measurement, ``None`` if it runs on another host or measures nothing.

    Raises:
        LlmpqError: the error of the rank that failed first, or a ``StageError`` that names a rank
            that was killed or hangs. All ranks have ended when the call returns.
    """
    write_job(folder / "job.json", replace(job, launch_s=time.perf_counter()))
    (folder / "job.json").chmod(0o600)
    reader, writer = os.pipe()
    workers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in ranks:
            workers[rank] = _start(job, plan, rank, ranks, folder, writer)
        _WorkerMonitor(plan, workers, folder, reader, job.step_timeout_s).run(progress, check)
        if any(worker.poll() for worker in workers.values()):
            _wait_for_errors(workers, folder)
            raise _cause(plan, workers, folder)
    finally:
        for worker in workers.values():
            worker.kill()
        for worker in workers.values():
            worker.wait()
        os.close(reader)
        os.close(writer)
    path = measurement_file(folder)
    return _read(Measurement, path) if path.is_file() else None


def _start(
    job: Job, plan: Plan, rank: int, ranks: Sequence[int], folder: Path, events: int
) -> subprocess.Popen[bytes]:
    available = job.cores or sorted(os.sched_getaffinity(0))
    own = rank_environment(plan, rank, ranks, available, job.store) | dict(job.environment)
    environment = os.environ | own
    environment["PYTHONPATH"] = python_path(os.environ)
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
    cores = _cores(plan, rank, ranks, available) if job.pins_workers else set()
    if cores:
        pin(worker.pid, cores)
    return worker


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM in processes that are started here: only the launcher ends ranks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _threads(plan: Plan, rank: int, local_ranks: Sequence[int], available: Sequence[int]) -> int:
    """Return the threads of a worker: the cluster file's, else an equal share of the cores."""
    given = plan.cluster.devices[plan.rank_devices[rank]].threads
    devices = {plan.rank_devices[other] for other in local_ranks}
    return given or max(1, len(available) // len(devices))


def _cores(plan: Plan, rank: int, ranks: Sequence[int], available: Sequence[int]) -> set[int]:
    """Return the cores of a CPU worker's device; none if there are too few for all devices.

    The kernel then shares all cores. A draft model has the cores of the stage on its device.
    """
    threads = {
        plan.rank_devices[other]: _threads(plan, other, ranks, available)
        for other in ranks
        if device_spec(plan.cluster.devices[plan.rank_devices[other]].type, plan.cluster).kind
        == "cpu"
    }
    own = plan.rank_devices[rank]
    if own not in threads or sum(threads.values()) > len(available):
        return set()
    first = sum(list(threads.values())[: list(threads).index(own)])
    return set(available[first : first + threads[own]])


class _WorkerMonitor:
    """Follows the workers of this host: their events, their ends, their silence."""

    def __init__(
        self,
        plan: Plan,
        workers: dict[int, subprocess.Popen[bytes]],
        folder: Path,
        reader: int,
        timeout_s: float,
    ) -> None:
        self._plan = plan
        self._workers = workers
        self._folder = folder
        self._reader = reader
        self._timeout_s = timeout_s
        self._silent_s = dict.fromkeys(workers, 0.0)
        self._started: set[int] = set()  # ranks that sent an event: their libraries are loaded
        self._has_drafts = False  # whether the rank of the draft model is loaded
        self._rest = b""

    def run(self, progress: RunProgress, check: Callable[[], None]) -> None:
        """Pass events on until all ranks have ended, one failed, or one was silent for too long."""
        os.set_blocking(self._reader, False)
        last = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while True:
                codes = {rank: worker.poll() for rank, worker in self._workers.items()}
                self._pass_on(selector.select(POLL_S) != [], progress)
                self._forget_lost_drafts(codes)
                if any(codes.values()) or all(code == 0 for code in codes.values()):
                    return
                now = time.monotonic()
                # A long step of this loop means that this process was stopped, not the workers.
                self._check_silence(min(now - last, 1.0))
                last = now
                check()

    def _pass_on(self, is_readable: bool, progress: RunProgress) -> None:
        data = os.read(self._reader, 65536) if is_readable else b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = Event.decode(line)
            self._started.add(event.rank)
            self._silent_s[event.rank] = 0.0
            self._has_drafts |= event.kind == "ready" and event.rank == self._plan.draft_rank
            if event.kind != "alive":
                progress.report(event)

    def _forget_lost_drafts(self, codes: dict[int, int | None]) -> None:
        """Go on without the rank of a draft model that was lost after it was loaded."""
        rank = self._plan.draft_rank
        if rank is None or not self._may_lose(rank) or not codes.get(rank):
            return
        # What it lost itself is reported by the other ranks.
        record = read_error_record(self._folder, rank)
        if record is None or record.lost_rank is None:
            cause = _cause(self._plan, {rank: self._workers[rank]}, self._folder)
            _log.warning("%s; going on without drafts", cause)
        del codes[rank], self._workers[rank]

    def _may_lose(self, rank: int) -> bool:
        """Whether the run goes on without a rank."""
        is_loaded = rank == self._plan.draft_rank and self._has_drafts
        return is_loaded and len(self._workers) > 1

    def _check_silence(self, elapsed_s: float) -> None:
        for rank, worker in self._workers.items():
            self._silent_s[rank] += elapsed_s
            has_started = rank in self._started
            allowed_s = self._timeout_s + GRACE_S if has_started else START_TIMEOUT_S
            if self._silent_s[rank] <= allowed_s or worker.poll() is not None:
                continue
            if self._may_lose(rank):
                worker.kill()
                continue
            name = stage_name(self._plan, rank, os.uname().nodename)
            if has_started:
                raise peer_silent(name, rank, self._timeout_s)
            raise PeerLostError(
                f"{name}: did not start within {START_TIMEOUT_S:g} s, expected its libraries to be "
                "loaded by then; the machine may be short of memory or busy",
                rank,
            )


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
            return StageError(f"{stage_name(plan, rank, host)}: was ended by {name}{hint}")
    records = _error_records(workers, folder)
    if records:
        first = min(records, key=lambda one: (one.lost_rank is not None, one.time_s))
        return error_from_status(first.exit_status, first.message, is_permanent=first.is_permanent)
    rank = next(rank for rank, worker in workers.items() if worker.poll())
    log = _log_file(folder, rank).read_text(encoding="utf-8", errors="replace").strip()
    name, status = stage_name(plan, rank, host), workers[rank].poll()
    if not log and (problem := _why_unwritable(folder)) is not None:
        return StageError(
            f"{name}: exited with status {status} and could not say why: {problem}; set TMPDIR to "
            "a folder with space",
            is_permanent=True,
        )
    return StageError(f"{name}: exited with status {status}: {log[-1000:]}")


def _why_unwritable(folder: Path) -> str | None:
    """Return why the ranks cannot write to their folder, such as a full disk; ``None``: they can.

    The reason of a rank that fails goes through a file there.
    """
    probe = folder / "probe"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        return f"{folder}: cannot be written: {error.strerror}"
    return None


def _error_records(workers: Mapping[int, object], folder: Path) -> list[ErrorRecord]:
    found = (read_error_record(folder, rank) for rank in workers)
    return [one for one in found if one is not None]


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"
