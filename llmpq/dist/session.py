"""Session: the ranks of a plan as processes of this host that load once and answer many batches.

One thread starts the ranks and supervises them, as for any run. Requests and answers pass between
the caller and the master's process over a control channel, a socket in the session's private
folder. Needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from llmpq.dist.engine.policy import schedule_of
from llmpq.dist.io.control_channel import ControlChannel, Message
from llmpq.dist.io.job import Job, Rendezvous, check_plan
from llmpq.dist.io.prompts import Prompt, RequestId, prompt_to_json
from llmpq.dist.io.results import Result, result_from_fields
from llmpq.dist.launch.launcher import launch
from llmpq.dist.launch.orphan_cleanup import clean_up_if_killed
from llmpq.dist.metrics.progress import RunProgress, SilentProgress
from llmpq.dist.transport.endpoint import Endpoint
from llmpq.errors import LlmpqError, SpecError, StageError, StoppedError
from llmpq.spec.fields import Fields
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import Plan, write_plan

CLOSE_TIMEOUT_S = 5.0
"""How long idle ranks may take to end by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A new token of a request; ``text`` is empty inside a character of several tokens."""

    id: RequestId
    token_id: int
    text: str


class Session(contextlib.AbstractContextManager["Session"]):
    """Loaded ranks that wait for requests; they answer one batch at a time.

    The arguments are those of :class:`~llmpq.dist.io.job.Job`; ``progress`` receives the events of
    the ranks.

    Raises:
        LlmpqError: ``SpecError`` for a model that the plan is not for, ``CapacityError`` when
            memory ran out, ``StageError`` when a rank died, hung or failed.
    """

    def __init__(
        self,
        plan: Plan,
        model_dir: Path,
        *,
        step_timeout_s: float = 10.0,
        store: Path | None = None,
        kernel: str | None = None,
        progress: RunProgress | None = None,
    ) -> None:
        check_plan(plan, model_dir, load_model_dir(model_dir).num_layers)
        schedule_of(plan, None)
        self._ranks = _RankThread(progress or SilentProgress())
        self._finalizer = weakref.finalize(self, self._ranks.stop)
        self._batch = 0
        self._is_running = False
        folder = self._ranks.folder
        job = Job(
            strategy=folder / "strategy.json",
            model_dir=model_dir,
            prompts=folder / "control",
            output=folder / "control",
            task="serve",
            rendezvous=Rendezvous(file=folder / "rendezvous"),
            launcher_pid=os.getpid(),
            step_timeout_s=step_timeout_s,
            store=store,
            kernel=kernel,
        )
        try:
            write_plan(job.strategy, plan)
            self._ranks.start(job, plan)
            self._receive()  # ready
        except BaseException:
            self._ranks.stop()
            raise

    def run(
        self, prompts: Sequence[Prompt], *, streams: bool = False
    ) -> Iterator[NewToken | Result]:
        """Answer a batch of prompts with different ids; an earlier batch is cancelled.

        Yields:
            The result of each prompt as it finishes, after its tokens when ``streams``.

        Raises:
            SpecError: a prompt cannot be served; no other one is answered either.
            LlmpqError: as for the class; the session has ended then.
        """
        self.cancel()
        self._send(
            "batch",
            prompts=[prompt_to_json(prompt) for prompt in prompts],
            streams=streams,
        )
        self._batch += 1
        self._is_running = True
        return self._answers(self._batch)

    def generate(self, prompts: Sequence[Prompt]) -> list[Result]:
        """Return the results of a batch in the order of its prompts; see :meth:`run`."""
        answers = self.run(prompts)
        results = {answer.id: answer for answer in answers if isinstance(answer, Result)}
        return [results[prompt.id] for prompt in prompts]

    def cancel(self) -> None:
        """End the running batch, if there is one."""
        if self._is_running:
            self._send("cancel")
        while self._is_running:
            self._receive()

    def close(self) -> None:
        """End all ranks; nothing of them is left when this returns."""
        self._ranks.stop(0.0 if self._is_running else CLOSE_TIMEOUT_S)
        self._is_running = False

    def __exit__(self, *error: object) -> None:
        """Close the session."""
        self.close()

    def _answers(self, batch: int) -> Iterator[NewToken | Result]:
        try:
            while True:
                self._check_current(batch)
                message = self._receive()
                if message["kind"] == "tokens":
                    for name, token, text in message["tokens"]:
                        yield NewToken(id=name, token_id=token, text=text)
                        self._check_current(batch)
                elif message["kind"] == "result":
                    yield result_from_fields(Fields(message["result"], "result"))
                elif message["kind"] == "refused":
                    raise SpecError(message["message"])
                else:
                    return
        finally:  # also when the caller stops early
            if batch == self._batch:
                with contextlib.suppress(LlmpqError):
                    self.cancel()

    def _check_current(self, batch: int) -> None:
        if batch != self._batch:
            raise StageError("this batch was ended by a later one")

    def _send(self, kind: str, **fields: object) -> None:
        try:
            self._ranks.channel().send(kind, **fields)
        except EOFError:
            self._raise_cause()

    def _receive(self) -> Message:
        try:
            message = self._ranks.channel().receive()
        except EOFError:
            self._raise_cause()
        assert message is not None
        if message["kind"] in ("done", "refused"):
            self._is_running = False
        return message

    def _raise_cause(self) -> NoReturn:
        self._is_running = False
        raise self._ranks.take_error() from None


class _RankThread:
    """The thread that starts and supervises the ranks of a session, and their control channel."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self._resources = contextlib.ExitStack()
        name = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="llmpq-"))
        self.folder = Path(name)
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._channel: ControlChannel | None = None
        self._is_stopping = False
        self._error: BaseException | None = None

    def start(self, job: Job, plan: Plan) -> None:
        """Start the ranks; the master connects to the socket ``job.prompts`` while it starts."""
        endpoint = Endpoint(path=str(job.prompts))
        self._listener = self._resources.enter_context(endpoint.listening())
        self._thread = threading.Thread(
            target=self._supervise, args=(job, plan), daemon=True, name="llmpq ranks"
        )
        self._thread.start()

    def channel(self) -> ControlChannel:
        """Return the control channel, waiting for the master; ``EOFError`` if the ranks ended."""
        if self._channel is None:
            if self._listener is None:
                raise EOFError("closed")
            try:
                self._channel = ControlChannel(self._listener.accept()[0])
            except OSError as error:  # the thread has shut the listener down
                raise EOFError(str(error)) from None
        return self._channel

    def take_error(self) -> BaseException:
        """Return why the ranks ended; all of them have when this returns."""
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        self.stop()
        error = self._error
        if error is None or isinstance(error, StoppedError):
            return StageError("the pipeline is closed; make a new one")
        self._error = StageError(f"the pipeline has ended, make a new one; its error was: {error}")
        return error

    def stop(self, timeout_s: float = 0.0) -> None:
        """End the ranks: idle ones by themselves, those that still run after ``timeout_s``."""
        if self._channel is not None:
            self._channel.hang_up()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._is_stopping = True
            self._thread.join()
        if self._channel is not None:
            self._channel.close()
        self._resources.close()

    def _check(self) -> None:
        if self._is_stopping:
            raise StoppedError("the session was closed")

    def _supervise(self, job: Job, plan: Plan) -> None:
        try:
            with clean_up_if_killed(self.folder):
                ranks = range(len(plan.stages))
                launch(job, plan, ranks, self.folder, self._progress, self._check)
        except BaseException as error:
            self._error = error
        finally:
            # Wake a thread that waits for the master.
            assert self._listener is not None
            self._listener.shutdown(socket.SHUT_RDWR)
            if self._channel is not None:
                self._channel.hang_up()
