"""The options by which llmpq-algo searches a schedule, and the plan that carries it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

from llmpq.assigner import PlanRequest
from llmpq.assigner.schedules.plan import (
    ScheduleRequest,
    best_of_policies,
    simulated,
    with_schedule,
)
from llmpq.assigner.task import costs_of
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import with_tensor_parallel
from llmpq.spec.lengths import constant, load_lengths
from llmpq.spec.plan import Plan
from llmpq.spec.precision import Phase
from llmpq.spec.schedule import default_schedule
from llmpq.units import format_seconds

POLICIES = ("hybrid", "static", "iteration", "rra", "waa", "auto")
SEARCHED = ("rra", "waa", "auto")
CONFIDENCE = 0.95
"""A schedule's latencies stay 1.6 standard deviations of what the tables state below a bound."""


def add_schedule_options(parser: argparse.ArgumentParser) -> None:
    """Add policy, latency bound and length distributions."""
    group = parser.add_argument_group("schedule (ExeGPT)")
    group.add_argument(
        "--policy",
        choices=POLICIES,
        help="batching policy written into the strategy (default: hybrid micro-batches); rra and "
        "waa are searched, waa with stages of their own for prefill and decode; auto is whichever "
        "answers most requests a second in simulation",
    )
    group.add_argument(
        "--latency_bound",
        type=float,
        metavar="SECONDS",
        help="rra, waa, auto: largest latency of a request, from the start of its prefill",
    )
    group.add_argument(
        "--sla",
        choices=("length", "queries"),
        default="length",
        help="the bound is for an answer of the 99th percentile's length (default), or for 99 %% "
        "of all requests, proven in simulation",
    )
    group.add_argument(
        "--bound_confidence",
        type=float,
        default=CONFIDENCE,
        metavar="SHARE",
        help="how likely --latency_bound is to be kept, given how unsure the measured tables say "
        f"they are (default {CONFIDENCE}; 0.5 takes them at their word)",
    )
    group.add_argument("--lengths", metavar="FILE.json", help="law of answer lengths")
    group.add_argument(
        "--prompt_lengths",
        metavar="FILE.json",
        help="law of prompt lengths (default: all as long as --s)",
    )
    group.add_argument(
        "--tensor_parallel",
        type=int,
        nargs="+",
        metavar="N",
        help="rra, waa, auto: let N like devices share every layer, of all N given the best when "
        "played; needs tables measured so, and is planned and simulated only",
    )


def scheduled(
    options: argparse.Namespace,
    request: PlanRequest,
    plan: Plan,
    planned: Callable[[PlanRequest], Plan],
) -> tuple[PlanRequest, Plan]:
    """Return the plan with the schedule asked for, and what it is a plan of.

    With ``--tensor_parallel`` every degree gets a plan of its own, and the one that answers most
    requests a second when played is returned (ExeGPT, Sec. 4.2: the degree is a variable).

    Args:
        options: parsed.
        request: what was planned.
        plan: its plan, of devices by themselves.
        planned: makes a plan of another request.

    Raises:
        SpecError: options that do not go together.
        InfeasibleError: no schedule meets the bound.
    """
    degrees = options.tensor_parallel or [1]
    if degrees == [1]:
        return request, _scheduled(options, request, plan)
    if options.policy not in SEARCHED:
        raise SpecError("--tensor_parallel: expected together with --policy rra, waa or auto")
    found: list[tuple[float, PlanRequest, Plan]] = []
    failures: list[InfeasibleError] = []
    for degree in sorted(set(degrees)):
        if degree < 1:
            raise SpecError(f"--tensor_parallel: found {degree}, expected 1 or more")
        own, base = request, plan
        try:
            if degree > 1:
                own = replace(request, cluster=with_tensor_parallel(request.cluster, degree))
                base = planned(own)
            made = _scheduled(options, own, base)
        except InfeasibleError as error:
            failures.append(error)
            continue
        report = simulated(made, costs_of(own, made.cluster), _wanted(options, own))
        found.append((report.throughput_requests_per_s, own, made))
    if not found:
        raise failures[0]
    _, best, made = max(found, key=lambda item: item[0])
    return best, made


def _scheduled(options: argparse.Namespace, request: PlanRequest, plan: Plan) -> Plan:
    if options.policy not in SEARCHED:
        if options.latency_bound is not None or options.lengths or options.prompt_lengths:
            raise SpecError(
                "--latency_bound, --lengths, --prompt_lengths: expected together with --policy "
                "rra, waa or auto"
            )
        if options.policy in (None, "hybrid"):
            return plan
        return replace(plan, schedule=default_schedule(options.policy, plan.workload.batch))
    costs, wanted = costs_of(request, plan.cluster), _wanted(options, request)
    if options.policy == "auto":
        return best_of_policies(plan, costs, wanted)
    return with_schedule(plan, costs, wanted, options.policy)


def _wanted(options: argparse.Namespace, request: PlanRequest) -> ScheduleRequest:
    """Return what is wanted of a schedule.

    Raises:
        SpecError: no law of lengths, or a bound of nothing.
    """
    if options.lengths is None:
        raise SpecError(f"--policy {options.policy}: expected --lengths, the law of answer lengths")
    bound_s = math.inf if options.latency_bound is None else options.latency_bound
    if not bound_s > 0:
        raise SpecError(f"--latency_bound: found {bound_s:g}, expected more than 0 seconds")
    prompts = (
        load_lengths(options.prompt_lengths)
        if options.prompt_lengths
        else constant(request.workload.prompt_tokens)
    )
    return ScheduleRequest(
        prompt_tokens=prompts,
        new_tokens=load_lengths(options.lengths),
        latency_bound_s=bound_s,
        sla=options.sla,
        confidence=options.bound_confidence,
    )


def schedule_text(plan: Plan) -> list[str]:
    """Return what people are told of a plan's schedule."""
    schedule = plan.schedule
    if schedule is None:
        return []
    sizes = plan.micro_batching
    lines = [f"policy         {schedule.policy}"]
    degrees = {device.members for device in plan.cluster.devices} - {1}
    lines += [f"sharing        {degree} devices share every layer" for degree in sorted(degrees)]
    if schedule.policy == "rra":
        lines[0] += (
            f": encode {schedule.encode_batch} in micro-batches of {sizes.prefill}, then decode "
            f"about {schedule.decode_batch} for {schedule.decode_iterations} iterations"
        )
    if schedule.policy == "waa":
        encoders = len(plan.stages_of(Phase.PREFILL))
        lines[0] += (
            f": {encoders} of {len(plan.stages)} stages encode {schedule.encode_batch} at a time, "
            f"the others decode {schedule.decode_batch} in micro-batches of {sizes.decode}"
        )
    found = schedule.estimate
    if found is not None:
        bound = "" if found.latency_bound_s is None else f" of {found.latency_bound_s:g} s allowed"
        lines.append(
            f"expected       {found.requests_per_s:.3g} requests/s; {found.new_tokens} tokens take "
            f"{format_seconds(found.latency_s)}{bound}"
        )
    return lines
