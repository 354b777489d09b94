"""llmpq-check: validate and explain a strategy file, price it again, draw it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmpq.assigner.decode import reprice
from llmpq.assigner.problem import FloatArray
from llmpq.assigner.task import DEFAULT_OMEGA, default_omega
from llmpq.cli.common import make_parser, print_json, run_command
from llmpq.cli.explanation import (
    Explanation,
    explain_costs,
    explanation_record,
    explanation_text,
)
from llmpq.cli.fit_cache import fit_cache
from llmpq.cli.report import plan_record, plan_table
from llmpq.cli.trust import StageTrust, plan_trust, trust_record, trust_text
from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.errors import CapacityError, SpecError, bad_field
from llmpq.spec import catalog
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan, PlanEstimate, read_plan
from llmpq.spec.precision import BITS
from llmpq.spec.sensitivity import read_sensitivity
from llmpq.units import format_bytes

TOLERANCE = 1e-6
"""Relative difference up to which a stored figure counts as confirmed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("llmpq-check", "Validate a strategy file, price it again and explain it.")
    parser.add_argument("strategy", metavar="FILE", help="strategy file, from llmpq-algo")
    parser.add_argument(
        "--omega_file", metavar="FILE.json", help="the sensitivity it was made with"
    )
    parser.add_argument("--profile", metavar="DIR", help="folder of measured latency tables")
    parser.add_argument("--plot", metavar="FILE.png", help="draw layers, memory and timeline")
    return parser


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """What pricing a plan again gave; ``repriced`` is ``None`` when it could not be done."""

    repriced: PlanEstimate | None
    excess_bytes: int
    warnings: tuple[str, ...]
    explanation: Explanation | None
    trust: tuple[StageTrust, ...] = ()


def _run(options: argparse.Namespace) -> int:
    plan = read_plan(options.strategy)
    verdict = _check(plan, options)
    if options.json:
        print_json(_record(plan, verdict, options.strategy))
    else:
        known = verdict.explanation
        print(plan_table(plan, {} if known is None else known.dropped))
        for line in () if known is None else explanation_text(plan, known):
            print(line)
        for line in trust_text(plan, verdict.trust):
            print(line)
        print(f"checked        {_summary(verdict)}")
    for warning in verdict.warnings:
        print(f"llmpq-check: warning: {warning}", file=sys.stderr)
    if options.plot is not None:
        from llmpq.cli.plots import draw_plan

        draw_plan(plan, options.plot)
    if verdict.excess_bytes:
        raise CapacityError(
            f"{options.strategy}: the plan needs {format_bytes(verdict.excess_bytes)} more memory "
            "than its devices have"
        )
    return 0


def _check(plan: Plan, options: argparse.Namespace) -> _Verdict:
    stored_excess = sum(
        max(0, stage.memory.total - stage.capacity_bytes) for stage in plan.estimate.stages
    )
    model = _model(plan, options.strategy)
    if model is None:
        return _Verdict(
            repriced=None,
            excess_bytes=stored_excess,
            warnings=(f"model directory '{plan.model.source}' is not here: not priced again",),
            explanation=None,
        )
    costs = build_costs(
        model,
        plan.cluster,
        dtype=plan.dtype,
        kv_bits=plan.kv_bits,
        profile_dir=None if options.profile is None else Path(options.profile),
        latency="fit" if _is_fitted(plan) else "table",
        cache_dir=fit_cache(os.environ),
    )
    omega = _omega(plan, model, options.omega_file)
    known = omega is not None
    repriced, excess = reprice(plan, costs, default_omega(model, BITS) if omega is None else omega)
    warnings = list(_differences(plan, repriced, with_quality=known))
    warnings += _source_changes(plan, costs)
    if not known:
        warnings.append(
            "quality is not verified: it was measured; pass its table with --omega_file"
        )
    return _Verdict(
        repriced=repriced,
        excess_bytes=max(excess, stored_excess),
        warnings=tuple(warnings),
        explanation=explain_costs(plan, costs),
        trust=plan_trust(plan, costs),
    )


def _is_fitted(plan: Plan) -> bool:
    """Tell whether a plan was priced by the fits of its tables."""
    return any(source.startswith("fit of ") for _, source in plan.provenance.inputs)


def _model(plan: Plan, where: str) -> ModelSpec | None:
    source = plan.model.source
    if source is not None and not Path(source).is_dir():
        return None
    model, _ = catalog.resolve_model(plan.model.name if source is None else source)
    if model.num_layers != plan.model.num_layers:
        raise bad_field(
            where,
            "model.num_layers",
            plan.model.num_layers,
            f"{model.num_layers}, as {model.name} has",
        )
    return model


def _omega(plan: Plan, model: ModelSpec, path: str | None) -> FloatArray | None:
    """Return ``[L, B]`` over ``BITS``: the table given, the default if it was that, or nothing."""
    if path is None:
        is_default = dict(plan.provenance.inputs).get("omega") == DEFAULT_OMEGA
        return default_omega(model, BITS) if is_default else None
    table = read_sensitivity(path)
    if table.num_layers != model.num_layers:
        raise bad_field(path, "omega", f"{table.num_layers} layers", f"{model.num_layers} layers")
    measured = [width for width in BITS if width == 16 or width in dict(table.omega)]
    missing = sorted(set(plan.bits) - set(measured))
    if missing:
        raise SpecError(f"{path}: field 'omega': no column for {missing} bits, which the plan uses")
    found = np.zeros((model.num_layers, len(BITS)))
    columns = [BITS.index(width) for width in measured]
    found[:, columns] = np.array(table.normalised(measured))
    return found


def _differences(plan: Plan, now: PlanEstimate, *, with_quality: bool) -> Iterator[str]:
    stored = plan.estimate
    totals = ["latency_s", *(["quality", "objective_s"] if with_quality else [])]
    for name in totals:
        yield from _difference(f"estimate.{name}", getattr(stored, name), getattr(now, name))
    for rank, (before, after) in enumerate(zip(stored.stages, now.stages, strict=True)):
        where = f"estimate.stages[{rank}]"
        for name in ("prefill_s", "decode_s", "send_prefill_s", "send_decode_s"):
            yield from _difference(f"{where}.{name}", getattr(before, name), getattr(after, name))
        for name in ("weights", "kv", "temporary", "master", "runtime"):
            yield from _difference(
                f"{where}.memory_bytes.{name}",
                getattr(before.memory, name),
                getattr(after.memory, name),
            )
        yield from _difference(
            f"{where}.capacity_bytes", before.capacity_bytes, after.capacity_bytes
        )


def _difference(name: str, stored: float, now: float) -> Iterator[str]:
    if abs(stored - now) > TOLERANCE * max(abs(stored), abs(now)):
        yield f"field '{name}': the file says {stored:.6g}, the cost models now say {now:.6g}"


def _source_changes(plan: Plan, costs: ClusterCosts) -> list[str]:
    """Name the devices whose seconds now come from elsewhere than when the plan was made."""
    recorded = dict(plan.provenance.inputs)
    changes = []
    for device in plan.cluster.devices:
        before = recorded.get(f"latency of {device.label}")
        now = costs.latency_source(device)
        if device.local_index == 0 and before is not None and before != now:
            changes.append(f"{device.label}: planned with {before}, priced again with {now}")
    return changes


def _summary(verdict: _Verdict) -> str:
    if verdict.excess_bytes:
        return f"does NOT fit: {format_bytes(verdict.excess_bytes)} too much"
    if verdict.repriced is None:
        return "valid; fits by its own figures"
    if verdict.warnings:
        return f"valid and fits; {len(verdict.warnings)} warnings"
    return "valid, fits, and every stored figure is confirmed by the cost models"


def _record(plan: Plan, verdict: _Verdict, path: str) -> dict[str, Any]:
    now = verdict.repriced
    return {
        **plan_record(plan, path),
        "fits": verdict.excess_bytes == 0,
        "excess_bytes": verdict.excess_bytes,
        "warnings": list(verdict.warnings),
        "repriced": None
        if now is None
        else {
            "latency_s": now.latency_s,
            "stages": [
                {
                    "memory_bytes": stage.memory.total,
                    "prefill_s": stage.prefill_s,
                    "decode_s": stage.decode_s,
                }
                for stage in now.stages
            ],
        },
        "explanation": None
        if verdict.explanation is None
        else explanation_record(plan, verdict.explanation),
        "trust": trust_record(verdict.trust),
    }
