"""llmpq-check: validate and explain a strategy file, or tell whether a model runs on devices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmpq.assigner.explain.explanation import explain_costs
from llmpq.assigner.verify import Verification, verify_plan
from llmpq.cli.common import make_parser, print_json, run_command
from llmpq.cli.options import with_described
from llmpq.cli.planning.fit import add_fit_options, run_fit
from llmpq.cli.planning.fleet import check_fleet, is_fleet
from llmpq.cli.planning.trust import plan_trust, trust_record, trust_text
from llmpq.cli.render import (
    draft_text,
    explanation_record,
    explanation_text,
    format_text,
    plan_record,
    plan_table,
    requests_record,
    requests_text,
)
from llmpq.errors import CapacityError, SpecError
from llmpq.options.declare import add_options, read_options
from llmpq.options.plan import CheckedFile, DeviceOptions, PlanOutput, QualityOptions
from llmpq.spec.plan import read_plan
from llmpq.units import format_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "llmpq-check",
        "Validate and explain a strategy file, or tell whether a model runs on devices.",
    )
    add_options(parser, CheckedFile)
    omega = {"help": "sensitivity table that the plan was made with"}
    add_options(parser, QualityOptions, "omega_file", omega_file=omega)
    add_options(parser, DeviceOptions, "devices")
    add_options(parser, PlanOutput, "requests")
    add_options(parser, DeviceOptions, "profile")
    picture = {"help": "draw layers, memory and timeline"}
    add_options(parser, PlanOutput, "plot", plot=picture)
    add_fit_options(parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    read_options(PlanOutput, options)
    if (options.strategy is None) == (options.model is None):
        raise SpecError("expected either a strategy FILE, or --model")
    if options.strategy is None:
        return run_fit(options)
    if options.what_if:
        raise SpecError("--what_if: found with a FILE, expected --model; llmpq-algo plans again")
    if is_fleet(options.strategy):
        return check_fleet(options)
    plan = read_plan(options.strategy)
    plan = replace(plan, cluster=with_described(plan.cluster, options.devices, options.strategy))
    found = verify_plan(
        plan,
        options.strategy,
        profile_dir=None if options.profile is None else Path(options.profile),
        omega_file=options.omega_file,
    )
    explanation = None if found.costs is None else explain_costs(plan, found.costs)
    trust = () if found.costs is None else plan_trust(plan, found.costs)
    if options.json:
        now = found.estimate
        stages = [] if now is None else now.stages
        repriced = [
            {
                "memory_bytes": stage.memory.total,
                "prefill_s": stage.prefill_s,
                "decode_s": stage.decode_s,
            }
            for stage in stages
        ]
        print_json(
            {
                **plan_record(plan, options.strategy),
                "fits": found.excess_bytes == 0,
                "excess_bytes": found.excess_bytes,
                "warnings": list(found.warnings),
                "repriced": now and {"latency_s": now.latency_s, "stages": repriced},
                "explanation": explanation and explanation_record(plan, explanation),
                "trust": trust_record(trust),
                **requests_record([plan], options.requests),
            }
        )
    else:
        print(plan_table(plan, {} if explanation is None else explanation.dropped))
        lines = () if explanation is None else explanation_text(plan, explanation)
        for line in (
            *requests_text([plan], options.requests),
            *lines,
            *format_text(plan),
            *draft_text(plan),
            *trust_text(plan, trust),
            f"checked        {_summary(found)}",
        ):
            print(line)
    for warning in found.warnings:
        print(f"llmpq-check: warning: {warning}", file=sys.stderr)
    if options.plot is not None:
        from llmpq.cli.plots import draw_plan

        draw_plan(plan, options.plot)
    if found.excess_bytes:
        raise CapacityError(
            f"{options.strategy}: the plan needs {format_bytes(found.excess_bytes)} more memory "
            "than its devices have"
        )
    return 0


def _summary(found: Verification) -> str:
    if found.excess_bytes:
        return f"does NOT fit: {format_bytes(found.excess_bytes)} too much"
    if found.estimate is None:
        return "valid; fits according to its own figures"
    if found.warnings:
        return f"valid and fits; {len(found.warnings)} warnings"
    return "valid, fits, and every stored figure is confirmed by the cost models"
