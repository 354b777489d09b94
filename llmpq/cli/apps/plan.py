"""llmpq-apps plan and simulate: which models run when, with which plans, on which devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llmpq.cli.apps.gantt import draw_schedule
from llmpq.cli.apps.render import schedule_record, schedule_table
from llmpq.cli.common import check_least, print_json
from llmpq.errors import SpecError
from llmpq.multillm.candidates import resolve_models
from llmpq.multillm.graph import Application, load_application
from llmpq.multillm.planner import METHODS, PlanOptions, plan_application
from llmpq.multillm.planner.application import (
    PlannedApplication,
    candidate_finder,
    replay,
    workload_of,
)
from llmpq.multillm.planner.search import TIME_LIMIT_S
from llmpq.multillm.schedule import ApplicationSchedule, load_schedule, write_schedule
from llmpq.multillm.workload import load_items
from llmpq.spec.cluster import Cluster, load_cluster

SCHEDULE_FILE, PICTURE_FILE = "schedule.json", "schedule.png"


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
    parser.add_argument(
        "--schedule", type=Path, metavar="FILE", help="schedule to play (default: plan one)"
    )
    parser.add_argument(
        "--play_seed", type=int, default=1, help="of the answer lengths that are played (default 1)"
    )
    parser.set_defaults(run=run_simulate)


def _add_application(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("application", type=Path, metavar="APP.json", help="application file")
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE", help="cluster file")
    parser.add_argument(
        "--output", type=Path, metavar="DIR",
        help=f"folder for {SCHEDULE_FILE} and, if matplotlib is installed, {PICTURE_FILE}",
    )  # fmt: skip
    parser.add_argument(
        "--no_pipelines", action="store_true",
        help="estimate tensor-parallel replicas also for models without measured iterations; such "
        "schedules cannot be run",
    )  # fmt: skip


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add how to search for a schedule."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--method", choices=METHODS, default="greedy",
        help="greedy (default): the best of the others, improved; samullm: Algorithm 1; max, min: "
        "its rivals; exact: all schedules, for small applications",
    )  # fmt: skip
    group.add_argument(
        "--no_preemption", action="store_true", help="never stop a model or change its plan"
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the answer lengths that are planned with (default 0)",
    )
    group.add_argument(
        "--time_limit", type=float, default=TIME_LIMIT_S, metavar="SECONDS",
        help=f"for improving and for the exact search (default {TIME_LIMIT_S:g})",
    )  # fmt: skip


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
    check_least(options, 0, "seed")
    if not options.time_limit >= 0:
        raise SpecError(f"--time_limit: found {options.time_limit}, expected at least 0")
    return plan_application(
        app,
        load_items(app),
        cluster,
        PlanOptions(
            method=options.method,
            preemption=not options.no_preemption,
            seed=options.seed,
            limit_s=options.time_limit,
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
        record = schedule_record(schedule, others, is_optimal=is_optimal)
        record["makespan_s"]["simulated"] = simulated_s
        print_json({**record, "schedule": None if path is None else str(path)})
        return
    print(schedule_table(schedule, others, is_optimal=is_optimal))
    if simulated_s is not None:
        change = simulated_s / schedule.makespan_s - 1.0
        print(f"simulated      {simulated_s:.1f} s with other answer lengths ({change:+.1%})")
    if path is not None:
        print(f"written        {path}")
