"""Simulation of one engine of packed steps on a virtual clock.

The simulator runs the :class:`~llmpq.batching.block_scheduler.BlockScheduler` of the runtime.
Speculative decoding is simulated at a given acceptance: there is a draft whenever the scheduler has
room for one. A draft model computes it before the step, once its device has computed the steps
before; the master waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from llmpq.batching.block_scheduler import BlockScheduler
from llmpq.batching.engine_step import DraftWork, EngineLimits, EngineStep
from llmpq.batching.length import LengthPredictor
from llmpq.batching.queue_order import QueueOrder
from llmpq.sim.costs import EngineCosts, StepSize, step_size
from llmpq.sim.pipeline import Accepts, DraftSeconds, VirtualPipeline
from llmpq.sim.report import SimReport
from llmpq.spec.workload import TraceRequest


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
    stages = range(costs.layout.num_ranks)
    hops = [costs.hop(stage, one) for stage in stages]
    step_s = costs.project_s(one) + sum(2 * hop.end_s + hop.delay_s for hop in hops)
    step_s += sum(costs.stage_s(stage, one) for stage in stages)
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
    predictor: LengthPredictor | None = None,
) -> SimReport:
    """Simulate a trace on one engine.

    Args:
        costs: seconds of a step.
        limits: of the engine.
        order: of the waiting queue.
        trace: requests in order of arrival.
        max_tokens: ``max_tokens`` of requests whose answer is not longer; by default that of the
            answer. ``no_preempt`` reserves it.
        predictor: predicts answer lengths, for ``trail``; ``None`` for the true ones.

    Raises:
        CapacityError: a request does not fit into the KV blocks.
    """
    engine = SimulatedEngine(costs, limits, order, predictor=predictor)
    for number, item in enumerate(trace):
        engine.advance(item.arrival_s)
        engine.add(number, item, max_tokens=max_tokens)
    engine.advance(math.inf)
    return engine.report()


class SimulatedEngine(VirtualPipeline[StepSize]):
    """One engine that receives requests while its clock runs.

    Args:
        costs: seconds of a step.
        limits: of the engine.
        order: of the waiting queue.
        accepts: which draft tokens are right; ``None`` for no speculative decoding.
        draft_s: seconds of the draft model that ``limits`` has.
        predictor: predicts answer lengths; ``None`` for the true ones.
    """

    scheduler: BlockScheduler

    def __init__(
        self,
        costs: EngineCosts,
        limits: EngineLimits,
        order: QueueOrder,
        accepts: Accepts | None = None,
        draft_s: DraftSeconds | None = None,
        predictor: LengthPredictor | None = None,
    ) -> None:
        looks_up = accepts is not None and limits.draft is None
        propose = (lambda _request, most: most) if looks_up else None
        super().__init__(
            costs,
            _packed_step,
            BlockScheduler(limits, order, propose),
            accepts=accepts,
            draft_s=draft_s,
            draft_stage=None if limits.draft is None else limits.draft.stage,
            predictor=predictor,
        )

    def report(self) -> SimReport:
        """Return the figures of all finished requests."""
        scheduler = self.scheduler
        return replace(
            super().report(),
            preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            draft_tokens=scheduler.drafts.num_draft_tokens,
            accepted_tokens=scheduler.drafts.num_accepted_tokens,
        )


def _packed_step(step: EngineStep) -> StepSize:
    return step_size(step.chunks)
