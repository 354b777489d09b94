"""Forecasts against measurements on this machine: one layer at unseen shapes, and whole plans.

    python benchmarks/forecast.py FOLDER model links turns
    python benchmarks/forecast.py FOLDER report --picture docs/images/forecast_this_machine.png

Every step writes into FOLDER; ``turns`` continues an interrupted run (``--seconds`` limits a part).
A random Llama (12 layers, hidden 768, feed-forward 2048, 12/4 heads, vocabulary 32,000) is profiled
on the planned grid at 3, 4, 8 and 16 bits. Batches 3, 5 and 7 and lengths that are not on the grid
are held out: timed in the same rounds, and kept out of the table. Then random plans (1 to 3 stages,
mixed bits, different micro-batches) are run. Both happen in ``--turns``: layers, all plans, layers
again, so that a table is of the same minutes as the runs; medians count. Workers have one thread;
three share two cores, which the cluster states (``cores``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from workbench import command, make_model, write_prompts

from llmpq.assigner.forecast import evaluate_plan, forecast
from llmpq.assigner.request import default_omega
from llmpq.cli.plots import INK, new_figure
from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.options.measure import POINTS
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import load_cluster
from llmpq.spec.plan import MicroBatching, Plan, StageAssignment, read_plan, write_plan
from llmpq.spec.precision import BITS
from llmpq.spec.tables import (
    MASTER_BITS,
    LatencySample,
    LatencyTable,
    read_latency_table,
    write_latency_table,
)
from llmpq.spec.workload import Workload

LIMITS = {"batch": 16, "prompt": 256, "context": 384, "prefill": 2048}
HELD = {
    "batches": (3, 5, 7),
    "prompt_tokens": (20, 56, 104, 168, 240),
    "context_tokens": (28, 80, 150, 220, 330),
}
STAGES = 3
NUM_PLANS = 24
LEFT_S = 14.0
"""Seconds that must be left to start a run."""


def main() -> int:
    """Do the steps asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    steps: dict[str, Callable[[argparse.Namespace], None]] = {
        "model": write_model,
        "links": measure_links,
        "turns": take_turns,
        "report": report,
    }
    parser.add_argument("steps", nargs="+", choices=steps)
    parser.add_argument("--budget", type=float, default=70.0, help="seconds of the layers, a turn")
    parser.add_argument("--seconds", type=float, default=360.0, help="of a part of the plans")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="scatter of predicted against measured")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    for step in options.steps:
        steps[step](options)
    return 0


def write_model(options: argparse.Namespace) -> None:
    """Write the random model."""
    make_model(options.folder / "model")


def take_turns(options: argparse.Namespace) -> None:
    """Time layers and run all plans, again and again; a folder that was left goes on."""
    for turn in range(options.turns):
        if not (options.folder / f"layers-{turn}.csv").exists():
            time_layers(options, turn)
        run_plans(options, turn)


def time_layers(options: argparse.Namespace, turn: int) -> None:
    """Time one layer on the planned grid and, in turn with it, on the held-out shapes."""
    sizes = [word for name, value in LIMITS.items() for word in (f"--max_{name}", str(value))]
    for name, values in HELD.items():
        sizes += [f"--{name}", *map(str, values)]
    command([
        "llmpq-profile", "layer", "--model", str(options.folder / "model"), "--core", "0", *sizes,
        "--points", str(POINTS), "--budget", str(options.budget),
        "--output", str(options.folder / f"layers-{turn}.csv"), "--resume", "--seed", str(turn),
    ])  # fmt: skip
    join_turns(options.folder)


def join_turns(folder: Path) -> None:
    """Write one table and one hold-out from all turns; a shape counts by its median over them."""
    tables = [read_latency_table(file) for file in sorted(folder.glob("layers-*.csv"))]
    for name, is_held in (("table", False), ("held", True)):
        seconds: dict[LatencySample, list[float]] = {}
        for one in (one for table in tables for one in table.samples):
            if held_out(one) == is_held:
                seconds.setdefault(replace(one, seconds=0.0), []).append(one.seconds)
        samples = (replace(one, seconds=statistics.median(all_s)) for one, all_s in seconds.items())
        table = LatencyTable(samples=tuple(samples), provenance=tables[0].provenance)
        write_latency_table(folder / f"{name}.csv", table)


def held_out(one: LatencySample) -> bool:
    """Say whether a sample is of a held-out shape; all batches of the master's own work are."""
    return one.batch in HELD["batches"]


def measure_links(options: argparse.Namespace) -> None:
    """Time messages between two workers of this machine."""
    (options.folder / "links").mkdir(exist_ok=True)
    command(["llmpq-profile", "link", "--output", str(options.folder / "links" / "links.csv")])


def costs_of(folder: Path) -> ClusterCosts:
    """Return the costs of three workers on two cores."""
    groups = [{"type": "cpu", "count": STAGES, "threads": 1, "profile": "table.csv"}]
    cores = len(os.sched_getaffinity(0))
    cluster = {
        "schema": 1,
        "name": "box",
        "nodes": [{"name": "here", "devices": groups, "cores": cores}],
        "links": [],
    }
    (folder / "cluster.json").write_text(json.dumps(cluster))
    model, _ = resolve_model(str(folder / "model"))
    return build_costs(
        model,
        load_cluster(folder / "cluster.json"),
        dtype="bfloat16",
        kv_bits=16,
        profile_dir=folder / "links",
    )


def random_plan(number: int, base: Plan, costs: ClusterCosts) -> Plan:
    """Return the plan of a seed: 1 to 3 stages in turn, mixed bits, different micro-batches."""
    chance = random.Random(1000 + number)
    stages = 1 + number % STAGES
    layers = base.model.num_layers
    cuts = [0, *sorted(chance.sample(range(1, layers), stages - 1)), layers]
    bits: list[int] = []
    while len(bits) < layers:
        bits += [chance.choice(BITS)] * chance.randint(1, 5)
    batch = chance.randint(4, LIMITS["batch"])
    plan = replace(
        base,
        workload=Workload(
            batch=batch,
            prompt_tokens=chance.randint(24, 200),
            new_tokens=chance.randint(12, 64),
        ),
        micro_batching=MicroBatching(
            prefill=chance.randint(1, batch),
            decode=chance.randint(max(1, batch // (stages + 2)), batch),
        ),
        stages=tuple(
            StageAssignment(
                rank=rank,
                device=rank,
                first_layer=first,
                end_layer=end,
                bits=tuple(bits[first:end]),
            )
            for rank, (first, end) in enumerate(pairwise(cuts))
        ),
        dropped_devices=tuple(range(stages, STAGES)),
        estimate=replace(base.estimate, stages=base.estimate.stages[:1] * stages, forecast=None),
    )
    return priced(plan, costs)


def priced(plan: Plan, costs: ClusterCosts) -> Plan:
    """Return the plan with its estimate and its forecast by these costs."""
    estimate, _ = evaluate_plan(plan, costs, default_omega(costs.model, BITS))
    return replace(plan, estimate=replace(estimate, forecast=forecast(plan, costs)))


def run_plans(options: argparse.Namespace, turn: int) -> None:
    """Run as many plans as fit into this part."""
    folder, start = options.folder, time.perf_counter()
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    costs = costs_of(folder)
    base = folder / "base.json"
    if not base.exists():
        command([
            "llmpq-algo", "--model", str(folder / "model"), "--cluster",
            str(folder / "cluster.json"), "--global_bz", "8", "--s", "64", "--n", "32",
            "--theta", "0", "--output", str(base),
        ])  # fmt: skip
    for number in range(NUM_PLANS):
        done = runs / f"{number:02}-{turn}.json"
        if done.exists():
            continue
        if time.perf_counter() - start > options.seconds - LEFT_S:
            return
        plan = random_plan(number, read_plan(base), costs)
        write_plan(runs / f"plan-{number:02}.json", plan)
        found = run(runs / f"plan-{number:02}.json", plan, runs)
        done.write_text(json.dumps(found, indent=2) + "\n")
        latency = found["latency_s"]
        print(
            f"{number:2} {latency['measured']:7.3f} s, forecast {latency['predicted']:7.3f}",
            flush=True,
        )


def run(strategy: Path, plan: Plan, folder: Path) -> dict[str, Any]:
    """Run a plan on prompts of exactly its lengths; return the report."""
    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    answers.unlink(missing_ok=True)
    work = plan.workload
    write_prompts(prompts, [(work.prompt_tokens, work.new_tokens)] * work.batch)
    text = command([
        "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts),
        "--output", str(answers), "--json",
    ])  # fmt: skip
    return dict(json.loads(text))


def report(options: argparse.Namespace) -> None:
    """Print the errors, and draw them."""
    folder = options.folder
    costs = costs_of(folder)
    held = read_latency_table(folder / "held.csv")
    for key in ("rounds", "noise"):
        print(f"{key}: {dict(held.provenance).get(key)}")
    rows = [(one, predicted(costs, one)) for one in held.samples]
    print_layers(rows)
    runs = measured_runs(folder)
    print("| plan | stages | micro-batches | predicted | measured | spread | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for one in runs:
        print(
            f"| {one['name']} | {one['stages']} | {one['sizes']} | {one['predicted']:.3f} | "
            f"{one['measured']:.3f} | {one['spread']:.0%} | {one['error']:+.1%} |"
        )
    for stages in (*range(1, STAGES + 1), None):
        errors = [abs(one["error"]) for one in runs if stages in (one["stages"], None)]
        if errors:
            print(f"| {stages or 'all'} stages | {len(errors)} plans | {line_of(errors)} |")
    if options.picture is not None:
        draw(options.picture, rows, runs)


def print_layers(rows: list[tuple[LatencySample, float]]) -> None:
    """Print the errors of one layer, by phase and bitwidth."""
    print("| phase | bits | shapes | mean | p95 | most |\n| --- | --- | --- | --- | --- | --- |")
    for phase in ("prefill", "decode"):
        for bits in (*BITS, None, MASTER_BITS):
            wanted = BITS if bits is None else (bits,)
            chosen = [
                abs(guess / one.seconds - 1)
                for one, guess in rows
                if one.phase == phase and one.bits in wanted
            ]
            name = {None: "all", MASTER_BITS: "master"}.get(bits, bits)
            print(f"| {phase} | {name} | {len(chosen)} | {line_of(chosen)} |")
    layers = [abs(guess / one.seconds - 1) for one, guess in rows if one.bits > MASTER_BITS]
    print(f"| both | all | {len(layers)} | {line_of(layers)} |")


def line_of(errors: list[float]) -> str:
    """Return mean, 95th percentile and maximum."""
    p95 = statistics.quantiles(errors, n=20, method="inclusive")[-1] if errors[1:] else errors[0]
    return f"{statistics.mean(errors):.1%} | {p95:.1%} | {max(errors):.1%}"


def predicted(costs: ClusterCosts, one: LatencySample) -> float:
    """Return what a plan is priced with at a shape."""
    device = costs.cluster.devices[0]
    if one.bits <= MASTER_BITS:
        costs = replace(costs, head_bits=-one.bits or 16)
        return costs.master_s(device, one.phase, one.batch, one.tokens)
    return costs.layer_s(device, one.phase, one.bits, one.batch, one.tokens, 0)


def measured_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the measurements of every plan and today's forecast of it."""
    costs, found = costs_of(folder), []
    for file in sorted((folder / "runs").glob("plan-*.json")):
        number = file.stem.removeprefix("plan-")
        plan = read_plan(file)
        reports = [json.loads(one.read_text()) for one in file.parent.glob(f"{number}-[0-9].json")]
        if not reports:
            continue
        seconds = [one["latency_s"]["measured"] for one in reports]
        middle, sizes = statistics.median(seconds), plan.micro_batching
        forecast_s = priced(plan, costs).estimate.predicted_s
        found.append(
            {
                "name": number,
                "stages": len(plan.stages),
                "sizes": f"{plan.workload.batch}: {sizes.prefill}, {sizes.decode}",
                "predicted": forecast_s,
                "measured": middle,
                "spread": (max(seconds) - min(seconds)) / middle,
                "error": forecast_s / middle - 1,
            }
        )
    return found


def draw(
    picture: Path, rows: list[tuple[LatencySample, float]], runs: list[dict[str, Any]]
) -> None:
    """Draw predicted against measured: layers on the left, plans on the right."""
    with new_figure(picture, 10, 4.6) as figure:
        left, right = figure.subplots(1, 2)
        for phase, marker in (("prefill", "s"), ("decode", "o")):
            for bits in BITS:
                chosen = [
                    (one.seconds, g) for one, g in rows if (one.phase, one.bits) == (phase, bits)
                ]
                left.scatter(
                    [1e3 * x for x, _ in chosen], [1e3 * y for _, y in chosen],
                    s=16, marker=marker, label=f"{phase}, {bits} bits", alpha=0.8,
                )  # fmt: skip
        for stages, marker in ((1, "o"), (2, "s"), (3, "^")):
            ran = [one for one in runs if one["stages"] == stages]
            right.scatter(
                [one["measured"] for one in ran], [one["predicted"] for one in ran],
                s=28, marker=marker, label=f"{stages} stage{'s' if stages > 1 else ''}",
            )  # fmt: skip
        for axes, unit, title in (
            (left, "ms", "One layer, shapes not in the table"),
            (right, "s", "Whole plans"),
        ):
            places = [xy for dots in axes.collections for xy in dots.get_offsets().tolist()]
            low, high = min(map(min, places)), max(map(max, places))
            axes.set(xscale="log", yscale="log", title=title)
            axes.plot([low, high], [low, high], color=INK, linewidth=0.8)
            axes.fill_between([low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high],
                              color=INK, alpha=0.1, label="within 5 %")  # fmt: skip
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:g}")
                if high < 10 * low:
                    axis.set_minor_formatter("{x:.1g}")
            axes.set_xlabel(f"measured, {unit}")
            axes.set_ylabel(f"predicted, {unit}")
            axes.legend()


if __name__ == "__main__":
    sys.exit(main())
