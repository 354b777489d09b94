"""Supervisor: a run from its first start to its end, over the deaths of its ranks.

A rank that dies or hangs takes its generation along: the launcher ends the others, and with them
all that was in flight. What was answered stands in the result file, so a new generation answers the
rest and nothing twice. Bad input, want of memory and our own bugs are not cured by another start
and end the run at once; so do two generations in a row that made no token. Needs no torch.
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
from llmpq.dist.metrics.progress import Event, Progress
from llmpq.errors import LlmpqError, SpecError, StageError, StoppedError
from llmpq.logging import get_logger
from llmpq.spec.plan import Plan

DRAIN_TIMEOUT_S = 30.0
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How a run is looked after.

    Attributes:
        max_restarts: how many times all ranks may be started anew after one was lost.
        drain_timeout_s: how long requests that have begun may go on once the run is asked to end.
        stop: asks for that end.
        health: file that says how the run is; ``None`` for nowhere.
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
    """Starts generations of ranks until the run is over; the overseer of each.

    Args:
        job: what to run. Only answers are journalled: other tasks are not started again.
        plan: of the job.
        ranks: those of this host.
        folder: private to this user and this run.
        supervision: how to look after them.
        progress: takes the ranks' events.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        ranks: Sequence[int],
        folder: Path,
        supervision: Supervision,
        progress: Progress,
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
        self._was_idle = False  # whether the generation before made no token

    def run(self) -> Measurement | None:
        """Run to the end.

        Returns:
            What the last generation measured; ``None`` on a host without the master.

        Raises:
            StoppedError: it was asked to end, and not everything was done by then.
            LlmpqError: as ``launch``, when another start is not allowed or would not help.
        """
        try:
            measurement = self._run_generations()
        except BaseException as error:
            self._health.cause = (
                self._health.cause if isinstance(error, StoppedError) else str(error)
            )
            is_stopped = isinstance(error, StoppedError | KeyboardInterrupt)
            self._health.enter("stopped" if is_stopped else "failed")
            raise
        self._health.enter("done")
        return measurement and replace(measurement, restarts=tuple(self._restarts))

    def on_event(self, event: Event) -> None:
        """Follow what the ranks do."""
        if event.kind == "tokens":
            self._is_serving = True
            self._health.tokens, self._health.expected = event.done, event.total
            if self._health.state in ("starting", "restarting"):
                self._health.enter("serving")
        if event.kind != "alive":
            self._progress.report(event)

    def check(self) -> None:
        """Begin to drain when asked to, and end when that took too long or nothing has begun.

        Raises:
            StoppedError: says what became of the requests.
        """
        self._health.beat()
        stop, limit_s = self._supervision.stop, self._supervision.drain_timeout_s
        if not stop.is_asked:
            return
        if not (self._is_serving and 0 in self._ranks and self._job.task == "generate"):
            raise self._stopped("nothing had begun here")
        if stop.waiting_s() >= limit_s:
            raise self._stopped(f"what had begun was not finished within {limit_s:g} s")
        if not drain_file(self._folder).exists():
            drain_file(self._folder).touch(mode=0o600)
            self._health.enter("draining")
            _log.warning(
                "%s: finishing what has begun, for up to %g s; once more ends it now",
                stop.by,
                limit_s,
            )

    def _run_generations(self) -> Measurement | None:
        while True:
            self._is_serving = False
            self._health.tokens = 0
            start_s = time.monotonic()
            self._health.enter("restarting" if self._restarts else "starting")
            before = self._count_finished()
            try:
                return launch(self._job, self._plan, self._ranks, self._folder, self)
            except StageError as error:
                self._health.cause = str(error)
                lost_s = time.monotonic() - start_s
                found = self._last_word(error)
                if found is not None:
                    raise found from None
                done = self._count_finished() - before
                self._restarts.append(Restart(cause=str(error), lost_s=lost_s, finished=done))
            self._health.restarts = len(self._restarts)
            self._prepare()

    def _last_word(self, error: StageError) -> LlmpqError | None:
        """Return the error to end with, ``None`` when the ranks are to be started anew."""
        limit, done = self._supervision.max_restarts, len(self._restarts)
        # Only the master says how many tokens there are.
        is_idle = 0 in self._ranks and self._health.tokens == 0
        if self._supervision.stop.is_asked or self._job.task != "generate" or limit == 0:
            return error
        if done == limit or (is_idle and self._was_idle):
            why = "none of the last two starts made a token" if done < limit else "no more allowed"
            return StageError(f"{error}; started anew {done} of {limit} times, {why}")
        self._was_idle = is_idle
        _log.warning("%s; starting all ranks anew (%d of %d)", error, done + 1, limit)
        return None

    def _prepare(self) -> None:
        """Leave nothing of the ranks that ended; the next ones go on from the results."""
        for path in self._folder.iterdir():
            path.unlink()
        self._job = replace(self._job, resume=True)

    def _stopped(self, why: str) -> StoppedError:
        stop = self._supervision.stop
        if 0 not in self._ranks or self._job.task != "generate":
            return StoppedError(f"stopped by {stop.by}: {why}")
        return StoppedError(
            f"stopped by {stop.by}: {why}; {self._job.output} holds {self._count_finished()} "
            "answers, --resume goes on from there"
        )

    def _count_finished(self) -> int:
        if 0 not in self._ranks or self._job.task != "generate":
            return 0
        return len(finished_ids(self._job.output, resume=True))
