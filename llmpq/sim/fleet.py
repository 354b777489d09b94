"""Simulation of several engines behind a load balancer, on one virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.length import LengthPredictor
from llmpq.batching.queue_order import QueueOrder
from llmpq.routing import (
    LoadBalancer,
    Replica,
    ReplicaCapacity,
    ReplicaStats,
    RoutedRequest,
    WorkloadMeans,
)
from llmpq.sim.costs import EngineCosts, StepSize
from llmpq.sim.engine import SimulatedEngine, random_acceptance, relative_draft_s
from llmpq.sim.report import SimReport, merged
from llmpq.spec.runtime_constants import POLL_S
from llmpq.spec.workload import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReplica:
    """Step costs, limits and queue order of one replica of a simulated fleet.

    Attributes:
        costs: seconds of a step.
        limits: of the engine.
        order: of its waiting queue.
        acceptance_rate: probability that a draft token is right, once those before it are;
            ``None`` for no speculative decoding.
        context: tokens of the sequence whose decode step is the unit of a draft model's cost.
        predictor: predicts answer lengths, for the order ``trail``; ``None`` for the true ones.
    """

    costs: EngineCosts
    limits: EngineLimits
    order: QueueOrder
    acceptance_rate: float | None = None
    context: int = 1
    predictor: LengthPredictor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """Results of a simulation.

    Attributes:
        total: over all replicas; ``work_s`` has the stages of the first replica, then of the next.
        replicas: one report for each.
        routed: the replica of each request, in order of arrival.
    """

    total: SimReport
    replicas: tuple[SimReport, ...]
    routed: tuple[int, ...]


def simulate_fleet(
    replicas: Sequence[FleetReplica],
    balancer: LoadBalancer,
    trace: Sequence[TraceRequest],
    *,
    poll_s: float = POLL_S,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FleetReport:
    """Simulate a trace.

    Args:
        replicas: at least one.
        balancer: chooses the replica of each request.
        trace: requests in order of arrival.
        poll_s: seconds between two readings of the statistics.
        max_tokens: see :func:`~llmpq.sim.engine.simulate_engine`.
        progress: is called with the number of arrived requests and of all.

    Raises:
        CapacityError: a request does not fit into the KV blocks of its replica.
    """
    means = _means(trace)
    engines = [_engine(number, item) for number, item in enumerate(replicas)]
    tracked = [Replica(replica_capacity(item.costs, item.limits, means)) for item in replicas]
    routed: list[int] = []
    poll = 0
    for number, item in enumerate(trace):
        while poll * poll_s <= item.arrival_s:
            for engine, replica, one in zip(engines, tracked, replicas, strict=True):
                _advance(engine, replica, poll * poll_s)
                replica.update(engine_stats(engine, one.limits), poll * poll_s)
            poll += 1
        for engine, replica in zip(engines, tracked, strict=True):
            _advance(engine, replica, item.arrival_s)
        request = RoutedRequest(prompt_tokens=item.prompt_tokens, prefix=tuple(item.hash_ids))
        views = {index: replica.view() for index, replica in enumerate(tracked)}
        chosen = balancer.rank(request, views, means)[0]
        balancer.routed(request, chosen)
        tracked[chosen].route(request, item.arrival_s)
        engines[chosen].add(number, item, max_tokens=max_tokens)
        routed.append(chosen)
        if progress is not None:
            progress(number + 1, len(trace))
    for engine in engines:
        engine.advance(math.inf)
    reports = tuple(engine.report() for engine in engines)
    return FleetReport(total=merged(reports), replicas=reports, routed=tuple(routed))


def replica_capacity(
    costs: EngineCosts, limits: EngineLimits, means: WorkloadMeans
) -> ReplicaCapacity:
    """Return limits and speed of a replica under requests of mean lengths.

    With several steps in flight, a step takes as long as the slowest stage; a sequence makes a
    token whenever its step has passed all stages.
    """
    kv_tokens = limits.num_blocks * limits.block_size
    prompt, new = means.prompt_tokens, means.new_tokens
    running = min(float(limits.max_sequences), kv_tokens / (prompt + new / 2))
    rows = max(1, round(min(running / limits.steps_in_flight, limits.token_budget)))
    context = round(prompt + new / 2)
    budget = limits.token_budget
    prefill = StepSize(1, budget, 0, 0, ((0, budget),))
    decode = StepSize(rows, rows, rows, rows * context, ())
    slowest_s, _ = _pass_s(costs, prefill)
    decode_slowest_s, decode_pass_s = _pass_s(costs, decode)
    if limits.steps_in_flight == 1:
        slowest_s = _pass_s(costs, prefill)[1]
    return ReplicaCapacity(
        kv_tokens=kv_tokens,
        token_budget=budget,
        prefill_step_s=slowest_s,
        decode_step_s=max(decode_pass_s, limits.steps_in_flight * decode_slowest_s),
    )


def _pass_s(costs: EngineCosts, shape: StepSize) -> tuple[float, float]:
    """Return the seconds of the slowest stage of a step, and of all of them with their hops."""
    ranks = range(costs.layout.num_ranks)
    stages = [costs.stage_s(rank, shape) for rank in ranks]
    hops = [costs.hop(rank, shape) for rank in ranks]
    stages[0] += costs.project_s(shape)
    slowest_s = max(seconds + hop.end_s for seconds, hop in zip(stages, hops, strict=True))
    return slowest_s, sum(stages) + sum(2 * hop.end_s + hop.delay_s for hop in hops)


def engine_stats(engine: SimulatedEngine, limits: EngineLimits) -> ReplicaStats:
    """Return the statistics that a router reads of an engine."""
    scheduler = engine.scheduler
    return ReplicaStats(
        queued_tokens=scheduler.queued_tokens,
        waiting_tokens=scheduler.waiting_tokens,
        free_tokens=scheduler.free_blocks * limits.block_size,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
    )


def _engine(number: int, replica: FleetReplica) -> SimulatedEngine:
    rate = replica.acceptance_rate
    accepts = None if rate is None else random_acceptance(rate, number)
    draft_s = relative_draft_s(replica.costs, replica.limits, replica.context)
    return SimulatedEngine(
        replica.costs, replica.limits, replica.order, accepts, draft_s, replica.predictor
    )


def _advance(engine: SimulatedEngine, replica: Replica, until_s: float) -> None:
    engine.advance(until_s)
    unfinished = engine.scheduler.num_running + engine.scheduler.num_waiting
    for _ in range(replica.outstanding - unfinished):
        replica.finish()


def _means(trace: Sequence[TraceRequest]) -> WorkloadMeans:
    count = max(1, len(trace))
    return WorkloadMeans(
        prompt_tokens=sum(item.prompt_tokens for item in trace) / count,
        new_tokens=sum(item.new_tokens for item in trace) / count,
    )
