"""Batching policies on the real pipeline of this machine: simulated against measured, and gains.

    python benchmarks/policies.py FOLDER model table plan loop runs --turn 0 --seconds 500
    python benchmarks/policies.py FOLDER table runs --turn 1 --seconds 500
    python benchmarks/policies.py FOLDER table runs --turn 2 --seconds 500
    python benchmarks/policies.py FOLDER report

Every step writes into FOLDER and goes on where it was stopped; ``--seconds`` bounds a part. A
random Llama (12 layers, hidden 768, 16 bits) runs on two workers of one thread each with 32 slots.
Lengths are those of ExeGPT's tasks S, T and C1 (Table 3, truncated normal), prompts divided by 16,
so that prefill stays the smaller part on a processor, and answers of T by 2, so that a run takes
seconds. WAA has one worker for each phase. All requests are there from the start; a bound is for
the time from the start of a request's prefill to its last token.

The memory of a shared machine is faster in one minute than in the next: layers are timed again
before every turn, each turn runs everything once, and what is simulated on the mean of the tables
is compared with the median of the runs. RRA's and WAA's schedules are searched as ``llmpq-algo
--policy rra`` does, on the first table alone. What the master's own loop takes beside the model is
in no table: ``loop`` takes it from two runs of equal requests, as what is neither work, waiting nor
sending.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from workbench import ROOT, command, make_model, write_prompts

from llmpq.assigner.schedules.plan import ScheduleRequest, with_schedule
from llmpq.assigner.schedules.polish import polished
from llmpq.batching import PipelineShape, make_policy
from llmpq.batching.length import Prediction, make_predictor
from llmpq.batching.multibin import quantile_boundaries
from llmpq.costmodel import build_costs
from llmpq.dist import Prompt, generate_offline
from llmpq.sim import SimReport, simulate
from llmpq.sim.plan_costs import MasterLoop, PlanCosts
from llmpq.spec.catalog import resolve_model
from llmpq.spec.lengths import LengthDistribution, truncated_normal
from llmpq.spec.plan import MicroBatching, Plan
from llmpq.spec.plan_io import read_plan, write_plan
from llmpq.spec.precision import Phase
from llmpq.spec.schedule import Schedule, default_schedule
from llmpq.spec.tables import LatencyTable, read_latency_table, write_latency_table
from llmpq.spec.trace import TraceRequest, draw_trace

SLOTS, STAGES, PROMPT, NEW = 32, 2, 32, 160
PREFILL, DECODE = 8, SLOTS // STAGES
TASKS = {
    "S": (256, 252, 512, 32, 13, 80),
    "T": (128, 81, 256, 128, 68, 320),
    "C1": (256, 115, 512, 64, 30, 160),
}
"""Mean, standard deviation and longest of prompts and answers."""
ANSWERS_BY = {"S": 1, "T": 2, "C1": 1}
REQUESTS = {"S": 512, "T": 256, "C1": 384}
"""Enough to fill the slots a dozen times: what fills and drains the pipeline counts little."""
POLICIES = ("static", "hybrid", "iteration", "rra", "waa", "multibin")
BOUND_BATCHES = (24, 16)
"""Static batches whose own latency is a bound; a batch of all slots is no bound."""
BINS, BIN_BATCH, BIN_TASK = 8, 16, "T"
BIN_RUNS = {"bins1": (1, 0.0), "bins8": (BINS, 0.0), "noisy8": (BINS, 0.3)}
MARGIN = 0.96
"""Share of a bound that the simulated 99th percentile may take."""
SHARES = (1.6, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Of a bound, what RRA is searched for; its closed form is of the longest answer and cautious."""
LOOP_ROWS, LOOP_TOKENS = (4, 16), 80
LEFT_S = 30.0
"""A run is not begun with less time left."""
HEAD = "schedule | runs | tokens/s | spread | simulated | error | mean latency, s | simulated | "
HEAD += "error | 99 % in service, s | bound, s"
FLIP_REQUESTS = 48


def main() -> int:
    """Do the steps asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    steps: dict[str, Callable[[argparse.Namespace], None]] = {
        "model": write_model,
        "table": profile,
        "plan": make_plan,
        "loop": time_loop,
        "runs": run_all,
        "flips": flips,
        "report": report,
    }
    parser.add_argument("steps", nargs="+", choices=steps)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a table")
    parser.add_argument("--turn", type=int, default=0, help="which table and which run")
    parser.add_argument("--seconds", type=float, default=500.0, help="of a part of the runs")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    for step in options.steps:
        steps[step](options)
    return 0


def write_model(options: argparse.Namespace) -> None:
    """Write the random model."""
    make_model(options.folder / "model")


def profile(options: argparse.Namespace) -> None:
    """Time one layer once more, and messages between two workers the first time."""
    folder = options.folder
    command([
        "llmpq-profile", "layer", "--model", str(folder / "model"), "--core", "0", "--bits", "16",
        "--batches", "1", "4", "8", "12", "16", "--prompt_tokens", "4", "8", "16", "32",
        "--context_tokens", "16", "64", "128", "192", "--companions", "1",
        "--budget", str(options.budget), "--output", str(folder / f"table-{options.turn}.csv"),
        "--resume",
    ])  # fmt: skip
    write_latency_table(folder / "table.csv", mean_table(sorted(folder.glob("table-*.csv"))))
    links = folder / "links" / "links.csv"
    if not links.exists():
        links.parent.mkdir()
        command(["llmpq-profile", "link", "--output", str(links)])


def mean_table(files: Sequence[Path]) -> LatencyTable:
    """Return the mean of the turns' tables, point by point."""
    tables = [read_latency_table(file) for file in files]
    keys = ("stage_s", "company")
    means = {
        key: " ".join(
            f"{phase} {fmean(float(dict(one.provenance)[key].split()[place]) for one in tables)}"
            for phase, place in (("prefill", 1), ("decode", 3))
        )
        for key in keys
    }
    kept = [(key, value) for key, value in tables[0].provenance if key not in keys]
    samples = tuple(
        replace(same[0], seconds=fmean(one.seconds for one in same))
        for same in zip(*(table.samples for table in tables), strict=True)
    )
    return LatencyTable(samples=samples, provenance=(*kept, *means.items()))


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
        "--bits", "16", "--output", str(folder / "plan.json"),
    ])  # fmt: skip


class Bench:
    """One task: its requests, simulated and run under any schedule."""

    def __init__(self, folder: Path, task: str) -> None:
        self.plan = read_plan(folder / "plan.json")
        self.prompts, self.answers = laws_of(task)
        self.trace = draw_trace(REQUESTS[task], self.prompts, self.answers, seed=8)
        self.folder = folder / "runs" / task
        self.folder.mkdir(parents=True, exist_ok=True)
        model, _ = resolve_model(str(folder / "model"))
        found = folder / "loop.json"
        self.loop = MasterLoop(**json.loads(found.read_text())) if found.exists() else None
        self.costs = build_costs(
            model, self.plan.cluster, dtype="bfloat16", kv_bits=16, profile_dir=folder / "links"
        )

    def simulate(self, plan: Plan, error: float = 0.0, loop: MasterLoop | None = None) -> SimReport:
        """Play the requests under a plan's schedule, by default with the loop that was measured."""
        assert plan.schedule is not None
        sizes = plan.micro_batching
        stages = len(plan.path(Phase.DECODE))
        shape = PipelineShape(micro_batching=sizes, num_slots=SLOTS, num_stages=stages)
        answers = [item.new_tokens for item in self.trace]
        prompts = [item.prompt_tokens for item in self.trace]
        predictor = make_predictor(Prediction(predictor="noisy", error=error), prompts, answers)
        policy = make_policy(plan.schedule, shape, predictor)
        costs = PlanCosts(plan, self.costs, loop=loop or self.loop)
        return simulate(costs, policy, self.trace, num_slots=SLOTS)

    def plan_of(self, name: str) -> Plan:
        """Return what a run is called for; RRA's is searched once and kept."""
        file = self.folder / f"plan-{name}.json"
        if not file.exists():
            write_plan(file, self._made(name))
        return read_plan(file)

    def _made(self, name: str) -> Plan:
        if name.startswith("rra"):
            return self._searched(self.bound_s(name))
        if name == "waa":
            return with_schedule(self.plan, self.costs, self._wanted(), "waa")
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
        """Return the bound of an RRA run: what static batches of its number kept in the first run.

        In simulation too, so that it is one that static batches keep.
        """
        batch = name.removeprefix("rra")
        if not name.startswith("rra") or not batch:
            return None
        made = json.loads((self.folder / f"static{batch}-0.json").read_text())
        played = self.simulate(self.plan_of(f"static{batch}"))
        slow = figures(played.to_json(), played.makespan_s)["service_p99_s"]
        return max(float(made["service_p99_s"]), slow)

    def _wanted(self) -> ScheduleRequest:
        return ScheduleRequest(prompt_tokens=self.prompts, new_tokens=self.answers)

    def _searched(self, bound_s: float | None) -> Plan:
        """Return the search's best schedule, with a bound the one that is fastest when played."""
        wanted = self._wanted()
        if bound_s is None:
            return with_schedule(self.plan, self.costs, wanted)
        found: tuple[float, Plan] | None = None
        for share in SHARES:
            plan = with_schedule(
                self.plan, self.costs, replace(wanted, latency_bound_s=share * bound_s)
            )
            played = self.simulate(plan)
            slow = figures(played.to_json(), played.makespan_s)["service_p99_s"]
            rate = played.throughput_tokens_per_s
            if slow <= MARGIN * bound_s and (found is None or rate > found[0]):
                found = rate, plan
        if found is None:
            raise SystemExit(f"no schedule keeps {bound_s} s in simulation")
        return polished(found[1], self.prompts, self.answers, partial(self._score, bound_s))

    def _score(self, bound_s: float, plan: Plan) -> float:
        """Return requests a second when played, 0 where the bound is broken."""
        played = self.simulate(plan)
        slow = figures(played.to_json(), played.makespan_s)["service_p99_s"]
        return played.throughput_requests_per_s if slow <= MARGIN * bound_s else 0.0

    def run(self, name: str, turn: int) -> None:
        """Run what is called for."""
        self.plan_of(name)
        found = self.report_of(self.folder / f"plan-{name}.json", BIN_RUNS.get(name, (0, 0.0))[1])
        counts = {key: found[key] for key in ("generated_tokens", "requests")}
        row = figures(found["per_request"] | counts, found["elapsed_s"])
        text = json.dumps({**row, "stages": found["stages"]}, indent=2)
        (self.folder / f"{name}-{turn}.json").write_text(text + "\n")
        print(self.folder.name, name, turn, f"{row['tokens_per_s']:.1f} tokens/s", flush=True)

    def report_of(self, strategy: Path, error: float = 0.0) -> dict[str, Any]:
        """Return the report of a run of the requests."""
        answers, prompts = self.folder / "answers.jsonl", self.folder / "prompts.jsonl"
        answers.unlink(missing_ok=True)
        write_prompts(prompts, [(item.prompt_tokens, item.new_tokens) for item in self.trace])
        return dict(json.loads(command([
            "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts),
            "--output", str(answers), "--predictor", "noisy", "--predictor_error", str(error),
            "--json",
        ])))  # fmt: skip


def time_loop(options: argparse.Namespace) -> None:
    """Measure what the master's loop takes, with micro-batches of two sizes."""
    bench = Bench(options.folder, "S")
    bench.trace = (TraceRequest(arrival_s=0.0, prompt_tokens=16, new_tokens=LOOP_TOKENS),) * SLOTS
    points = []
    for size in LOOP_ROWS:
        plan = replace(
            bench.plan,
            schedule=Schedule(policy="static", decode_batch=SLOTS),
            micro_batching=MicroBatching(prefill=size, decode=size),
        )
        strategy = bench.folder / f"plan-loop{size}.json"
        write_plan(strategy, plan)
        found = bench.report_of(strategy)
        master = found["stages"][0]
        known = sum(master[f"{what}_fraction"] for what in ("busy", "wait", "send"))
        count = SLOTS // size * LOOP_TOKENS
        points.append((1 - known) * found["elapsed_s"] / count)
    low, high = LOOP_ROWS
    row_s = max(0.0, (points[1] - points[0]) / (high - low))
    loop = {"step_s": max(0.0, points[0] - row_s * low), "row_s": row_s}
    (options.folder / "loop.json").write_text(json.dumps(loop))
    print(f"master's loop: {loop}", flush=True)


def laws_of(task: str) -> tuple[LengthDistribution, LengthDistribution]:
    """Return the scaled laws of a task's prompts and answers."""
    mean_in, std_in, most_in, mean_out, std_out, most_out = TASKS[task]
    by = ANSWERS_BY[task]
    return (
        truncated_normal(mean_in / 16, std_in / 16, most_in // 16),
        truncated_normal(mean_out / by, std_out / by, most_out // by),
    )


def runs_of(task: str, turn: int) -> Iterator[str]:
    """Yield the runs of a turn: every policy without a bound; bounds and bins in the first."""
    yield from POLICIES
    if turn == 0:
        for batch in BOUND_BATCHES:
            yield f"static{batch}"
            yield f"rra{batch}"
        if task == BIN_TASK:
            yield from BIN_RUNS


def run_all(options: argparse.Namespace) -> None:
    """Run what this turn lacks, as far as this part's time goes."""
    start = time.perf_counter()
    for task in TASKS:
        bench = Bench(options.folder, task)
        for name in runs_of(task, options.turn):
            if (bench.folder / f"{name}-{options.turn}.json").exists():
                continue
            if time.perf_counter() - start > options.seconds - LEFT_S:
                print("out of time; call again")
                return
            bench.run(name, options.turn)


def flips(options: argparse.Namespace) -> None:
    """Count how often a token of the shipped model in bfloat16 depends on the policy."""
    folder = options.folder
    group = {"type": "cpu", "count": 1, "threads": 1}
    cluster = {"schema": 1, "name": "box", "nodes": [{"name": "here", "devices": [group]}],
               "links": []}  # fmt: skip
    (folder / "one.json").write_text(json.dumps(cluster))
    command([
        "llmpq-algo", "--model", str(ROOT / "models" / "demo"), "--cluster",
        str(folder / "one.json"), "--global_bz", "8", "--s", "64", "--n", "64", "--theta", "0",
        "--bits", "16", "--output", str(folder / "demo.json"),
    ])  # fmt: skip
    plan = replace(read_plan(folder / "demo.json"), dtype="bfloat16", kv_bits=16)
    text = (ROOT / "models" / "demo" / "heldout.txt").read_text(encoding="utf-8")
    prompts = [
        Prompt(id=number, where="here", text=text[900 * number :][: 40 + 7 * (number % 9)],
               max_new_tokens=8 + 11 * number % 57, ignore_eos=True)
        for number in range(FLIP_REQUESTS)
    ]  # fmt: skip
    one = replace(plan, micro_batching=MicroBatching(prefill=1, decode=1))
    alone = generate_offline(one, prompts)
    for policy in ("hybrid", "static", "iteration", "rra", "multibin"):
        schedule = default_schedule(policy, 8)
        if policy == "multibin":
            schedule = replace(schedule, decode_batch=4, boundaries=(20.0, 40.0))
        found = generate_offline(
            replace(plan, schedule=schedule, micro_batching=MicroBatching(prefill=4, decode=8)),
            prompts,
        )
        print(policy, differences([one.token_ids for one in alone], [o.token_ids for o in found]))


def differences(alone: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> str:
    """Count first differences over the tokens up to them: what follows one is another text."""
    same = flipped = 0
    for left, right in zip(alone, found, strict=True):
        equal = next(
            (place for place, two in enumerate(zip(left, right, strict=True)) if two[0] != two[1]),
            len(left),
        )
        same += equal
        flipped += equal < len(left)
    share = flipped / (same + flipped)
    return f"{flipped} of {same + flipped} tokens flip ({share:.2%}), in {len(alone)} requests"


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


def report(options: argparse.Namespace) -> None:
    """Print the tables."""
    errors: dict[str, list[float]] = {"tokens/s": [], "latency": []}
    for task in TASKS:
        bench = Bench(options.folder, task)
        rows = {name: row for name in runs_of(task, 0) if (row := row_of(bench, name))}
        print(f"\n| {task}: run | {HEAD} | x static |\n" + "| --- " * 13 + "|")
        for name, row in rows.items():
            for key, error in zip(errors, row["errors"], strict=True):
                errors[key].append(abs(error))
            number = "" if name in POLICIES else name.removeprefix("static").removeprefix("rra")
            base = rows.get("bins1" if name in BIN_RUNS else f"static{number}")
            gain = row["tokens_per_s"] / base["tokens_per_s"] if base else math.nan
            print(f"| {name} | {row['text']} | {gain:.2f} |")
    for key, found in errors.items():
        if found:
            print(f"\n{key}: {len(found)} errors, mean {fmean(found):.1%}, most {max(found):.1%}")


def row_of(bench: Bench, name: str) -> dict[str, Any] | None:
    """Return one run's medians and errors, and its line of the table."""
    found = [json.loads(file.read_text()) for file in bench.folder.glob(f"{name}-[0-9].json")]
    if not found:
        return None
    plan = bench.plan_of(name)
    report_ = bench.simulate(plan, BIN_RUNS.get(name, (0, 0.0))[1])
    played = figures(report_.to_json(), report_.makespan_s)
    made = {key: median(row[key] for row in found) for key in played}
    rates = [row["tokens_per_s"] for row in found]
    spread = (max(rates) - min(rates)) / made["tokens_per_s"]
    two = [played[key] / made[key] - 1 for key in ("tokens_per_s", "latency_s")]
    bound = bench.bound_s(name)
    cells = [
        words(plan), str(len(found)), f"{made['tokens_per_s']:.0f}", f"{spread:.1%}",
        f"{played['tokens_per_s']:.0f}", f"{two[0]:+.1%}", f"{made['latency_s']:.2f}",
        f"{played['latency_s']:.2f}", f"{two[1]:+.1%}", f"{made['service_p99_s']:.2f}",
        "" if bound is None else f"{bound:.2f}",
    ]  # fmt: skip
    return {**made, "errors": two, "text": " | ".join(cells)}


def words(plan: Plan) -> str:
    """Return a schedule and its micro-batches in short."""
    schedule, micro = plan.schedule, plan.micro_batching
    assert schedule is not None
    sizes = (schedule.encode_batch, schedule.decode_batch, schedule.decode_iterations)
    text = "/".join("-" if size is None else str(size) for size in sizes)
    return f"{schedule.policy} {text} by {micro.prefill}, {micro.decode}"


if __name__ == "__main__":
    sys.exit(main())
