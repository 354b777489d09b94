"""AsyncEngine: asyncio client of an engine whose ranks run as processes of one or more hosts.

A thread starts the ranks of this host, and starts them again when one dies. Requests and tokens
pass over a control channel. The client keeps the tokens of every unfinished answer: after a restart
it adds these requests again, and each answer goes on where its client is. On the other hosts of a
plan, ``run_engine_stages`` runs the ranks. ``Session`` is for callers without an event loop. Needs
no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from llmpq.dist.io.control_channel import AddedRequest, added_to_json, output_from_json
from llmpq.dist.io.generation import GenerationRequest, ServingStats, TokenOutput
from llmpq.dist.io.job import Job, Task, check_model, checked_speculation, schedule_of
from llmpq.dist.io.prompts import Prompt, RequestId, prompt_to_json
from llmpq.dist.io.results import Result, result_from_fields
from llmpq.dist.io.sampling_params import StructuredOutputsParams, TokenLogprobs
from llmpq.dist.launch.ranks import (
    CLOSE_TIMEOUT_S,
    HostMonitor,
    Hosts,
    Ranks,
    ranks_of_node,
)
from llmpq.dist.launch.signals import StopRequest
from llmpq.dist.limited.form_checker import FormChecker
from llmpq.dist.metrics.control_groups import available_memory_bytes
from llmpq.dist.metrics.progress import RunProgress
from llmpq.errors import SpecError, StageError, StoppedError
from llmpq.logging import get_logger
from llmpq.options.declare import read_keywords, values_of, with_keywords
from llmpq.options.engine import EngineOptions, SpeculationOptions
from llmpq.options.limits import check_host_memory, check_state_cache
from llmpq.options.limits import max_model_len as longest_sequence
from llmpq.options.run import FaultOptions, LaunchOptions, RunOptions
from llmpq.spec.fields import Fields
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.plan import Plan

__all__ = ["AsyncEngine", "GenerationRequest", "TokenOutput", "run_engine_stages"]

MAX_LINE_BYTES = 1 << 28
MAX_DEATHS = 2
"""A request fails after so many deaths of the ranks in a row without a new token of its own."""
T = TypeVar("T")
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A new token of a request; ``text`` is empty inside a character of several tokens."""

    id: RequestId
    token_id: int
    text: str


class _Unread(Generic[T]):
    """What the ranks sent and its reader has not taken yet."""

    def __init__(self) -> None:
        self._pending: list[T] = []
        self.is_over = False
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def put(self, item: T) -> None:
        """Add an item."""
        self._pending.append(item)
        self._has_news.set()

    def end(self, error: BaseException | None = None) -> None:
        """Add no more; an error is raised once everything is taken."""
        self.is_over, self._error = True, error
        self._has_news.set()

    async def take(self) -> list[T]:
        """Return everything that is new, waiting for it; nothing at the end."""
        await self._has_news.wait()
        pending, self._pending = self._pending, []
        if not self.is_over:
            self._has_news.clear()
        elif self._error is not None and not pending:
            raise self._error
        return pending


class _Batch(_Unread[NewToken | Result]):
    """A batch of prompts that the ranks answer."""

    def __init__(self, id: int) -> None:
        super().__init__()
        self.id = id
        self.is_aborted = False

    def receive(self, message: Mapping[str, Any]) -> None:
        """Take a message of the ranks."""
        for name, token, text in message.get("tokens", ()):
            self.put(NewToken(id=name, token_id=token, text=text))
        if "result" in message:
            self.put(result_from_fields(Fields(message["result"], "result")))
        if "error" in message:
            self.end(SpecError(message["error"]))
        elif "is_done" in message:
            self.end()

    def abort(self) -> None:
        """End early."""
        self.is_aborted = True
        self._pending.clear()
        self.end(StageError("this batch was ended by a later one"))


class _Answer(_Unread[TokenOutput]):
    """An unfinished answer: what its client has, and what waits for it."""

    def __init__(
        self, request: GenerationRequest, token_ids: Sequence[int], arrival_s: float
    ) -> None:
        super().__init__()
        self.request = request
        self.arrival_s = arrival_s
        self.num_deaths = 0  # of ranks that computed it, since its last token
        self.is_started = False  # in the ranks of this start
        self._token_ids = list(token_ids)
        self._needs_prompt_logprobs = request.sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs] = []  # found in this start

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
        self.put(output)

    async def next(self) -> TokenOutput:
        """Return everything that is new as one output, waiting for it."""
        return _merged(await self.take())


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

    With the task ``serve`` it answers one batch of prompts at a time, for :class:`Session`.

    Attributes:
        stats: the latest counters.
        error: why the engine has ended for good, ``None`` while it has not.
        max_model_len: most tokens of prompt and answer together.
        vocab_size: tokens are below this number.
        start_s: seconds of each step of the last start of rank 0.
    """

    def __init__(
        self,
        ranks: Ranks,
        model_dir: Path,
        own: EngineOptions,
        run: LaunchOptions,
        task: Task = "online",
    ) -> None:
        self.stats = ServingStats()
        self.error: BaseException | None = None
        self.max_model_len = 0
        self.vocab_size = 0
        self.start_s: dict[str, float] = {}
        self._ranks = ranks
        self._forms = FormChecker(model_dir, run.form_timeout_s)
        self._ended: Future[BaseException] = Future()  # of the thread that starts the ranks
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None  # of a loaded engine
        self._connection = asyncio.Lock()
        self._answers: dict[str, _Answer] = {}
        self._batch: _Batch | None = None
        self._batch_ids = itertools.count()
        self._is_started = asyncio.Event()  # or has ended
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_draining = False
        job, self._listener = _engine_job(ranks, model_dir, own, run, task)
        ranks.start(job, self._ranks_ended)

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
        model_dir, own, run = _checked_options(plan, model_dir, options, hosts)
        faults = FaultOptions(max_restarts=run.max_restarts)
        ranks = Ranks(plan, faults, hosts=hosts, progress=progress, clock=clock, monitor=monitor)
        return cls(ranks, model_dir, own, run)

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
        """End all ranks at once; for an engine without a running event loop."""
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

    async def start_batch(self, prompts: Sequence[Prompt], *, streams: bool) -> _Batch:
        """Answer a batch of prompts with different ids; an earlier batch is aborted.

        Raises:
            StageError: the engine has ended.
        """
        self._check_open()
        if self._batch is not None:
            self.abort_batch(self._batch)
        batch = self._batch = _Batch(next(self._batch_ids))
        lines = [prompt_to_json(prompt) for prompt in prompts]
        self._send("batch", id=batch.id, prompts=lines, streams=streams)
        return batch

    def abort_batch(self, batch: _Batch) -> None:
        """End a batch, if it is unfinished."""
        if batch is self._batch:
            self._batch = None
            batch.abort()
            self._send("abort", id=batch.id)

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
        is_idle = not self._answers and self._batch is None
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
            raise StageError(
                f"the engine has ended, start another one; its error was: {self.error}"
            )
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
            answer.end(error)
        self._answers.clear()
        if self._batch is not None:
            self._batch.end(error)
            self._batch = None
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
                answer.end(StageError(text))

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
                answer.end(SpecError(message["message"]))
        elif kind == "batch":
            self._receive_of_batch(message)
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

    def _receive_of_batch(self, message: dict[str, Any]) -> None:
        batch = self._batch
        if batch is None or batch.id != message["id"]:
            return  # it was aborted meanwhile
        batch.receive(message)
        if batch.is_over:
            self._batch = None

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


class Session(contextlib.AbstractContextManager["Session"]):
    """An engine for callers without an event loop; it answers one batch of prompts at a time.

    Its event loop runs in a thread. The options are those of ``RunOptions``, and the engine's
    ``speculative_config``; ``progress`` receives the events of the ranks. ``hosts`` is this host's
    place, by default the only one, and ``monitor`` watches the others.

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
        self._engine = engine = AsyncEngine(
            Ranks(
                plan,
                FaultOptions(max_restarts=0),
                hosts=hosts,
                progress=progress,
                monitor=monitor,
            ),
            model_dir,
            EngineOptions(speculative_config=speculation),
            LaunchOptions(**values_of(run)),
            task="serve",
        )
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = loop = runner.get_loop()
        self._finalizer = weakref.finalize(self, _end_session, engine, loop)
        self._thread = threading.Thread(
            target=_run_loop, args=(runner,), daemon=True, name="llmpq session"
        )
        self._thread.start()
        try:
            self._await(engine.ready())
        except BaseException:
            self._finalizer()
            raise

    def run(
        self, prompts: Sequence[Prompt], *, streams: bool = False
    ) -> Iterator[NewToken | Result]:
        """Answer a batch of prompts with different ids; an earlier batch is aborted.

        Yields:
            The result of each prompt as it finishes, after its tokens when ``streams``.

        Raises:
            SpecError: a prompt cannot be served; no other one is answered either.
            LlmpqError: as for the class; the session has ended then.
        """
        batch = self._await(self._engine.start_batch(prompts, streams=streams))
        try:
            while items := self._await(batch.take()):
                for item in items:
                    yield item
                    if batch.is_aborted:
                        break
        finally:  # also when the caller stops early
            with contextlib.suppress(RuntimeError):  # the session is closed
                self._loop.call_soon_threadsafe(self._engine.abort_batch, batch)

    def generate(self, prompts: Sequence[Prompt]) -> list[Result]:
        """Return the results of a batch in the order of its prompts; see :meth:`run`."""
        answers = self.run(prompts)
        results = {answer.id: answer for answer in answers if isinstance(answer, Result)}
        return [results[prompt.id] for prompt in prompts]

    def close(self) -> None:
        """End all ranks; nothing of them is left when this returns."""
        if self._finalizer.alive:
            self._await(self._engine.close())
            self._finalizer()
            self._thread.join()

    def __exit__(self, *error: object) -> None:
        """Close the session."""
        self.close()

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine of the engine."""
        if not self._finalizer.alive:
            coroutine.close()
            raise StageError("the pipeline is closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # where the caller was interrupted
            raise


def _run_loop(runner: asyncio.Runner) -> None:
    with runner:
        runner.get_loop().run_forever()


def _end_session(engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
    engine.kill()
    loop.call_soon_threadsafe(loop.stop)


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
    model_dir, own, run = _checked_options(plan, model_dir, options, hosts)
    faults = FaultOptions(max_restarts=run.max_restarts)
    with Ranks(plan, faults, hosts=hosts, progress=progress, stop=stop) as ranks:
        ranks.run(_engine_job(ranks, model_dir, own, run)[0])


def _engine_job(
    ranks: Ranks, model_dir: Path, own: EngineOptions, run: LaunchOptions, task: Task = "online"
) -> tuple[Job, socket.socket]:
    """Return the job of an engine, and the socket that its master connects to."""
    if own.kv_offloading_folder is not None:
        own = replace(own, kv_offloading_folder=ranks.make_folder(own.kv_offloading_folder))
    return ranks.socket_job(model_dir, task=task, engine=own, **values_of(run, RunOptions))


def _checked_options(
    plan: Plan, model_dir: str | Path, options: Mapping[str, Any], hosts: Hosts | None
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
    check_state_cache(own, model)
    if own.kv_offloading_bytes or own.state_cache_bytes:
        here = hosts or Hosts()
        ranks = ranks_of_node(plan, here.node_rank, here.num_nodes)
        check_host_memory(plan, own, ranks, available_memory_bytes())
    return model_dir, own, run
