"""Supervisor: starts all ranks again after one was lost, and drains a run that is asked to end.

When a rank dies or hangs, the launcher ends the others, and the running requests are lost. Finished
answers are in the result file, so a new start answers the rest and nothing twice. Errors that
another start does not cure (bad input, too little memory, full disk, NaN scores, our own bugs) end
the run at once; so do two starts in a row without a token. Needs no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from llmpq.dist.io.job import Job
from llmpq.dist.io.results import finished_ids
from llmpq.dist.launch.launcher import launch
from llmpq.dist.launch.signals import StopRequest, drain_file
from llmpq.dist.metrics.measurement import Measurement, Restart
from llmpq.dist.metrics.progress import Event, RunProgress
from llmpq.errors import LlmpqError, SpecError, StageError, StoppedError
from llmpq.logging import get_logger
from llmpq.options.declare import check_options
from llmpq.options.run import DrainOptions
from llmpq.spec.fields import dump_json, write_text
from llmpq.spec.plan import Plan

_log = get_logger(__name__)

State = Literal["starting", "serving", "draining", "restarting", "done", "stopped", "failed"]
HEARTBEAT_S = 1.0
"""How often the file is written while nothing changes."""


class Health:
    """The health file of a run, for monitoring: its state, replaced as a whole.

    It is written at every change and once a second: an old ``time`` means that the launcher hangs
    or was killed.

    Attributes:
        state: requests make progress while ``serving``; while ``draining``, running ones do.
        restarts: number of restarts of all ranks.
        tokens: generated since the last start.
        expected: tokens of all requests.
        cause: the last error that ended the ranks, empty before the first.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.state: State = "starting"
        self.restarts = 0
        self.tokens = 0
        self.expected = 0
        self.cause = ""
        self._path = path
        self._clock = clock
        self._written_s = 0.0

    def set_state(self, state: State) -> None:
        """Change the state and write the file."""
        if state != self.state or not self._written_s:
            self.state = state
            self._write()

    def heartbeat(self) -> None:
        """Write the file if it is older than ``HEARTBEAT_S``."""
        if self._clock() - self._written_s >= HEARTBEAT_S:
            self._write()

    def _write(self) -> None:
        self._written_s = self._clock()
        if self._path is None:
            return
        fields = {
            "state": self.state,
            "is_healthy": self.state in ("serving", "done"),
            "restarts": self.restarts,
            "tokens": self.tokens,
            "expected_tokens": self.expected,
            "cause": self.cause,
            "pid": os.getpid(),
            "time": self._written_s,
        }
        write_text(self._path, dump_json(fields))


@dataclass(frozen=True, kw_only=True)
class Supervision(DrainOptions):
    """Restarts and the end of a run.

    Attributes:
        max_restarts: how many times all ranks may be started again after one was lost.
        stop: asks the run to end.
        health: file of :class:`Health`; ``None`` for none.
    """

    max_restarts: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    health: Path | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_restarts < 0:
            raise SpecError(f"max_restarts: found {self.max_restarts}, expected at least 0")


class Supervisor:
    """Starts all ranks until the run is over, and monitors them; see :func:`launch`.

    Only the task ``generate`` is started again.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        ranks: Sequence[int],
        folder: Path,
        supervision: Supervision,
        progress: RunProgress,
    ) -> None:
        self._job = job
        self._plan = plan
        self._ranks = ranks
        self._folder = folder
        self._supervision = supervision
        self._progress = progress
        self._health = Health(supervision.health)
        self._restarts: list[Restart] = []
        self._is_serving = False
        self._was_idle = False  # whether the previous start made no token
        self._has_answers = 0 in ranks and job.task == "generate"  # whether they are written here

    def run(self) -> Measurement | None:
        """Run to the end.

        Returns:
            The measurement of the last start; ``None`` on a host without the master.

        Raises:
            StoppedError: the run was asked to end before all requests were answered.
            LlmpqError: as ``launch``, if another start is not allowed or would not help.
        """
        try:
            measurement = self._run_until_done()
        except BaseException as error:
            if not isinstance(error, StoppedError):
                self._health.cause = str(error)
            is_stopped = isinstance(error, StoppedError | KeyboardInterrupt)
            self._health.set_state("stopped" if is_stopped else "failed")
            raise
        self._health.set_state("done")
        return measurement and replace(measurement, restarts=tuple(self._restarts))

    def report(self, event: Event) -> None:
        """Update the health file and pass the event on."""
        if event.kind == "tokens":
            self._is_serving = True
            self._health.tokens, self._health.expected = event.done, event.total
            if self._health.state in ("starting", "restarting"):
                self._health.set_state("serving")
        self._progress.report(event)

    def check(self) -> None:
        """Drain when asked to; ``StoppedError`` if that takes too long or nothing is running."""
        self._health.heartbeat()
        stop, limit_s = self._supervision.stop, self._supervision.drain_timeout_s
        if not stop.is_requested:
            return
        if not (self._is_serving and self._has_answers):
            raise self._stopped("nothing had begun here")
        if stop.elapsed_s() >= limit_s:
            raise self._stopped(f"what had begun was not finished within {limit_s:g} s")
        if not drain_file(self._folder).exists():
            drain_file(self._folder).touch(mode=0o600)
            self._health.set_state("draining")
            _log.warning(
                "%s: finishing what has begun, for up to %g s; once more ends it now",
                stop.source,
                limit_s,
            )

    def _run_until_done(self) -> Measurement | None:
        while True:
            self._is_serving = False
            self._health.tokens = 0
            start_s = time.monotonic()
            self._health.set_state("restarting" if self._restarts else "starting")
            before = self._count_finished()
            try:
                return launch(self._job, self._plan, self._ranks, self._folder, self, self.check)
            except StageError as error:
                self._health.cause = str(error)
                lost_s = time.monotonic() - start_s
                if (final := self._final_error(error)) is not None:
                    raise final from None
                done = self._count_finished() - before
                self._restarts.append(Restart(cause=str(error), lost_s=lost_s, finished=done))
            self._health.restarts = len(self._restarts)
            for path in self._folder.iterdir():  # files of the ranks that ended
                path.unlink()
            self._job = replace(self._job, resume=True, start_s=None)

    def _final_error(self, error: StageError) -> LlmpqError | None:
        """Return the error to end with, ``None`` to start the ranks again."""
        limit, done = self._supervision.max_restarts, len(self._restarts)
        # Only the master counts tokens.
        is_idle = 0 in self._ranks and self._health.tokens == 0
        is_final = error.is_permanent or limit == 0
        if is_final or self._supervision.stop.is_requested or self._job.task != "generate":
            return error
        if done == limit or (is_idle and self._was_idle):
            why = "none of the last two starts made a token" if done < limit else "no more allowed"
            return StageError(f"{error}; started anew {done} of {limit} times, {why}")
        self._was_idle = is_idle
        _log.warning("%s; starting all ranks anew (%d of %d)", error, done + 1, limit)
        return None

    def _stopped(self, why: str) -> StoppedError:
        stop = self._supervision.stop
        if not self._has_answers:
            return StoppedError(f"stopped by {stop.source}: {why}")
        return StoppedError(
            f"stopped by {stop.source}: {why}; {self._job.output} holds {self._count_finished()} "
            "answers, --resume goes on from there"
        )

    def _count_finished(self) -> int:
        return len(finished_ids(self._job.output, resume=True)) if self._has_answers else 0
