"""llmpq-sim: simulate a strategy on requests."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.assigner.forecast import costs_of_plan
from llmpq.batching import PipelineShape, make_policy
from llmpq.batching.drift import Drift, DriftMonitor
from llmpq.cli.common import make_parser, print_json, run_command
from llmpq.cli.engine_simulation import (
    add_engine_options,
    answer_rate,
    answer_rate_text,
    refuse_engine_options,
    run_engine,
)
from llmpq.cli.options import (
    add_policy_options,
    predictor_of,
    schedule_of,
    with_described,
)
from llmpq.errors import SpecError
from llmpq.options.declare import add_options
from llmpq.options.plan import DeviceOptions, WorkloadOptions
from llmpq.options.run import DriftOptions
from llmpq.options.simulate import PlayOptions
from llmpq.sim import SimReport, simulate
from llmpq.sim.costs import PlanCosts
from llmpq.sim.report import chrome_trace
from llmpq.spec import catalog
from llmpq.spec.fields import write_text
from llmpq.spec.plan import Plan, read_plan
from llmpq.spec.workload import (
    TraceRequest,
    constant,
    draw_trace,
    fit_trace,
    load_lengths,
    load_trace,
    load_workload,
)
from llmpq.units import format_number, format_seconds

NAME = "llmpq-sim"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(NAME, "Simulate a strategy on requests.")
    add_options(parser, PlayOptions, "strategy")
    add_options(parser, DeviceOptions, "devices", "profile")
    what = parser.add_argument_group("requests (default: the strategy's own workload)")
    work = {"help": "equal requests that arrive at once"}
    add_options(what, WorkloadOptions, "workload", workload=work)
    names = ("trace", "lengths", "prompt_lengths", "requests", "rate", "seed", "too_long")
    add_options(what, PlayOptions, *names)
    add_policy_options(parser)
    replan = {
        "help": "rra: adjust the encoding frequency to the answer lengths, as llmpq-dist --replan"
    }
    add_options(parser, DriftOptions, "replan", replan=replan)
    add_engine_options(parser)
    add_options(parser, PlayOptions, "trace_out")
    return parser


def _run(options: argparse.Namespace) -> int:
    plan = read_plan(options.strategy)
    plan = replace(plan, cluster=with_described(plan.cluster, options.devices, options.strategy))
    if options.engine:
        costs = _costs(plan, options.profile)
        return run_engine(options, plan, costs, _requests(options, plan))
    refuse_engine_options(options)
    trace, skipped = fit_trace(_requests(options, plan), plan.workload, options.too_long)
    answers = [item.new_tokens for item in trace]
    schedule = schedule_of(options, plan, answers)
    policy = make_policy(schedule, PipelineShape.of(plan))
    monitor = DriftMonitor.of(schedule, policy, replans=options.replan)
    report = simulate(
        _costs(plan, options.profile),
        policy,
        trace,
        num_slots=plan.workload.batch,
        with_activities=options.trace_out is not None,
        monitor=monitor,
        predictor=predictor_of(options, trace),
    )
    if options.trace_out is not None:
        write_text(options.trace_out, chrome_trace(report, _stage_names(plan)))
    record = {"policy": schedule.policy, "skipped": skipped, **report.to_json()}
    record["answer_tokens_per_s"] = answer_rate(report.requests)
    drift = Drift.of(schedule, answers)
    if drift is not None and monitor is not None:
        record["drift"] = drift.to_json(monitor.adjusted)
    for stage, name in zip(record["stages"], _stage_names(plan), strict=True):
        stage["device"] = name
    if options.json:
        print_json(record)
    else:
        print(_text(plan, record, report))
        if drift is not None and monitor is not None and drift.is_notable:
            text = drift.text(replans=options.replan, adjusted=monitor.adjusted)
            print(f"drift          {text}")
    return 0


def _costs(plan: Plan, profile: str | None) -> PlanCosts:
    source = plan.model.source
    model, _ = catalog.resolve_model(
        source if source is not None and Path(source).exists() else plan.model.name
    )
    return PlanCosts(plan, costs_of_plan(plan, model, None if profile is None else Path(profile)))


def _requests(options: argparse.Namespace, plan: Plan) -> Sequence[TraceRequest]:
    given = [name for name in ("workload", "trace", "lengths") if getattr(options, name)]
    if len(given) > 1:
        raise SpecError(f"found --{' and --'.join(given)}, expected one of them")
    if options.trace:
        return load_trace(options.trace)
    if options.lengths:
        file, longest = options.prompt_lengths, plan.workload.prompt_tokens
        prompts = load_lengths(file) if file else constant(longest)
        return draw_trace(
            options.requests,
            prompts,
            load_lengths(options.lengths),
            requests_per_s=options.rate,
            seed=options.seed,
        )
    work = load_workload(options.workload) if options.workload else plan.workload
    item = TraceRequest(arrival_s=0.0, prompt_tokens=work.prompt_tokens, new_tokens=work.new_tokens)
    return [item] * work.batch


def _stage_names(plan: Plan) -> list[str]:
    return [plan.device_of(stage).label for stage in plan.stages]


def _text(plan: Plan, record: dict[str, Any], report: SimReport) -> str:
    lines = [
        f"policy         {record['policy']}",
        f"requests       {record['requests']}"
        + (f" ({record['skipped']} left out)" if record["skipped"] else ""),
        f"makespan       {format_seconds(report.makespan_s)}",
        f"throughput     {format_number(report.throughput_tokens_per_s)} tokens/s of all, "
        f"{format_number(report.throughput_requests_per_s)} requests/s",
        f"one answer     {answer_rate_text(record['answer_tokens_per_s'])}",
    ]
    for title, key in (
        ("latency", "latency_s"),
        ("first token", "time_to_first_token_s"),
        ("per token", "time_per_token_s"),
    ):
        found = record[key]
        times = ", ".join(f"{name} {format_seconds(value)}" for name, value in found.items())
        lines.append(f"{title:<15}{times}")
    for rank, (name, share) in enumerate(
        zip(_stage_names(plan), report.busy_fractions, strict=True)
    ):
        lines.append(f"stage {rank:<9}{name}: busy {share:.1%}, waiting {1 - share:.1%}")
    return "\n".join(lines)
