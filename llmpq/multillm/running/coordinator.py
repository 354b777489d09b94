"""Coordinator: runs an application by its schedule.

It starts and stops the replicas of models as the dynamic scheduler decides, gives requests to them
first come first served, and passes answers on. A stopped replica's unfinished requests keep their
tokens and go on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.sampling_params import GREEDY, SamplingParams
from llmpq.dist.transport.errors import error_from_status
from llmpq.errors import LlmpqError, StageError, StoppedError
from llmpq.multillm.dynamic import Change, DynamicScheduler, Placed
from llmpq.multillm.graph import Application
from llmpq.multillm.running.dataflow import Dataflow, ReadyRequest
from llmpq.multillm.running.engines import ReplicaEngine, StartEngine
from llmpq.multillm.running.journal import AnswerJournal, RequestAnswer
from llmpq.multillm.running.prepare import RunModel, misfit
from llmpq.multillm.running.timeline import ReplicaRecord, Timeline
from llmpq.multillm.schedule import ModelReplica
from llmpq.spec.plan import Plan

BATCHES_AHEAD = 2
"""Requests that a replica has, in batches of its plan: it never waits for the next one."""
PROGRESS_S = 0.5


@dataclass(slots=True, kw_only=True, eq=False)
class _Work:
    """An unfinished request: its prompt, and the tokens of its answer so far."""

    ready: ReadyRequest
    order: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Replica:
    """A replica that loads or runs."""

    model: str
    limit: int
    record: ReplicaRecord
    engine: ReplicaEngine | None = None
    loading: asyncio.Task[None] | None = None
    tasks: dict[asyncio.Task[None], _Work] = field(default_factory=dict)

    def forget(self, task: asyncio.Task[None]) -> None:
        """Remove a task that has ended."""
        self.tasks.pop(task, None)


class Coordinator:
    """Runs what is unfinished of an application; see :meth:`run`.

    Args:
        app: the application.
        flow: its requests.
        scheduler: decides which models run.
        models: by name.
        plans: by ``ModelReplica.source``.
        start_engine: loads a replica.
        journal: takes the answers, and has those of earlier runs.
        timeline: takes what happens when.
        sampling: how tokens are chosen.
        on_progress: called now and then while requests run.
    """

    def __init__(  # noqa: PLR0913  the parts of a run
        self,
        *,
        app: Application,
        flow: Dataflow,
        scheduler: Callable[[Iterable[str]], DynamicScheduler],
        models: Mapping[str, RunModel],
        plans: Mapping[str | Plan | int | None, Plan],
        start_engine: StartEngine,
        journal: AnswerJournal,
        timeline: Timeline,
        sampling: SamplingParams = GREEDY,
        on_progress: Callable[[Coordinator], None] = lambda _: None,
    ) -> None:
        self.flow = flow
        self.timeline = timeline
        self.done = dict.fromkeys(app.order, 0)
        self._models = models
        self._model_of = {node.name: node.model for node in app.nodes}
        self._plans = plans
        self._start_engine = start_engine
        self._journal = journal
        self._sampling = sampling
        self._on_progress = on_progress
        self._queues: dict[str, list[tuple[int, _Work]]] = {name: [] for name in app.order}
        self._order = 0
        self._replicas: dict[Placed, _Replica] = {}
        self._nodes: Mapping[str, tuple[str, ...]] = {}
        self._ending: dict[asyncio.Task[None], tuple[str, ...]] = {}
        self._end = asyncio.Event()
        self._error: BaseException | None = None
        self._enqueue(flow.begin())
        self._scheduler = scheduler(flow.finished())

    async def run(self) -> None:
        """Ask all unfinished requests; return when the last is answered.

        Raises:
            LlmpqError: a replica did not start, or failed for good; names the model. What was
                answered is in the journal.
        """
        progress = asyncio.create_task(self._report())
        try:
            self._apply(self._scheduler.begin())
            self._pump()
            await self._end.wait()
        finally:
            progress.cancel()
            self.timeline.end()
            for key in list(self._replicas):
                self._stop(key)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*self._ending, return_exceptions=True)
        if self._error is not None:
            raise self._error

    def stop(self, source: str) -> None:
        """End the run early; ``source`` says why."""
        if self._end.is_set():
            return
        left = sum(self.flow.unfinished.values())
        self._end_with(
            StoppedError(f"{source}: stopped with {left} items unanswered; --resume goes on")
        )

    @property
    def stage(self) -> int:
        """Number of the planned stage that is run."""
        return self._scheduler.stage

    async def _report(self) -> None:
        while True:
            self._on_progress(self)
            await asyncio.sleep(PROGRESS_S)

    def _enqueue(self, found: Iterable[ReadyRequest]) -> None:
        """Queue requests; those that an earlier run answered, or that do not fit, are passed on."""
        waiting = deque(found)
        while waiting:
            ready = waiting.popleft()
            node = ready.key.node
            known = self._journal.answers.get(ready.key)
            if known is not None:
                self.done[node] += 1
                waiting += self.flow.answer(ready.key, known.text)
                continue
            model = self._models[self._model_of[node]]
            tokens = tuple(model.tokenizer.encode(ready.prompt))
            room = model.context - len(tokens)
            if room < 1 or not tokens:
                waiting += self.flow.fail(ready.key, misfit(ready.where, node, len(tokens), model))
                continue
            self._order += 1
            work = _Work(
                ready=ready,
                order=self._order,
                prompt_token_ids=tokens,
                max_tokens=min(ready.max_new_tokens or room, room),
            )
            heapq.heappush(self._queues[node], (work.order, work))

    def _apply(self, change: Change) -> None:
        """Stop and start replicas."""
        for placed in change.stop:
            self._stop(placed)
        self._nodes = change.nodes
        for model, replica in change.start:
            self._start(model, replica)
        if self._replicas and (change.stop or change.start):
            current: dict[str, list[ModelReplica]] = {}
            for model, replica in self._replicas:
                current.setdefault(model, []).append(replica)
            self.timeline.begin_stage(change.stage, current)

    def _start(self, model: str, replica: ModelReplica) -> None:
        plan = self._plans[replica.source]
        found = _Replica(
            model=model,
            limit=BATCHES_AHEAD * plan.workload.batch,
            record=self.timeline.begin_replica(model, replica),
        )
        before = [
            task for task, devices in self._ending.items() if set(devices) & set(replica.devices)
        ]
        found.loading = asyncio.create_task(self._load(found, plan, replica, before))
        self._replicas[model, replica] = found

    async def _load(
        self,
        found: _Replica,
        plan: Plan,
        replica: ModelReplica,
        before: Iterable[asyncio.Task[None]],
    ) -> None:
        """Load a replica once its devices are free."""
        try:
            await asyncio.gather(*before)
            found.record.start_s = self.timeline.now_s()
            folder = self._models[found.model].folder
            found.engine = await self._start_engine(plan, folder, replica.devices)
            found.record.ready_s = self.timeline.now_s()
        except LlmpqError as error:
            self._fail(found, error)
        except Exception as error:
            self._end_with(error)
        else:
            self._pump()

    def _stop(self, key: Placed) -> None:
        """Begin to end a replica; its requests are queued again at once."""
        replica = self._replicas.pop(key)
        replica.record.stop_s = self.timeline.now_s()
        works = list(replica.tasks.values())
        for task in replica.tasks:
            task.cancel()
        for work in works:
            if not work.is_finished:
                replica.record.end_request(self.timeline.now_s(), None)
                heapq.heappush(self._queues[work.ready.key.node], (work.order, work))
        task = asyncio.create_task(self._close(replica))
        self._ending[task] = replica.record.devices
        task.add_done_callback(self._closed)

    async def _close(self, replica: _Replica) -> None:
        if replica.loading is not None and not replica.loading.done():
            replica.loading.cancel()
            await asyncio.gather(replica.loading, return_exceptions=True)
        await asyncio.gather(*replica.tasks, return_exceptions=True)
        if replica.engine is not None:
            await replica.engine.close()
        replica.record.end_s = self.timeline.now_s()

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._ending.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end_with(error)

    def _pump(self) -> None:
        """Change models where nodes are finished; give waiting requests to replicas with room."""
        if self._end.is_set():
            return
        if news := self.flow.finished() - self._scheduler.finished:
            self._apply(self._scheduler.finish(news))
        if not any(self.flow.unfinished.values()):
            self._end.set()
            return
        for model in self._nodes:
            self._give(model)
        self._check_stalled()

    def _give(self, model: str) -> None:
        replicas = [
            one for one in self._replicas.values() if one.model == model and one.engine is not None
        ]
        while replicas:
            replica = min(replicas, key=lambda one: len(one.tasks) / one.limit)
            if len(replica.tasks) >= replica.limit:
                return
            queues = [self._queues[node] for node in self._nodes[model] if self._queues[node]]
            if not queues:
                return
            _, work = heapq.heappop(min(queues, key=lambda queue: queue[0][0]))
            replica.record.begin_request(self.timeline.now_s())
            task = asyncio.create_task(self._answer(replica, work))
            replica.tasks[task] = work
            task.add_done_callback(replica.forget)

    def _check_stalled(self) -> None:
        """Run other models if none of the running ones can get a request any more."""
        if self._end.is_set() or any(
            one.tasks or one.engine is None for one in self._replicas.values()
        ):
            return
        change = self._scheduler.stalled()
        assert change.start or set(change.nodes) - set(self._nodes), "no model can go on"
        self._apply(change)
        for model in self._nodes:
            self._give(model)

    async def _answer(self, replica: _Replica, work: _Work) -> None:
        """Get the answer of a request from a replica."""
        key = work.ready.key
        request = GenerationRequest(
            id=f"{key.node}/{key.item}/{key.part}/{work.order}",
            prompt_token_ids=work.prompt_token_ids,
            sampling=replace(self._sampling, max_tokens=work.max_tokens),
        )
        assert replica.engine is not None
        try:
            async with aclosing(replica.engine.generate(request, tuple(work.token_ids))) as outputs:
                async for output in outputs:
                    work.token_ids += output.token_ids
                    if output.finish_reason in ("stop", "length"):
                        self._finish(replica, work, output.finish_reason)
                        return
            raise StageError(f"request {request.id}: ended without an answer")
        except LlmpqError as error:
            self._fail(replica, error)
        except Exception as error:
            self._end_with(error)
        finally:
            if work.is_finished:
                replica.tasks.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
                self._pump()

    def _finish(self, replica: _Replica, work: _Work, reason: Literal["stop", "length"]) -> None:
        """Keep an answer, and queue the requests that it makes possible; without a pause."""
        key, tokens = work.ready.key, tuple(work.token_ids)
        text = self._models[replica.model].tokenizer.decode(tokens)
        self._journal.write(
            RequestAnswer(key=key, token_ids=tokens, text=text, finish_reason=reason)
        )
        work.is_finished = True
        self.done[key.node] += 1
        self.timeline.finish_request(replica.record, key.node, len(tokens))
        self._enqueue(self.flow.answer(key, text))

    def _fail(self, replica: _Replica, error: LlmpqError) -> None:
        """End the run because of a replica."""
        where = f"model '{replica.model}' on {', '.join(replica.record.devices)}"
        permanent = error.is_permanent
        self._end_with(
            error_from_status(error.exit_status, f"{where}: {error}", is_permanent=permanent)
        )

    def _end_with(self, error: BaseException) -> None:
        self._error = self._error or error
        self._end.set()
