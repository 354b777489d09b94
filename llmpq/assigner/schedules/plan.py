"""From a plan to a plan with a schedule: the policy, its control variables, fitting micro-batches.

The assignment of layers and bits is the planner's; the schedule is searched on top of it, on the
same cost models. A schedule for ``queries`` is proven by the simulator: a trace of the same laws
must answer 99 of 100 requests in time, counted from the start of each one's prefill. Either way
latencies count by the guard of what the tables are unsure of (``schedules.guard``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import numpy as np

from llmpq.assigner.decode import reprice
from llmpq.assigner.schedules.guard import guard_of
from llmpq.assigner.schedules.polish import BATCHES, CYCLES, Move, polished
from llmpq.assigner.schedules.rra import ChosenSchedule, ScheduleTask, best_rra, estimated
from llmpq.assigner.schedules.split import SHARINGS, Sharing, split_plans
from llmpq.assigner.schedules.waa import WaaSpace, best_waa
from llmpq.assigner.split import excess_bytes
from llmpq.batching import PipelineShape, make_policy, percentile
from llmpq.costmodel import ClusterCosts
from llmpq.errors import InfeasibleError, SpecError
from llmpq.sim import simulate
from llmpq.sim.plan_costs import PlanCosts
from llmpq.sim.report import SimReport
from llmpq.spec.lengths import LengthDistribution
from llmpq.spec.plan import MicroBatching, Plan
from llmpq.spec.precision import BITS, Phase
from llmpq.spec.schedule import PolicyName, default_schedule
from llmpq.spec.trace import draw_trace
from llmpq.units import format_bytes

Sla = Literal["length", "queries"]

PERCENT = 99
_TRIES = 6
_SAME = 1.0 + 1e-9
_TRACE_REQUESTS = 2000
_POLISH_REQUESTS, _POLISH_ROUNDS = 500, 8
"""Requests that neighbours are compared on: at least so many, and so many fillings of the slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """What is wanted of a schedule.

    Attributes:
        prompt_tokens: law of prompt lengths.
        new_tokens: law of answer lengths.
        latency_bound_s: largest latency; infinity is no bound.
        sla: what the bound is for (ExeGPT, Sec. 7.6). ``length``: an answer as long as the 99th
            percentile. ``queries``: 99 % of all requests.
        seed: of the simulated requests.
        sharings: of WAA: layers by time (WAA-C), by memory (WAA-M), or whichever is better.
        confidence: how likely the bound is to be kept, given what the tables say they are unsure
            of; 0.5 takes them at their word.
    """

    prompt_tokens: LengthDistribution
    new_tokens: LengthDistribution
    latency_bound_s: float = math.inf
    sla: Sla = "length"
    seed: int = 0
    sharings: tuple[Sharing, ...] = SHARINGS
    confidence: float = 0.5


Searched = Literal["rra", "waa"]
SEARCHED: tuple[Searched, ...] = get_args(Searched)


def with_schedule(
    plan: Plan, costs: ClusterCosts, request: ScheduleRequest, policy: Searched = "rra"
) -> Plan:
    """Return the plan with the schedule of highest throughput within the bound.

    Args:
        plan: layers and bits; its workload's batch is the number of KV slots.
        costs: the cost models of its cluster.
        request: what is wanted.
        policy: whose schedule. WAA shares the layers out anew, to stages of either phase.

    Raises:
        SpecError: the laws hold lengths that the plan has no room for.
        InfeasibleError: no schedule meets the bound, or memory does not hold two copies (WAA).
    """
    _check_room(plan, request)
    reached_s = math.inf
    bound_s = request.latency_bound_s / guard_of(plan, costs, request.confidence)
    for _ in range(_TRIES):
        made = _MAKERS[policy](plan, costs, request, bound_s)
        if math.isinf(request.latency_bound_s):
            return _polished(made, costs, request)
        if request.sla == "length":
            reached_s = bound_s * guard_of(made, costs, request.confidence)
        else:
            reached_s = _kept_s(simulated(made, costs, request), made, costs, request)
        if reached_s <= request.latency_bound_s * _SAME:
            asked = _asked(made, request)
            return asked if request.sla == "length" else _polished(asked, costs, request)
        # Aim lower by as much as the simulation is above the bound, and a little more.
        bound_s *= 0.98 * request.latency_bound_s / reached_s
    raise InfeasibleError(
        f"no {policy.upper()} schedule answers {PERCENT} % of the requests within "
        f"{request.latency_bound_s:g} s; the last one tried takes {reached_s:.3g} s"
    )


def best_of_policies(plan: Plan, costs: ClusterCosts, request: ScheduleRequest) -> Plan:
    """Return the plan under whichever policy answers most requests a second within the bound.

    Compared in simulation: the best RRA schedule, the best WAA schedule, iteration-level batching,
    and static batches.

    Raises:
        InfeasibleError: none keeps the bound; the message is that of RRA.
    """
    slots = plan.workload.batch
    found: list[Plan] = []
    failure: InfeasibleError | None = None
    for policy in SEARCHED:
        try:
            found.append(with_schedule(plan, costs, request, policy))
        except InfeasibleError as error:
            failure = failure or error
    names: tuple[PolicyName, ...] = ("iteration", "static")
    found += [replace(plan, schedule=default_schedule(name, slots)) for name in names]
    best: tuple[float, Plan] | None = None
    for candidate in found:
        report = simulated(candidate, costs, request)
        rate = report.throughput_requests_per_s
        latency_s = _kept_s(report, candidate, costs, request)
        is_searched = candidate.schedule is not None and candidate.schedule.policy in SEARCHED
        # What they were searched for is their own bound; others are held to it in simulation.
        keeps = is_searched or latency_s <= request.latency_bound_s
        if keeps and (best is None or rate > best[0]):
            best = rate, candidate
    if best is None:
        assert failure is not None
        raise failure
    return best[1]


def _polished(plan: Plan, costs: ClusterCosts, request: ScheduleRequest) -> Plan:
    """Return the plan, or under RRA a better neighbour that keeps the bound when played."""
    if plan.schedule is None or plan.schedule.policy != "rra":
        return plan
    count = max(_POLISH_REQUESTS, _POLISH_ROUNDS * plan.workload.batch)
    bound_s = request.latency_bound_s
    moves: tuple[Move, ...] = CYCLES
    if not math.isinf(bound_s):
        # The few requests of a play differ from all that a bound is kept for, of all plans alike.
        few, every = (simulated(plan, costs, request, n) for n in (count, _TRACE_REQUESTS))
        bound_s *= _kept_s(few, plan, costs, request) / _kept_s(every, plan, costs, request)
        moves += BATCHES

    def score(candidate: Plan) -> float:
        if not _fits(candidate, costs, candidate.micro_batching):
            return 0.0
        report = simulated(candidate, costs, request, count)
        kept = _kept_s(report, candidate, costs, request) <= bound_s * _SAME
        return report.throughput_requests_per_s if kept else 0.0

    path = polished(plan, request.prompt_tokens, request.new_tokens, score, moves=moves)
    while len(path) > 1:
        best = path.pop()
        reached_s = _kept_s(simulated(best, costs, request), best, costs, request)
        if reached_s <= request.latency_bound_s:
            task = _task(best, costs, request, request.latency_bound_s)
            return _repriced(replace(best, schedule=estimated(best, task)), costs)
    return plan


def simulated(
    plan: Plan, costs: ClusterCosts, request: ScheduleRequest, count: int = _TRACE_REQUESTS
) -> SimReport:
    """Play requests of the given laws, all there at once, under the plan's schedule."""
    assert plan.schedule is not None
    trace = draw_trace(count, request.prompt_tokens, request.new_tokens, seed=request.seed)
    shape = PipelineShape(
        micro_batching=plan.micro_batching,
        num_slots=plan.workload.batch,
        num_stages=len(plan.path(Phase.DECODE)),
    )
    return simulate(
        PlanCosts(plan, costs),
        make_policy(plan.schedule, shape),
        trace,
        num_slots=plan.workload.batch,
    )


def _kept_s(report: SimReport, plan: Plan, costs: ClusterCosts, request: ScheduleRequest) -> float:
    """Return the guarded latency of 99 % of the requests, from the start of their prefill."""
    played_s = percentile([record.service_s for record in report.requests], PERCENT)
    return played_s * guard_of(plan, costs, request.confidence)


def _asked(plan: Plan, request: ScheduleRequest) -> Plan:
    """Return the plan with the bound that was asked for, where the search aimed lower."""
    schedule = plan.schedule
    if schedule is None or schedule.estimate is None:
        return plan
    estimate = replace(schedule.estimate, latency_bound_s=request.latency_bound_s)
    return replace(plan, schedule=replace(schedule, estimate=estimate))


def _task(
    plan: Plan, costs: ClusterCosts, request: ScheduleRequest, bound_s: float
) -> ScheduleTask:
    return ScheduleTask(
        costs=PlanCosts(plan, costs),
        num_slots=plan.workload.batch,
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
        latency_bound_s=bound_s,
        bound_tokens=request.new_tokens.quantile(PERCENT / 100),
    )


def _rra(plan: Plan, costs: ClusterCosts, request: ScheduleRequest, bound_s: float) -> Plan:
    return _applied(plan, costs, best_rra(_task(plan, costs, request, bound_s)))


def _waa(plan: Plan, costs: ClusterCosts, request: ScheduleRequest, bound_s: float) -> Plan:
    """Return the best of all ways to split the devices into those that encode and that decode."""
    best: tuple[Plan, ChosenSchedule] | None = None
    failures: list[tuple[float, InfeasibleError]] = []
    for candidate in split_plans(
        plan,
        costs,
        prompt=max(1, round(request.prompt_tokens.mean)),
        context=max(1, round(request.prompt_tokens.mean + request.new_tokens.mean / 2)),
        sharings=request.sharings,
    ):
        task = _task(candidate, costs, request, bound_s)
        try:
            found = best_waa(task, fits=partial(_fits, candidate, costs))
        except InfeasibleError as error:
            fastest_s = WaaSpace(task).look((0, 0)).performance.latency_s
            failures.append((fastest_s, error))
            continue
        rate = found.performance.requests_per_s
        if best is None or rate > best[1].performance.requests_per_s:
            best = candidate, found
    if best is None:
        if not failures:
            raise InfeasibleError(_no_split(plan, costs))
        raise min(failures, key=lambda item: item[0])[1]
    return _applied(best[0], costs, best[1])


_MAKERS: dict[Searched, Callable[[Plan, ClusterCosts, ScheduleRequest, float], Plan]] = {
    "rra": _rra,
    "waa": _waa,
}


def _fits(plan: Plan, costs: ClusterCosts, sizes: MicroBatching) -> bool:
    return not excess_bytes(replace(plan, micro_batching=sizes), costs)


def _no_split(plan: Plan, costs: ClusterCosts) -> str:
    """Say why no stages of either phase can be had."""
    devices = plan.cluster.devices
    if len(devices) == 1:
        return "no WAA schedule: found one device, expected at least two: one encodes, one decodes"
    kinds = costs.model.layer_kinds
    weights = sum(
        costs.layer_weight_bytes(devices[0], kind, bits)
        for kind, bits in zip(kinds, plan.bits, strict=True)
    )
    work = plan.workload
    kv = sum(costs.layer_kv_bytes(kind, work.batch, work.max_context_tokens) for kind in kinds)
    room = sum(costs.capacity_bytes(device) - costs.runtime_bytes(device) for device in devices)
    return (
        f"no WAA schedule: two copies of the layers take {format_bytes(2 * weights)} and "
        f"{work.batch} slots {format_bytes(kv)}, which {len(devices)} devices with "
        f"{format_bytes(room)} for both do not hold as runs of layers; allow fewer bits, or fewer "
        "sequences (--global_bz)"
    )


def _applied(plan: Plan, costs: ClusterCosts, chosen: ChosenSchedule) -> Plan:
    """Put a schedule into the plan; its micro-batches must fit in memory as well."""
    sizes = chosen.micro_batching
    made = replace(
        plan,
        micro_batching=MicroBatching(
            prefill=min(sizes.prefill, plan.workload.batch),
            decode=min(sizes.decode, plan.workload.batch),
        ),
        schedule=chosen.schedule,
    )
    return _repriced(made, costs)


def _repriced(made: Plan, costs: ClusterCosts) -> Plan:
    """Price a plan whose micro-batches have changed; they must fit in memory.

    Raises:
        InfeasibleError: they do not.
    """
    nothing = np.zeros((made.model.num_layers, len(BITS)))
    estimate, excess = reprice(made, costs, nothing)
    if excess:
        raise InfeasibleError(
            f"the schedule's micro-batches of {made.micro_batching.prefill} and "
            f"{made.micro_batching.decode} sequences need "
            f"{excess} bytes more than there are; plan for fewer sequences (--global_bz)"
        )
    quality = made.estimate.quality
    return replace(
        made,
        estimate=replace(
            estimate,
            quality=quality,
            objective_s=estimate.latency_s + made.search.theta_s * quality,
        ),
    )


def _check_room(plan: Plan, request: ScheduleRequest) -> None:
    work = plan.workload
    prompt, new = request.prompt_tokens.longest, request.new_tokens.longest
    if prompt > work.prompt_tokens or prompt + new > work.max_context_tokens:
        raise SpecError(
            f"lengths: found prompts of up to {prompt} and answers of up to {new} tokens, "
            f"expected at most the workload's {work.prompt_tokens} and {work.new_tokens} "
            "(--s and --n)"
        )
