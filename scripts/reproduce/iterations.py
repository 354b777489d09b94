"""Simulate one worker with chunked prefill; iterations are scheduled one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmpq.batching import RequestRecord
from llmpq.batching.engine_scheduler import (
    EngineLimits,
    EngineRequest,
    EngineScheduler,
    EngineStep,
    ScheduledChunk,
)
from llmpq.batching.queue_order import queue_order
from llmpq.spec.trace import TraceRequest

IterationCost = Callable[[Sequence[ScheduledChunk]], float]
"""Returns the seconds of an iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationsReport:
    """Results of a simulation.

    Attributes:
        requests: one record each, in order of their numbers.
        iterations: how many there were.
        preemptions: number of preempted sequences.
        work_s: seconds the worker was busy.
    """

    requests: tuple[RequestRecord, ...]
    iterations: int
    preemptions: int
    work_s: float

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token."""
        return max(one.end_s for one in self.requests) - min(one.arrival_s for one in self.requests)


def simulate_iterations(
    cost: IterationCost, trace: Sequence[TraceRequest], limits: EngineLimits
) -> IterationsReport:
    """Simulate a trace.

    Args:
        cost: seconds of an iteration.
        trace: requests in order of arrival.
        limits: of the engine.

    Raises:
        CapacityError: a request does not fit into memory.
    """
    return _Run(cost, trace, limits).run()


class _Run:
    def __init__(
        self, cost: IterationCost, trace: Sequence[TraceRequest], limits: EngineLimits
    ) -> None:
        self._cost, self._trace = cost, trace
        self._scheduler = EngineScheduler(limits, queue_order("fcfs"))
        self._now_s = self._work_s = 0.0
        self._arrived = self._iterations = 0
        self._left = [item.new_tokens for item in trace]
        self._start_s = [-1.0] * len(trace)
        self._first_s = [-1.0] * len(trace)
        self._end_s = [0.0] * len(trace)

    def run(self) -> IterationsReport:
        while self._arrived < len(self._trace) or not self._scheduler.is_idle:
            self._take_arrivals()
            step = self._scheduler.schedule(self._now_s)
            if step is None:
                self._now_s = self._trace[self._arrived].arrival_s
            else:
                self._compute(step)
        return IterationsReport(
            requests=tuple(self._record(number) for number in range(len(self._trace))),
            iterations=self._iterations,
            preemptions=self._scheduler.num_preemptions,
            work_s=self._work_s,
        )

    def _take_arrivals(self) -> None:
        trace = self._trace
        while self._arrived < len(trace) and trace[self._arrived].arrival_s <= self._now_s:
            item = trace[self._arrived]
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

    def _compute(self, step: EngineStep) -> None:
        self._iterations += 1
        for chunk in step.chunks:
            if self._start_s[chunk.request] < 0:
                self._start_s[chunk.request] = self._now_s
        seconds = self._cost(step.chunks)
        self._work_s += seconds
        self._now_s += seconds
        made = [chunk.request for chunk in step.chunks if chunk.makes_token]
        for request in made:
            self._left[request] -= 1
            if self._first_s[request] < 0:
                self._first_s[request] = self._now_s
        ended = {request for request in made if not self._left[request]}
        for request in ended:
            self._end_s[request] = self._now_s
        self._scheduler.complete(step.number, dict.fromkeys(made, 0), ended)

    def _record(self, number: int) -> RequestRecord:
        item = self._trace[number]
        return RequestRecord(
            request=number,
            prompt_tokens=item.prompt_tokens,
            new_tokens=item.new_tokens,
            arrival_s=item.arrival_s,
            start_s=self._start_s[number],
            first_token_s=self._first_s[number],
            end_s=self._end_s[number],
        )
