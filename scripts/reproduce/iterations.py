"""Simulate one worker with chunked prefill.

The next iteration is scheduled while one is computed; a request that arrives meanwhile is
considered when an iteration ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmpq.batching import RequestRecord
from llmpq.batching.policies.chunked import Chunk, ChunkedScheduler, ChunkLimits
from llmpq.errors import LlmpqError
from llmpq.spec.trace import TraceRequest

IterationCost = Callable[[Sequence[Chunk]], float]
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
    cost: IterationCost, trace: Sequence[TraceRequest], limits: ChunkLimits, *, ahead: int = 2
) -> IterationsReport:
    """Simulate a trace.

    Args:
        cost: seconds of an iteration.
        trace: requests in order of arrival.
        limits: of an iteration.
        ahead: iterations scheduled at once, the one being computed counted.

    Raises:
        CapacityError: a request does not fit into memory.
        LlmpqError: no request can continue.
    """
    return _Run(cost, trace, limits, ahead).run()


class _Run:
    def __init__(
        self, cost: IterationCost, trace: Sequence[TraceRequest], limits: ChunkLimits, ahead: int
    ) -> None:
        self._cost, self._trace, self._ahead = cost, trace, ahead
        self._scheduler = ChunkedScheduler(limits)
        self._now_s = self._free_s = self._work_s = 0.0
        self._out: deque[tuple[float, tuple[Chunk, ...]]] = deque()
        self._arrived = self._iterations = 0
        self._start_s = [0.0] * len(trace)
        self._first_s = [-1.0] * len(trace)
        self._end_s = [0.0] * len(trace)
        self._left = len(trace)

    def run(self) -> IterationsReport:
        while self._left:
            self._take_arrivals()
            if len(self._out) < self._ahead and self._send():
                continue
            if self._out:
                self._complete_next()
            elif self._arrived < len(self._trace):
                self._now_s = self._trace[self._arrived].arrival_s
            else:
                raise LlmpqError("chunked prefill: requests are left, and none can continue")
        return IterationsReport(
            requests=tuple(self._record(number) for number in range(len(self._trace))),
            iterations=self._iterations,
            preemptions=self._scheduler.preemptions,
            work_s=self._work_s,
        )

    def _take_arrivals(self) -> None:
        trace = self._trace
        while self._arrived < len(trace) and trace[self._arrived].arrival_s <= self._now_s:
            item = trace[self._arrived]
            self._scheduler.arrive(self._arrived, item.prompt_tokens, item.new_tokens)
            self._arrived += 1

    def _send(self) -> bool:
        chunks = self._scheduler.schedule()
        if not chunks:
            return False
        for chunk in chunks:
            if chunk.start == 0 and self._first_s[chunk.request] < 0:
                self._start_s[chunk.request] = self._now_s
        seconds = self._cost(chunks)
        self._work_s += seconds
        self._free_s = max(self._now_s, self._free_s) + seconds
        self._out.append((self._free_s, chunks))
        self._iterations += 1
        return True

    def _complete_next(self) -> None:
        self._now_s, chunks = self._out.popleft()
        for chunk in chunks:
            if chunk.makes_token and self._first_s[chunk.request] < 0:
                self._first_s[chunk.request] = self._now_s
        for request in self._scheduler.complete(chunks):
            self._end_s[request] = self._now_s
            self._left -= 1

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
