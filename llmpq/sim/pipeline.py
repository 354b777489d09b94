"""Discrete-event simulation of an engine's loop on a virtual pipeline.

Like ``llmpq.dist.engine``, the master does one task at a time: it completes a step (projection,
sampling), or asks the scheduler and dispatches the next one (embedding, its own layers). Other
ranks process steps in order of arrival. The scheduler is that of the runtime, so that both make the
same decisions for the same times.

Busy workers share the cores of a host evenly. Between two events every worker runs at a constant
rate.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Generic, TypeVar

from llmpq.batching import BatchingPolicy, PolicyScheduler, RequestRecord
from llmpq.batching.drift import DriftMonitor
from llmpq.batching.engine_step import (
    DraftWork,
    EngineRequest,
    EngineStep,
    ScheduledChunk,
    StepScheduler,
)
from llmpq.batching.length import LengthPredictor
from llmpq.batching.policy_scheduler import slot_limits
from llmpq.errors import LlmpqError
from llmpq.sim.costs import BatchShape, Hop, MicroBatchCosts, PipelineCosts, batch_shape
from llmpq.sim.report import Activity, SimReport
from llmpq.spec.precision import Phase
from llmpq.spec.workload import HASH_BLOCK_TOKENS, TraceRequest

Accepts = Callable[[int, int], bool]
"""Returns whether a draft token is right, by the number of its request and its place there."""
DraftSeconds = Callable[[Sequence[DraftWork]], float]
"""Returns the seconds in which a draft model computes the drafts of a step."""

Shape = TypeVar("Shape")

_TINY_S = 1e-12
"""Events that are so close are simultaneous: their times are sums in different orders."""
_NO_HOP = Hop(0.0, 0.0)


def simulate(  # noqa: PLR0913  the parts of a simulation
    costs: MicroBatchCosts,
    policy: BatchingPolicy,
    trace: Sequence[TraceRequest],
    *,
    num_slots: int,
    with_activities: bool = False,
    monitor: DriftMonitor | None = None,
    predictor: LengthPredictor | None = None,
) -> SimReport:
    """Simulate a trace under a batching policy.

    Args:
        costs: layout and costs of the pipeline.
        policy: a new batching policy.
        trace: requests in order of arrival.
        num_slots: number of KV slots.
        with_activities: record every activity, for a timeline.
        monitor: compares answer lengths with the schedule, as in the runtime.
        predictor: predicts answer lengths; ``None`` for the true ones.

    Raises:
        LlmpqError: the policy makes an invalid decision, or waits forever.
    """
    longest = max((item.prompt_tokens + item.new_tokens for item in trace), default=1)
    limits = slot_limits(num_slots, longest, block_size=longest)
    scheduler = PolicyScheduler(policy, limits, costs.layout.depth, monitor=monitor)
    pipeline = VirtualPipeline(
        costs, _micro_batch, scheduler, predictor=predictor, with_activities=with_activities
    )
    for number, item in enumerate(trace):
        pipeline.advance(item.arrival_s)
        pipeline.add(number, item)
    scheduler.close()
    pipeline.advance(math.inf)
    if not scheduler.is_done:
        raise LlmpqError("batching policy: waits although nothing is in flight")
    return pipeline.report()


def _micro_batch(step: EngineStep) -> BatchShape:
    assert step.phase is not None
    return batch_shape(step.phase, [chunk.first + chunk.count for chunk in step.chunks])


@dataclass(slots=True, kw_only=True, eq=False)
class _Message(Generic[Shape]):
    """A step between ranks.

    Attributes:
        step: the step.
        shape: its size.
        path: ranks that compute it.
        position: index of the next rank on the path; past the end it returns to the master.
        received_s: seconds of work of the receiver for the transfer.
    """

    step: EngineStep
    shape: Shape
    path: tuple[int, ...]
    position: int = 0
    received_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker(Generic[Shape]):
    """State of one rank.

    Attributes:
        is_busy: whether it computes.
        message: what it computes; ``None`` for drafts.
        hop: cost of sending it.
        end: number of the event that ends its task, at ``end_s``.
        rate: speed of the task, 1 with cores enough.
        steps: steps that it has computed its layers of.
    """

    rank: int
    host: str
    threads: int
    waiting: deque[_Message[Shape]] = field(default_factory=deque)
    is_busy: bool = False
    message: _Message[Shape] | None = None
    hop: Hop = _NO_HOP
    start_s: float = 0.0
    end: int = -1
    end_s: float = 0.0
    rate: float = 1.0
    steps: int = 0


class VirtualPipeline(Generic[Shape]):
    """A pipeline that receives requests while its clock runs.

    Args:
        costs: layout and costs of the pipeline.
        size: returns what the costs of a step depend on.
        scheduler: decides the steps.
        accepts: which draft tokens are right; ``None`` for no speculative decoding.
        draft_s: seconds of the draft model, whose drafts the master waits for.
        draft_stage: stage whose device computes them, after the steps before; ``None`` for a device
            of its own.
        predictor: predicts answer lengths, from the prompts' lengths; ``None`` for the true ones.
        with_activities: record every activity.
    """

    def __init__(  # noqa: PLR0913  the parts of an engine
        self,
        costs: PipelineCosts[Shape],
        size: Callable[[EngineStep], Shape],
        scheduler: StepScheduler,
        *,
        accepts: Accepts | None = None,
        draft_s: DraftSeconds | None = None,
        draft_stage: int | None = None,
        predictor: LengthPredictor | None = None,
        with_activities: bool = False,
    ) -> None:
        layout = costs.layout
        self.now_s = 0.0
        self.scheduler = scheduler
        self._costs, self._size, self._predictor = costs, size, predictor
        self._accepts, self._draft_s, self._draft_stage = accepts, draft_s, draft_stage
        self._paths = {phase: layout.path(phase) for phase in (None, *Phase)}
        self._is_split = layout.is_split
        self._cores = layout.cores
        self._workers: list[_Worker[Shape]] = [
            _Worker(rank=rank, host=layout.hosts[rank], threads=layout.threads[rank])
            for rank in range(layout.num_ranks)
        ]
        self._others = self._workers[1:]
        self._is_waiting = False  # the scheduler has no step before the next event
        self._drafting: EngineStep | None = None  # the master waits for its drafts
        # Ends of tasks, and messages on their way: time, number, rank.
        self._events: list[tuple[float, int, int, _Message[Shape] | None]] = []
        self._number = count()
        self._delivered_s: dict[tuple[int, int], float] = {}  # last delivery by link
        self._times: dict[int, _Times] = {}
        self._not_started: set[int] = set()
        self._unfinished = 0
        self._num_steps = self._num_tokens = 0
        self._work_s: list[dict[Phase | None, float]] = [
            dict.fromkeys((*Phase, None), 0.0) for _ in self._workers
        ]
        self._activities: list[Activity] | None = [] if with_activities else None

    def add(self, request: int, item: TraceRequest, *, max_tokens: int | None = None) -> None:
        """Let a request arrive.

        Args:
            request: its number.
            item: lengths of prompt and answer.
            max_tokens: ``max_tokens`` of the request if its answer is not longer.

        Raises:
            CapacityError: the request does not fit into the KV blocks.
        """
        asked = EngineRequest(
            request=request,
            token_ids=_token_ids(item),
            prompt_tokens=item.prompt_tokens,
            max_tokens=max(item.new_tokens, max_tokens or 0),
            arrival_s=item.arrival_s,
            predicted_tokens=float(item.new_tokens),
        )
        if self._predictor is not None:
            # Its content is made up: the tokens of a real prompt would say more.
            predicted = self._predictor(replace(asked, token_ids=None))
            asked = replace(asked, predicted_tokens=predicted)
        self.scheduler.add(asked)
        self._times[request] = _Times(item)
        self._not_started.add(request)
        self._unfinished += 1

    def advance(self, until_s: float) -> None:
        """Work until a time; a task of the master that begins before it is finished."""
        self._is_waiting = False
        events = self._events
        while True:
            if self._is_idle:
                if self.now_s >= until_s:
                    return
                self._wake_master(until_s)
            next_s = events[0][0] if events else math.inf
            if self._is_idle:
                next_s = min(next_s, until_s)
                if self._is_waiting:
                    next_s = min(next_s, max(self.now_s, self.scheduler.wake_s))
            if next_s == math.inf:
                return
            self._play(next_s)

    def report(self) -> SimReport:
        """Return the figures of all finished requests."""
        return SimReport(
            requests=tuple(
                times.record(number) for number, times in self._times.items() if not times.left
            ),
            steps=self._num_steps,
            step_tokens=self._num_tokens,
            work_s=tuple(self._work_s),
            activities=tuple(self._activities or ()),
        )

    @property
    def _is_idle(self) -> bool:
        """Whether the master can begin a task."""
        return not self._workers[0].is_busy and self._drafting is None

    def _wake_master(self, until_s: float) -> None:
        """Give the idle master its next task, as the engine does: complete, then dispatch."""
        master = self._workers[0]
        if master.waiting:
            self._begin(master, self._take(master))
            return
        # Without unfinished requests nothing is left to decide once none will come.
        if self._is_waiting or (not self._unfinished and until_s == math.inf):
            return
        step = self.scheduler.schedule(self.now_s)
        if step is None:
            self._is_waiting = True
        elif step.drafts:
            self._drafting = step
            self._begin_drafts()
        else:
            self._dispatch(step)

    def _begin_drafts(self) -> None:
        """Begin the drafts of a step once their stage has computed all steps before it."""
        step, stage = self._drafting, self._draft_stage
        assert step is not None
        assert self._draft_s is not None
        worker = self._workers[stage or 0]
        if worker.steps < self._num_steps:
            return
        seconds = self._draft_s(step.drafts)
        if stage is not None:
            self._work_s[stage][step.phase] += seconds
        self._start(worker, None, seconds)

    def _dispatch(self, step: EngineStep) -> None:
        self._num_steps += 1
        self._num_tokens += sum(chunk.count for chunk in step.chunks)
        if self._not_started:
            for request in self._not_started.intersection(chunk.request for chunk in step.chunks):
                self._times[request].start_s = self.now_s
                self._not_started.remove(request)
        message = _Message(step=step, shape=self._size(step), path=self._paths[step.phase])
        self._begin(self._workers[0], message)

    def _begin(self, worker: _Worker[Shape], message: _Message[Shape]) -> None:
        """Start a worker on a message."""
        costs, shape, path = self._costs, message.shape, message.path
        if message.position == len(path):
            seconds, worker.hop = costs.project_s(shape), _NO_HOP
        else:
            seconds = costs.stage_s(worker.rank, shape)
            worker.hop = costs.hop(worker.rank, shape) if len(path) > 1 else _NO_HOP
        self._work_s[worker.rank][message.step.phase] += seconds
        self._start(worker, message, message.received_s + seconds + worker.hop.end_s)

    def _take(self, worker: _Worker[Shape]) -> _Message[Shape]:
        """Return the next message of a worker; decode first if the paths are separate."""
        waiting = worker.waiting
        if self._is_split:
            decode = [message for message in waiting if message.step.phase is Phase.DECODE]
            if decode:
                waiting.remove(decode[0])
                return decode[0]
        return waiting.popleft()

    def _start(
        self, worker: _Worker[Shape], message: _Message[Shape] | None, seconds: float
    ) -> None:
        worker.is_busy, worker.message = True, message
        worker.start_s, worker.end_s = self.now_s, self.now_s + seconds
        worker.rate = 1.0
        self._end_at(worker, worker.end_s)
        if worker.host in self._cores:
            self._share_cores(worker.host)

    def _end_at(self, worker: _Worker[Shape], end_s: float) -> None:
        worker.end, worker.end_s = next(self._number), end_s
        heapq.heappush(self._events, (end_s, worker.end, worker.rank, None))

    def _share_cores(self, host: str) -> None:
        """Give each busy worker of a host its share of the cores."""
        busy = [worker for worker in self._workers if worker.is_busy and worker.host == host]
        rate = min(1.0, self._cores[host] / max(1, sum(worker.threads for worker in busy)))
        for worker in busy:
            if worker.rate != rate:
                left_s = (worker.end_s - self.now_s) * worker.rate
                worker.rate = rate
                self._end_at(worker, self.now_s + left_s / rate)

    def _play(self, at_s: float) -> None:
        """Set the clock, end the tasks and deliver the messages of that time."""
        self.now_s = at_s
        if at_s >= self.scheduler.wake_s:
            self._is_waiting = False
        events, latest_s = self._events, at_s + _TINY_S
        while events and events[0][0] <= latest_s:
            _, number, rank, message = heapq.heappop(events)
            worker = self._workers[rank]
            if message is not None:
                worker.waiting.append(message)
            elif worker.end == number:
                self._end(worker)
        for worker in self._others:
            if worker.waiting and not worker.is_busy:
                self._begin(worker, self._take(worker))
        if self._drafting is not None and not self._workers[self._draft_stage or 0].is_busy:
            self._begin_drafts()

    def _end(self, worker: _Worker[Shape]) -> None:
        """Finish the task of a worker and send its output."""
        message = worker.message
        worker.is_busy, worker.message = False, None
        if worker.host in self._cores:
            self._share_cores(worker.host)
        if message is None:
            self._complete_drafts()
            return
        self._record_activity(worker, message)
        path = message.path
        if message.position == len(path):
            self._complete(message.step)
            return
        worker.steps += 1
        message.position += 1
        message.received_s = worker.hop.end_s
        target = path[message.position] if message.position < len(path) else 0
        # A small message does not overtake a large one on the same link.
        link = worker.rank, target
        delivered_s = max(self.now_s + worker.hop.delay_s, self._delivered_s.get(link, 0.0))
        self._delivered_s[link] = delivered_s
        heapq.heappush(self._events, (delivered_s, next(self._number), target, message))

    def _complete_drafts(self) -> None:
        step, self._drafting = self._drafting, None
        assert step is not None
        self.scheduler.complete_drafts(step, self.now_s)
        self._dispatch(step)

    def _complete(self, step: EngineStep) -> None:
        times, now_s = self._times, self.now_s
        tokens: dict[int, int] = {}
        finished: set[int] = set()
        accepted: dict[int, list[int]] = {}
        for chunk in step.chunks:
            if chunk.makes_token:
                request = chunk.request
                # Token ids below zero: no prompt continues an answer of the simulation.
                tokens[request] = -1 - request
                if chunk.num_draft_tokens:
                    right = self._count_accepted(chunk)
                    accepted[request] = [-1 - request] * right
                    for _ in range(right):
                        times[request].add_token(now_s)
                if times[request].add_token(now_s):
                    finished.add(request)
        self._unfinished -= len(finished)
        self._is_waiting = False
        self.scheduler.complete(step.number, tokens, finished, accepted, now_s=now_s)

    def _count_accepted(self, chunk: ScheduledChunk) -> int:
        """Return how many draft tokens become tokens of the answer; one more token follows them."""
        assert self._accepts is not None
        most = min(chunk.num_draft_tokens, self._times[chunk.request].left - 1)
        for right in range(most):
            if not self._accepts(chunk.request, chunk.first + 1 + right):
                return right
        return most

    def _record_activity(self, worker: _Worker[Shape], message: _Message[Shape]) -> None:
        if self._activities is not None:
            step = message.step
            self._activities.append(
                Activity(
                    stage=worker.rank,
                    phase=step.phase,
                    micro_batch=step.number,
                    rows=len(step.chunks),
                    start_s=worker.start_s,
                    end_s=self.now_s,
                )
            )


class _Times:
    """Times of a request."""

    __slots__ = ("end_s", "first_token_s", "item", "left", "start_s")

    def __init__(self, item: TraceRequest) -> None:
        self.item = item
        self.left = item.new_tokens
        self.start_s: float | None = None
        self.first_token_s = self.end_s = 0.0

    def add_token(self, now_s: float) -> bool:
        """Return whether the answer is complete."""
        left = self.left
        if left == self.item.new_tokens:
            self.first_token_s = now_s
        self.left = left = left - 1
        self.end_s = now_s
        return not left

    def record(self, number: int) -> RequestRecord:
        assert self.start_s is not None
        return RequestRecord(
            request=number,
            prompt_tokens=self.item.prompt_tokens,
            new_tokens=self.item.new_tokens,
            arrival_s=self.item.arrival_s,
            start_s=self.start_s,
            first_token_s=self.first_token_s,
            end_s=self.end_s,
        )


def _token_ids(item: TraceRequest) -> tuple[int, ...] | None:
    """Return tokens that are equal where the hashes of two prompts are; ``None`` without hashes."""
    if not item.hash_ids:
        return None
    ids = [number for number in item.hash_ids for _ in range(HASH_BLOCK_TOKENS)]
    return tuple(ids[: item.prompt_tokens])
