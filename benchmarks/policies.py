"""Batching policies on the real pipeline of this machine: simulated against measured, and gains.

    python benchmarks/policies.py FOLDER model table plan calibrate calibrate           # 3 minutes
    python benchmarks/policies.py FOLDER runs --turn 0 --seconds 570                    # 7 minutes
    python benchmarks/policies.py FOLDER search                                         # 90 seconds
    python benchmarks/policies.py FOLDER bounds --turn 0 --seconds 570                  # 6 minutes
    python benchmarks/policies.py FOLDER runs --turn 1 --seconds 570                    # 7 minutes
    python benchmarks/policies.py FOLDER runs --turn 2 --seconds 570                    # 7 minutes
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

A core of this machine runs on one of two levels (``benchmarks/cores.py``): cores are kept awake and
watched. Calibrating runs are brought to the calm level (``calm.csv``), and a run is compared with
what is simulated at the levels that its cores had. What a user forecasts who watches nothing, with
``table.csv``, is told beside it.

Schedules are searched as ``llmpq-algo --policy rra|waa|auto`` does: those of the first turn on what
is known before it, those for a bound behind it, when the drift of some minutes is known. A bound is
what static batches of 24 or 16 keep for 99 % of the requests when played, and as surely as the
schedule is to keep it: the guard (``assigner/schedules/guard.py``) is on both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cores import CoreWatch, awake_cores, disturbed_share
from leveled import State, at_share, busy_level, rows_of, share_of, slowdown_of
from workbench import command, make_model, write_prompts

from llmpq.assigner.schedules.guard import guard_of
from llmpq.assigner.schedules.plan import (
    ScheduleRequest,
    best_of_policies,
    simulated,
    with_schedule,
)
from llmpq.batching import PipelineShape, make_policy, percentile
from llmpq.batching.length import Prediction, make_predictor
from llmpq.batching.multibin import quantile_boundaries
from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.costmodel.lookup import MASTER_BITS
from llmpq.sim import SimReport, simulate
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.catalog import resolve_model
from llmpq.spec.lengths import LengthDistribution, truncated_normal
from llmpq.spec.plan import MicroBatching, Plan
from llmpq.spec.plan_io import read_plan, write_plan
from llmpq.spec.precision import Phase
from llmpq.spec.schedule import Schedule, default_schedule
from llmpq.spec.tables import LatencyTable, read_latency_table, write_latency_table
from llmpq.spec.trace import TraceRequest, draw_trace

SLOTS, STAGES, PROMPT, NEW = 32, 2, 32, 160
BITS = 16
PREFILL, DECODE = 8, SLOTS // STAGES
TASKS = {
    "S": (256, 252, 512, 32, 13, 80),
    "T": (128, 81, 256, 128, 68, 320),
    "C1": (256, 115, 512, 64, 30, 160),
}
"""Mean, standard deviation and longest of prompts and answers."""
ANSWERS_BY = {"S": 1, "T": 2, "C1": 1}
REQUESTS = {"S": 320, "T": 160, "C1": 200}
"""Enough to fill the slots five to ten times: what fills and drains the pipeline counts little."""
POLICIES = ("static", "hybrid", "iteration", "rra", "waa", "multibin")
BOUND_BATCHES = (24, 16)
"""Static batches whose own latency is a bound; a batch of all slots is no bound."""
BINS, BIN_BATCH, BIN_TASK = 8, 16, "T"
BIN_REQUESTS = 256
"""Eight bins in batches of 16: with 160 requests most are not full, and nothing is gained."""
BIN_RUNS = {"bins1": (1, 0.0), "bins8": (BINS, 0.0), "noisy8": (BINS, 0.3)}
CONFIDENCE = 0.95
"""How sure a bound is to be kept, of what the table knows of itself: the default of llmpq-algo."""
CALIBRATIONS = {4: (16, 96), 16: (64, 96)}
"""Of each size of micro-batch: requests and new tokens; all have ``CALIBRATION_PROMPT`` tokens."""
CALIBRATION_PROMPT = 16
TIMED_ROWS = (1, 2, 4, 6, 8, 12, 13, 16, 32)
"""Weights are multiplied in strips of six rows: thirteen cost 4 % more than between 12 and 16."""
ENDING_S = 0.3
"""What a run takes behind its last token."""
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
    parser.add_argument("--seconds", type=float, default=500.0, help="of all that is run now")
    options = parser.parse_args()
    options.until_s = time.perf_counter() + options.seconds
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    with awake_cores() as options.watch:
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
        "--companions", "1",
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


def calibrate(options: argparse.Namespace) -> None:
    """Run requests of one length in micro-batches of two sizes; correct the table by all so far."""
    folder = options.folder / "calibration"
    folder.mkdir(exist_ok=True)
    number = len(list(folder.glob(f"*-{max(CALIBRATIONS)}.json")))
    plan = read_plan(options.folder / "plan.json")
    for size, (count, new) in CALIBRATIONS.items():
        strategy, prompts = folder / f"plan{size}.json", folder / f"prompts{size}.jsonl"
        write_plan(
            strategy,
            replace(
                plan,
                schedule=Schedule(policy="static", decode_batch=min(count, SLOTS)),
                micro_batching=MicroBatching(prefill=min(size, PREFILL), decode=size),
            ),
        )
        write_prompts(prompts, [(CALIBRATION_PROMPT, new)] * count)
        found = run_plan(strategy, prompts, options.watch)
        (folder / f"{number}-{size}.json").write_text(json.dumps(found))
        print(f"calibration {number} by {size}: {found['throughput_tokens_per_s']:.1f} tokens/s")
    recalibrate(options.folder)


def recalibrate(folder: Path) -> None:
    """Correct the measured table by every calibrating run, as they were and as on calm cores."""
    reports = sorted((folder / "calibration").glob("*-*.json"))
    plans = [report.with_name(f"plan{report.stem.partition('-')[2]}.json") for report in reports]
    print(_corrected(folder, reports, plans, "measured.csv", "table.csv"))
    measured = read_latency_table(folder / "measured.csv")
    write_latency_table(folder / "leveled.csv", at_share(measured, -share_of(measured)))
    leveled = [_leveled(report, measured) for report in reports]
    _corrected(folder, leveled, plans, "leveled.csv", "calm.csv")


def _corrected(
    folder: Path, reports: Sequence[Path], plans: Sequence[Path], table: str, output: str
) -> str:
    return command([
        "llmpq-profile", "recalibrate", "--report", *map(str, reports),
        "--strat_file_name", *map(str, plans), "--table", str(folder / table),
        "--output", str(folder / output),
    ])  # fmt: skip


def _leveled(report: Path, measured: LatencyTable) -> Path:
    """Write a report as if its cores had been calm; return the file."""
    found = json.loads(report.read_text())
    shares = stage_shares(found["loops_s"], measured)
    for stage, share in zip(found["stages"], shares, strict=True):
        for work in stage["work"]:
            phase = Phase(work["phase"])
            rows = rows_of(phase, work["rows"], work["tokens"])
            for key, bits in (("seconds", BITS), ("master_s", MASTER_BITS)):
                work[key] /= busy_level(slowdown_of(measured, phase, bits).at(rows), share)
    file = report.parent / "leveled" / report.name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found))
    return file


def stage_shares(loops_s: Sequence[Sequence[float]], measured: LatencyTable) -> list[float]:
    """Return the share of a run in which each stage's core was disturbed."""
    return [disturbed_share([own], calm_s_of(measured)) for own in loops_s]


def calm_s_of(measured: LatencyTable) -> float:
    """Return the loop's time on the calm level."""
    return float(dict(measured.provenance)["reference_s"])


def run_plan(strategy: Path, prompts: Path, watch: CoreWatch, error: float = 0.0) -> dict[str, Any]:
    """Return the report of a run, and the loops of its cores."""
    answers = prompts.with_name("answers.jsonl")
    answers.unlink(missing_ok=True)
    found = dict(json.loads(command([
        "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts),
        "--output", str(answers), "--predictor", "noisy", "--predictor_error", str(error),
        "--json",
    ])))  # fmt: skip
    end_s = time.time() - ENDING_S
    found["loops_s"] = watch.loops_s(end_s - found["elapsed_s"], end_s, watch.cores[:STAGES])
    return found


class Bench:
    """One task: its requests, simulated and run under any schedule."""

    def __init__(self, folder: Path, task: str) -> None:
        self.plan = read_plan(folder / "plan.json")
        self.prompts, self.answers = laws_of(task)
        self.trace = draw_trace(REQUESTS[task], self.prompts, self.answers, seed=8)
        self.many = draw_trace(BIN_REQUESTS, self.prompts, self.answers, seed=8)
        self.folder = folder / "runs" / task
        self.folder.mkdir(parents=True, exist_ok=True)
        self.root = folder
        self.costs = self._costs(["table.csv"] * STAGES)
        self._by_state: dict[State, ClusterCosts] = {}

    def _costs(self, tables: Sequence[str]) -> ClusterCosts:
        """Return the costs of workers that take the times of a table each."""
        model, _ = resolve_model(str(self.root / "model"))
        (node,) = self.plan.cluster.nodes
        groups = tuple(
            replace(node.devices[0], count=1, profile=str(self.root / table)) for table in tables
        )
        cluster = replace(self.plan.cluster, nodes=(replace(node, devices=groups),))
        return build_costs(
            model, cluster, dtype="bfloat16", kv_bits=16, profile_dir=self.root / "links"
        )

    def costs_of(self, state: State) -> ClusterCosts:
        """Return the costs on cores of which some are disturbed all the time."""
        if state not in self._by_state:
            calm = read_latency_table(self.root / "calm.csv")
            write_latency_table(self.root / "disturbed.csv", at_share(calm, 1.0))
            tables = ["disturbed.csv" if one else "calm.csv" for one in state]
            self._by_state[state] = self._costs(tables)
        return self._by_state[state]

    def simulate(self, name: str, costs: ClusterCosts) -> SimReport:
        """Play the requests under the schedule that a run is called for."""
        plan, error = self.plan_of(name), BIN_RUNS.get(name, (0, 0.0))[1]
        return played(plan, costs, self.many if name in BIN_RUNS else self.trace, error)

    def plan_of(self, name: str) -> Plan:
        """Return what a run is called for; what is searched is searched once and kept."""
        file = self.folder / f"plan-{name}.json"
        if not file.exists():
            write_plan(file, self._made(name))
        return read_plan(file)

    def _made(self, name: str) -> Plan:
        bound_s = self.bound_s(name)
        if bound_s is not None:
            wanted = replace(
                self._wanted(), latency_bound_s=bound_s, sla="queries", confidence=CONFIDENCE
            )
            return best_of_policies(self.plan, self.costs, wanted)
        if name in ("rra", "waa"):
            return with_schedule(self.plan, self.costs, self._wanted(), name)  # type: ignore[arg-type]
        batch = SLOTS
        answers = [item.new_tokens for item in self.trace]
        if name in BIN_RUNS:
            batch = BIN_BATCH
            edges = quantile_boundaries(answers, BIN_RUNS[name][0])
            schedule = Schedule(policy="multibin", decode_batch=batch, boundaries=edges)
        elif name == "multibin":
            edges = quantile_boundaries(answers, 2)
            schedule = Schedule(policy="multibin", decode_batch=batch, boundaries=edges)
        elif name.startswith("static"):
            batch = int(name.removeprefix("static") or SLOTS)
            schedule = Schedule(policy="static", decode_batch=batch)
        else:
            schedule = default_schedule(name, SLOTS)  # type: ignore[arg-type]
        half = batch // STAGES
        sizes = MicroBatching(prefill=min(PREFILL, half), decode=half)
        return replace(self.plan, schedule=schedule, micro_batching=sizes)

    def bound_s(self, name: str) -> float | None:
        """Return the bound of a run, set once: what static batches of its number surely keep.

        It is what 99 % of the requests take when played, times the guard.
        """
        batch = name.removeprefix("bound")
        if batch == name:
            return None
        file = self.folder / f"bound{batch}.json"
        if not file.exists():
            plan, wanted = self.plan_of(f"static{batch}"), self._wanted()
            played = simulated(plan, self.costs, wanted)
            slow_s = percentile([record.service_s for record in played.requests], 99)
            guard = guard_of(plan, self.costs, CONFIDENCE)
            file.write_text(json.dumps({"bound_s": guard * slow_s, "guard": guard}))
        return float(json.loads(file.read_text())["bound_s"])

    def _wanted(self) -> ScheduleRequest:
        return ScheduleRequest(prompt_tokens=self.prompts, new_tokens=self.answers)

    def run(self, name: str, turn: int, watch: CoreWatch) -> None:
        """Run what is called for."""
        self.plan_of(name)
        prompts = self.folder / "prompts.jsonl"
        trace = self.many if name in BIN_RUNS else self.trace
        write_prompts(prompts, [(item.prompt_tokens, item.new_tokens) for item in trace])
        strategy = self.folder / f"plan-{name}.json"
        found = run_plan(strategy, prompts, watch, BIN_RUNS.get(name, (0, 0.0))[1])
        counts = {key: found[key] for key in ("generated_tokens", "requests")}
        row = figures(found["per_request"] | counts, found["elapsed_s"])
        kept = {key: found[key] for key in ("stages", "loops_s")}
        text = json.dumps({**row, **kept}, indent=2)
        (self.folder / f"{name}-{turn}.json").write_text(text + "\n")
        print(
            self.folder.name, name, turn, f"{row['tokens_per_s']:.1f} tokens/s, 99 % in "
            f"{row['service_p99_s']:.2f} s", flush=True,
        )  # fmt: skip


def played(
    plan: Plan, costs: ClusterCosts, trace: Sequence[TraceRequest], error: float = 0.0
) -> SimReport:
    """Play requests under a plan's schedule, with lengths predicted with an error."""
    assert plan.schedule is not None
    shape = PipelineShape(
        micro_batching=plan.micro_batching,
        num_slots=SLOTS,
        num_stages=len(plan.path(Phase.DECODE)),
    )
    answers = [item.new_tokens for item in trace]
    prompts = [item.prompt_tokens for item in trace]
    predictor = make_predictor(Prediction(predictor="noisy", error=error), prompts, answers)
    policy = make_policy(plan.schedule, shape, predictor)
    return simulate(PlanCosts(plan, costs), policy, trace, num_slots=SLOTS)


def laws_of(task: str) -> tuple[LengthDistribution, LengthDistribution]:
    """Return the scaled laws of a task's prompts and answers."""
    mean_in, std_in, most_in, mean_out, std_out, most_out = TASKS[task]
    by = ANSWERS_BY[task]
    return (
        truncated_normal(mean_in / 16, std_in / 16, most_in // 16),
        truncated_normal(mean_out / by, std_out / by, most_out // by),
    )


def search(options: argparse.Namespace) -> None:
    """Search schedules, so that no run waits for it: those of a bound behind the first turn."""
    for task in TASKS:
        bench = Bench(options.folder, task)
        is_known = (bench.folder / f"{POLICIES[-1]}-0.json").exists()
        for name in (*POLICIES, *(bound_runs() if is_known else ())):
            print(task, name, words(bench.plan_of(name)), bench.bound_s(name) or "", flush=True)


def bound_runs() -> Iterator[str]:
    """Yield the runs under a bound, each behind the static batches that it is held against."""
    for batch in BOUND_BATCHES:
        yield f"static{batch}"
        yield f"bound{batch}"


def run_policies(options: argparse.Namespace) -> None:
    """Run every policy without a bound, on every task."""
    _run_all(options, TASKS, POLICIES)


def run_bounds(options: argparse.Namespace) -> None:
    """Run smaller static batches, and what is fastest within their latency."""
    _run_all(options, TASKS, tuple(bound_runs()))


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
            bench.run(name, options.turn, options.watch)


def figures(found: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return what is compared."""
    return {
        "seconds": seconds,
        "tokens_per_s": found["generated_tokens"] / seconds,
        "requests_per_s": found["requests"] / seconds,
        "latency_s": found["latency_s"]["mean"],
        "service_s": found["service_s"]["mean"],
        "service_p99_s": found["service_s"]["p99"],
        "first_token_s": found["time_to_first_token_s"]["mean"],
    }


def words(plan: Plan) -> str:
    """Return a schedule and its micro-batches in short."""
    schedule, micro = plan.schedule, plan.micro_batching
    assert schedule is not None
    sizes = (schedule.encode_batch, schedule.decode_batch, schedule.decode_iterations)
    text = "/".join("-" if size is None else str(size) for size in sizes)
    return f"{schedule.policy} {text} by {micro.prefill}, {micro.decode}"


if __name__ == "__main__":
    sys.exit(main())
