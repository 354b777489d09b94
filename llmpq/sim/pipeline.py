"""Discrete-event simulation of the engine's loop on a pipeline.

Like ``llmpq.dist.engine``, the master does one task at a time: it completes a micro-batch
(projection, sampling), or asks the policy and dispatches the next one (embedding, its own layers).
Other ranks process micro-batches in order of arrival. The simulator uses the scheduler of the
runtime, so that both make the same decisions for the same times.

Busy workers share the cores of a host evenly. Between two events every worker runs at a constant
rate.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from llmpq.batching import (
    BatchingPolicy,
    PolicyScheduler,
    RequestRecord,
)
from llmpq.batching.drift import DriftMonitor
from llmpq.batching.engine_step import EngineRequest, EngineStep
from llmpq.batching.policy_scheduler import slot_limits
from llmpq.errors import LlmpqError
from llmpq.sim.costs import BatchShape, Hop, MicroBatchCosts, batch_shape
from llmpq.sim.report import Activity, SimReport
from llmpq.spec.precision import Phase
from llmpq.spec.workload import TraceRequest

_TINY_S = 1e-12
_NO_HOP = Hop(0.0, 0.0)


def simulate(
    costs: MicroBatchCosts,
    policy: BatchingPolicy,
    trace: Sequence[TraceRequest],
    *,
    num_slots: int,
    with_activities: bool = False,
    monitor: DriftMonitor | None = None,
) -> SimReport:
    """Simulate a trace.

    Args:
        costs: layout and costs of the pipeline.
        policy: a new batching policy.
        trace: requests in order of arrival.
        num_slots: number of KV slots.
        with_activities: record every activity, for a timeline.
        monitor: compares answer lengths with the schedule, as in the runtime.

    Raises:
        LlmpqError: the policy makes an invalid decision, or waits forever.
    """
    longest = max((item.prompt_tokens + item.new_tokens for item in trace), default=1)
    limits = slot_limits(num_slots, longest, block_size=longest)
    scheduler = PolicyScheduler(policy, limits, costs.layout.depth, monitor=monitor)
    return _Simulation(costs, scheduler, trace, with_activities).run()


@dataclass(slots=True, kw_only=True)
class _Message:
    """A micro-batch between ranks.

    Attributes:
        step: the micro-batch.
        shape: its size.
        position: index of the next rank on the path; past the end it returns to the master.
        received_s: seconds of work of the receiver for the transfer.
    """

    step: EngineStep
    shape: BatchShape
    position: int = 0
    received_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Worker:
    """State of one rank."""

    rank: int
    host: str
    threads: int
    waiting: deque[_Message] = field(default_factory=deque)
    message: _Message | None = None
    left_s: float = 0.0
    start_s: float = 0.0


class _Simulation:
    def __init__(
        self,
        costs: MicroBatchCosts,
        scheduler: PolicyScheduler,
        trace: Sequence[TraceRequest],
        with_activities: bool,
    ) -> None:
        self._costs = costs
        self._layout = costs.layout
        self._trace = trace
        self._scheduler = scheduler
        self._workers = [
            _Worker(rank=rank, host=self._layout.hosts[rank], threads=self._layout.threads[rank])
            for rank in range(self._layout.num_ranks)
        ]
        self._now_s = 0.0
        self._arrived = 0
        self._micro_batches = 0
        self._is_waiting = False  # until the next event
        self._messages: list[tuple[float, int, int, _Message]] = []
        self._tie = count()
        self._delivered_s: dict[tuple[int, int], float] = {}  # last delivery by link
        self._times = [_RequestTimes() for _ in trace]
        self._work_s = [dict.fromkeys(Phase, 0.0) for _ in self._workers]
        self._activities: list[Activity] | None = [] if with_activities else None

    def run(self) -> SimReport:
        self._take_arrivals()
        self._wake_master()
        while not self._scheduler.is_done:
            self._advance()
            self._take_arrivals()
            self._wake_master()
        start_s = self._trace[0].arrival_s if self._trace else 0.0
        return SimReport(
            requests=tuple(
                times.record(number, item)
                for number, (times, item) in enumerate(zip(self._times, self._trace, strict=True))
            ),
            makespan_s=max((times.end_s for times in self._times), default=0.0) - start_s,
            work_s=tuple(self._work_s),
            micro_batches=self._micro_batches,
            activities=tuple(self._activities or ()),
        )

    def _take_arrivals(self) -> None:
        """Add the requests that have arrived to the scheduler."""
        trace = self._trace
        if self._arrived == len(trace) > 0:
            return
        while self._arrived < len(trace):
            item = trace[self._arrived]
            if item.arrival_s > self._now_s:
                return
            self._scheduler.add(
                EngineRequest(
                    request=self._arrived,
                    token_ids=None,
                    prompt_tokens=item.prompt_tokens,
                    max_tokens=item.new_tokens,
                    arrival_s=item.arrival_s,
                )
            )
            self._arrived += 1
            self._is_waiting = False
        self._scheduler.close()
        self._is_waiting = False

    def _wake_master(self) -> None:
        """Give an idle master its next task, as the engine does: complete, then dispatch."""
        master = self._workers[0]
        if master.message is not None:
            return
        if master.waiting:
            self._begin(master)
            return
        if self._is_waiting or self._scheduler.is_done:
            return
        step = self._scheduler.schedule(self._now_s)
        if step is None:
            self._is_waiting = True
            return
        self._micro_batches += 1
        assert step.phase is not None
        if step.phase is Phase.PREFILL:
            for chunk in step.chunks:
                self._times[chunk.request].start_s = self._now_s
        shape = batch_shape(step.phase, [chunk.first + chunk.count for chunk in step.chunks])
        master.waiting.append(_Message(step=step, shape=shape))
        self._begin(master)

    def _begin(self, worker: _Worker) -> None:
        """Start a worker on its next message."""
        message = worker.message = self._take(worker)
        costs, shape = self._costs, message.shape
        path = self._layout.path(shape.phase)
        if message.position == len(path):
            seconds = costs.project_s(shape)
        else:
            seconds = costs.stage_s(worker.rank, shape)
            seconds += costs.embed_s(shape) if message.position == 0 else 0.0
        self._work_s[worker.rank][shape.phase] += seconds
        worker.start_s = self._now_s
        worker.left_s = message.received_s + seconds + self._hop(message).end_s

    def _take(self, worker: _Worker) -> _Message:
        """Return the next message of a worker; decode first if the paths are separate."""
        first = 0
        if self._layout.is_split:
            phases = [message.shape.phase for message in worker.waiting]
            first = phases.index(Phase.DECODE) if Phase.DECODE in phases else 0
        message = worker.waiting[first]
        del worker.waiting[first]
        return message

    def _hop(self, message: _Message) -> Hop:
        """Return the cost of sending a message from its current rank."""
        path = self._layout.path(message.shape.phase)
        if len(path) == 1 or message.position == len(path):
            return _NO_HOP
        return self._costs.hop(path[message.position], message.shape)

    def _advance(self) -> None:
        """Advance to the next end of a task, or arrival of a message or request."""
        rates = self._rates()
        passed_s = self._next_end_s(rates)
        if (event_s := self._next_event_s()) - self._now_s <= passed_s:
            passed_s, self._now_s = event_s - self._now_s, event_s
        else:
            self._now_s += passed_s
        if self._now_s >= self._scheduler.wake_s:
            self._is_waiting = False
        for worker in self._workers:
            if worker.message is not None:
                worker.left_s -= passed_s * rates[worker.rank]
                if worker.left_s <= _TINY_S:
                    self._end(worker)
        while self._messages and self._messages[0][0] <= self._now_s + _TINY_S:
            _, _, rank, message = heapq.heappop(self._messages)
            self._workers[rank].waiting.append(message)
        for worker in self._workers[1:]:
            if worker.message is None and worker.waiting:
                self._begin(worker)

    def _next_end_s(self, rates: Sequence[float]) -> float:
        """Return the seconds until the next task ends.

        They are no difference of two times: after hours, what is left of a task may be less than
        the clock resolves, and would never pass.
        """
        busy = (worker for worker in self._workers if worker.message is not None)
        return min((worker.left_s / rates[worker.rank] for worker in busy), default=math.inf)

    def _next_event_s(self) -> float:
        """Return the time of the next arrival, or when the scheduler goes on; ``inf`` if none."""
        events = []
        if self._messages:
            events.append(max(self._now_s, self._messages[0][0]))
        if self._arrived < len(self._trace):
            events.append(max(self._now_s, self._trace[self._arrived].arrival_s))
        if self._is_waiting and self._scheduler.wake_s < math.inf:
            events.append(max(self._now_s, self._scheduler.wake_s))
        if not events and all(worker.message is None for worker in self._workers):
            raise LlmpqError("batching policy: waits although nothing is in flight")
        return min(events, default=math.inf)

    def _rates(self) -> list[float]:
        """Return the relative speed of each worker, given the busy workers."""
        layout = self._layout
        busy = [worker for worker in self._workers if worker.message is not None]
        rates = [1.0] * len(self._workers)
        for worker in busy:
            if worker.host in layout.cores:
                threads = sum(other.threads for other in busy if other.host == worker.host)
                rates[worker.rank] *= min(1.0, layout.cores[worker.host] / max(1, threads))
        return rates

    def _end(self, worker: _Worker) -> None:
        """Finish the task of a worker and send its output."""
        message = worker.message
        assert message is not None
        worker.message = None
        self._record_activity(worker, message)
        path = self._layout.path(message.shape.phase)
        if message.position == len(path):
            self._complete(message)
            return
        hop = self._hop(message)
        message.position += 1
        is_back = message.position == len(path)
        target = 0 if is_back else path[message.position]
        delay_s = hop.delay_s
        if is_back and message.shape.phase is Phase.PREFILL:
            delay_s += self._costs.handover_s(message.shape)
        message.received_s = hop.end_s
        # A small message does not overtake a large one on the same link.
        link = worker.rank, target
        at_s = max(self._now_s + delay_s, self._delivered_s.get(link, 0.0))
        self._delivered_s[link] = at_s
        entry = (at_s, next(self._tie), target, message)
        heapq.heappush(self._messages, entry)

    def _complete(self, message: _Message) -> None:
        step = message.step
        tokens: dict[int, int] = {}
        finished: set[int] = set()
        for chunk in step.chunks:
            if chunk.makes_token:
                tokens[chunk.request], times = 0, self._times[chunk.request]
                times.add_token(self._now_s)
                if times.tokens == self._trace[chunk.request].new_tokens:
                    times.end_s = self._now_s
                    finished.add(chunk.request)
        self._is_waiting = False
        self._scheduler.complete(step.number, tokens, finished)

    def _record_activity(self, worker: _Worker, message: _Message) -> None:
        if self._activities is not None:
            self._activities.append(
                Activity(
                    stage=worker.rank,
                    phase=message.shape.phase,
                    micro_batch=message.step.number,
                    rows=message.shape.rows,
                    start_s=worker.start_s,
                    end_s=self._now_s,
                )
            )


@dataclass(slots=True)
class _RequestTimes:
    """Times of a request."""

    tokens: int = 0
    start_s: float = 0.0
    first_token_s: float = 0.0
    end_s: float = 0.0

    def add_token(self, now_s: float) -> None:
        self.tokens += 1
        if self.tokens == 1:
            self.first_token_s = now_s

    def record(self, number: int, item: TraceRequest) -> RequestRecord:
        return RequestRecord(
            request=number,
            prompt_tokens=item.prompt_tokens,
            new_tokens=item.new_tokens,
            arrival_s=item.arrival_s,
            start_s=self.start_s,
            first_token_s=self.first_token_s,
            end_s=self.end_s,
        )
