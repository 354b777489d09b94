"""AsyncEngine: asyncio client of an engine whose ranks run as processes of one or more hosts.

A thread starts the ranks of this host, and starts them again when one dies. Requests and tokens
pass over a control channel. The client keeps the tokens of every unfinished answer: after a restart
it adds these requests again, and each answer goes on where its client is. On the other hosts of a
plan, ``run_engine_stages`` runs the ranks. Needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.dist.io.control_channel import AddedRequest, added_to_json, output_from_json
from llmpq.dist.io.generation import GenerationRequest, ServingStats, TokenOutput
from llmpq.dist.io.job import Job, check_model, checked_speculation
from llmpq.dist.io.sampling_params import StructuredOutputsParams, TokenLogprobs
from llmpq.dist.launch.ranks import CLOSE_TIMEOUT_S, HostMonitor, Hosts, Ranks
from llmpq.dist.launch.signals import StopRequest
from llmpq.dist.limited.form_checker import FormChecker
from llmpq.dist.metrics.progress import RunProgress
from llmpq.errors import SpecError, StageError, StoppedError
from llmpq.logging import get_logger
from llmpq.options.declare import read_keywords, values_of, with_keywords
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import max_model_len as longest_sequence
from llmpq.options.run import FaultOptions, LaunchOptions, RunOptions
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.plan import Plan

__all__ = ["AsyncEngine", "GenerationRequest", "TokenOutput", "run_engine_stages"]

MAX_LINE_BYTES = 1 << 28
MAX_DEATHS = 2
"""A request fails after so many deaths of the ranks in a row without a new token of its own."""
_log = get_logger(__name__)


class _Answer:
    """An unfinished answer: what its client has, and what waits for it."""

    def __init__(
        self, request: GenerationRequest, token_ids: Sequence[int], arrival_s: float
    ) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self.num_deaths = 0  # of ranks that computed it, since its last token
        self.is_started = False  # in the ranks of this start
        self._token_ids = list(token_ids)
        self._needs_prompt_logprobs = request.sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs] = []  # found in this start
        self._pending: list[TokenOutput] = []
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def to_add(self) -> AddedRequest:
        """Return the request as the engine goes on with it."""
        self._prompt_logprobs.clear()
        return AddedRequest(
            request=self.request,
            token_ids=tuple(self._token_ids),
            needs_prompt_logprobs=self._needs_prompt_logprobs,
            arrival_s=self.arrival_s,
        )

    def receive(self, output: TokenOutput) -> None:
        """Take an output of the engine; log probabilities of a prompt come before its tokens."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs += filter(None, output.prompt_logprobs)
            return
        self._token_ids += output.token_ids
        self.num_deaths = 0
        if self._needs_prompt_logprobs:
            output = replace(output, prompt_logprobs=(None, *self._prompt_logprobs))
            self._prompt_logprobs.clear()
            self._needs_prompt_logprobs = False
        self._pending.append(output)
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        """End the answer with an error."""
        self._error = error
        self._has_news.set()

    async def next(self) -> TokenOutput:
        """Return everything that is new, waiting for it."""
        await self._has_news.wait()
        self._has_news.clear()
        pending, self._pending = self._pending, []
        if not pending:
            assert self._error is not None
            raise self._error
        if self._error is not None:
            self._has_news.set()  # it is raised after the tokens
        return _merged(pending)


def _merged(outputs: Sequence[TokenOutput]) -> TokenOutput:
    first, last = outputs[0], outputs[-1]
    if len(outputs) == 1:
        return first
    logprobs = [item for output in outputs for item in output.logprobs or ()]
    return replace(
        last,
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprobs) if logprobs else None,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
    )


class AsyncEngine:
    """A loaded plan that answers any number of requests at the same time; see :meth:`start`.

    Attributes:
        stats: the latest counters.
        error: why the engine has ended for good, ``None`` while it has not.
        max_model_len: most tokens of prompt and answer together.
        vocab_size: tokens are below this number.
        start_s: seconds of each step of the last start of rank 0.
    """

    def __init__(self, ranks: Ranks, listener: socket.socket, forms: FormChecker) -> None:
        self.stats = ServingStats()
        self.error: BaseException | None = None
        self.max_model_len = 0
        self.vocab_size = 0
        self.start_s: dict[str, float] = {}
        self._ranks = ranks
        self._forms = forms
        self._listener = listener
        self._ended: Future[BaseException] = Future()  # of the thread that starts the ranks
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None  # of a loaded engine
        self._connection = asyncio.Lock()
        self._answers: dict[str, _Answer] = {}
        self._is_started = asyncio.Event()  # or has ended
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_draining = False

    @classmethod
    async def start(cls, plan: Plan, model_dir: str | Path, **options: Any) -> AsyncEngine:
        """Start the ranks of a plan; return once all of them are loaded.

        The arguments and errors are those of :meth:`launch` and :meth:`ready`.
        """
        return await cls.launch(plan, model_dir, **options).ready()

    @classmethod
    @with_keywords(EngineOptions, LaunchOptions)
    def launch(
        cls,
        plan: Plan,
        model_dir: str | Path,
        *,
        hosts: Hosts | None = None,
        progress: RunProgress | None = None,
        clock: Callable[[], float] = time.monotonic,
        monitor: HostMonitor | None = None,
        **options: Any,
    ) -> AsyncEngine:
        """Start the ranks of a plan, and return while they load; :meth:`ready` waits for them.

        Needs no event loop.

        Args:
            plan: the strategy; prefill and decode on the same stages.
            model_dir: directory with the weights.
            hosts: this host's place, which is the master's; by default all ranks run here.
            progress: receives loading events.
            clock: seconds, for ``max_restarts``.
            monitor: watches the other hosts, and has the plan without those that are lost.
            options: those of ``EngineOptions`` and ``LaunchOptions``.

        Raises:
            SpecError: the plan is not for this model, has stages of its own for each phase, or does
                not hold ``max_model_len``; or a draft model has another vocabulary.
        """
        model_dir, own, run = _checked_options(plan, model_dir, options)
        faults = FaultOptions(max_restarts=run.max_restarts)
        ranks = Ranks(plan, faults, hosts=hosts, progress=progress, clock=clock, monitor=monitor)
        job, listener = _engine_job(ranks, model_dir, own, run)
        engine = cls(ranks, listener, FormChecker(model_dir, run.form_timeout_s))
        ranks.start(job, engine._ranks_ended)
        return engine

    async def ready(self) -> AsyncEngine:
        """Wait until all ranks are loaded; return this engine, which belongs to the running loop.

        Raises:
            LlmpqError: ``CapacityError`` when memory ran out, ``StageError`` when a rank died, hung
                or failed.
        """
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, sock=self._listener, limit=MAX_LINE_BYTES
            )
            ended = asyncio.wrap_future(self._ended)
            ended.add_done_callback(lambda _: self._end(ended.result()))
            await self._is_started.wait()
            if self.error is not None:
                raise self.error
        except BaseException:
            await self.close()
            raise
        return self

    def kill(self) -> None:
        """End all ranks at once; for an engine whose :meth:`ready` was never called."""
        self._forms.close()
        self._ranks.stop()
        self._ranks.close()

    @property
    def is_alive(self) -> bool:
        """Whether the engine answers now; false while it restarts."""
        return self._writer is not None

    @property
    def num_restarts(self) -> int:
        """How often the ranks were started again."""
        return len(self._ranks.restarts)

    async def check_form(self, form: StructuredOutputsParams) -> None:
        """Check that a form of answers can be compiled within the limits.

        Raises:
            SpecError: it cannot.
        """
        await self._forms.check(form)

    async def generate(
        self, request: GenerationRequest, token_ids: Sequence[int] = ()
    ) -> AsyncGenerator[TokenOutput, None]:
        """Answer a request; leaving the iterator aborts it.

        Args:
            request: its id is that of no unfinished request.
            token_ids: tokens of the answer that another engine made; they are not yielded again.

        Yields:
            What is new since the last output; the final output has a ``finish_reason``.

        Raises:
            SpecError: the request cannot be served.
            StageError: the engine has ended.
            StoppedError: it drains, and takes no new requests.
        """
        arrival_s = time.monotonic()
        form = request.sampling.structured_outputs
        if form is not None:
            await self.check_form(form)
        self._check_open()
        if request.id in self._answers:
            raise SpecError(f"id: found {request.id!r} of an unfinished request, expected another")
        answer = self._answers[request.id] = _Answer(request, token_ids, arrival_s)
        self._is_idle.clear()
        self._add(answer)
        try:
            while True:
                output = await answer.next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self._answers.get(request.id) is answer:
                self._forget(request.id)
                self._send("abort", id=request.id)

    async def abort(self, id: str) -> None:
        """End a request, if it is unfinished; its last output has the reason ``abort``."""
        answer = self._answers.get(id)
        if answer is not None:
            self._forget(id)
            self._send("abort", id=id)
            answer.receive(TokenOutput(token_ids=(), finish_reason="abort"))

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests; return when all are finished, at the latest after ``timeout_s``.

        What is unfinished then is aborted.
        """
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        for id in list(self._answers):
            await self.abort(id)

    async def close(self) -> None:
        """End all ranks; nothing of them is left when this returns."""
        is_idle = not self._answers
        self._fail_all(StageError("the engine is closed; start another one"))
        self._forms.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        await asyncio.to_thread(self._ranks.stop, CLOSE_TIMEOUT_S if is_idle else 0.0)
        if self._server is not None:
            self._server.close()
        self._ranks.close()

    def _check_open(self) -> None:
        if self.error is not None:
            raise StageError(f"the engine has ended: {self.error}")
        if self._is_draining:
            raise StoppedError("the engine drains and takes no new requests")

    def _add(self, answer: _Answer) -> None:
        self._send("add", **added_to_json(answer.to_add()))

    def _send(self, kind: str, **fields: object) -> None:
        """Send a message; without an engine, what it needs to know is sent when one is loaded."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def _forget(self, id: str) -> None:
        del self._answers[id]
        if not self._answers:
            self._is_idle.set()

    def _fail_all(self, error: BaseException) -> None:
        for answer in self._answers.values():
            answer.fail(error)
        self._answers.clear()
        self._is_idle.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of one start of the ranks."""
        # What the ranks sent before is handled before.
        async with self._connection:
            try:
                while True:
                    self._handle(json.loads(await reader.readuntil(b"\n")), writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # the ranks have ended
            finally:
                if self._writer is writer:
                    self._writer = None
                    self._count_death()
                writer.close()

    def _count_death(self) -> None:
        """Fail the requests that may be the reason why the ranks die again and again."""
        for id, answer in list(self._answers.items()):
            answer.num_deaths += answer.is_started
            answer.is_started = False
            if answer.num_deaths == MAX_DEATHS:
                self._forget(id)
                text = f"the ranks died {MAX_DEATHS} times in a row without a token of this request"
                answer.fail(StageError(text))

    def _handle(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        kind = message["kind"]
        if kind == "tokens":
            self._receive(message["outputs"])
        elif kind == "started":
            for id in self._answers.keys() & message["ids"]:
                self._answers[id].is_started = True
        elif kind == "stats":
            self.stats = ServingStats(**message["stats"])
        elif kind == "refused":
            if (answer := self._answers.get(message["id"])) is not None:
                self._forget(message["id"])
                answer.fail(SpecError(message["message"]))
        elif kind == "ready":
            self._become_ready(message, writer)

    def _receive(self, outputs: Sequence[Any]) -> None:
        for item in outputs:
            id, output = output_from_json(item)
            if (answer := self._answers.get(id)) is None:
                continue  # it was aborted meanwhile
            answer.receive(output)
            if output.finish_reason is not None:
                self._forget(id)

    def _become_ready(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Give the unfinished requests to ranks that have started."""
        self.start_s = message["start_s"]
        steps = [f"{name} {seconds:.2f}" for name, seconds in self.start_s.items()]
        _log.info("ranks started, seconds: %s", ", ".join(steps))
        self.max_model_len, self.vocab_size = message["max_model_len"], message["vocab_size"]
        self._writer = writer
        self._ranks.serve()
        for answer in self._answers.values():
            self._add(answer)
        self._is_started.set()

    def _ranks_ended(self, error: BaseException | None) -> None:
        if error is None or isinstance(error, StoppedError):
            error = StageError("the engine is closed; start another one")
        self._ended.set_result(error)

    def _end(self, error: BaseException) -> None:
        self.error = error
        self._fail_all(error)
        self._is_started.set()


@with_keywords(EngineOptions, LaunchOptions)
def run_engine_stages(
    plan: Plan,
    model_dir: str | Path,
    hosts: Hosts,
    *,
    progress: RunProgress | None = None,
    stop: StopRequest | None = None,
    **options: Any,
) -> None:
    """Run the ranks of a host without the master, until the engine on the master's host is closed.

    Ranks that were lost are started again, as the master's host does.

    Args:
        plan: the strategy.
        model_dir: directory with the weights on this host.
        hosts: this host's place.
        progress: receives loading events.
        stop: asks to end the ranks.
        options: those of :meth:`AsyncEngine.launch`, with the same values as there.

    Raises:
        SpecError: as :meth:`AsyncEngine.launch`.
        StoppedError: they were asked to end.
        LlmpqError: a rank failed, or the master's host did not come within the time of a start.
    """
    model_dir, own, run = _checked_options(plan, model_dir, options)
    faults = FaultOptions(max_restarts=run.max_restarts)
    with Ranks(plan, faults, hosts=hosts, progress=progress, stop=stop) as ranks:
        ranks.run(_engine_job(ranks, model_dir, own, run)[0])


def _engine_job(
    ranks: Ranks, model_dir: Path, own: EngineOptions, run: LaunchOptions
) -> tuple[Job, socket.socket]:
    """Return the job of an engine, and the socket that its master connects to."""
    return ranks.socket_job(model_dir, task="online", engine=own, **values_of(run, RunOptions))


def _checked_options(
    plan: Plan, model_dir: str | Path, options: Mapping[str, Any]
) -> tuple[Path, EngineOptions, LaunchOptions]:
    """Return the absolute path of the model and the options of an engine.

    Raises:
        SpecError: the plan is not for this model or these options.
    """
    model_dir = absolute_model_path(model_dir)
    own, run = read_keywords(options, EngineOptions, LaunchOptions)
    model = load_model_dir(model_dir)
    check_model(plan, model_dir, model)
    if plan.is_split:
        raise SpecError(
            "plan: found stages of their own for prefill and decode, expected stages that do "
            "both: a step of the engine mixes prefill and decode"
        )
    speculation = checked_speculation(plan, own.speculative_config, model_dir)
    own = replace(own, speculative_config=speculation)
    longest_sequence(plan, own, model.max_positions)
    return model_dir, own, run
