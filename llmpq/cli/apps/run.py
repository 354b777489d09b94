"""llmpq-apps run: answer all requests of an application by a schedule."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from llmpq.cli.apps.gantt import Span, draw_schedule
from llmpq.cli.apps.plan import add_search_options, planned_of
from llmpq.cli.common import print_json, progress_bar, require
from llmpq.cli.render import aligned
from llmpq.cli.run_options import (
    MAX_LISTED,
    add_store_options,
    ray_address_of,
    read_run_options,
)
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.errors import SpecError
from llmpq.multillm.dynamic import DynamicScheduler
from llmpq.multillm.graph import Application, load_application
from llmpq.multillm.running.coordinator import Coordinator
from llmpq.multillm.running.dataflow import Dataflow
from llmpq.multillm.running.engines import LocalEngines, StartEngine
from llmpq.multillm.running.journal import AnswerJournal, identity_of, write_batch_files
from llmpq.multillm.running.prepare import check_prompts, prepare_models
from llmpq.multillm.running.timeline import Timeline, build_report, time_left_s
from llmpq.multillm.schedule import ApplicationSchedule, load_schedule, write_schedule
from llmpq.multillm.workload import load_items
from llmpq.options.declare import add_options, read_options
from llmpq.options.plan import SCHEDULE_FILE, ApplicationOptions
from llmpq.options.run import ApplicationRun, LauncherOptions, LaunchOptions
from llmpq.spec.cluster import Cluster, load_cluster
from llmpq.spec.fields import to_json
from llmpq.units import format_seconds

RESTARTS = {
    "help": "restart the ranks of a model up to N times in a row after one of them died or hung "
    "(default %(default)s)"
}
PACKAGES = ("torch", "transformers", "tokenizers", "jinja2")


def add_run(verbs: Any) -> None:
    """Add the command to those of ``llmpq-apps``."""
    parser = verbs.add_parser("run", help="answer all requests", description=__doc__)
    parser.set_defaults(run=_run)
    files = parser.add_argument_group("files")
    changes: dict[str, dict[str, Any]] = {
        "cluster": {"help": "devices of this host"},
        "schedule": {
            "help": f"schedule file (default: {SCHEDULE_FILE} in --output; it is planned if it is "
            "not there)"
        },
        "output": {"required": True, "help": "folder of the answers (answers.jsonl)"},
    }
    names = ("application", "cluster", "schedule", "output")
    add_options(files, ApplicationOptions, *names, **changes)
    add_options(files, ApplicationRun, "resume", "model", "format", "plot")
    sampling = parser.add_argument_group("sampling (greedy by default)")
    add_options(sampling, SamplingParams, "temperature", "top_p")
    place = parser.add_argument_group("launching")
    launcher = {
        "help": "ray: replicas run on nodes of a Ray cluster whose label llmpq-device has the "
        "device types of their node, joined by _ (default local: on this host)"
    }
    add_options(place, LauncherOptions, "launcher", "ray_address", launcher=launcher)
    faults = parser.add_argument_group("when something fails")
    add_options(faults, ApplicationRun, "overflow")
    add_options(faults, LaunchOptions, "max_restarts", "step_timeout_s", max_restarts=RESTARTS)
    add_store_options(parser.add_argument_group("loading"))
    add_search_options(parser)
    parser.set_defaults(no_pipelines=False)  # only plans of pipelines can be run


def _run(options: argparse.Namespace) -> int:
    ray_address_of(options)
    app = load_application(options.application)
    items = load_items(app)
    cluster = load_cluster(options.cluster)
    output = Path(options.output)
    schedule = _schedule_of(options, app, cluster)
    require(*PACKAGES)
    from llmpq.server.text.tokenizer import load_server_tokenizer

    models, plans = prepare_models(
        app, schedule, cluster, _folders(options.model), cache(load_server_tokenizer)
    )
    check_prompts(app, items, models, refuses_overflow=options.overflow == "refuse")
    sampling = read_options(SamplingParams, options, leaves=["seed"])  # which is of the search
    identity = identity_of(app, items, to_json(sampling))
    with (
        _engines(options, cluster) as engines,
        AnswerJournal(output, identity, resume=options.resume) as journal,
        progress_bar("run") as show,
    ):
        flow, timeline = Dataflow(app, items), Timeline()
        if options.schedule is None:
            write_schedule(output / SCHEDULE_FILE, schedule)
        run = Coordinator(
            app=app,
            flow=flow,
            scheduler=lambda done: DynamicScheduler(app, schedule, cluster, done),
            models=models,
            plans=plans,
            start_engine=engines,
            journal=journal,
            timeline=timeline,
            sampling=sampling,
            on_progress=lambda found: _show(found, schedule, show),
        )
        asyncio.run(_until_signal(run))
    errors = {f"{key.node}/{key.item}/{key.part}": text for key, text in flow.errors.items()}
    report = build_report(
        schedule, timeline, num_devices=len(cluster.devices), requests=run.done, errors=errors
    )
    if options.format == "openai_batch":
        write_batch_files(output, app, flow.errors)
    if options.plot is not None:
        draw_schedule(schedule, options.plot, list(_spans(timeline)))
    if options.json:
        print_json(report)
    else:
        print(_text(app, report, output))
    return _report_errors(errors)


def _schedule_of(
    options: argparse.Namespace, app: Application, cluster: Cluster
) -> ApplicationSchedule:
    """Return the schedule that was asked for, that of the output folder, or a new one."""
    path = Path(options.schedule or Path(options.output) / SCHEDULE_FILE)
    if options.schedule is None and not path.exists():
        return planned_of(options, app, cluster).schedule
    schedule = load_schedule(path)
    schedule.check(app, cluster)
    return schedule


@contextmanager
def _engines(options: argparse.Namespace, cluster: Cluster) -> Iterator[StartEngine]:
    """Yield what starts the replicas: on this host, or on a Ray cluster."""
    settings: dict[str, Any] = {
        "cluster": cluster,
        "options": read_run_options(LaunchOptions, options),
    }
    if options.launcher == "local":
        yield LocalEngines(**settings)
        return
    require("ray")
    from llmpq.server.ray.engines import RayEngines
    from llmpq.server.ray.launcher import ray_cluster

    with ray_cluster(ray_address_of(options)):
        yield RayEngines(**settings)


async def _until_signal(run: Coordinator) -> None:
    """Run; SIGTERM and Ctrl-C end it with what is answered in the journal."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, run.stop, signal.Signals(number).name)
    await run.run()


def _folders(words: list[str]) -> dict[str, Path]:
    found = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not (name and equals and folder):
            raise SpecError(f"--model: found '{word}', expected NAME=DIR")
        if not Path(folder).is_dir():
            raise SpecError(f"--model: {folder}: no such directory, expected weights of '{name}'")
        found[name] = Path(folder)
    return found


def _show(run: Coordinator, schedule: ApplicationSchedule, show: Callable[..., None]) -> None:
    """Show how far every node is; the bar is the predicted time."""
    counts = ", ".join(f"{name} {n}/{run.flow.known(name)}" for name, n in run.done.items())
    text = f"stage {run.stage + 1}/{len(schedule.stages)}, {counts}"
    left_s, total_s = time_left_s(schedule, run.done), schedule.makespan_s
    if any(one.requests for _, one in schedule.entries()) and total_s > 0:
        show(total_s - left_s, total_s, text)
    else:
        show(sum(run.done.values()), sum(map(run.flow.known, run.done)), text)


def _text(app: Application, report: Mapping[str, Any], output: Path) -> str:
    """Return the report of a run as text."""
    rows = [("stage", "from", "to", "model", "plan", "devices", "requests")]
    for stage in report["stages"]:
        for one in stage["models"]:
            counts = ", ".join(f"{node} {n}" for node, n in one["nodes"].items())
            rows.append(
                (
                    str(stage["stage"] + 1),
                    f"{stage['start_s']:.1f} s",
                    f"{stage['end_s']:.1f} s",
                    one["model"],
                    one["plan"],
                    " ".join(one["devices"]),
                    counts or "-",
                )
            )
    makespan, loads = report["makespan_s"], [one["load_s"] or 0.0 for one in report["replicas"]]
    done = ", ".join(f"{name} {count}" for name, count in report["requests"].items())
    return "\n".join(
        [
            f"{app.name}: {done}",
            "",
            *aligned(rows),
            "",
            f"makespan       {format_seconds(makespan['measured'])}, predicted "
            f"{format_seconds(makespan['predicted'])}",
            f"idle           {report['idle_s']:.1f} device-seconds",
            f"loading        {len(loads)} times, {sum(loads):.1f} s in all",
            f"tokens         {report['generated_tokens']}",
            f"written        {output / 'answers.jsonl'}",
        ]
    )


def _spans(timeline: Timeline) -> Iterator[Span]:
    """Yield what each device did: loading until a replica is ready, then answering."""
    for one in timeline.replicas:
        end_s = min(timeline.makespan_s, one.end_s or timeline.makespan_s)
        ready_s = end_s if one.ready_s is None else min(one.ready_s, end_s)
        for device in one.devices:
            yield Span(device, one.model, one.start_s, ready_s, True)
            yield Span(device, one.model, ready_s, end_s)


def _report_errors(errors: Mapping[str, str]) -> int:
    for text in list(errors.values())[:MAX_LISTED]:
        print(f"llmpq-apps: error: not asked: {text}", file=sys.stderr)
    if len(errors) > MAX_LISTED:
        print(f"llmpq-apps: error: {len(errors)} in all", file=sys.stderr)
    return SpecError.exit_status if errors else 0
