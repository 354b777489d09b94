"""Ranks: the processes of a plan on this host, from their first start to their end.

The processes get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK ...) and their own thread
count, vector extensions and cores. Ranks that torchrun starts (``llmpq-dist --no_auto``) run the
same code. :func:`launch` runs them once, and ends all when one fails; :class:`Ranks` starts them
again.

When a rank dies or hangs, the launcher ends the others. All are started again if another start can
go on: finished answers of a batch are in its result file, and the client of an engine adds its
unfinished requests again. Errors that another start does not cure (bad input, too little memory,
full disk, NaN scores, our own bugs) end the ranks at once. Needs no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from llmpq.dist.io.job import START_TIMEOUT_S, Job, Rendezvous, write_job
from llmpq.dist.io.results import finished_ids
from llmpq.dist.launch.process_environment import (
    HOST_CORES,
    cpu_environment,
    cuda_environment,
    pin,
    python_path,
)
from llmpq.dist.launch.signals import SIGNALS, StopRequest, clean_up_if_killed, drain_file
from llmpq.dist.metrics.measurement import Measurement, Restart
from llmpq.dist.metrics.progress import Event, RunProgress, SilentProgress
from llmpq.dist.transport.endpoint import Endpoint
from llmpq.dist.transport.errors import (
    PeerLostError,
    error_from_status,
    peer_silent,
    stage_name,
)
from llmpq.errors import LlmpqError, SpecError, StageError, StoppedError
from llmpq.logging import get_logger
from llmpq.options.run import FaultOptions
from llmpq.spec.catalog import device as device_spec
from llmpq.spec.fields import Fields, dump_json, from_json, read_json, to_json, write_text
from llmpq.spec.plan import Plan, default_schedule, write_plan

T = TypeVar("T")
_log = get_logger(__name__)

State = Literal["starting", "serving", "draining", "restarting", "done", "stopped", "failed"]
HEARTBEAT_S = 1.0
"""How often the health file is written while nothing changes."""
RESTART_WINDOW_S = 300.0
"""Seconds of serving in which the restarts of an engine are counted; loading is no serving."""
CLOSE_TIMEOUT_S = 5.0
"""How long idle ranks may take to end by themselves."""
POLL_S = 0.05
GRACE_S = 1.0
"""How long the other ranks may take to write their errors, after one failed."""
_PROBE_BYTES = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """This host's place among those of a run.

    Attributes:
        num_nodes: how many hosts there are.
        node_rank: which of them this is; 0 is the master's.
        address: host and port on which rank 0 waits for the others; unused on one host.
        token_file: the secret that all hosts share; unused on one host.
    """

    num_nodes: int = 1
    node_rank: int = 0
    address: tuple[str, int] | None = None
    token_file: Path | None = None


class HostMonitor(Protocol):
    """Knows whether the other hosts of a run are there, and what to run without those that are not.

    The thread that runs the ranks calls it.
    """

    def check(self) -> None:
        """Raise ``StageError`` if a host of the plan was lost; called many times a second."""

    def next_start(self) -> tuple[Plan, Hosts] | None:
        """Return the plan without hosts that were lost, and this host's place in it.

        ``None`` where none was lost.

        Raises:
            LlmpqError: there is no such plan.
        """


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """The ranks of a plan on this host, and their private folder.

    :meth:`run` starts them in the caller's thread, :meth:`start` in a thread of its own. The health
    file of the options says for monitoring how they are. It is replaced as a whole at every change
    and once a second: an old ``time`` means that the launcher hangs or was killed.

    Args:
        plan: of the ranks.
        faults: restarts, drain and health file.
        hosts: this host's place; by default all ranks run here.
        progress: receives the events of the ranks.
        stop: asks them to end.
        clock: seconds of serving.
        monitor: watches the other hosts. Ranks that answer requests go on with its plan when one
            was lost; ``max_restarts`` does not count that.

    Attributes:
        folder: only this user can enter it; it has the job, logs and sockets of the ranks.
        state: requests make progress while ``serving``; while ``draining``, running ones do.
        restarts: all of them so far.
    """

    def __init__(  # noqa: PLR0913  what starts, watches and ends the ranks
        self,
        plan: Plan,
        faults: FaultOptions | None = None,
        *,
        hosts: Hosts | None = None,
        progress: RunProgress | None = None,
        stop: StopRequest | None = None,
        clock: Callable[[], float] = time.monotonic,
        monitor: HostMonitor | None = None,
    ) -> None:
        self._faults = faults or FaultOptions()
        self._monitor = monitor
        self._progress = progress or SilentProgress()
        self._stop = stop or StopRequest()
        self._clock = clock
        self._place(plan, hosts or Hosts())
        self._resources = contextlib.ExitStack()
        name = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="llmpq-"))
        self.folder = Path(name)
        self._others: list[Path] = []  # folders that are removed, too
        self.state: State = "starting"
        self.restarts: list[Restart] = []
        self._job: Job | None = None
        self._thread: threading.Thread | None = None
        self._loaded: set[int] = set()  # ranks of this start
        self._ready_s: float | None = None  # since when this start serves
        self._has_served = False
        self._served_s = 0.0  # by all starts that have ended
        self._losses_s: list[float] = []  # what had been served at each restart
        self._was_idle = False  # whether the previous start made no token
        self._tokens = self._expected_tokens = 0  # of this start, of all requests
        self._cause = ""  # the last error that ended the ranks
        self._written_s = 0.0

    def _place(self, plan: Plan, hosts: Hosts) -> None:
        """Take the ranks of a plan that are on this host."""
        self._plan, self._hosts = plan, hosts
        self._ranks = ranks_of_node(plan, hosts.node_rank, hosts.num_nodes)
        # A host without the master serves once its stages, or else its draft model, are loaded.
        stages = [rank for rank in self._ranks if rank != plan.draft_rank]
        self._waits_for = () if 0 in self._ranks else tuple(stages or self._ranks)

    def __exit__(self, *error: object) -> None:
        """Remove the folder."""
        self.close()

    def make_folder(self, parent: Path) -> Path:
        """Return a new folder that only this user can enter; it is removed at the end.

        Args:
            parent: where it is made; it is made, too, where it is missing, and stays.

        Raises:
            SpecError: it cannot be made.
        """
        try:
            parent.mkdir(parents=True, exist_ok=True)
            made = tempfile.TemporaryDirectory(prefix="llmpq-", dir=parent)
        except OSError as error:
            reason = error.strerror or error
            raise SpecError(f"{parent}: no folder can be made in it: {reason}") from None
        self._others.append(Path(self._resources.enter_context(made)))
        return self._others[-1]

    def socket_job(self, model_dir: Path, **options: Any) -> tuple[Job, socket.socket]:
        """Return a job for requests from a socket, and the socket that every master connects to.

        Args:
            model_dir: where the weights are.
            options: other fields of the job.
        """
        control, strategy = self.folder / "control", self.folder / "strategy.json"
        write_plan(strategy, self._plan)
        listener = self._resources.enter_context(Endpoint(path=str(control)).listening())
        job = Job(
            strategy=strategy, model_dir=model_dir, prompts=control, output=control, **options
        )
        return job, listener

    def run(self, job: Job) -> Measurement | None:
        """Run all ranks to their end.

        Args:
            job: what to run; its rendezvous is completed here.

        Returns:
            The master's measurement, ``None`` if it runs on another host or measures nothing.

        Raises:
            StoppedError: they were asked to end before all requests were answered.
            LlmpqError: as ``launch``, if another start is not allowed or would not help.
        """
        job = replace(job, rendezvous=self._rendezvous(), launcher_pid=os.getpid())
        try:
            with clean_up_if_killed(self.folder, *self._others):
                measurement = self._run_until_done(job)
        except BaseException as error:
            if not isinstance(error, StoppedError):
                self._cause = str(error)
            is_stopped = isinstance(error, StoppedError | KeyboardInterrupt)
            self._set_state("stopped" if is_stopped else "failed")
            raise
        self._set_state("done")
        return measurement and replace(measurement, restarts=tuple(self.restarts))

    def start(self, job: Job, on_end: Callable[[BaseException | None], None]) -> None:
        """Run all ranks in a thread of their own.

        Args:
            job: as for :meth:`run`.
            on_end: called in the thread at the end, with its error.
        """
        self._thread = threading.Thread(
            target=self._run_in_thread, args=(job, on_end), daemon=True, name="llmpq ranks"
        )
        self._thread.start()

    def serve(self) -> None:
        """Note that this start answers requests from now on."""
        self._ready_s, self._has_served = self._clock(), True
        if self.state in ("starting", "restarting"):
            self._set_state("serving")

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the thread, at most ``timeout_s``."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def stop(self, timeout_s: float = 0.0) -> None:
        """End all ranks that still run after ``timeout_s``, and the thread."""
        self.join(timeout_s)
        self._stop.request("close")
        self.join()

    def close(self) -> None:
        """Remove the folder, after the end."""
        self._resources.close()

    def report(self, event: Event) -> None:
        """Update the state and pass the event on."""
        if event.kind == "tokens":
            self._tokens, self._expected_tokens = event.done, event.total
            if self._ready_s is None:
                self.serve()
        elif event.kind == "ready":
            self._loaded.add(event.rank)
            if self._waits_for and self._loaded.issuperset(self._waits_for):
                self.serve()
        self._progress.report(event)

    def check(self) -> None:
        """Drain when asked to; ``StoppedError`` if that takes too long or nothing is running."""
        if time.time() - self._written_s >= HEARTBEAT_S:
            self._write_health()
        if self._monitor is not None:
            self._monitor.check()
        if not self._stop.is_requested:
            return
        limit_s = self._faults.drain_timeout_s
        if self._ready_s is None or not self._has_answers:
            raise self._stopped("nothing had begun here")
        if self._stop.elapsed_s() >= limit_s:
            raise self._stopped(f"what had begun was not finished within {limit_s:g} s")
        if not drain_file(self.folder).exists():
            drain_file(self.folder).touch(mode=0o600)
            self._set_state("draining")
            _log.warning(
                "%s: finishing what has begun, for up to %g s; once more ends it now",
                self._stop.source,
                limit_s,
            )

    @property
    def _has_answers(self) -> bool:
        """Whether the answers of a batch are written on this host."""
        return self._job is not None and self._job.task == "generate" and 0 in self._ranks

    def _rendezvous(self) -> Rendezvous:
        if self._hosts.num_nodes == 1:
            return Rendezvous(file=self.folder / "rendezvous")
        return Rendezvous(
            address=self._hosts.address,
            folder=self.folder,
            token_file=self._hosts.token_file,
        )

    def _run_in_thread(self, job: Job, on_end: Callable[[BaseException | None], None]) -> None:
        error: BaseException | None = None
        try:
            self.run(job)
        except BaseException as found:
            error = found
        on_end(error)

    def _run_until_done(self, job: Job) -> Measurement | None:
        own = set(self.folder.iterdir())
        while True:
            self._job = job
            self._tokens = 0
            self._loaded.clear()
            self._set_state("restarting" if self.restarts else "starting")
            start_s, before = time.monotonic(), self._count_finished()
            try:
                return launch(job, self._plan, self._ranks, self.folder, self, self.check)
            except StageError as error:
                self._cause = str(error)
                lost_s = time.monotonic() - start_s
                for path in set(self.folder.iterdir()) - own:  # files of the ranks that ended
                    path.unlink()
                moved = self._moved(job)
                if moved is None and (final := self._final_error(job, error)) is not None:
                    raise final from None
                job = moved or job
                own.add(job.strategy)
                done = self._count_finished() - before
                self.restarts.append(Restart(cause=str(error), lost_s=lost_s, finished=done))
            job = replace(job, resume=True, start_s=None)

    def _moved(self, job: Job) -> Job | None:
        """Return the job of a plan without hosts that were lost, ``None`` if all are there."""
        answers = job.task in ("online", "generate")
        if self._monitor is None or not answers or self._stop.is_requested:
            return None
        found = self._monitor.next_start()
        if found is None:
            return None
        self._count_served()
        self._place(*found)
        plan, strategy, schedule = self._plan, self.folder / "strategy.json", job.schedule
        write_plan(strategy, plan)
        if schedule is not None:  # its batches were those of the plan before
            slots = default_schedule(schedule.policy, plan.workload.batch)
            schedule = replace(slots, boundaries=schedule.boundaries)
        return replace(job, strategy=strategy, schedule=schedule, rendezvous=self._rendezvous())

    def _final_error(self, job: Job, error: StageError) -> LlmpqError | None:
        """Return the error to end with, ``None`` to start the ranks again."""
        self._count_served()
        is_engine = job.task == "online"
        limit, done = self._faults.max_restarts, self._recent_restarts(is_engine)
        goes_on = self._has_served if is_engine else job.task == "generate"
        if error.is_permanent or limit == 0 or self._stop.is_requested or not goes_on:
            return error
        is_idle = self._has_answers and self._tokens == 0  # only the master counts tokens
        if done >= limit or (is_idle and self._was_idle):
            why = "none of the last two starts made a token" if done < limit else "no more allowed"
            return StageError(f"{error}; started anew {done} of {limit} times, {why}")
        self._was_idle = is_idle
        self._losses_s.append(self._served_s)
        _log.warning("%s; starting all ranks anew (%d of %d)", error, done + 1, limit)
        return None

    def _count_served(self) -> None:
        """Add how long the start that was lost has served."""
        ready_s, self._ready_s = self._ready_s, None
        if ready_s is not None:
            self._served_s += self._clock() - ready_s

    def _recent_restarts(self, is_engine: bool) -> int:
        """Return the restarts that count: of an engine, those of its last seconds of serving."""
        window_s = RESTART_WINDOW_S if is_engine else math.inf
        return sum(self._served_s - loss_s <= window_s for loss_s in self._losses_s)

    def _stopped(self, why: str) -> StoppedError:
        source = self._stop.source
        if self._job is None or not self._has_answers:
            return StoppedError(f"stopped by {source}: {why}")
        return StoppedError(
            f"stopped by {source}: {why}; {self._job.output} holds {self._count_finished()} "
            "answers, --resume goes on from there"
        )

    def _count_finished(self) -> int:
        if self._job is None or not self._has_answers:
            return 0
        return len(finished_ids(self._job.output, resume=True))

    def _set_state(self, state: State) -> None:
        """Change the state and write it."""
        if state != self.state or not self._written_s:
            self.state = state
            self._write_health()

    def _write_health(self) -> None:
        self._written_s = time.time()
        if self._faults.health is None:
            return
        fields = {
            "state": self.state,
            "is_healthy": self.state in ("serving", "done"),
            "restarts": len(self.restarts),
            "tokens": self._tokens,
            "expected_tokens": self._expected_tokens,
            "cause": self._cause,
            "pid": os.getpid(),
            "time": self._written_s,
        }
        write_text(self._faults.health, dump_json(fields))


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
    host = _host_cores(plan, rank, local_ranks, cores)
    return variables | {
        HOST_CORES: ",".join(map(str, host)),
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
    """Return the threads of a worker: the cluster file's, else an equal share of the cores.

    Threads that compute experts have cores of their own.
    """
    given = plan.cluster.devices[plan.rank_devices[rank]].threads
    devices = {plan.rank_devices[other] for other in local_ranks}
    left = len(available) - sum(_host_threads(plan, other) for other in local_ranks)
    return given or max(1, left // len(devices))


def _host_threads(plan: Plan, rank: int) -> int:
    """Return the threads that compute a rank's experts in the host's memory."""
    return plan.stages[rank].host_threads if rank < len(plan.stages) else 0


def _host_cores(
    plan: Plan, rank: int, ranks: Sequence[int], available: Sequence[int]
) -> tuple[int, ...]:
    """Return the cores of these threads, after those of all devices; none if there are too few."""
    used = sum(_device_threads(plan, ranks, available).values())
    counts = {other: _host_threads(plan, other) for other in ranks}
    if used + sum(counts.values()) > len(available):
        return ()
    first = used + sum(counts[other] for other in ranks if other < rank)
    return tuple(available[first : first + counts[rank]])


def _cores(plan: Plan, rank: int, ranks: Sequence[int], available: Sequence[int]) -> set[int]:
    """Return the cores of a CPU worker's device; none if there are too few for all devices.

    The kernel then shares all cores. A draft model has the cores of the stage on its device.
    """
    threads = _device_threads(plan, ranks, available)
    own = plan.rank_devices[rank]
    if own not in threads or sum(threads.values()) > len(available):
        return set()
    first = sum(list(threads.values())[: list(threads).index(own)])
    return set(available[first : first + threads[own]])


def _device_threads(plan: Plan, ranks: Sequence[int], available: Sequence[int]) -> dict[int, int]:
    """Return the threads of each CPU device of these ranks."""
    return {
        plan.rank_devices[other]: _threads(plan, other, ranks, available)
        for other in ranks
        if device_spec(plan.cluster.devices[plan.rank_devices[other]].type, plan.cluster).kind
        == "cpu"
    }


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
