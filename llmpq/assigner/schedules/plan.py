"""From a plan to a plan with a schedule: the policy, its control variables, its micro-batches.

A bound is verified by the simulator: 99 of 100 requests of a trace with the same length
distributions must be answered in time, counted from the start of each one's prefill, and by default
99 of 100 of those whose answers are about as long as the 99th percentile.
Simulated latencies are multiplied by ``safety_factor``.

A local search improves an RRA schedule; the simulator evaluates each neighbour. The closed form
assumes that a cycle ends before the next one begins. In a pipeline prompts follow the last decode
steps of the old cycle, so encoding more often costs less than it says, and a batch that is refilled
at every encoding (a threshold of 0) has a higher throughput. With a bound for 99 % of the requests
the decoding batch varies too. A neighbour encodes the ``B_E`` that its ``B_D`` and ``N_D`` need.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from statistics import NormalDist
from typing import Literal, NamedTuple, get_args

import numpy as np

from llmpq.assigner.forecast import evaluate_plan, excess_bytes, micro_batches_of, policy_of
from llmpq.assigner.request import PlanRequest, Progress, costs_of, silent
from llmpq.assigner.schedules.rra import ChosenSchedule, ScheduleTask, best_rra, with_estimate
from llmpq.assigner.schedules.steady_state import SteadyBatch
from llmpq.assigner.schedules.waa import BALANCES, Balance, WaaSpace, best_waa, split_plans
from llmpq.batching import percentile
from llmpq.costmodel import ClusterCosts
from llmpq.errors import InfeasibleError, SpecError
from llmpq.options.plan import Sla
from llmpq.sim import simulate
from llmpq.sim.costs import PlanCosts
from llmpq.sim.report import SimReport
from llmpq.spec.cluster import with_tensor_parallel
from llmpq.spec.plan import MicroBatching, Plan, PolicyName, StageAssignment, default_schedule
from llmpq.spec.precision import BITS
from llmpq.spec.workload import LengthDistribution, draw_trace
from llmpq.units import format_bytes

LEAST_GAIN = 1.003
"""Smaller gains are due to the trace."""
ALWAYS_REFILL = 0.0
"""The threshold with which every encoding refills the decoding batch."""
_ROUNDS = 3

Score = Callable[[Plan], float]
"""Simulated requests a second of a plan; 0 when it breaks the bound or does not fit."""


class Move(NamedTuple):
    """A step to a neighbour: factors on its variables, and a new threshold unless ``None``."""

    iterations: float = 1.0
    decode_batch: float = 1.0
    prefill: float = 1.0
    threshold: float | None = None


CYCLE_MOVES = (
    Move(threshold=ALWAYS_REFILL),
    Move(iterations=0.5),
    Move(iterations=0.7),
    Move(prefill=2.0),
    Move(prefill=0.5),
    Move(iterations=1.4),
    Move(iterations=2.0),
)
"""Moves of any schedule, in this order."""
BATCH_MOVES = (
    Move(decode_batch=1.25),
    Move(decode_batch=1.1),
    Move(decode_batch=1.25, iterations=2.0),
    Move(decode_batch=0.9),
    Move(decode_batch=0.9, iterations=0.5),
)
"""More moves where a bound, and not the number of slots, limits the decoding batch."""
MAX_EVALUATIONS = 1 + _ROUNDS * (len(CYCLE_MOVES) + len(BATCH_MOVES))


def local_search(
    plan: Plan,
    prompt_tokens: LengthDistribution,
    new_tokens: LengthDistribution,
    score: Score,
    *,
    moves: tuple[Move, ...] = CYCLE_MOVES,
) -> list[Plan]:
    """Return ever better RRA plans, from the given one to a local optimum.

    ``score`` is called once for each plan; ``moves`` are tried in turn from the best plan so far.
    """
    path, best_score = [plan], score(plan)
    seen = {(plan.schedule, plan.micro_batching)}
    for _ in range(_ROUNDS):
        start = path[-1]
        for move in moves:
            candidate = _moved(path[-1], move, prompt_tokens, new_tokens)
            key = candidate.schedule, candidate.micro_batching
            if key in seen:
                continue
            seen.add(key)
            reached = score(candidate)
            if reached > LEAST_GAIN * best_score:
                path.append(candidate)
                best_score = reached
        if path[-1] is start:
            break
    return path


def _moved(
    plan: Plan, move: Move, prompt_tokens: LengthDistribution, new_tokens: LengthDistribution
) -> Plan:
    """Return the neighbour, each variable within its range."""
    schedule, sizes = plan.schedule, plan.micro_batching
    assert schedule is not None
    assert schedule.encode_batch is not None
    assert schedule.decode_batch is not None
    assert schedule.decode_iterations is not None
    slots, longest = plan.workload.batch, max(1, new_tokens.longest - 1)
    iterations = min(max(1, round(move.iterations * schedule.decode_iterations)), longest)
    decode_batch = min(max(1, round(move.decode_batch * schedule.decode_batch)), slots)
    encode_batch, decode = schedule.encode_batch, sizes.decode
    if (decode_batch, iterations) != (schedule.decode_batch, schedule.decode_iterations):
        steady = SteadyBatch(
            prompt_tokens=prompt_tokens, new_tokens=new_tokens, decode_iterations=iterations
        )
        encode_batch = min(max(1, round(steady.encode_batch(decode_batch))), decode_batch)
    if decode_batch != schedule.decode_batch:
        decode = math.ceil(decode_batch / len(plan.stages))
    prefill = min(max(1, math.floor(move.prefill * sizes.prefill)), decode_batch)
    return replace(
        plan,
        schedule=replace(
            schedule,
            encode_batch=encode_batch,
            decode_batch=decode_batch,
            decode_iterations=iterations,
            threshold=schedule.threshold if move.threshold is None else move.threshold,
        ),
        micro_batching=MicroBatching(prefill=prefill, decode=decode),
    )


PERCENT = 99
NEARLY = 97
"""Answers from this percentile on are about as long as that of ``PERCENT``."""
SLOT_EIGHTHS = (8, 6, 5, 4, 3, 2)
"""Of the slots: the shares that WAA is searched with."""
_TRIES = 6
_ROUNDING = 1.0 + 1e-9
_TRACE_REQUESTS = 2000
_SEARCH_REQUESTS, _SEARCH_ROUNDS = 500, 8
"""Requests that neighbours are compared on: at least so many, and so many fillings of the slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """Length distributions and the latency bound of a schedule.

    Attributes:
        latency_bound_s: largest latency; infinity for no bound.
        sla: what the bound applies to (ExeGPT, Sec. 7.6). ``queries``: 99 % of all requests in
            simulation. ``both``: also 99 % of the answers that are about as long as the 99th
            percentile. ``length``: an answer of that length, by closed form, as in the paper.
        balances: of WAA: layers by time (WAA-C), by memory (WAA-M), or the better of the two.
        confidence: probability of keeping the bound, given the uncertainty that tables state; 0.5
            for no margin.
        pads_prompts: price an engine that pads prompts, as ``PlanCosts``.
    """

    prompt_tokens: LengthDistribution
    new_tokens: LengthDistribution
    latency_bound_s: float = math.inf
    sla: Sla = "both"
    seed: int = 0
    balances: tuple[Balance, ...] = BALANCES
    confidence: float = 0.5
    pads_prompts: bool = False


Searched = Literal["rra", "waa"]
SEARCHED: tuple[Searched, ...] = get_args(Searched)
SearchedPolicy = Literal["rra", "waa", "auto"]
_SEARCHED_BY: dict[SearchedPolicy, tuple[Searched, ...]] = {
    "rra": ("rra",),
    "waa": ("waa",),
    "auto": SEARCHED,
}


def schedule_plan(  # noqa: PLR0913  what a search needs
    request: PlanRequest,
    plan: Plan,
    wanted: ScheduleRequest,
    policy: SearchedPolicy,
    *,
    degrees: Sequence[int],
    planned: Callable[[PlanRequest], Plan],
    progress: Progress = silent,
) -> tuple[PlanRequest, Plan]:
    """Return the plan with a searched schedule, and the request that it is a plan of.

    Every degree gets its own plan by ``planned``; the result is the one with the most requests per
    second in simulation. Degree 1 is ``plan`` itself; the policy ``auto`` compares all.
    ``progress`` receives the searches that are done, and how many there are.

    Raises:
        SpecError: no group of devices divides into teams of a degree.
        InfeasibleError: no schedule meets the bound.
    """
    found: list[tuple[float, PlanRequest, Plan]] = []
    failures: list[InfeasibleError] = []
    done, searches = (
        itertools.count(1),
        len(set(degrees)) * sum(map(_searches_of, _SEARCHED_BY[policy])),
    )

    def step() -> None:
        progress(next(done), searches, None)

    for degree in sorted(set(degrees)):
        if degree < 1:
            raise SpecError(f"--tensor_parallel: found {degree}, expected 1 or more")
        own, base = request, plan
        try:
            if degree > 1:
                own = replace(request, cluster=with_tensor_parallel(request.cluster, degree))
                base = planned(own)
            costs = costs_of(own, base.cluster)
            if policy == "auto":
                made = best_of_policies(base, costs, wanted, step)
            else:
                made = with_schedule(base, costs, wanted, policy, step)
        except InfeasibleError as error:
            failures.append(error)
            continue
        if len(degrees) == 1:
            return own, made
        report = simulated(made, costs_of(own, made.cluster), wanted)
        found.append((report.throughput_requests_per_s, own, made))
    if not found:
        raise failures[0]
    _, best, made = max(found, key=lambda item: item[0])
    return best, made


def _searches_of(policy: Searched) -> int:
    """Return how many numbers of slots a policy is searched with, at most."""
    return len(SLOT_EIGHTHS) if policy == "waa" else 1


def with_schedule(
    plan: Plan,
    costs: ClusterCosts,
    request: ScheduleRequest,
    policy: Searched = "rra",
    step: Callable[[], None] = lambda: None,
) -> Plan:
    """Return the plan with the schedule of highest throughput within the bound.

    The workload's batch is the number of KV slots. WAA assigns the layers anew to separate stages
    per phase, and may use fewer slots: with less memory for keys and values other cuts fit. The
    estimate of the schedule is what the simulator plays, with ``length`` the closed form. ``step``
    is called after each search.

    Raises:
        SpecError: the distributions hold lengths that the plan has no room for.
        InfeasibleError: no schedule meets the bound, or memory does not hold two copies (WAA).
    """
    check_lengths(plan, request)
    found: list[Plan] = []
    failure: InfeasibleError | None = None
    for one in _with_fewer_slots(plan) if policy == "waa" else [plan]:
        try:
            found.append(_with_schedule(one, costs, request, policy))
        except InfeasibleError as error:
            failure = failure or error
        step()
    if not found:
        assert failure is not None
        raise failure
    return max(found, key=_expected_rate)


def _with_fewer_slots(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with all its slots, and with eighths of them."""
    slots, sizes = plan.workload.batch, plan.micro_batching
    for count in dict.fromkeys(max(1, slots * share // 8) for share in SLOT_EIGHTHS):
        yield replace(
            plan,
            workload=replace(plan.workload, batch=count),
            micro_batching=MicroBatching(
                prefill=min(sizes.prefill, count), decode=min(sizes.decode, count)
            ),
        )


def _expected_rate(plan: Plan) -> float:
    assert plan.schedule is not None
    assert plan.schedule.estimate is not None
    return plan.schedule.estimate.requests_per_s


def _with_schedule(
    plan: Plan, costs: ClusterCosts, request: ScheduleRequest, policy: Searched
) -> Plan:
    """Return the plan with the best schedule for its slots."""
    reached_s = math.inf
    bound_s = request.latency_bound_s / safety_factor(plan, costs, request.confidence)
    for _ in range(_TRIES):
        made = _SEARCHES[policy](plan, costs, request, bound_s)
        if math.isinf(request.latency_bound_s):
            return _as_played(_improved(made, costs, request), costs, request)
        if request.sla == "length":
            reached_s = bound_s * safety_factor(made, costs, request.confidence)
        else:
            reached_s = _reached_s(simulated(made, costs, request), made, costs, request)
        if reached_s <= request.latency_bound_s * _ROUNDING:
            made = _with_bound(made, request)
            if request.sla == "length":
                return made
            return _as_played(_improved(made, costs, request), costs, request)
        # Lower the bound by as much as the simulation exceeds it, and a little more.
        bound_s *= 0.98 * request.latency_bound_s / reached_s
    raise InfeasibleError(
        f"no {policy.upper()} schedule answers {PERCENT} % of the requests within "
        f"{request.latency_bound_s:g} s; the last one tried takes {reached_s:.3g} s"
    )


def best_of_policies(
    plan: Plan,
    costs: ClusterCosts,
    request: ScheduleRequest,
    step: Callable[[], None] = lambda: None,
) -> Plan:
    """Return the plan under the policy that answers most requests a second within the bound.

    The simulator compares the best RRA and WAA schedules, iteration-level and static batching.
    ``step`` is called after each search.

    Raises:
        InfeasibleError: none keeps the bound; the message is that of RRA.
    """
    found: list[Plan] = []
    failure: InfeasibleError | None = None
    for policy in SEARCHED:
        try:
            found.append(with_schedule(plan, costs, request, policy, step))
        except InfeasibleError as error:
            failure = failure or error
    names: tuple[PolicyName, ...] = ("iteration", "static")
    found += [replace(plan, schedule=default_schedule(n, plan.workload.batch)) for n in names]
    best: tuple[float, Plan] | None = None
    for candidate in found:
        report = simulated(candidate, costs, request)
        rate = report.throughput_requests_per_s
        latency_s = _reached_s(report, candidate, costs, request)
        is_searched = candidate.schedule is not None and candidate.schedule.policy in SEARCHED
        # Searched schedules keep the bound already; the others must keep it in simulation.
        keeps = is_searched or latency_s <= request.latency_bound_s
        if keeps and (best is None or rate > best[0]):
            best = rate, candidate
    if best is None:
        assert failure is not None
        raise failure
    return best[1]


def _improved(plan: Plan, costs: ClusterCosts, request: ScheduleRequest) -> Plan:
    """Return the plan, or under RRA a better neighbour that keeps the bound in simulation."""
    if plan.schedule is None or plan.schedule.policy != "rra":
        return plan
    count = max(_SEARCH_REQUESTS, _SEARCH_ROUNDS * plan.workload.batch)
    bound_s = request.latency_bound_s
    moves: tuple[Move, ...] = CYCLE_MOVES
    if not math.isinf(bound_s):
        # The neighbours' short trace differs from the full one, for all plans alike.
        short, full = (simulated(plan, costs, request, n) for n in (count, _TRACE_REQUESTS))
        bound_s *= _reached_s(short, plan, costs, request) / _reached_s(full, plan, costs, request)
        moves += BATCH_MOVES

    def score(candidate: Plan) -> float:
        if not _fits(candidate, costs, candidate.micro_batching):
            return 0.0
        report = simulated(candidate, costs, request, count)
        kept = _reached_s(report, candidate, costs, request) <= bound_s * _ROUNDING
        return report.throughput_requests_per_s if kept else 0.0

    path = local_search(plan, request.prompt_tokens, request.new_tokens, score, moves=moves)
    while len(path) > 1:
        best = path.pop()
        reached_s = _reached_s(simulated(best, costs, request), best, costs, request)
        if reached_s <= request.latency_bound_s:
            task = _task(best, costs, request, request.latency_bound_s)
            return _reevaluated(with_estimate(best, task), costs)
    return plan


def simulated(
    plan: Plan, costs: ClusterCosts, request: ScheduleRequest, count: int = _TRACE_REQUESTS
) -> SimReport:
    """Simulate ``count`` drawn requests, all waiting at the start, under the plan's schedule.

    The report of a schedule, on the same stages and for the same trace, is kept for the next call.
    """
    assert plan.schedule is not None
    key = (
        *(plan.model, plan.cluster, plan.stages, plan.micro_batching, plan.workload),
        *(replace(plan.schedule, estimate=None), count),
        *(request.prompt_tokens, request.new_tokens, request.seed, request.pads_prompts),
    )
    return _simulated(_Simulation(key=key, plan=plan, request=request, count=count), costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulation:
    """What is simulated; ``key`` holds all that the report depends on, so no estimate."""

    key: tuple[object, ...]
    plan: Plan = field(compare=False)
    request: ScheduleRequest = field(compare=False)
    count: int = field(compare=False)


@lru_cache(maxsize=64)
def _simulated(wanted: _Simulation, costs: ClusterCosts) -> SimReport:
    plan, request = wanted.plan, wanted.request
    assert plan.schedule is not None
    trace = draw_trace(wanted.count, request.prompt_tokens, request.new_tokens, seed=request.seed)
    policy = policy_of(plan, plan.schedule)
    prices = PlanCosts(plan, costs, pads_prompts=request.pads_prompts)
    return simulate(prices, policy, trace, num_slots=plan.workload.batch)


def _reached_s(
    report: SimReport, plan: Plan, costs: ClusterCosts, request: ScheduleRequest
) -> float:
    """Return the latency to which a bound applies, from the start of prefill, with the margin."""
    simulated_s = percentile([record.service_s for record in report.requests], PERCENT)
    if request.sla == "both":
        longest, nearly = (request.new_tokens.quantile(share / 100) for share in (PERCENT, NEARLY))
        about = [one.service_s for one in report.requests if nearly <= one.new_tokens <= longest]
        simulated_s = max(simulated_s, percentile(about, PERCENT) if about else 0.0)
    return simulated_s * safety_factor(plan, costs, request.confidence)


def safety_factor(plan: Plan, costs: ClusterCosts, confidence: float) -> float:
    """Return the factor on simulated latencies, at least 1: the safety margin of a bound.

    It follows from the standard deviation that latency models state; a roofline gives none.

    ``confidence`` is the probability of keeping the bound, with normal errors of the stated
    deviation; 0.5 for no margin.

    Raises:
        SpecError: ``confidence`` is not in [0.5, 1).
    """
    if not 0.5 <= confidence < 1.0:
        raise SpecError(f"bound confidence: found {confidence:g}, expected 0.5 to less than 1")
    if confidence == 0.5:
        return 1.0
    deviation = max((_deviation(plan, costs, stage) for stage in plan.stages), default=0.0)
    return 1.0 + NormalDist().inv_cdf(confidence) * deviation


def _deviation(plan: Plan, costs: ClusterCosts, stage: StageAssignment) -> float:
    """Return one standard deviation of a stage's seconds, relative to them."""
    device = plan.device_of(stage)
    if costs.latency_source(device) == "roofline" or not stage.num_layers:
        return 0.0
    kinds = costs.model.layer_kinds[stage.first_layer : stage.end_layer]
    layers = set(zip(kinds, stage.bits, strict=True))
    return max(
        (
            costs.layer_estimate(device, phase, bits, rows, round(tokens), kind).relative_deviation
            for phase, rows, tokens in micro_batches_of(plan)
            if stage.computes(phase)
            for kind, bits in layers
        ),
        default=0.0,
    )


def _as_played(plan: Plan, costs: ClusterCosts, request: ScheduleRequest) -> Plan:
    """Return the plan whose schedule's estimate is what the simulator plays."""
    schedule = plan.schedule
    if request.sla == "length" or schedule is None or schedule.estimate is None:
        return plan
    report = simulated(plan, costs, request)
    estimate = replace(
        schedule.estimate,
        requests_per_s=report.throughput_requests_per_s,
        latency_s=_reached_s(report, plan, costs, request),
    )
    return replace(plan, schedule=replace(schedule, estimate=estimate))


def _with_bound(plan: Plan, request: ScheduleRequest) -> Plan:
    """Return the plan with the requested bound, where the search used a lower one."""
    schedule = plan.schedule
    if schedule is None or schedule.estimate is None:
        return plan
    estimate = replace(schedule.estimate, latency_bound_s=request.latency_bound_s)
    return replace(plan, schedule=replace(schedule, estimate=estimate))


def _task(
    plan: Plan, costs: ClusterCosts, request: ScheduleRequest, bound_s: float
) -> ScheduleTask:
    return ScheduleTask(
        costs=PlanCosts(plan, costs, pads_prompts=request.pads_prompts),
        num_slots=plan.workload.batch,
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
        latency_bound_s=bound_s,
        bound_tokens=request.new_tokens.quantile(PERCENT / 100),
    )


def _search_rra(plan: Plan, costs: ClusterCosts, request: ScheduleRequest, bound_s: float) -> Plan:
    return _applied(plan, costs, best_rra(_task(plan, costs, request, bound_s)))


def _search_waa(plan: Plan, costs: ClusterCosts, request: ScheduleRequest, bound_s: float) -> Plan:
    """Return the best of all splits of the devices into encoders and decoders."""
    if any(layer.kv_source is not None for layer in costs.model.layer_types):
        raise InfeasibleError(
            "no WAA schedule: layers read keys and values of earlier layers, which stages for "
            "prefill do not send to those for decode; choose --policy rra"
        )
    best: tuple[Plan, ChosenSchedule] | None = None
    failures: list[tuple[float, InfeasibleError]] = []
    for candidate in split_plans(
        plan,
        costs,
        prompt=max(1, round(request.prompt_tokens.mean)),
        context=max(1, round(request.prompt_tokens.mean + request.new_tokens.mean / 2)),
        balances=request.balances,
    ):
        task = _task(candidate, costs, request, bound_s)
        try:
            found = best_waa(task, fits=partial(_fits, candidate, costs))
        except InfeasibleError as error:
            failures.append((WaaSpace(task).point((0, 0)).performance.latency_s, error))
            continue
        rate = found.performance.requests_per_s
        if best is None or rate > best[1].performance.requests_per_s:
            best = candidate, found
    if best is None:
        if not failures:
            raise InfeasibleError(_no_split_text(plan, costs))
        raise min(failures, key=lambda item: item[0])[1]
    return _applied(best[0], costs, best[1])


_SEARCHES: dict[Searched, Callable[[Plan, ClusterCosts, ScheduleRequest, float], Plan]] = {
    "rra": _search_rra,
    "waa": _search_waa,
}


def _fits(plan: Plan, costs: ClusterCosts, sizes: MicroBatching) -> bool:
    return not excess_bytes(replace(plan, micro_batching=sizes), costs)


def _no_split_text(plan: Plan, costs: ClusterCosts) -> str:
    """Return why the devices cannot be split."""
    devices = plan.cluster.devices
    if len(devices) == 1:
        return "no WAA schedule: found one device, expected at least two: one encodes, one decodes"
    formats = sorted({costs.format_of(device) for device in devices})
    if len(formats) > 1:
        return (
            f"no WAA schedule: the devices compute in {' and '.join(formats)}, expected one format "
            "in which stages for prefill send keys and values to those for decode; leave devices "
            "out, or choose --dtype"
        )
    kinds, work = costs.model.layer_kinds, plan.workload
    layers = zip(kinds, plan.bits, strict=True)
    weights = sum(costs.layer_weight_bytes(devices[0], kind, bits) for kind, bits in layers)
    kv = sum(
        costs.layer_kv_bytes(kind, work.batch, work.max_context_tokens, keeps_all=True)
        for kind in kinds
    )
    room = sum(costs.capacity_bytes(device) - costs.runtime_bytes(device) for device in devices)
    return (
        f"no WAA schedule: two copies of the layers take {format_bytes(2 * weights)} and "
        f"{work.batch} slots {format_bytes(kv)}, which {len(devices)} devices with "
        f"{format_bytes(room)} for both do not hold as contiguous stages; allow fewer bits, or "
        "fewer sequences (--global_bz)"
    )


def _applied(plan: Plan, costs: ClusterCosts, chosen: ChosenSchedule) -> Plan:
    """Return the plan with a schedule; its micro-batches must fit in memory as well."""
    sizes, batch = chosen.micro_batching, plan.workload.batch
    sizes = MicroBatching(prefill=min(sizes.prefill, batch), decode=min(sizes.decode, batch))
    return _reevaluated(replace(plan, micro_batching=sizes, schedule=chosen.schedule), costs)


def _reevaluated(plan: Plan, costs: ClusterCosts) -> Plan:
    """Return the plan with the estimate of its new micro-batches, if they fit in memory."""
    nothing = np.zeros((plan.model.num_layers, len(BITS)))
    estimate, excess = evaluate_plan(plan, costs, nothing)
    if excess:
        raise InfeasibleError(
            f"the schedule's micro-batches of {plan.micro_batching.prefill} and "
            f"{plan.micro_batching.decode} sequences need {excess} bytes more than there are; plan "
            "for fewer sequences (--global_bz)"
        )
    quality = plan.estimate.quality
    objective_s = estimate.latency_s + plan.search.theta_s * quality
    return replace(plan, estimate=replace(estimate, quality=quality, objective_s=objective_s))


def check_lengths(plan: Plan, request: ScheduleRequest) -> None:
    """Check that the plan has room for the longest prompt and answer.

    Raises:
        SpecError: it has not.
    """
    work = plan.workload
    prompt, new = request.prompt_tokens.longest, request.new_tokens.longest
    if prompt > work.prompt_tokens or prompt + new > work.max_context_tokens:
        raise SpecError(
            f"lengths: found prompts of up to {prompt} and answers of up to {new} tokens, "
            f"expected at most the workload's {work.prompt_tokens} and {work.new_tokens} "
            "(--s and --n)"
        )
