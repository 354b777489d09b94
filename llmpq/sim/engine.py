"""Simulation of one engine of packed steps on a virtual clock.

The simulator runs the :class:`~llmpq.batching.block_scheduler.BlockScheduler` of the runtime. As
there, the master does one task at a time: it completes a step (head, sampling), or schedules and
dispatches the next one (embedding, its own layers). Other stages compute the steps in order.

Speculative decoding is simulated at a given acceptance: there is a draft whenever the scheduler has
room for one. A draft model computes it before the step, once its device has computed the steps
before; the master waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from llmpq.batching import RequestRecord
from llmpq.batching.block_scheduler import BlockScheduler
from llmpq.batching.engine_step import (
    DraftWork,
    EngineLimits,
    EngineRequest,
    EngineStep,
    ScheduledChunk,
)
from llmpq.batching.queue_order import QueueOrder
from llmpq.sim.engine_costs import EngineCosts, StepSize, step_size
from llmpq.sim.engine_report import EngineReport
from llmpq.spec.workload import HASH_BLOCK_TOKENS, TraceRequest

Accepts = Callable[[int, int], bool]
"""Returns whether a draft token is right, by the number of its request and its place there."""
DraftSeconds = Callable[[Sequence[DraftWork]], float]
"""Returns the seconds in which a draft model computes the drafts of a step."""


def random_acceptance(rate: float, seed: int = 0) -> Accepts:
    """Return draft tokens each of which is right with a probability, once those before it are."""
    chance = Random(seed)
    return lambda _request, _place: chance.random() < rate


def relative_draft_s(costs: EngineCosts, limits: EngineLimits, context: int) -> DraftSeconds | None:
    """Return the seconds of a draft model, from its costs in steps; ``None`` without one.

    Another row takes the same share of a pass as of a step.

    Args:
        costs: seconds of a step.
        limits: of the engine, with the draft model's costs.
        context: tokens of the sequence whose step is the unit.
    """
    if limits.draft is None:
        return None
    one = StepSize(1, 1, 1, context, ())
    hops = [costs.hop(stage, one) for stage in range(costs.num_stages)]
    step_s = costs.project_s(one) + sum(2 * hop.end_s + hop.delay_s for hop in hops)
    step_s += sum(costs.stage_s(stage, one) for stage in range(costs.num_stages))
    pass_s, row_cost = limits.draft.cost * step_s, limits.row_cost
    handover_s = limits.draft.handover * step_s

    def seconds(works: Sequence[DraftWork]) -> float:
        rows = [sum(work.tokens - work.first for work in works)]
        for place in range(1, max(work.length for work in works)):
            rows.append(sum(work.length > place for work in works))
        return handover_s + sum(pass_s * (1 + row_cost * (count - 1)) for count in rows)

    return seconds


def simulate_engine(
    costs: EngineCosts,
    limits: EngineLimits,
    order: QueueOrder,
    trace: Sequence[TraceRequest],
    *,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EngineReport:
    """Simulate a trace on one engine.

    Args:
        costs: seconds of a step.
        limits: of the engine.
        order: of the waiting queue.
        trace: requests in order of arrival; their answer lengths are known to ``trail`` only.
        max_tokens: ``max_tokens`` of requests whose answer is not longer; by default that of the
            answer. ``no_preempt`` reserves it.
        progress: is called with the number of arrived requests and of all.

    Raises:
        CapacityError: a request does not fit into the KV blocks.
    """
    engine = SimulatedEngine(costs, limits, order)
    for number, item in enumerate(trace):
        engine.advance(item.arrival_s)
        engine.add(number, item, max_tokens=max_tokens)
        if progress is not None:
            progress(number + 1, len(trace))
    engine.advance(math.inf)
    return engine.report()


class SimulatedEngine:
    """One engine that receives requests while its clock runs.

    Args:
        costs: seconds of a step.
        limits: of the engine.
        order: of the waiting queue.
        accepts: which draft tokens are right; ``None`` for no speculative decoding.
        draft_s: seconds of the draft model that ``limits`` has.
    """

    def __init__(
        self,
        costs: EngineCosts,
        limits: EngineLimits,
        order: QueueOrder,
        accepts: Accepts | None = None,
        draft_s: DraftSeconds | None = None,
    ) -> None:
        looks_up = accepts is not None and limits.draft is None
        propose = (lambda _request, most: most) if looks_up else None
        self.scheduler = BlockScheduler(limits, order, propose)
        self._accepts = accepts
        self._draft_s = draft_s
        self._draft_stage = None if limits.draft is None else limits.draft.stage
        self.now_s = 0.0
        self._costs = costs
        self._free_s = [0.0] * costs.num_stages  # when each stage is done with its last step
        self._returning: deque[tuple[float, float, EngineStep, StepSize]] = deque()
        self._times: dict[int, _Times] = {}
        self._not_started: set[int] = set()
        self._busy_s = [0.0] * costs.num_stages
        self._steps = self._tokens = 0

    def add(self, request: int, item: TraceRequest, *, max_tokens: int | None = None) -> None:
        """Let a request arrive; see :func:`simulate_engine`.

        Raises:
            CapacityError: the request does not fit into the KV blocks.
        """
        self.scheduler.add(
            EngineRequest(
                request=request,
                token_ids=_token_ids(item),
                prompt_tokens=item.prompt_tokens,
                max_tokens=max(item.new_tokens, max_tokens or 0),
                arrival_s=item.arrival_s,
                predicted_tokens=float(item.new_tokens),
            )
        )
        self._times[request] = _Times(item)
        self._not_started.add(request)

    def advance(self, until_s: float) -> None:
        """Work until a time; a task that begins before it is finished."""
        while self.now_s < until_s:
            if self._returning and self._returning[0][0] <= self.now_s:
                self._complete()
                continue
            step = self.scheduler.schedule(self.now_s)
            if step is not None:
                self._dispatch(step)
            elif self._returning:
                self.now_s = min(until_s, self._returning[0][0])
            elif until_s < math.inf:
                self.now_s = until_s
            else:
                return

    def report(self) -> EngineReport:
        """Return the figures of all finished requests."""
        return EngineReport(
            requests=tuple(
                times.record(number) for number, times in self._times.items() if not times.left
            ),
            steps=self._steps,
            step_tokens=self._tokens,
            busy_s=tuple(self._busy_s),
            preemptions=self.scheduler.num_preemptions,
            prefix_cache_queries=self.scheduler.prefix_cache_queries,
            prefix_cache_hits=self.scheduler.prefix_cache_hits,
            draft_tokens=self.scheduler.drafts.num_draft_tokens,
            accepted_tokens=self.scheduler.drafts.num_accepted_tokens,
        )

    def _dispatch(self, step: EngineStep) -> None:
        if step.drafts:
            assert self._draft_s is not None
            seconds, stage = self._draft_s(step.drafts), self._draft_stage
            if stage is not None:
                self.now_s = max(self.now_s, self._free_s[stage])
                self._busy_s[stage] += seconds
                self._free_s[stage] = self.now_s + seconds
            self.now_s += seconds
            self._free_s[0] = self.now_s
            self.scheduler.complete_drafts(step, self.now_s)
        shape = step_size(step.chunks)
        self._steps += 1
        self._tokens += shape.tokens
        if self._not_started:
            for request in self._not_started.intersection(chunk.request for chunk in step.chunks):
                self._times[request].start_s = self.now_s
                self._not_started.remove(request)
        ready_s, received_s = self.now_s, 0.0
        for stage in range(self._costs.num_stages):
            hop = self._costs.hop(stage, shape)
            seconds = self._costs.stage_s(stage, shape)
            self._busy_s[stage] += seconds
            done_s = max(ready_s, self._free_s[stage]) + received_s + seconds + hop.end_s
            self._free_s[stage] = done_s
            if stage == 0:
                self.now_s = done_s
            ready_s, received_s = done_s + hop.delay_s, hop.end_s
        self._returning.append((ready_s, received_s, step, shape))

    def _complete(self) -> None:
        _, received_s, step, shape = self._returning.popleft()
        seconds = self._costs.project_s(shape)
        self._busy_s[0] += seconds
        self.now_s += received_s + seconds
        self._free_s[0] = self.now_s
        now_s, times = self.now_s, self._times
        made: dict[int, int] = {}
        ended: set[int] = set()
        accepted: dict[int, list[int]] = {}
        for chunk in step.chunks:
            if chunk.makes_token:
                request = chunk.request
                # Token ids below zero: no prompt continues an answer of the simulation.
                made[request] = -1 - request
                if chunk.num_draft_tokens:
                    count = self._count_accepted(chunk)
                    accepted[request] = [-1 - request] * count
                    for _ in range(count):
                        times[request].add_token(now_s)
                if times[request].add_token(now_s):
                    ended.add(request)
        self.scheduler.complete(step.number, made, ended, accepted, now_s=now_s)

    def _count_accepted(self, chunk: ScheduledChunk) -> int:
        """Return how many draft tokens become tokens of the answer; one more token follows them."""
        assert self._accepts is not None
        most = min(chunk.num_draft_tokens, self._times[chunk.request].left - 1)
        for count in range(most):
            if not self._accepts(chunk.request, chunk.first + 1 + count):
                return count
        return most


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
