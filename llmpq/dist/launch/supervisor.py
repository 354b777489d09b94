"""Supervisor: starts all ranks again after one was lost, and drains a run that is asked to end.

When a rank dies or hangs, the launcher ends the others, and the running requests are lost. Finished
answers are in the result file, so a new start answers the rest and nothing twice. Errors that
another start does not cure (bad input, too little memory, full disk, NaN scores, our own bugs) end
the run at once; so do two starts in a row without a token. Needs no torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmpq.dist.io.job import Job
from llmpq.dist.io.results import finished_ids
from llmpq.dist.launch.health import Health
from llmpq.dist.launch.launcher import launch
from llmpq.dist.launch.signals import StopRequest, drain_file
from llmpq.dist.metrics.measurement import Measurement, Restart
from llmpq.dist.metrics.progress import Event, RunProgress
from llmpq.errors import LlmpqError, SpecError, StageError, StoppedError
from llmpq.logging import get_logger
from llmpq.spec.plan import Plan

DRAIN_TIMEOUT_S = 30.0
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Restarts and the end of a run.

    Attributes:
        max_restarts: how many times all ranks may be started again after one was lost.
        drain_timeout_s: how long running requests may go on once the run is asked to end.
        stop: asks the run to end.
        health: file of :class:`~llmpq.dist.launch.health.Health`; ``None`` for none.
    """

    max_restarts: int = 0
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    stop: StopRequest = field(default_factory=StopRequest)
    health: Path | None = None

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise SpecError(f"max_restarts: found {self.max_restarts}, expected at least 0")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise SpecError(
                f"drain_timeout: found {self.drain_timeout_s}, expected at least 0 seconds"
            )


class Supervisor:
    """Starts all ranks until the run is over, and monitors them.

    Args:
        job: what to run; only the task ``generate`` is started again.
        plan: of the job.
        ranks: those of this host.
        folder: private to this user and this run.
        supervision: limits.
        progress: receives the ranks' events.
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
            self._health.cause = (
                self._health.cause if isinstance(error, StoppedError) else str(error)
            )
            is_stopped = isinstance(error, StoppedError | KeyboardInterrupt)
            self._health.set_state("stopped" if is_stopped else "failed")
            raise
        self._health.set_state("done")
        return measurement and replace(measurement, restarts=tuple(self._restarts))

    def on_event(self, event: Event) -> None:
        """Update the health file and report progress."""
        if event.kind == "tokens":
            self._is_serving = True
            self._health.tokens, self._health.expected = event.done, event.total
            if self._health.state in ("starting", "restarting"):
                self._health.set_state("serving")
        if event.kind != "alive":
            self._progress.report(event)

    def check(self) -> None:
        """Drain when asked to; end if that takes too long or no request is running.

        Raises:
            StoppedError: with the number of answers.
        """
        self._health.heartbeat()
        stop, limit_s = self._supervision.stop, self._supervision.drain_timeout_s
        if not stop.is_requested:
            return
        if not (self._is_serving and 0 in self._ranks and self._job.task == "generate"):
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
                return launch(self._job, self._plan, self._ranks, self._folder, self)
            except StageError as error:
                self._health.cause = str(error)
                lost_s = time.monotonic() - start_s
                found = self._final_error(error)
                if found is not None:
                    raise found from None
                done = self._count_finished() - before
                self._restarts.append(Restart(cause=str(error), lost_s=lost_s, finished=done))
            self._health.restarts = len(self._restarts)
            self._prepare_restart()

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

    def _prepare_restart(self) -> None:
        """Remove the files of the ranks that ended; the next ones resume from the results."""
        for path in self._folder.iterdir():
            path.unlink()
        self._job = replace(self._job, resume=True)

    def _stopped(self, why: str) -> StoppedError:
        stop = self._supervision.stop
        if 0 not in self._ranks or self._job.task != "generate":
            return StoppedError(f"stopped by {stop.source}: {why}")
        return StoppedError(
            f"stopped by {stop.source}: {why}; {self._job.output} holds {self._count_finished()} "
            "answers, --resume goes on from there"
        )

    def _count_finished(self) -> int:
        if 0 not in self._ranks or self._job.task != "generate":
            return 0
        return len(finished_ids(self._job.output, resume=True))
