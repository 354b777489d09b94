"""``llmpq-sim --engine``: simulate an online engine on a strategy, at one rate or several."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from llmpq.batching import RequestRecord
from llmpq.batching.engine_step import DraftLimits, EngineLimits
from llmpq.batching.queue_order import queue_order
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.cli.common import print_json, progress_bar
from llmpq.cli.options import predictor_of
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import check_state_cache, engine_limits, planned_speculation
from llmpq.options.simulate import EngineSimulation
from llmpq.routing import load_balancer
from llmpq.sim.costs import PlanCosts, PlanEngineCosts
from llmpq.sim.fleet import FleetReplica, FleetReport, simulate_fleet
from llmpq.sim.report import capacity
from llmpq.spec.huggingface.config import LengthScaling, read_length_scaling
from llmpq.spec.model import ModelSpec
from llmpq.spec.model_files.config import language_fields, model_fields
from llmpq.spec.plan import ACCEPTANCE_RATE, Plan
from llmpq.spec.workload import (
    TraceRequest,
    Workload,
    draw_arrivals,
    fit_trace,
    scale_rate,
    slice_trace,
    with_arrivals,
)
from llmpq.units import format_number, format_seconds


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine's simulation."""
    group = parser.add_argument_group("online engine: packed steps, paged memory, a queue")
    add_options(group, EngineSimulation, "engine")
    add_options(group, EngineOptions, "scheduler", "alpha")
    _, first, *others = (one.name for one in fields(EngineSimulation))
    add_options(group, EngineSimulation, first)
    limits = ("token_budget", "max_sequences", "num_blocks", "watermark", "prefix_caching")
    add_options(group, EngineOptions, *limits, "state_cache_bytes")
    add_options(group, EngineSimulation, *others)


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
    asked = read_options(EngineSimulation, options)
    acceptance_rate = _acceptance_rate(asked, plan)
    limits = simulated_limits(options, plan, costs.model)
    order = queue_order(options.scheduler, alpha=options.alpha, unit=asked.unit)
    requests = _with_arrivals(options, asked, requests)
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
        predictor=predictor_of(options, fitting),
    )

    def play(scale: float) -> FleetReport:
        with progress_bar(f"rate x {scale:.3g}") as show:
            return simulate_fleet(
                [replica] * asked.replicas,
                load_balancer(asked.balancer, seed=options.seed),
                scale_rate(fitting, scale),
                poll_s=asked.poll_s,
                max_tokens=asked.max_tokens,
                progress=show,
            )

    reports = {scale: play(scale) for scale in asked.rate_scale}
    rate = _rate(fitting)
    record: dict[str, Any] = {
        "scheduler": order.name,
        "replicas": asked.replicas,
        "balancer": asked.balancer,
        "token_budget": limits.token_budget,
        "num_blocks": limits.num_blocks,
        "skipped": skipped,
        "rates": [
            {
                "rate_scale": scale,
                "requests_per_s": None if rate is None else scale * rate,
                **report.total.engine_json(),
                "answer_tokens_per_s": answer_rate(report.total.requests),
                "requests_of_replicas": [len(one.requests) for one in report.replicas],
            }
            for scale, report in reports.items()
        ],
    }
    if asked.ttft_bound is not None:
        record["capacity"] = _capacity(play, asked.ttft_bound, asked.rate_scale[0], rate)
    if asked.plot:
        from llmpq.cli.plots import draw_engine

        draw_engine(
            {scale: report.total for scale, report in reports.items()}, order.name, asked.plot
        )
    if options.json:
        print_json(record)
    else:
        print(_text(record))
    return 0


def _acceptance_rate(asked: EngineSimulation, plan: Plan) -> float:
    if asked.acceptance_rate is not None:
        return asked.acceptance_rate
    return ACCEPTANCE_RATE if plan.draft is None else plan.draft.acceptance_rate


def simulated_limits(options: argparse.Namespace, plan: Plan, model: ModelSpec) -> EngineLimits:
    """Return the limits of the engine that runs a plan of a model with these options."""
    asked = read_options(EngineSimulation, options)
    engine = read_options(
        EngineOptions,
        options,
        leaves=("scheduler", "alpha", "predictor"),
        speculative_config=_speculation(asked, plan),
    )
    check_state_cache(engine, model)
    limits = engine_limits(
        plan,
        engine,
        window_tokens=model.window_tokens,
        scaling=_length_scaling(plan),
        state_bytes=model.state_bytes(),
    )
    if asked.draft_cost is None:
        return limits
    if not asked.num_speculative_tokens:
        raise SpecError("--draft_cost: found without --num_speculative_tokens, expected both")
    return replace(  # a draft model that may not exist
        limits, draft=DraftLimits(num_blocks=limits.num_blocks, cost=asked.draft_cost)
    )


def _length_scaling(plan: Plan) -> LengthScaling:
    """Return how the angles of the model in the plan's directory depend on the length."""
    source = plan.model.source
    if source is None or not Path(source).exists():
        return LengthScaling()
    return read_length_scaling(language_fields(model_fields(source)))


def _speculation(asked: EngineSimulation, plan: Plan) -> SpeculativeConfig | None:
    """Return the drafts that are asked for: by default those of the plan's draft model."""
    planned, most = planned_speculation(plan), asked.num_speculative_tokens
    if most is None or most == 0:
        return planned if most is None else None
    if planned is None or asked.draft_cost is not None:
        return SpeculativeConfig(num_speculative_tokens=most)
    return replace(planned, num_speculative_tokens=most)


def _with_arrivals(
    options: argparse.Namespace, asked: EngineSimulation, requests: Sequence[TraceRequest]
) -> Sequence[TraceRequest]:
    if asked.trace_slice is not None:
        requests = slice_trace(requests, *asked.trace_slice)
    if asked.arrivals == "trace":
        return requests
    rate = options.rate or _rate(requests)
    if rate is None:
        raise SpecError(f"--arrivals {asked.arrivals}: found no rate, expected --rate")
    times = draw_arrivals(asked.arrivals, len(requests), rate, cv=asked.cv, seed=options.seed)
    return with_arrivals(requests, times)


def _rate(requests: Sequence[TraceRequest]) -> float | None:
    """Return the mean rate of arrivals; ``None`` if all arrive at once."""
    last_s = requests[-1].arrival_s
    return len(requests) / last_s if last_s > 0 else None


def _capacity(
    play: Callable[[float], FleetReport], bound_s: float, first_scale: float, rate: float | None
) -> dict[str, float | None]:
    if rate is None:
        raise SpecError("--ttft_bound: found requests that all arrive at once, expected a rate")

    def ttft_p95_s(scale: float) -> float:
        figures: dict[str, float] = play(scale).total.engine_json()["time_to_first_token_s"]
        return figures["p95"]

    scale = capacity(ttft_p95_s, bound_s, start=first_scale)
    return {
        "ttft_p95_s": bound_s,
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
