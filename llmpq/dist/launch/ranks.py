"""Ranks: the processes of a plan on this host, from their first start to their end.

When a rank dies or hangs, the launcher ends the others. All are started again if another start can
go on: finished answers of a batch are in its result file, and the client of an engine adds its
unfinished requests again. Errors that another start does not cure (bad input, too little memory,
full disk, NaN scores, our own bugs) end the ranks at once. Needs no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmpq.dist.io.job import Job, Rendezvous
from llmpq.dist.io.results import finished_ids
from llmpq.dist.launch.launcher import launch, ranks_of_node
from llmpq.dist.launch.orphan_cleanup import clean_up_if_killed
from llmpq.dist.launch.signals import StopRequest, drain_file
from llmpq.dist.metrics.measurement import Measurement, Restart
from llmpq.dist.metrics.progress import Event, RunProgress, SilentProgress
from llmpq.dist.transport.endpoint import Endpoint
from llmpq.errors import LlmpqError, StageError, StoppedError
from llmpq.logging import get_logger
from llmpq.options.run import FaultOptions
from llmpq.spec.fields import dump_json, write_text
from llmpq.spec.plan import Plan, write_plan

_log = get_logger(__name__)

State = Literal["starting", "serving", "draining", "restarting", "done", "stopped", "failed"]
HEARTBEAT_S = 1.0
"""How often the health file is written while nothing changes."""
RESTART_WINDOW_S = 300.0
"""Seconds of serving in which the restarts of an engine are counted; loading is no serving."""
CLOSE_TIMEOUT_S = 5.0
"""How long idle ranks may take to end by themselves."""


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

    Attributes:
        folder: only this user can enter it; it has the job, logs and sockets of the ranks.
        state: requests make progress while ``serving``; while ``draining``, running ones do.
        restarts: all of them so far.
    """

    def __init__(
        self,
        plan: Plan,
        faults: FaultOptions | None = None,
        *,
        hosts: Hosts | None = None,
        progress: RunProgress | None = None,
        stop: StopRequest | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._faults = faults or FaultOptions()
        self._hosts = hosts or Hosts()
        self._progress = progress or SilentProgress()
        self._stop = stop or StopRequest()
        self._clock = clock
        self._ranks = ranks_of_node(plan, self._hosts.node_rank, self._hosts.num_nodes)
        self._resources = contextlib.ExitStack()
        name = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="llmpq-"))
        self.folder = Path(name)
        self.state: State = "starting"
        self.restarts: list[Restart] = []
        self._job: Job | None = None
        self._thread: threading.Thread | None = None
        # A host without the master serves once its stages, or else its draft model, are loaded.
        stages = [rank for rank in self._ranks if rank != plan.draft_rank]
        self._waits_for = () if 0 in self._ranks else tuple(stages or self._ranks)
        self._loaded: set[int] = set()  # ranks of this start
        self._ready_s: float | None = None  # since when this start serves
        self._has_served = False
        self._served_s = 0.0  # by all starts that have ended
        self._losses_s: list[float] = []  # what had been served at each restart
        self._was_idle = False  # whether the previous start made no token
        self._tokens = self._expected_tokens = 0  # of this start, of all requests
        self._cause = ""  # the last error that ended the ranks
        self._written_s = 0.0

    def __exit__(self, *error: object) -> None:
        """Remove the folder."""
        self.close()

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
            with clean_up_if_killed(self.folder):
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
                if (final := self._final_error(job, error)) is not None:
                    raise final from None
                done = self._count_finished() - before
                self.restarts.append(Restart(cause=str(error), lost_s=lost_s, finished=done))
            for path in set(self.folder.iterdir()) - own:  # files of the ranks that ended
                path.unlink()
            job = replace(job, resume=True, start_s=None)

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
