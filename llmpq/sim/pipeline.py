"""A pipeline in simulated time: the runtime's own loop, with seconds in place of tensors.

The master is one worker that does one thing at a time, as ``llmpq.dist.engine.engine`` does:
it takes in a micro-batch that came back (projection, sampling), or asks the policy and sends the
next one off (embedding, its own layers). Every other rank takes micro-batches in the order they
arrive. Requests are kept in the book that the runtime keeps them in, so both make the same
decisions when time passes equally.

Workers that share cores share them evenly while they work: time advances from event to event, and
between two events every worker goes on at its present rate.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from llmpq.batching import (
    BatchingPolicy,
    InFlightBatch,
    RequestRecord,
    Scheduler,
    Wait,
    WaitingRequest,
)
from llmpq.batching.workload_shift import DriftWatch
from llmpq.errors import LlmpqError
from llmpq.sim.costs import Hop, Shape, StepCosts, mean_shape
from llmpq.sim.report import Activity, SimReport
from llmpq.spec.precision import Phase
from llmpq.spec.trace import TraceRequest

_TINY_S = 1e-12
_NO_HOP = Hop(0.0, 0.0)


def simulate(
    costs: StepCosts,
    policy: BatchingPolicy,
    trace: Sequence[TraceRequest],
    *,
    num_slots: int,
    with_activities: bool = False,
    watch: DriftWatch | None = None,
) -> SimReport:
    """Play a trace.

    Args:
        costs: who takes part and what everything takes.
        policy: decides what is sent off; a fresh one for each run.
        trace: requests in order of arrival.
        num_slots: sequences that may hold a slot at once.
        with_activities: keep every block of work, for a timeline.
        watch: compares answers with the policy's schedule, as in the runtime.

    Raises:
        LlmpqError: the policy makes a decision that is not allowed, or never ends.
    """
    scheduler = Scheduler(policy=policy, num_slots=num_slots, watch=watch)
    return _Simulation(costs, scheduler, trace, with_activities).run()


@dataclass(slots=True, kw_only=True)
class _Message:
    """A micro-batch on its way.

    Attributes:
        batch: what it is.
        shape: what it asks.
        position: where on its path it goes next; past the end it goes back to the master.
        received_s: what taking it in costs the receiver.
    """

    batch: InFlightBatch
    shape: Shape
    position: int = 0
    received_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Worker:
    """One rank: what waits for it and what it does."""

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
        costs: StepCosts,
        scheduler: Scheduler,
        trace: Sequence[TraceRequest],
        with_activities: bool,
    ) -> None:
        self._costs = costs
        self._layout = costs.layout
        self._depth = self._layout.depth
        self._trace = trace
        self._scheduler = scheduler
        self._workers = [
            _Worker(rank=rank, host=self._layout.hosts[rank], threads=self._layout.threads[rank])
            for rank in range(self._layout.num_ranks)
        ]
        self._now_s = 0.0
        self._arrived = 0
        self._micro_batches = 0
        self._is_waiting = False  # the policy has nothing to send until something changes
        self._wake_s: float | None = None  # when it would decide otherwise anyway
        self._messages: list[tuple[float, int, int, _Message]] = []
        self._tie = count()
        self._delivered_s: dict[tuple[int, int], float] = {}  # by link, the newest message
        self._lives = [_Life() for _ in trace]
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
                life.record(number, item)
                for number, (life, item) in enumerate(zip(self._lives, self._trace, strict=True))
            ),
            makespan_s=max((life.end_s for life in self._lives), default=0.0) - start_s,
            work_s=tuple(self._work_s),
            micro_batches=self._micro_batches,
            activities=tuple(self._activities or ()),
        )

    def _take_arrivals(self) -> None:
        """Put requests into the book whose time has come."""
        trace = self._trace
        if self._arrived == len(trace) > 0:
            return
        while self._arrived < len(trace):
            item = trace[self._arrived]
            if item.arrival_s > self._now_s:
                return
            self._scheduler.arrive(
                WaitingRequest(
                    request=self._arrived,
                    prompt_tokens=item.prompt_tokens,
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
        open_phases = self._depth.open_phases(self._scheduler)
        if self._is_waiting or not open_phases or self._scheduler.is_done:
            return
        decision, batch = self._scheduler.decide(self._now_s, open_phases)
        if batch is None:
            self._is_waiting = True
            self._wake_s = decision.until_s if isinstance(decision, Wait) else None
            return
        self._micro_batches += 1
        if batch.phase is Phase.PREFILL:
            for number in batch.requests:
                self._lives[number].start_s = self._now_s
        shape = mean_shape(batch.phase, [item.context_tokens for item in batch.sequences])
        master.waiting.append(_Message(batch=batch, shape=shape))
        self._begin(master)

    def _begin(self, worker: _Worker) -> None:
        """Start a worker on the oldest message that waits for it."""
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
        """Return what a worker does next; where two ways end, decode answers go first."""
        first = 0
        if self._layout.is_split:
            phases = [message.shape.phase for message in worker.waiting]
            first = phases.index(Phase.DECODE) if Phase.DECODE in phases else 0
        message = worker.waiting[first]
        del worker.waiting[first]
        return message

    def _hop(self, message: _Message) -> Hop:
        """Return what sending on takes from where the message is."""
        path = self._layout.path(message.shape.phase)
        if len(path) == 1 or message.position == len(path):
            return _NO_HOP
        return self._costs.hop(path[message.position], message.shape)

    def _advance(self) -> None:
        """Go on to the next moment at which a task ends, or a message or request arrives."""
        rates = self._rates()
        moment_s = self._next_moment_s(rates)
        passed_s = moment_s - self._now_s
        self._now_s = moment_s
        if self._wake_s is not None and self._now_s >= self._wake_s:
            self._is_waiting, self._wake_s = False, None
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

    def _next_moment_s(self, rates: Sequence[float]) -> float:
        moments = [
            self._now_s + worker.left_s / rates[worker.rank]
            for worker in self._workers
            if worker.message is not None
        ]
        if self._messages:
            moments.append(self._messages[0][0])
        if self._arrived < len(self._trace):
            moments.append(max(self._now_s, self._trace[self._arrived].arrival_s))
        if self._is_waiting and self._wake_s is not None:
            moments.append(max(self._now_s, self._wake_s))
        if not moments:
            raise LlmpqError("batching policy: waits although nothing is in flight")
        return min(moments)

    def _rates(self) -> list[float]:
        """Return the share of its speed that each worker has while those now at work are."""
        layout = self._layout
        busy = [worker for worker in self._workers if worker.message is not None]
        rates = [1.0] * len(self._workers)
        for worker in busy:
            beside = [other for other in busy if other.host == worker.host]
            if worker.host in layout.cores:
                threads = sum(other.threads for other in beside)
                rates[worker.rank] *= min(1.0, layout.cores[worker.host] / max(1, threads))
        return rates

    def _end(self, worker: _Worker) -> None:
        """Pass on what a worker has done."""
        message = worker.message
        assert message is not None
        worker.message = None
        self._note(worker, message)
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
        batch = message.batch
        complete = []
        for item in batch.sequences:
            life = self._lives[item.request]
            if not item.is_finished:
                life.takes_token(self._now_s)
            complete.append(life.made == self._trace[item.request].new_tokens)
        self._is_waiting = False
        for number in self._scheduler.complete(batch.number, complete):
            self._lives[number].end_s = self._now_s

    def _note(self, worker: _Worker, message: _Message) -> None:
        if self._activities is not None:
            self._activities.append(
                Activity(
                    stage=worker.rank,
                    phase=message.shape.phase,
                    micro_batch=message.batch.number,
                    rows=message.shape.rows,
                    start_s=worker.start_s,
                    end_s=self._now_s,
                )
            )


@dataclass(slots=True)
class _Life:
    """What happened to a request so far."""

    made: int = 0
    start_s: float = 0.0
    first_token_s: float = 0.0
    end_s: float = 0.0

    def takes_token(self, now_s: float) -> None:
        self.made += 1
        if self.made == 1:
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
