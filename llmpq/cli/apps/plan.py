"""llmpq-apps plan and simulate: which models run when, with which plans, on which devices."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmpq.assigner.objective import relative_gap
from llmpq.cli.apps.gantt import draw_schedule
from llmpq.cli.common import print_json
from llmpq.cli.planning.fleet import devices_text
from llmpq.cli.render import aligned
from llmpq.multillm.candidates import resolve_models
from llmpq.multillm.graph import Application, load_application
from llmpq.multillm.planner import PlanOptions, plan_application
from llmpq.multillm.planner.application import (
    PlannedApplication,
    candidate_finder,
    replay,
    workload_of,
)
from llmpq.multillm.schedule import (
    ApplicationSchedule,
    ScheduledModel,
    load_schedule,
    write_schedule,
)
from llmpq.multillm.workload import load_items
from llmpq.options.declare import add_options, read_options, values_of
from llmpq.options.plan import (
    PICTURE_FILE,
    SCHEDULE_FILE,
    ApplicationOptions,
    ApplicationSearch,
)
from llmpq.spec.cluster import Cluster, load_cluster


def add_plan(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add ``plan`` to the commands."""
    parser = verbs.add_parser("plan", help="find a schedule of least makespan")
    _add_application(parser)
    add_search_options(parser)
    parser.set_defaults(run=run_plan)


def add_simulate(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add ``simulate`` to the commands."""
    parser = verbs.add_parser("simulate", help="play a schedule with other answer lengths")
    _add_application(parser)
    add_search_options(parser)
    add_options(parser, ApplicationOptions, "schedule", "play_seed")
    parser.set_defaults(run=run_simulate)


def _add_application(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ApplicationOptions, "application", "cluster", "output", "pipelines")


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add how to search for a schedule."""
    group = parser.add_argument_group("search")
    add_options(group, ApplicationSearch)


def run_plan(options: argparse.Namespace) -> int:
    """Plan, write and print."""
    app, cluster = load_application(options.application), load_cluster(options.cluster)
    planned = planned_of(options, app, cluster)
    path = _write(options, planned.schedule)
    _print(options, planned.schedule, planned, path)
    return 0


def run_simulate(options: argparse.Namespace) -> int:
    """Plan or read a schedule, play it and print."""
    app, cluster = load_application(options.application), load_cluster(options.cluster)
    items, models = load_items(app), resolve_models(app)
    planned = None
    if options.schedule is None:
        planned = planned_of(options, app, cluster)
        schedule = planned.schedule
    else:
        schedule = load_schedule(options.schedule)
        schedule.check(app, cluster)
    workload = workload_of(app, items, models, options.play_seed)
    known = planned.problem.candidates if planned else ()
    finder = candidate_finder(models, cluster, workload, known)
    played = replay(workload, schedule, cluster, finder)
    path = _write(options, schedule)
    _print(options, schedule, planned, path, simulated_s=played.makespan_s)
    return 0


def planned_of(
    options: argparse.Namespace, app: Application, cluster: Cluster
) -> PlannedApplication:
    """Plan with the options of ``add_search_options``."""
    return plan_application(
        app,
        load_items(app),
        cluster,
        PlanOptions(
            **values_of(read_options(ApplicationSearch, options)),
            pipelines=not options.no_pipelines,
            command=options.command,
        ),
    )


def _write(options: argparse.Namespace, schedule: ApplicationSchedule) -> Path | None:
    if options.output is None:
        return None
    path: Path = options.output / SCHEDULE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_schedule(path, schedule)
    draw_schedule(schedule, options.output / PICTURE_FILE)
    return path


def _print(
    options: argparse.Namespace,
    schedule: ApplicationSchedule,
    planned: PlannedApplication | None,
    path: Path | None,
    simulated_s: float | None = None,
) -> None:
    others = planned.found.others if planned else {}
    is_optimal = planned is not None and planned.found.is_optimal
    if options.json:
        record = _record(schedule, others, is_optimal=is_optimal)
        record["makespan_s"]["simulated"] = simulated_s
        print_json({**record, "schedule": None if path is None else str(path)})
        return
    print(_table(schedule, others, is_optimal=is_optimal))
    if simulated_s is not None:
        change = simulated_s / schedule.makespan_s - 1.0
        print(f"simulated      {simulated_s:.1f} s with other answer lengths ({change:+.1%})")
    if path is not None:
        print(f"written        {path}")


def _record(
    schedule: ApplicationSchedule, others: Mapping[str, float], *, is_optimal: bool = False
) -> dict[str, Any]:
    """Return the JSON object of a schedule; ``others`` has the makespans of other methods."""
    bound = schedule.bound_s
    return {
        "application": schedule.application,
        "cluster": schedule.cluster,
        "method": schedule.method,
        "makespan_s": {"predicted": schedule.makespan_s, "measured": None},
        "idle_s": schedule.idle_s,
        "bound_s": bound,
        "gap": None if bound is None else relative_gap(schedule.makespan_s, bound),
        "is_optimal": is_optimal,
        "stages": [
            {
                "start_s": stage.start_s,
                "end_s": stage.end_s,
                "models": [
                    {
                        "model": one.model,
                        "plan": one.plan_name,
                        "devices": list(one.devices),
                        "requests": _requests_of(one),
                        "load_s": one.load_s,
                    }
                    for one in stage.models
                ],
            }
            for stage in schedule.stages
        ],
        "search_s": schedule.search_s,
        "others_s": dict(others),
    }


def _requests_of(one: ScheduledModel) -> int:
    """Return the requests that are finished in a stage."""
    return sum(count for _, count in one.requests)


def _table(
    schedule: ApplicationSchedule, others: Mapping[str, float], *, is_optimal: bool = False
) -> str:
    """Return a schedule as text: one row for each model of each stage."""
    rows = [("stage", "from s", "to s", "model", "plan", "devices", "load s", "requests")]
    for number, stage in enumerate(schedule.stages, start=1):
        for place, one in enumerate(stage.models):
            first = (str(number), f"{stage.start_s:.1f}", f"{stage.end_s:.1f}")
            rows.append(
                (
                    *(first if not place else ("", "", "")),
                    one.model,
                    one.plan_name,
                    devices_text(one.devices),
                    f"{one.load_s:.1f}" if one.load_s else "",
                    str(_requests_of(one)),
                )
            )
    return "\n".join(
        [
            f"{schedule.application} on {schedule.cluster}",
            "",
            *aligned(rows),
            "",
            *_totals(schedule, others, is_optimal=is_optimal),
        ]
    )


def _totals(
    schedule: ApplicationSchedule, others: Mapping[str, float], *, is_optimal: bool
) -> list[str]:
    bound = schedule.bound_s
    proof = ""
    if is_optimal:
        proof = ", the best of all schedules"
    elif bound is not None:
        gap = relative_gap(schedule.makespan_s, bound)
        proof = f", no schedule takes less than {bound:.1f} s ({gap:.0%} less)"
    lines = [f"makespan       {schedule.makespan_s:.1f} s{proof}"]
    if others:
        text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in others.items())
        lines.append(f"by method      {text}")
    if schedule.idle_s is not None:
        lines.append(f"idle           {schedule.idle_s:.1f} device-seconds")
    lines.append(f"search         {schedule.search_s:.1f} s")
    return lines
