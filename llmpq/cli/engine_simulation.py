"""``llmpq-sim --engine``: simulate an online engine on a strategy, at one rate or several."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llmpq.batching import RequestRecord
from llmpq.batching.draft_model import DraftLimits, planned_limits
from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.queue_order import ALPHA, QUEUE_ORDERS, queue_order
from llmpq.cli.common import print_json, progress_bar
from llmpq.dist.engine.policy import engine_limits, with_windows
from llmpq.dist.io.job import EngineOptions
from llmpq.errors import SpecError
from llmpq.routing import BALANCERS, load_balancer
from llmpq.sim.engine_costs import PlanEngineCosts
from llmpq.sim.engine_report import capacity
from llmpq.sim.fleet import FleetReplica, FleetReport, simulate_fleet
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan
from llmpq.spec.runtime_constants import POLL_S, PROMPT_CHUNK_TOKENS
from llmpq.spec.workload import (
    ARRIVALS,
    TraceRequest,
    Workload,
    draw_arrivals,
    fit_trace,
    scale_rate,
    slice_trace,
    with_arrivals,
)
from llmpq.units import format_number, format_seconds

DEFAULT_ACCEPTANCE = 0.7
"""Probability that a draft token is right where neither option nor plan has one."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine's simulation."""
    group = parser.add_argument_group("online engine: packed steps, paged memory, a queue")
    group.add_argument(
        "--engine",
        action="store_true",
        help="simulate the online engine instead of a batching policy",
    )
    group.add_argument(
        "--scheduler",
        choices=QUEUE_ORDERS,
        default="fcfs",
        help="order of the waiting queue (default fcfs)",
    )
    group.add_argument(
        "--alpha",
        type=float,
        default=ALPHA,
        help="larry: weight of waiting, in mean prefill times of a prompt (default "
        f"{ALPHA:g}; 0 is spf, above 1000 fcfs)",
    )
    group.add_argument(
        "--unit",
        type=float,
        metavar="TOKENS",
        help="larry: unit of prompt lengths (default: mean prompt so far)",
    )
    group.add_argument(
        "--token_budget",
        type=int,
        help=f"tokens of a step (default: those of llmpq-serve, at most {PROMPT_CHUNK_TOKENS:,})",
    )
    group.add_argument(
        "--max_sequences",
        type=int,
        help="running sequences (default: those of llmpq-serve)",
    )
    group.add_argument(
        "--num_blocks",
        type=int,
        help="KV blocks of 16 tokens (default: those of the strategy's slots)",
    )
    group.add_argument(
        "--watermark",
        type=float,
        default=0.01,
        help="share of the blocks that an admission leaves free (default 0.01)",
    )
    group.add_argument(
        "--no_prefix_caching", action="store_true", help="do not reuse blocks of equal content"
    )
    group.add_argument(
        "--num_speculative_tokens",
        type=int,
        metavar="K",
        help="speculative decoding: draft tokens of a sequence in a step (default: those of the "
        "strategy's draft model, else 0)",
    )
    group.add_argument(
        "--acceptance_rate",
        type=float,
        metavar="A",
        help="probability that a draft token is right, once those before it are (default: that of "
        "the strategy's draft model, else 0.7)",
    )
    group.add_argument(
        "--draft_cost",
        type=float,
        metavar="C",
        help="drafts are those of a draft model beside stage 0, one token of which takes C decode "
        "steps of a sequence (default: the strategy's draft model, else prompt lookup)",
    )
    group.add_argument(
        "--max_tokens",
        type=int,
        metavar="N",
        help="longest answer that a request allows (default: its answer), for no_preempt",
    )
    group.add_argument(
        "--trace_slice",
        type=_slice,
        metavar="FIRST:END",
        help="simulate these requests of the trace only",
    )
    group.add_argument(
        "--arrivals",
        choices=("trace", *ARRIVALS),
        default="trace",
        help="arrival times: those of the requests (default), or random ones at --rate",
    )
    group.add_argument(
        "--cv", type=float, default=2.0, help="gamma: variation of the gaps (default 2)"
    )
    group.add_argument(
        "--rate_scale",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="X",
        help="simulate at these multiples of the rate (default 1)",
    )
    group.add_argument(
        "--ttft_bound",
        type=float,
        metavar="S",
        help="find the rate at which the 95th percentile of TTFT reaches this",
    )
    group.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="simulate N engines behind a load balancer (default 1)",
    )
    group.add_argument(
        "--balancer",
        choices=BALANCERS,
        default="round_robin",
        help="which replica takes a request (default round_robin)",
    )
    group.add_argument(
        "--poll",
        type=float,
        default=POLL_S,
        metavar="S",
        help=f"seconds between two readings of the replicas' statistics (default {POLL_S:g})",
    )
    group.add_argument(
        "--plot", metavar="FILE", help="draw TTFT and TGT over the rate, and their distributions"
    )


def refuse_engine_options(options: argparse.Namespace) -> None:
    """Check that no option of the engine is given without ``--engine``.

    Raises:
        SpecError: names the first one that is.
    """
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    for name, value in vars(parser.parse_args([])).items():
        if getattr(options, name) != value:
            raise SpecError(f"--{name}: found without --engine, expected both")


def run_engine(
    options: argparse.Namespace, plan: Plan, costs: PlanCosts, requests: Sequence[TraceRequest]
) -> int:
    """Simulate, print and draw; return the exit status."""
    if options.replicas < 1 or not options.poll > 0:
        raise SpecError(
            f"--replicas, --poll: found {options.replicas} and {options.poll:g}, expected at least "
            "1 and more than 0"
        )
    acceptance_rate = _acceptance_rate(options, plan)
    limits = simulated_limits(options, plan, costs.model)
    order = queue_order(options.scheduler, alpha=options.alpha, unit=options.unit)
    requests = _with_arrivals(options, requests)
    room = limits.num_blocks * limits.block_size
    fitting, skipped = fit_trace(
        requests,
        Workload(batch=1, prompt_tokens=max(1, room - 1), new_tokens=1),
        options.too_long,
    )
    replica = FleetReplica(
        costs=PlanEngineCosts(costs),
        limits=limits,
        order=order,
        acceptance_rate=acceptance_rate if limits.num_speculative_tokens else None,
        context=round(plan.workload.mean_context_tokens),
    )

    def play(scale: float) -> FleetReport:
        with progress_bar(f"rate x {scale:.3g}") as show:
            return simulate_fleet(
                [replica] * options.replicas,
                load_balancer(options.balancer, seed=options.seed),
                scale_rate(fitting, scale),
                poll_s=options.poll,
                max_tokens=options.max_tokens,
                progress=show,
            )

    reports = {scale: play(scale) for scale in options.rate_scale}
    rate = _rate(fitting)
    record: dict[str, Any] = {
        "scheduler": order.name,
        "replicas": options.replicas,
        "balancer": options.balancer,
        "token_budget": limits.token_budget,
        "num_blocks": limits.num_blocks,
        "skipped": skipped,
        "rates": [
            {
                "rate_scale": scale,
                "requests_per_s": None if rate is None else scale * rate,
                **report.total.to_json(),
                "answer_tokens_per_s": answer_rate(report.total.requests),
                "requests_of_replicas": [len(one.requests) for one in report.replicas],
            }
            for scale, report in reports.items()
        ],
    }
    if options.ttft_bound is not None:
        record["capacity"] = _capacity(play, options, rate)
    if options.plot:
        from llmpq.cli.engine_plots import draw_engine

        draw_engine(
            {scale: report.total for scale, report in reports.items()}, order.name, options.plot
        )
    if options.json:
        print_json(record)
    else:
        print(_text(record))
    return 0


def _acceptance_rate(options: argparse.Namespace, plan: Plan) -> float:
    rate: float | None = options.acceptance_rate
    if rate is None:
        rate = DEFAULT_ACCEPTANCE if plan.draft is None else plan.draft.acceptance_rate
    if not 0 <= rate <= 1:
        raise SpecError(f"--acceptance_rate: found {rate:g}, expected 0 to 1")
    return rate


def _slice(text: str) -> tuple[int, int | None]:
    first, _, end = text.partition(":")
    try:
        return int(first or 0), int(end) if end else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"found '{text}', expected FIRST:END") from None


def simulated_limits(options: argparse.Namespace, plan: Plan, model: ModelSpec) -> EngineLimits:
    """Return the limits of the engine that runs a plan of a model with these options."""
    served = engine_limits(plan, EngineOptions(num_blocks=options.num_blocks))
    names = ("token_budget", "max_sequences", "num_blocks")
    asked = {name: getattr(options, name) for name in names}
    limits = replace(
        served,
        **{name: value for name, value in asked.items() if value is not None},
        watermark=options.watermark,
        prefix_caching=not options.no_prefix_caching,
    )
    limits = with_windows(limits, plan, model.window_tokens)
    most = options.num_speculative_tokens
    if options.draft_cost is not None:
        if not most:
            raise SpecError("--draft_cost: found without --num_speculative_tokens, expected both")
        draft = DraftLimits(num_blocks=limits.num_blocks, cost=options.draft_cost)
        return replace(limits, num_speculative_tokens=most, draft=draft)
    if most is None and plan.draft is not None:
        return replace(
            limits,
            num_speculative_tokens=plan.draft.num_speculative_tokens,
            draft=planned_limits(plan, limits.num_blocks),
        )
    return replace(limits, num_speculative_tokens=most or 0)


def _with_arrivals(
    options: argparse.Namespace, requests: Sequence[TraceRequest]
) -> Sequence[TraceRequest]:
    if options.trace_slice is not None:
        requests = slice_trace(requests, *options.trace_slice)
    if options.arrivals == "trace":
        return requests
    rate = options.rate or _rate(requests)
    if rate is None:
        raise SpecError(f"--arrivals {options.arrivals}: found no rate, expected --rate")
    times = draw_arrivals(options.arrivals, len(requests), rate, cv=options.cv, seed=options.seed)
    return with_arrivals(requests, times)


def _rate(requests: Sequence[TraceRequest]) -> float | None:
    """Return the mean rate of arrivals; ``None`` if all arrive at once."""
    last_s = requests[-1].arrival_s
    return len(requests) / last_s if last_s > 0 else None


def _capacity(
    play: Callable[[float], FleetReport], options: argparse.Namespace, rate: float | None
) -> dict[str, float | None]:
    if rate is None:
        raise SpecError("--ttft_bound: found requests that all arrive at once, expected a rate")

    def ttft_p95_s(scale: float) -> float:
        figures: dict[str, float] = play(scale).total.to_json()["time_to_first_token_s"]
        return figures["p95"]

    scale = capacity(ttft_p95_s, options.ttft_bound, start=options.rate_scale[0])
    return {
        "ttft_p95_s": options.ttft_bound,
        "rate_scale": scale,
        "requests_per_s": None if scale is None else scale * rate,
    }


def _text(record: dict[str, Any]) -> str:
    lines = [
        f"scheduler      {record['scheduler']}, {record['token_budget']} tokens a step, "
        f"{record['num_blocks']} KV blocks"
    ]
    if record["replicas"] > 1:
        lines.append(f"replicas       {record['replicas']}, balanced by {record['balancer']}")
    for row in record["rates"]:
        rate = row["requests_per_s"]
        at = "all at once" if rate is None else f"{format_number(rate)} requests/s"
        lines += [
            f"rate           x {row['rate_scale']:g}, {at}"
            + (f" ({record['skipped']} requests left out)" if record["skipped"] else ""),
            f"  throughput   {format_number(row['throughput_tokens_per_s'])} tokens/s of all, "
            f"{format_number(row['throughput_requests_per_s'])} requests/s",
            f"  one answer   {answer_rate_text(row['answer_tokens_per_s'])}",
            f"  TTFT         {_times(row['time_to_first_token_s'])}",
            "  TTFT a token "
            + ", ".join(
                f"{name} {format_seconds(value)}"
                for name, value in row["normalized_ttft_s"].items()
            ),
            f"  TGT          {_times(row['total_generation_time_s'])}",
            f"  per token    {_times(row['time_per_token_s'])}",
            f"  preempted    {row['preemption_rate']:.2%} of requests; "
            f"{row['prefix_cache_hit_rate']:.1%} of prompt tokens found in the cache",
        ]
        if row["draft_tokens"]:
            lines.append(
                f"  drafts       {row['draft_tokens']} tokens, {row['accepted_tokens']} accepted"
            )
    if "capacity" in record:
        found = record["capacity"]
        rate = found["requests_per_s"]
        text = "not found" if rate is None else f"{format_number(rate)} requests/s"
        lines.append(f"capacity       {text} with p95 TTFT {format_seconds(found['ttft_p95_s'])}")
    return "\n".join(lines)


def answer_rate(records: Sequence[RequestRecord]) -> float | None:
    """Return tokens a second of one answer after its first token; ``None`` without others."""
    times = [record.time_per_token_s for record in records if record.new_tokens > 1]
    return len(times) / sum(times) if sum(times) > 0 else None


def answer_rate_text(rate: float | None) -> str:
    """Return the rate of one answer."""
    return "one token each" if rate is None else f"{format_number(rate)} tokens/s"


def _times(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {format_seconds(value)}" for name, value in found.items())
