"""Batching policies on the real pipeline of this machine: simulated against measured, and gains.

    python benchmarks/policies.py FOLDER model table plan S T C1 multibin flips report

Every step writes into FOLDER, is short, and goes on where it was stopped. A random Llama (12
layers, hidden 768, 16 bits) runs on two workers of one thread each with 16 slots. Lengths are those
of ExeGPT's tasks S, T and C1 (Table 3, truncated normal), prompts divided by 16 and answers by 2,
so that a run takes seconds and prefill stays the smaller part of it. All requests are there from
the start; a bound is for the time from the start of a request's prefill to its last token.
Schedules under a bound are chosen by the simulator alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from llmpq.batching import PipelineShape, make_policy
from llmpq.batching.length import Prediction, make_predictor
from llmpq.batching.multibin import quantile_boundaries
from llmpq.costmodel import build_costs
from llmpq.dist import Prompt, generate_offline
from llmpq.sim import SimReport, simulate
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.catalog import resolve_model
from llmpq.spec.fields import Fields
from llmpq.spec.lengths import truncated_normal
from llmpq.spec.plan import MicroBatching
from llmpq.spec.plan_io import read_plan, write_plan
from llmpq.spec.schedule import Schedule, default_schedule, schedule_from_fields, schedule_to_json
from llmpq.spec.trace import TraceRequest, draw_trace

ROOT = Path(__file__).resolve().parents[1]
SHAPE = {
    "layers": 12,
    "hidden": 768,
    "intermediate": 2048,
    "heads": 12,
    "kv_heads": 4,
    "vocab": 32000,
    "max_positions": 1024,
}
SLOTS, STAGES, PROMPT, NEW = 16, 2, 32, 160
MOST = MicroBatching(prefill=8, decode=8)
TASKS = {"S": (256, 252, 512, 32, 13, 80), "T": (128, 81, 256, 128, 68, 320),
         "C1": (256, 115, 512, 64, 30, 160)}  # fmt: skip
REQUESTS = {"S": 64, "T": 32, "C1": 48}
BOUND_BATCHES = (8, 12)
"""Static batches whose own latency is a bound; a batch of all slots is no bound."""
MARGIN = 0.95
"""Share of a bound that simulated latencies may take."""
HEAD = "schedule | tokens/s | simulated | error | mean latency, s | simulated | error | "
HEAD += "99 % in service, s | bound, s"
FLIP_REQUESTS = 48
BINS, BIN_BATCH, BIN_REQUESTS = 8, 8, 192


def main() -> int:
    """Do the steps asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "steps",
        nargs="+",
        choices=("model", "table", "plan", *TASKS, "multibin", "flips", "report"),
    )
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of the profile")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for step in options.steps:
        if step in TASKS:
            run_task(options.folder, step)
        elif step == "table":
            profile(options.folder, options.budget)
        else:
            {
                "model": make_model,
                "plan": make_plan,
                "multibin": run_bins,
                "flips": flips,
                "report": report,
            }[step](options.folder)
    return 0


def make_model(folder: Path) -> None:
    """Write the random model."""
    sizes = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
    script = str(ROOT / "scripts" / "make_tiny_model.py")
    call([sys.executable, script, "--family", "llama", *sizes, "--dtype", "bfloat16",
          "--output", str(folder / "model")])  # fmt: skip


def profile(folder: Path, budget_s: float) -> None:
    """Time one layer, and messages between two workers."""
    command([
        "llmpq-profile", "layer", "--model", str(folder / "model"), "--core", "0", "--bits", "16",
        "--batches", "1", "2", "4", "6", "8", "--prompt_tokens", "4", "8", "16", "32",
        "--context_tokens", "8", "32", "64", "128", "192", "--budget", str(budget_s),
        "--output", str(folder / "table.csv"), "--resume",
    ])  # fmt: skip
    (folder / "links").mkdir(exist_ok=True)
    command(["llmpq-profile", "link", "--output", str(folder / "links" / "links.csv")])


def make_plan(folder: Path) -> None:
    """Plan two stages once; what is run differs in its schedule only."""
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

    def __init__(self, folder: Path, task: str, count: int) -> None:
        self.plan = replace(read_plan(folder / "plan.json"), micro_batching=MOST)
        self.trace = trace_of(task, count)
        self.folder = folder / "runs" / task
        self.folder.mkdir(parents=True, exist_ok=True)
        model, _ = resolve_model(str(folder / "model"))
        costs = build_costs(
            model, self.plan.cluster, dtype="bfloat16", kv_bits=16, profile_dir=folder / "links"
        )
        self._costs = PlanCosts(self.plan, costs)

    def simulate(self, schedule: Schedule, prediction: Prediction) -> SimReport:
        """Play a schedule."""
        sizes = micro_batches(schedule)
        shape = PipelineShape(micro_batching=sizes, num_slots=SLOTS, num_stages=STAGES)
        answers = [item.new_tokens for item in self.trace]
        prompts = [item.prompt_tokens for item in self.trace]
        predictor = make_predictor(prediction, prompts, answers)
        policy = make_policy(schedule, shape, predictor)
        return simulate(self._costs, policy, self.trace, num_slots=SLOTS)

    def measure(
        self, name: str, schedule: Schedule, bound_s: float | None = None, error: float = 0.0
    ) -> dict[str, Any]:
        """Run a schedule, unless that was done; return what both say of it."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            prediction = Prediction(predictor="noisy", error=error)
            played = self.simulate(schedule, prediction).to_json()
            made = self._run(name, schedule, error)
            row = {"name": name, "bound_s": bound_s, "schedule": words(schedule),
                   "simulated": figures(played, played["makespan_s"]),
                   "measured": figures(made["per_request"] | {
                       "generated_tokens": made["generated_tokens"],
                       "requests": made["requests"]}, made["elapsed_s"])}  # fmt: skip
            file.write_text(json.dumps(row, indent=2) + "\n")
            print(json.dumps(row), flush=True)
        return dict(json.loads(file.read_text()))

    def _run(self, name: str, schedule: Schedule, error: float) -> dict[str, Any]:
        strategy, answers = self.folder / f"plan-{name}", self.folder / "answers.jsonl"
        prompts = self.folder / "prompts.jsonl"
        answers.unlink(missing_ok=True)
        plan = replace(self.plan, schedule=schedule, micro_batching=micro_batches(schedule))
        write_plan(strategy, plan)
        prompts.write_text("".join(prompt_lines(self.trace)))
        text = command([
            "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts),
            "--output", str(answers), "--predictor", "noisy", "--predictor_error", str(error),
            "--json",
        ])  # fmt: skip
        return dict(json.loads(text))


def run_task(folder: Path, task: str) -> None:
    """Run every policy without a bound, then static batches and RRA at each bound.

    A part that is stopped goes on with the run that it was stopped in.
    """
    bench = Bench(folder, task, REQUESTS[task])
    bench.measure("static", static(SLOTS))
    bench.measure("rra", chosen(bench, "rra", None))
    for name in ("hybrid", "iteration"):
        bench.measure(name, Schedule(policy=name))
    lengths = [item.new_tokens for item in bench.trace]
    bins = Schedule(
        policy="multibin", decode_batch=SLOTS, boundaries=quantile_boundaries(lengths, 2)
    )
    bench.measure("multibin", bins)
    for batch in BOUND_BATCHES:
        found = bench.measure(f"static{batch}", static(batch))
        bound_s = max(found["measured"]["service_p99_s"], found["simulated"]["service_p99_s"])
        bench.measure(f"rra{batch}", chosen(bench, f"rra{batch}", bound_s), bound_s)


def static(batch: int) -> Schedule:
    """Return FasterTransformer's way: ended sequences stay until the batch is done."""
    return Schedule(policy="static", decode_batch=batch)


def chosen(bench: Bench, name: str, bound_s: float | None) -> Schedule:
    """Return the best schedule, searched once: the search takes seconds of a quiet machine."""
    file = bench.folder / f"{name}.schedule"
    if not file.exists():
        file.write_text(json.dumps(schedule_to_json(best_rra(bench, bound_s))))
    return schedule_from_fields(Fields(json.loads(file.read_text()), str(file)))


def best_rra(bench: Bench, bound_s: float | None) -> Schedule:
    """Return the schedule of highest simulated throughput whose 99th percentile keeps a bound."""
    found: tuple[float, Schedule] | None = None
    for schedule in rra_schedules():
        report_ = bench.simulate(schedule, Prediction())
        slow_s = figures(report_.to_json(), report_.makespan_s)["service_p99_s"]
        is_kept = bound_s is None or slow_s <= MARGIN * bound_s
        if is_kept and (found is None or report_.throughput_tokens_per_s > found[0]):
            found = report_.throughput_tokens_per_s, schedule
    assert found is not None, "no schedule keeps the bound"
    return found[1]


def rra_schedules() -> Iterator[Schedule]:
    """Yield the space that is searched."""
    for decode in range(6, SLOTS + 1, 2):
        for encode in (1, 2, 4, 8):
            for iterations in (2, 4, 8, 16):
                if encode <= decode:
                    yield Schedule(
                        policy="rra",
                        encode_batch=encode,
                        decode_batch=decode,
                        decode_iterations=iterations,
                    )


def flips(folder: Path) -> None:
    """Count how often a token of the shipped model in bfloat16 depends on the policy."""
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


def micro_batches(schedule: Schedule) -> MicroBatching:
    """Return halves of the batch, one for each stage."""
    half = max(1, -(-(schedule.decode_batch or SLOTS) // STAGES))
    return MicroBatching(prefill=min(MOST.prefill, half), decode=min(MOST.decode, half))


def run_bins(folder: Path) -> None:
    """Run one bin, eight with the truth, eight with a noisy prediction."""
    bench = Bench(folder, "S", BIN_REQUESTS)
    lengths = [item.new_tokens for item in bench.trace]
    for name, bins, error in (("bins1", 1, 0.0), ("bins8", BINS, 0.0), ("noisy8", BINS, 0.3)):
        edges = quantile_boundaries(lengths, bins)
        schedule = Schedule(policy="multibin", decode_batch=BIN_BATCH, boundaries=edges)
        bench.measure(name, schedule, error=error)


def trace_of(task: str, count: int) -> tuple[TraceRequest, ...]:
    """Draw requests of a task, scaled."""
    mean_in, std_in, most_in, mean_out, std_out, most_out = TASKS[task]
    prompts = truncated_normal(mean_in / 16, std_in / 16, most_in // 16)
    answers = truncated_normal(mean_out / 2, std_out / 2, most_out // 2)
    return draw_trace(count, prompts, answers, seed=8)


def prompt_lines(trace: Sequence[TraceRequest]) -> Iterator[str]:
    """Yield the prompt file of a trace."""
    for number, item in enumerate(trace):
        tokens = [
            (number * 997 + place * 31) % SHAPE["vocab"] for place in range(item.prompt_tokens)
        ]
        line = {"id": number, "prompt_token_ids": tokens, "max_new_tokens": item.new_tokens,
                "ignore_eos": True}  # fmt: skip
        yield json.dumps(line) + "\n"


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


def words(schedule: Schedule) -> str:
    """Return a schedule in short."""
    sizes = (schedule.encode_batch, schedule.decode_batch, schedule.decode_iterations)
    return f"{schedule.policy} " + "/".join("-" if size is None else str(size) for size in sizes)


def report(folder: Path) -> None:
    """Print the tables."""
    errors: list[float] = []
    for task in TASKS:
        files = sorted((folder / "runs" / task).glob("*.json"))
        print(f"\n| {task}: run | {HEAD} |\n" + "| --- " * 10 + "|")
        for row in (json.loads(file.read_text()) for file in files):
            made, played = row["measured"], row["simulated"]
            two = [played[key] / made[key] - 1 for key in ("tokens_per_s", "latency_s")]
            errors += [abs(error) for error in two]
            bound = "" if row["bound_s"] is None else f"{row['bound_s']:.2f}"
            print(f"| {row['name']} | {row['schedule']} | {made['tokens_per_s']:.1f} | "
                  f"{played['tokens_per_s']:.1f} | {two[0]:+.1%} | {made['latency_s']:.2f} | "
                  f"{played['latency_s']:.2f} | {two[1]:+.1%} | {made['service_p99_s']:.2f} | "
                  f"{bound} |")  # fmt: skip
    if errors:
        print(f"\n{len(errors)} errors: mean {fmean(errors):.1%}, most {max(errors):.1%}")


def command(words_: Sequence[str]) -> str:
    """Run one of our commands; return what it printed."""
    code = f"import sys; from llmpq.cli.{_MODULES[words_[0]]} import main; sys.exit(main())"
    return call([sys.executable, "-c", code, *words_[1:]])


_MODULES = {"llmpq-algo": "algo", "llmpq-dist": "dist", "llmpq-profile": "profile"}


def call(words_: Sequence[str]) -> str:
    """Run a program; its own words are the error's when it fails."""
    done = subprocess.run(words_, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words_[:4]}: status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
