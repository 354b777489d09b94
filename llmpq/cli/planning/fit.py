"""Does it run my model on my device? The options of ``llmpq-check --model``, and its answer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from llmpq.assigner import PlanRequest
from llmpq.assigner.explain.compare import FitAnswer, fit_answers
from llmpq.assigner.explain.explanation import Alternative, one_more
from llmpq.cli.common import print_json
from llmpq.cli.front.host_devices import with_kept_figures
from llmpq.cli.options import with_described, with_reserve
from llmpq.cli.planning.request import cluster_of
from llmpq.cli.render import (
    aligned,
    apart_text,
    format_text,
    memory_pair,
    more_record,
    more_text,
    plan_record,
    requests_record,
    speed_cells,
    speed_heads,
)
from llmpq.costmodel.host_clusters import clusters_to_plan
from llmpq.errors import InfeasibleError, SpecError
from llmpq.options.declare import add_options, read_options
from llmpq.options.plan import ClusterOptions, ModelOptions, PlanOutput, WorkloadOptions
from llmpq.profiler.device import host_cluster
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster
from llmpq.spec.fields import to_json
from llmpq.spec.model import ModelSpec
from llmpq.spec.model_files.facts import Fact, model_facts
from llmpq.spec.plan import seconds_of_requests
from llmpq.spec.precision import DTYPE_BYTES, Dtype
from llmpq.spec.workload import Workload
from llmpq.units import format_duration


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a check without a strategy file."""
    group = parser.add_argument_group(
        "does a model run on devices",
        "Instead of FILE: which bits fit, and how fast; without devices, on this host.",
    )
    add_options(group, ModelOptions, "model", "dtype")
    names = ("cluster", "device_names", "device_numbers", "host_gib", "reserve_gib")
    add_options(group, ClusterOptions, *names)
    sizes = {
        "global_bz": {"default": 1, "help": "sequences (1)"},
        "s": {"default": 512, "help": "prompt length (512)"},
        "n": {"default": 128, "help": "new tokens (128)"},
    }
    add_options(group, WorkloadOptions, *sizes, **sizes)
    more = "also plan with one more device of each kind, at the most bits that fit"
    add_options(group, PlanOutput, "what_if", what_if={"help": more})


def run_fit(options: argparse.Namespace) -> int:
    """Answer whether the model runs on the devices; print it and return the exit status.

    Raises:
        InfeasibleError: it fits at no bitwidth.
    """
    request, others = _requested(options)
    facts = () if request.model_source is None else model_facts(request.model_source)
    answers = fit_answers(request, others)
    best = next((one.plan for one in answers if one.plan is not None), None)
    more: tuple[Alternative, ...] = ()
    if options.what_if and best is not None:
        own = replace(request, cluster=best.cluster, bits=(best.bits[0],), theta_s=0.0)
        more = one_more(own, best)
    if options.json:
        record = {
            "model": request.model.name,
            "cluster": request.cluster.name,
            "facts": [to_json(fact) for fact in facts],
            "fits": best is not None,
            "answers": [_record(one, options.requests) for one in answers],
        }
        if best is not None and options.what_if:
            record["one_more"] = more_record(best, more)
        print_json(record)
    else:
        for line in facts_text(facts):
            print(line)
        print(_text(request, answers, options.requests))
        for line in () if best is None else (*more_text(best, more), *format_text(best)):
            print(line)
    if best is None:
        last = answers[-1]
        raise InfeasibleError(
            f"{request.model.name} does not fit on {request.cluster.name}; at {last.bits} bits: "
            f"{last.short}"
        )
    return 0


def facts_text(facts: Sequence[Fact]) -> list[str]:
    """Return the lines of what a model's files say, and an empty one after them."""
    rows = []
    for fact in facts:
        source = fact.source if fact.contradiction is None else f"{fact.source}; {_but(fact)}"
        rows.append((fact.name, fact.value, source))
    return [*aligned(rows), ""] if rows else []


def _but(fact: Fact) -> str:
    return f"not used: {fact.contradiction}"


def _requested(options: argparse.Namespace) -> tuple[PlanRequest, tuple[Cluster, ...]]:
    """Return the request of the options, and clusters that a plan may be for instead of its own."""
    asked = read_options(ClusterOptions, options, leaves=["profile"])
    model, source = catalog.resolve_model(options.model)
    dtype = model.dtype if options.dtype == "auto" else cast(Dtype, options.dtype)
    clusters = _clusters(asked, model, options.global_bz)
    request = PlanRequest(
        model=model,
        model_source=None if source is None else str(source),
        cluster=clusters[0],
        workload=Workload(batch=options.global_bz, prompt_tokens=options.s, new_tokens=options.n),
        dtype=dtype,
        kv_bits=8 * DTYPE_BYTES[dtype],
        profile_dir=None if options.profile is None else Path(options.profile),
    )
    return request, clusters[1:]


def _clusters(asked: ClusterOptions, model: ModelSpec, sequences: int) -> tuple[Cluster, ...]:
    """Return the devices of the options; without any those of this host, used in each way.

    Raises:
        SpecError: the options are wrong.
    """
    if (asked.cluster, asked.device_names, asked.device_numbers) != (None, None, None):
        return (cluster_of(asked, sequences),)
    if asked.host_gib is not None:
        raise SpecError(
            "--host_gib: found without devices, expected --cluster or --device_names: this host's "
            "own memory is known"
        )
    found = with_described(with_kept_figures(host_cluster()), asked.devices, "this host")
    return clusters_to_plan(with_reserve(found, asked.reserve_gib), model, sequences)


def _record(answer: FitAnswer, requests: int | None) -> dict[str, Any]:
    plan = answer.plan
    found: dict[str, Any] = {"bits": answer.bits, "fits": plan is not None, "reason": answer.reason}
    if plan is None:
        return found
    return {**found, **plan_record(plan, None), **requests_record([plan], requests)}


def _text(request: PlanRequest, answers: Sequence[FitAnswer], requests: int | None) -> str:
    work = request.workload
    speeds = speed_heads(work)
    asked = () if requests is None else (f"{requests:,} requests",)
    rows: list[tuple[str, ...]] = [("bits", "runs", "memory", *speeds, *asked, "devices")]
    reasons = []
    for answer in answers:
        plan = answer.plan
        if plan is None:
            rows.append((str(answer.bits), "no", *[""] * (len(rows[0]) - 2)))
            reasons.append(f"{f'{answer.bits} bits':<9}{answer.short}")
            continue
        stages = plan.estimate.stages
        needed = sum(one.memory.total for one in stages)
        taken = (
            () if requests is None else (format_duration(seconds_of_requests([plan], requests)),)
        )
        rows.append(
            (
                str(answer.bits),
                "yes",
                memory_pair(needed, sum(one.capacity_bytes for one in stages)),
                *speed_cells(plan),
                *taken,
                ", ".join(
                    " and ".join([plan.device_of(stage).label, *apart_text(stage, estimate)])
                    for stage, estimate in zip(plan.stages, stages, strict=True)
                ),
            )
        )
    title = (
        f"{request.model.name} on {request.cluster.name}: {work.batch} x {work.prompt_tokens} "
        f"prompt tokens, {work.new_tokens} new tokens each, {request.dtype}; predicted"
    )
    return "\n".join([title, "", *aligned(rows), "", *reasons, *_slower_lines(answers)])


def _slower_lines(answers: Sequence[FitAnswer]) -> list[str]:
    """Return a line for each bitwidth at which neither batch nor decode step is faster.

    It names the fewest of the more bits at which both take as little time or less.
    """
    lines: list[str] = []
    wider: list[tuple[int, float, float]] = []
    for bits, plan in ((one.bits, one.plan) for one in answers if one.plan is not None):
        own_s = plan.estimate.latency_s, plan.decode_round_s
        as_fast = [
            width for width, batch_s, step_s in wider if batch_s <= own_s[0] and step_s <= own_s[1]
        ]
        if as_fast:
            lines.append(f"{f'{bits} bits':<9}no faster than {as_fast[-1]} bits; saves memory")
        wider.append((bits, *own_s))
    return lines
