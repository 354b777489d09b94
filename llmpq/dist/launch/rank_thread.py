"""RankThread: the ranks of a plan, started and supervised by a thread of this process.

The ranks' files and the socket that the master connects to are in a private folder. Needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from llmpq.dist.io.job import Job, Rendezvous
from llmpq.dist.launch.launcher import launch
from llmpq.dist.launch.orphan_cleanup import clean_up_if_killed
from llmpq.dist.metrics.progress import RunProgress, SilentProgress
from llmpq.dist.transport.endpoint import Endpoint
from llmpq.errors import StoppedError
from llmpq.spec.plan import Plan, write_plan

CLOSE_TIMEOUT_S = 5.0
"""How long idle ranks may take to end by themselves."""


class RankThread:
    """A thread that starts the ranks of a plan on this host, and their private folder.

    Args:
        plan: of the ranks.
        model_dir: where the weights are.
        progress: receives the events of the ranks; ``None`` for none.

    Attributes:
        folder: only this user can enter it.
        job: of the ranks, with the default of every option and the task ``generate``.
    """

    def __init__(self, plan: Plan, model_dir: Path, progress: RunProgress | None) -> None:
        self._plan = plan
        self._progress = progress or SilentProgress()
        self._resources = contextlib.ExitStack()
        name = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="llmpq-"))
        self.folder = Path(name)
        self.job = Job(
            strategy=self.folder / "strategy.json",
            model_dir=model_dir,
            prompts=self.folder / "control",
            output=self.folder / "control",
            rendezvous=Rendezvous(file=self.folder / "rendezvous"),
            launcher_pid=os.getpid(),
        )
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    def listen(self) -> socket.socket:
        """Write the plan, and return the socket that the master of every start connects to."""
        write_plan(self.job.strategy, self._plan)
        endpoint = Endpoint(path=str(self.job.prompts))
        return self._resources.enter_context(endpoint.listening())

    def start(
        self, run: Callable[[], object], on_end: Callable[[BaseException | None], None]
    ) -> None:
        """Start the thread.

        Args:
            run: called in the thread; starts ranks by :meth:`launch`.
            on_end: called in the thread after ``run``, with its exception.
        """
        self._thread = threading.Thread(
            target=self._supervise, args=(run, on_end), daemon=True, name="llmpq ranks"
        )
        self._thread.start()

    def launch(self, job: Job, folder: Path) -> None:
        """Run all ranks until they end, with their files in ``folder``; see ``launch``.

        Raises:
            StoppedError: :meth:`stop` was called.
            LlmpqError: the error of the rank that failed first.
        """
        ranks = range(len(self._plan.rank_devices))
        launch(job, self._plan, ranks, folder, self._progress, self._check_stopping)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, at most ``timeout_s``."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """End all ranks that still run after ``timeout_s``, and the thread."""
        self.join(timeout_s)
        self._is_stopping = True
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Remove the folder, after :meth:`stop`."""
        self._resources.close()

    def _check_stopping(self) -> None:
        if self._is_stopping:
            raise StoppedError("the ranks were stopped")

    def _supervise(
        self, run: Callable[[], object], on_end: Callable[[BaseException | None], None]
    ) -> None:
        error: BaseException | None = None
        try:
            with clean_up_if_killed(self.folder):
                run()
        except BaseException as found:
            error = found
        on_end(error)
