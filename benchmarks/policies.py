"""Batching policies on the real pipeline of this machine: simulated against measured, and gains.

    python benchmarks/policies.py FOLDER model table plan calibrate calibrate           # 4 minutes
    python benchmarks/policies.py FOLDER runs --turn 0 --seconds 570                    # 9 minutes
    python benchmarks/policies.py FOLDER search                                         # 90 seconds
    python benchmarks/policies.py FOLDER bounds --turn 0 --seconds 570                  # 7 minutes
    python benchmarks/policies.py FOLDER runs --turn 1 --seconds 570                    # 9 minutes
    python benchmarks/policies.py FOLDER runs --turn 2 --tasks S --policies static rra  # 90 seconds
    python benchmarks/policies.py FOLDER bounds bins --turn 1 --seconds 590             # 9 minutes
    python benchmarks/policies_report.py FOLDER --picture FILE.png

Every step writes into FOLDER and goes on where it was stopped; ``--seconds`` bounds a part; all but
``search`` time something. A random Llama (12 layers, hidden 768, 16 bits) runs on
two workers of one thread each with 32 slots. Lengths are those of ExeGPT's tasks S, T and C1 (Table
3, truncated normal), prompts divided by 16, so that prefill stays the smaller part on a processor,
and answers of T by 2, so that a run takes seconds. WAA has one worker for each phase. All requests
are there from the start; a bound is for the time from the start of a request's prefill to its last
token.

The memory of a shared machine is faster in one minute than in the next. So the table is corrected
as a user would do it: ``calibrate`` runs other requests, all of one length, in static batches of
two micro-batch sizes, before every task of every turn, and ``llmpq-profile recalibrate`` corrects
the table by all of these runs. No run that is forecast is among them. What is simulated on that
table is compared with the median of a policy's runs.

Schedules are searched as ``llmpq-algo --policy rra|waa|auto`` does: those of the first turn on what
is known before it, those for a bound after it. A bound is
what static batches of 24 or 16 keep for 99 % of the requests when played, and as surely as the
schedule is to keep it: both use the safety factor of
``assigner/schedules/plan.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from policies_bench import (
    BIN_RUNS,
    BIN_TASK,
    BITS,
    NEW,
    POLICIES,
    PROMPT,
    SLOTS,
    STAGES,
    TASKS,
    Bench,
    bound_runs,
    words,
)
from policies_table import calibrate
from workbench import command, make_model

TIMED_ROWS = (1, 2, 4, 6, 8, 12, 13, 16, 32)
"""Weights are multiplied in strips of six rows: thirteen cost 4 % more than between 12 and 16."""
LEFT_S = 35.0
"""A run is not begun with less time left."""


def main() -> int:
    """Do the steps asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    steps: dict[str, Callable[[argparse.Namespace], None]] = {
        "model": write_model,
        "table": profile,
        "plan": make_plan,
        "calibrate": calibrate,
        "search": search,
        "runs": run_policies,
        "bounds": run_bounds,
        "bins": run_bins,
    }
    parser.add_argument("steps", nargs="+", choices=steps)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a table")
    parser.add_argument("--turn", type=int, default=0, help="which run of each")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--seconds", type=float, default=500.0, help="of all that is run now")
    options = parser.parse_args()
    options.until_s = time.perf_counter() + options.seconds
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    for step in options.steps:
        steps[step](options)
    return 0


def write_model(options: argparse.Namespace) -> None:
    """Write the random model."""
    make_model(options.folder / "model")


def profile(options: argparse.Namespace) -> None:
    """Time one layer, and messages between two workers."""
    folder = options.folder
    command([
        "llmpq-profile", "layer", "--model", str(folder / "model"), "--core", "0",
        "--bits", str(BITS), "--batches", *map(str, TIMED_ROWS),
        "--prompt_tokens", "4", "8", "16", "32", "--context_tokens", "16", "64", "192",
        "--budget", str(options.budget), "--output", str(folder / "measured.csv"), "--resume",
    ])  # fmt: skip
    shutil.copy(folder / "measured.csv", folder / "table.csv")
    links = folder / "links" / "links.csv"
    links.parent.mkdir(exist_ok=True)
    command(["llmpq-profile", "link", "--output", str(links)])


def make_plan(options: argparse.Namespace) -> None:
    """Plan two stages once; what is run differs in its schedule only."""
    folder = options.folder
    group = {"type": "cpu", "count": STAGES, "threads": 1, "profile": "table.csv"}
    cores = len(os.sched_getaffinity(0))
    node = {"name": "here", "devices": [group], "cores": cores}
    cluster = {"schema": 1, "name": "box", "nodes": [node], "links": []}
    (folder / "cluster.json").write_text(json.dumps(cluster))
    command([
        "llmpq-algo", "--model", str(folder / "model"), "--cluster", str(folder / "cluster.json"),
        "--global_bz", str(SLOTS), "--s", str(PROMPT), "--n", str(NEW), "--theta", "0",
        "--bits", str(BITS), "--output", str(folder / "plan.json"),
    ])  # fmt: skip


def search(options: argparse.Namespace) -> None:
    """Search schedules, so that no run waits for it: those of a bound behind the first turn."""
    for task in options.tasks:
        bench = Bench(options.folder, task)
        is_known = (bench.folder / f"{POLICIES[-1]}-0.json").exists()
        for name in (*POLICIES, *(bound_runs() if is_known else ())):
            print(task, name, words(bench.plan_of(name)), bench.bound_s(name) or "", flush=True)


def run_policies(options: argparse.Namespace) -> None:
    """Run policies without a bound."""
    _run_all(options, options.tasks, options.policies)


def run_bounds(options: argparse.Namespace) -> None:
    """Run smaller static batches, and what is fastest within their latency."""
    _run_all(options, options.tasks, tuple(bound_runs()))


def run_bins(options: argparse.Namespace) -> None:
    """Run multi-bin batches, with lengths known and predicted."""
    _run_all(options, (BIN_TASK,), tuple(BIN_RUNS))


def _run_all(options: argparse.Namespace, tasks: Sequence[str], names: Sequence[str]) -> None:
    """Run what this turn lacks, a calibration before every task, as far as the time goes."""
    for task in tasks:
        bench = Bench(options.folder, task)
        missing = [
            name for name in names if not (bench.folder / f"{name}-{options.turn}.json").exists()
        ]
        for name in missing:
            if time.perf_counter() > options.until_s - LEFT_S:
                print("out of time; call again")
                return
            if name == missing[0]:
                calibrate(options)
            bench.run(name, options.turn)


if __name__ == "__main__":
    sys.exit(main())
