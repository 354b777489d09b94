"""Session: the ranks of a plan as processes of this host that load once and answer many batches.

The ranks run in a thread of their own. Requests and answers pass between the caller and the
master's process over a control channel, a socket in the session's private folder. Needs no torch.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from llmpq.dist.io.control_channel import ControlChannel, Message
from llmpq.dist.io.job import check_model, checked_speculation, schedule_of
from llmpq.dist.io.prompts import Prompt, RequestId, prompt_to_json
from llmpq.dist.io.results import Result, result_from_fields
from llmpq.dist.launch.ranks import CLOSE_TIMEOUT_S, HostMonitor, Hosts, Ranks
from llmpq.dist.metrics.progress import RunProgress
from llmpq.errors import LlmpqError, SpecError, StageError, StoppedError
from llmpq.options.declare import read_keywords, values_of, with_keywords
from llmpq.options.engine import EngineOptions, SpeculationOptions
from llmpq.options.run import FaultOptions, RunOptions
from llmpq.spec.fields import Fields
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A new token of a request; ``text`` is empty inside a character of several tokens."""

    id: RequestId
    token_id: int
    text: str


class Session(contextlib.AbstractContextManager["Session"]):
    """Loaded ranks that wait for requests; they answer one batch at a time.

    The options are those of ``RunOptions``, and the engine's ``speculative_config``; ``progress``
    receives the events of the ranks. ``hosts`` is this host's place, by default the only one, and
    ``monitor`` watches the others.

    Raises:
        LlmpqError: ``SpecError`` for a model that the plan is not for, ``CapacityError`` when
            memory ran out, ``StageError`` when a rank died, hung or failed.
    """

    @with_keywords(RunOptions, SpeculationOptions)
    def __init__(
        self,
        plan: Plan,
        model_dir: Path,
        *,
        progress: RunProgress | None = None,
        hosts: Hosts | None = None,
        monitor: HostMonitor | None = None,
        **options: Any,
    ) -> None:
        run, asked = read_keywords(options, RunOptions, SpeculationOptions)
        check_model(plan, model_dir, load_model_dir(model_dir))
        schedule_of(plan, None)
        speculation = checked_speculation(plan, asked.speculative_config, model_dir)
        engine = EngineOptions(speculative_config=speculation)
        faults = FaultOptions(max_restarts=0)
        ranks = Ranks(plan, faults, hosts=hosts, progress=progress, monitor=monitor)
        self._ranks = _ServedRanks(ranks)
        self._finalizer = weakref.finalize(self, self._ranks.stop)
        self._batch = 0
        self._is_running = False
        try:
            self._ranks.start(model_dir, engine=engine, **values_of(run))
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


class _ServedRanks:
    """The ranks of a session, and their control channel."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._listener: socket.socket | None = None
        self._channel: ControlChannel | None = None
        self._error: BaseException | None = None
        self._is_reported = False  # whether the caller has had the error

    def start(self, model_dir: Path, **options: Any) -> None:
        """Start the ranks; the master connects while it starts. ``options`` are those of a job."""
        job, self._listener = self._ranks.socket_job(model_dir, task="serve", **options)
        self._ranks.start(job, self._end)

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
        self._ranks.join(CLOSE_TIMEOUT_S)
        self.stop()
        error = self._error
        if error is None or isinstance(error, StoppedError):
            return StageError("the pipeline is closed; make a new one")
        if self._is_reported:
            return StageError(f"the pipeline has ended, make a new one; its error was: {error}")
        self._is_reported = True
        return error

    def stop(self, timeout_s: float = 0.0) -> None:
        """End the ranks: idle ones by themselves, those that still run after ``timeout_s``."""
        if self._channel is not None:
            self._channel.hang_up()
        self._ranks.stop(timeout_s)
        if self._channel is not None:
            self._channel.close()
        self._ranks.close()

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        # Wake a thread that waits for the master.
        assert self._listener is not None
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._channel is not None:
            self._channel.hang_up()
