"""llmpq-algo: make a strategy file from a model, a cluster and a workload."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from llmpq.assigner import METHODS, PlanRequest, make_plan
from llmpq.assigner.constraints.resolve import Deadline
from llmpq.assigner.draft_placement import (
    DraftPlace,
    DraftRequest,
    draft_places,
    mtp_request,
    place_draft,
)
from llmpq.assigner.explain.compare import compare_methods, pareto_plans
from llmpq.assigner.explain.explanation import explain_plan
from llmpq.assigner.export.export import ENGINES, PLAN_FILE, Command, write_export
from llmpq.assigner.planner import check_method
from llmpq.assigner.request import Progress, costs_of
from llmpq.cli import render
from llmpq.cli.common import (
    command_start_s,
    make_parser,
    print_json,
    progress_bar,
    run_command,
)
from llmpq.cli.planning.fleet import run_fleet
from llmpq.cli.planning.request import add_plan_options, request_of, scheduled
from llmpq.cli.planning.trust import plan_trust, trust_record, trust_text
from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options
from llmpq.options.limits import check_mtp
from llmpq.options.plan import DraftOptions, PlanOutput, ReplicaOptions
from llmpq.spec.catalog import resolve_model
from llmpq.spec.fields import dump_json, write_text
from llmpq.spec.plan import DRAFT_HEAD_BITS, MTP, Plan, write_plan
from llmpq.spec.precision import DTYPE_BYTES

NAME = "llmpq-algo"
V = TypeVar("V")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    started_s = command_start_s(argv)

    return run_command(_parser(), lambda options: _run(options, started_s), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        NAME, "Plan which device runs which layers at how many bits, and the micro-batch sizes."
    )
    add_plan_options(parser)
    replicas = "Cut the cluster into pipelines that serve side by side."
    add_options(parser.add_argument_group("replicas", replicas), ReplicaOptions)
    drafts = parser.add_argument_group("speculative decoding with a draft model")
    add_options(drafts, DraftOptions)
    add_options(parser.add_argument_group("result"), PlanOutput, export={"choices": tuple(ENGINES)})
    return parser


def _run(options: argparse.Namespace, started_s: float) -> int:
    asked = read_options(PlanOutput, options)
    _check_options(options)
    request = request_of(options)
    if request.time_limit_s is not None:
        request = replace(request, deadline=Deadline(started_s + request.time_limit_s))
    if options.replicas is not None:
        return run_fleet(
            options,
            request,
            _output(options, request, "fleet"),
            lambda work: _with_progress("parts", work),
        )
    if options.pareto is not None:
        return _run_pareto(options, request)
    if options.method == "all":
        return _run_all(options, request)
    plan = _with_progress(
        "candidates",
        lambda show: make_plan(request, options.method, command=options.command, progress=show),
    )
    request = replace(request, head_bits=(plan.head_width,))
    request, plan = _with_progress(
        "schedules",
        lambda show: scheduled(
            options,
            request,
            plan,
            lambda own: make_plan(own, options.method, command=options.command),
            show,
        ),
    )
    plan, places = _with_draft(options, request, plan)
    commands: tuple[Command, ...] = ()
    if options.export is None:
        path = _write(plan, _output(options, request, options.method))
    else:
        commands = write_export(plan, options.export, options.output).commands
        path = str(Path(options.output) / PLAN_FILE)
    found = _with_progress(
        "explanation",
        lambda show: explain_plan(
            request, plan, resolve=asked.explains, more=options.what_if, progress=show
        ),
    )
    costs = costs_of(request, plan.cluster)
    trust = plan_trust(plan, costs)
    if options.json:
        record = {
            **render.plan_record(plan, path),
            "explanation": render.explanation_record(plan, found),
        }
        record["stored"] = [str(precision) for precision in request.model.stored]
        record["draft_places"] = [asdict(place) for place in places]
        record |= render.requests_record([plan], options.requests)
        print_json({**record, "trust": trust_record(trust), "hurried": []})
    else:
        print(render.plan_table(plan, found.dropped))
        more = (
            *render.requests_text([plan], options.requests),
            *render.explanation_text(plan, found),
            *render.format_text(plan),
            *render.stored_text(request.model),
            *render.schedule_text(plan),
            *render.draft_text(plan, options.speculative_model, places),
        )
        for line in (*more, *trust_text(plan, trust)):
            print(line)
        print("\n".join([f"written        {path}", *_next_text(commands, Path(path).parent)]))
    if options.plot is not None:
        from llmpq.cli.plots import draw_plan

        draw_plan(plan, options.plot)
    return 0


def _next_text(commands: Sequence[Command], folder: Path) -> list[str]:
    """Return a line about each script of an export, in the order in which to run them."""
    return [
        f"then           {folder / f'{command.name}.sh'}: {command.purpose}" for command in commands
    ]


def _check_options(options: argparse.Namespace) -> None:
    for name in ("same_bits", "rate"):
        if getattr(options, name) not in (None, False) and options.replicas is None:
            raise SpecError(f"--{name}: found without --replicas, expected both")
    _check_draft(options)
    is_one_plan = options.method != "all" and options.pareto is None
    if options.requests is not None and not is_one_plan:
        raise SpecError("--requests: found with --method all or --pareto, expected one plan")
    if options.export is None:
        return
    if options.output is None:
        raise SpecError("--export: found no --output, expected --output DIR")
    if not is_one_plan:
        raise SpecError("--export: found with --method all or --pareto, expected one plan")
    if Path(options.output).exists():
        raise SpecError(f"{options.output}: exists already, expected a new directory")


def _check_draft(options: argparse.Namespace) -> None:
    if options.speculative_model is None:
        if options.speculative_bits is not None:
            raise SpecError("--speculative_bits: found without --speculative_model, expected both")
        return
    read_options(DraftOptions, options)
    others = ("replicas", "pareto", "export")
    found = [name for name in others if getattr(options, name) is not None]
    found += ["method all"] * (options.method == "all")
    if found:
        raise SpecError(f"--speculative_model: found with --{found[0]}, expected one plan")


def _with_draft(
    options: argparse.Namespace, request: PlanRequest, plan: Plan
) -> tuple[Plan, tuple[DraftPlace, ...]]:
    """Return the plan with the draft model of the options, where that pays, and its places."""
    if options.speculative_model is None:
        return plan, ()
    if plan.is_split:
        raise SpecError(
            f"--speculative_model: found --policy {options.policy} and a plan with stages of their "
            "own for prefill, expected stages that do both phases"
        )
    if options.speculative_model == MTP:
        own = costs_of(request, plan.cluster)
        check_mtp(own.model, "--speculative_model")
        # Keys and values of the layer are not rounded.
        whole = replace(request, kv_bits=8 * DTYPE_BYTES[plan.dtype])
        wanted = mtp_request(
            plan,
            costs_of(whole, plan.cluster),
            bits=options.speculative_bits,
            acceptance_rate=options.acceptance_rate,
            most=options.num_speculative_tokens,
        )
        return _placed(plan, own, wanted)
    model, source = resolve_model(options.speculative_model)
    is_rounded = options.speculative_bits not in (None, 16)
    head_bits = DRAFT_HEAD_BITS if is_rounded else 16
    costs = build_costs(
        model,
        plan.cluster,
        dtype=plan.dtype,
        kv_bits=8 * DTYPE_BYTES[plan.dtype],
        head_bits=head_bits if model.stored_head is None else model.stored_head.bits,
        profile_dir=request.profile_dir,
        latency=request.latency,
    )
    wanted = DraftRequest(
        costs=costs,
        source=model.name if source is None else str(source),
        bits=options.speculative_bits,
        acceptance_rate=options.acceptance_rate,
        most=options.num_speculative_tokens,
    )
    return _placed(plan, costs_of(request, plan.cluster), wanted)


def _placed(
    plan: Plan, costs: ClusterCosts, wanted: DraftRequest
) -> tuple[Plan, tuple[DraftPlace, ...]]:
    places = draft_places(plan, costs, wanted)
    return replace(plan, draft=place_draft(plan, costs, wanted, places)), places


def _run_all(options: argparse.Namespace, request: PlanRequest) -> int:
    if options.plot is not None or options.what_if:
        raise SpecError("--plot, --what_if: found together with --method all, expected one method")
    for method in METHODS:
        check_method(request, method)
    outcomes = compare_methods(request, command=options.command, run=_with_progress)
    records: list[dict[str, Any]] = []
    for outcome in outcomes:
        method, plan = outcome.method, outcome.plan
        if plan is None:
            records.append({"method": method, "status": "infeasible", "reason": str(outcome.error)})
        else:
            path = _write(plan, _output(options, request, method, f"__{method}"))
            records.append(render.plan_record(plan, path))
    if options.json:
        print_json({"plans": records})
    else:
        print(render.comparison_table(outcomes))
        for record in records:
            if "strategy" in record:
                print(f"written        {record['strategy']}")
    error = outcomes[0].error
    if error is not None:
        raise error
    return 0


def _run_pareto(options: argparse.Namespace, request: PlanRequest) -> int:
    if options.method == "all" or options.what_if:
        raise SpecError(
            "--pareto: found together with --method all or --what_if, expected one method alone"
        )
    plans = _with_progress(
        "plans",
        lambda show: pareto_plans(
            request, options.pareto, method=options.method, command=options.command, progress=show
        ),
    )
    paths = [
        _write(plan, _output(options, request, options.method, f"__p{number}"))
        for number, plan in enumerate(plans, start=1)
    ]
    base = _output(options, request, options.method, "__pareto")
    picture = base.with_suffix(".png") if options.plot is None else Path(options.plot)
    drawn = _draw_front(plans, picture, asked=options.plot is not None)
    record = render.front_record(plans, paths, str(picture) if drawn else None)
    write_text(base, dump_json(record))
    if options.json:
        print_json(record)
        return 0
    print(render.front_table(plans, paths))
    if len(plans) < options.pareto:
        found = render.plans_text(len(plans))
        print(f"{found} instead of {options.pareto}: found no other that is faster or loses less\n")
    print(f"written        {base}{f' and {picture}' if drawn else ''}")
    return 0


def _draw_front(plans: Sequence[Plan], path: Path, *, asked: bool) -> bool:
    """Draw the front; without ``asked``, a failure is only a warning."""
    from llmpq.cli.plots import draw_front

    try:
        draw_front(plans, path)
    except SpecError as error:
        if asked:
            raise
        print(f"{NAME}: warning: no picture: {error}", file=sys.stderr)
        return False
    return True


def _output(
    options: argparse.Namespace, request: PlanRequest, method: str, suffix: str = ""
) -> Path:
    """Return the file of a plan; several plans of one ``--output`` differ by their suffix."""
    if options.output is not None:
        path = Path(options.output)
        return path.with_name(f"{path.stem}{suffix}{path.suffix or '.json'}") if suffix else path
    model = request.model.name.rstrip("/").rpartition("/")[2]
    parts = model, request.cluster.name, request.workload.name, method
    name = "__".join(part.replace("/", "-").replace(" ", "-") for part in parts)
    return Path("strategies") / f"{name}{'' if suffix == f'__{method}' else suffix}.json"


def _write(plan: Plan, path: Path) -> str:
    write_plan(path, plan)
    return str(path)


def _with_progress(name: str, work: Callable[[Progress], V]) -> V:
    with progress_bar(name) as show:

        def progress(done: int, total: int, best_s: float | None) -> None:
            show(done, total, "" if best_s is None else f"best {best_s:.4g} s")

        return work(progress)
