"""A pipeline in simulated time: the runtime's own loop, with seconds in place of tensors.

The master is one process that does one thing at a time, exactly as ``llmpq.dist.engine`` does it:
it takes in a micro-batch that came back (projection, sampling), or asks the policy and sends the
next one off (embedding, the first stage's layers). Every other stage takes micro-batches in the
order they arrive. Links only delay. Requests are kept in the book that the runtime keeps them in,
so both make the same decisions when time passes equally.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llmpq.batching import BatchingPolicy, RequestBook, Step, WaitingRequest
from llmpq.errors import LlmpqError
from llmpq.sim.report import Activity, RequestRecord, SimReport
from llmpq.spec.precision import Phase
from llmpq.spec.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a micro-batch asks of a stage.

    Attributes:
        phase: prefill or decode.
        rows: sequences.
        longest: in prefill the longest prompt, to which all are padded; in decode the longest
            context.
        total: sum over the sequences of prompt or context tokens.
    """

    phase: Phase
    rows: int
    longest: int
    total: int

    @property
    def mean(self) -> float:
        """Mean prompt or context."""
        return self.total / self.rows


class StepCosts(Protocol):
    """Seconds of a pipeline's parts."""

    @property
    def num_stages(self) -> int:
        """Stages in a row; the first is the master's."""
        ...

    def stage_s(self, stage: int, shape: Shape) -> float:
        """Return the seconds of one stage's layers."""
        ...

    def embed_s(self, shape: Shape) -> float:
        """Return the seconds the master spends before its layers."""
        ...

    def project_s(self, shape: Shape) -> float:
        """Return the seconds of final norm, head and sampling."""
        ...

    def send_s(self, stage: int, shape: Shape) -> float:
        """Return the seconds of the link behind a stage; behind the last it leads to the master."""
        ...


def simulate(
    costs: StepCosts,
    policy: BatchingPolicy,
    trace: Sequence[TraceRequest],
    *,
    num_slots: int,
    with_activities: bool = False,
) -> SimReport:
    """Play a trace.

    Args:
        costs: seconds of the plan's parts.
        policy: decides what is sent off; a fresh one for each run.
        trace: requests in order of arrival.
        num_slots: sequences that may hold a slot at once.
        with_activities: keep every block of work, for a timeline.

    Raises:
        LlmpqError: the policy makes a decision that is not allowed, or never ends.
    """
    return _Simulation(costs, policy, trace, num_slots, with_activities).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    step: Step
    shape: Shape
    back_s: float


class _Simulation:
    def __init__(
        self,
        costs: StepCosts,
        policy: BatchingPolicy,
        trace: Sequence[TraceRequest],
        num_slots: int,
        with_activities: bool,
    ) -> None:
        self._costs = costs
        self._trace = trace
        self._book = RequestBook(policy=policy, num_slots=num_slots)
        self._stages = costs.num_stages
        self._max_in_flight = 1 if self._stages == 1 else self._stages + 1
        self._free_s = [0.0] * self._stages  # the master's is its clock
        self._busy_s = [0.0] * self._stages
        self._sent: deque[_Sent] = deque()
        self._arrived = 0
        self._micro_batches = 0
        self._made = [0] * len(trace)
        self._first_token_s = [0.0] * len(trace)
        self._end_s = [0.0] * len(trace)
        self._activities: list[Activity] | None = [] if with_activities else None

    def run(self) -> SimReport:
        self._take_arrivals()
        while not self._book.is_done:
            if self._must_land() or not self._launch_next():
                self._advance()
            self._take_arrivals()
        start_s = self._trace[0].arrival_s if self._trace else 0.0
        return SimReport(
            requests=tuple(
                RequestRecord(
                    request=number,
                    prompt_tokens=item.prompt_tokens,
                    new_tokens=item.new_tokens,
                    arrival_s=item.arrival_s,
                    first_token_s=self._first_token_s[number],
                    end_s=self._end_s[number],
                )
                for number, item in enumerate(self._trace)
            ),
            makespan_s=max(self._end_s, default=0.0) - start_s,
            busy_s=tuple(self._busy_s),
            micro_batches=self._micro_batches,
            activities=tuple(self._activities or ()),
        )

    def _take_arrivals(self) -> None:
        trace, now_s = self._trace, self._free_s[0]
        if self._arrived == len(trace) > 0:
            return
        while self._arrived < len(trace):
            item = trace[self._arrived]
            if item.arrival_s > now_s:
                return
            self._book.arrive(
                WaitingRequest(
                    request=self._arrived,
                    prompt_tokens=item.prompt_tokens,
                    arrival_s=item.arrival_s,
                )
            )
            self._arrived += 1
        self._book.close()

    def _must_land(self) -> bool:
        if len(self._sent) >= self._max_in_flight:
            return True
        return bool(self._sent) and self._stages > 1 and self._sent[0].back_s <= self._free_s[0]

    def _launch_next(self) -> bool:
        _, step = self._book.decide(self._free_s[0])
        if step is None:
            return False
        tokens = [item.context_tokens for item in step.sequences]
        shape = Shape(
            phase=step.flight.phase, rows=len(tokens), longest=max(tokens), total=sum(tokens)
        )
        self._micro_batches += 1
        self._work(0, shape, step, self._costs.embed_s(shape) + self._costs.stage_s(0, shape))
        back_s = self._free_s[0]
        if self._stages > 1:
            back_s += self._costs.send_s(0, shape)
        for stage in range(1, self._stages):
            self._free_s[stage] = max(self._free_s[stage], back_s)
            self._work(stage, shape, step, self._costs.stage_s(stage, shape))
            back_s = self._free_s[stage] + self._costs.send_s(stage, shape)
        self._sent.append(_Sent(step=step, shape=shape, back_s=back_s))
        return True

    def _advance(self) -> None:
        if self._sent:
            self._land(self._sent.popleft())
        elif self._arrived < len(self._trace):
            self._free_s[0] = max(self._free_s[0], self._trace[self._arrived].arrival_s)
        else:
            raise LlmpqError("batching policy: waits although nothing is in flight")

    def _land(self, sent: _Sent) -> None:
        self._free_s[0] = max(self._free_s[0], sent.back_s)
        self._work(0, sent.shape, sent.step, self._costs.project_s(sent.shape))
        now_s = self._free_s[0]
        complete = []
        for item in sent.step.sequences:
            number = item.request
            if not item.is_finished:
                self._made[number] += 1
                if self._made[number] == 1:
                    self._first_token_s[number] = now_s
            complete.append(self._made[number] == self._trace[number].new_tokens)
        for number in self._book.land(sent.step.flight.number, complete):
            self._end_s[number] = now_s

    def _work(self, stage: int, shape: Shape, step: Step, seconds: float) -> None:
        """Keep a stage busy from when it is free."""
        start_s = self._free_s[stage]
        self._free_s[stage] = start_s + seconds
        self._busy_s[stage] += seconds
        if self._activities is not None:
            self._activities.append(
                Activity(
                    stage=stage,
                    phase=shape.phase,
                    micro_batch=step.flight.number,
                    rows=shape.rows,
                    start_s=start_s,
                    end_s=self._free_s[stage],
                )
            )
