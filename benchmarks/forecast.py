"""Forecasts against measurements on this machine: one layer at unseen shapes, and whole plans.

    python benchmarks/forecast.py FOLDER model links turns
    python benchmarks/forecast_report.py FOLDER --picture docs/images/forecast_this_machine.png

Every step writes into FOLDER; ``turns`` goes on where it was stopped (``--seconds`` bounds a part).
A random Llama (12 layers, hidden 768, feed-forward 2048, 12/4 heads, vocabulary 32,000) is profiled
on the planned grid at 3, 4, 8 and 16 bits, alone and beside a companion. Held out are batches 3, 5
and 7 and lengths that are not on the grid: timed in turn with the grid's, since the memory of a
shared machine is faster in one minute than in the next, and kept out of the table. Then random
plans (1 to 3 stages, mixed bits, unlike micro-batches) are run. Both happen in ``--turns``: layers,
all plans, layers again, so that a table is of the same minutes as the runs; medians count. Workers
have one thread; three share two cores, which the cluster says (``cores``).

Cores are kept awake and watched (``benchmarks/cores.py``); tables are brought to the calm level.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cores import WARM_S, CoreWatch, awake_cores
from leveled import (
    at_share,
    by_phase,
    share_of,
    slowdown_key,
    slowdown_of,
    slowdown_words,
    words_of,
)
from workbench import command, make_model, write_prompts

from llmpq.assigner.forecast import forecast
from llmpq.assigner.plan_estimate import evaluate_plan
from llmpq.assigner.request import default_omega
from llmpq.cli.commands.profile_layer import POINTS
from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.costmodel.tables.latency import MASTER_BITS
from llmpq.profiler.levels import Slowdown
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import load_cluster
from llmpq.spec.plan import MicroBatching, Plan, StageAssignment, read_plan, write_plan
from llmpq.spec.precision import BITS, Phase
from llmpq.spec.tables import LatencySample, LatencyTable, read_latency_table, write_latency_table
from llmpq.spec.workload import Workload

LIMITS = {"batch": 16, "prompt": 256, "context": 384, "prefill": 2048}
HELD = {
    "batches": (3, 5, 7),
    "prompt_tokens": (20, 56, 104, 168, 240),
    "context_tokens": (28, 80, 150, 220, 330),
}
STAGES = 3
NUM_PLANS = 24
ENDING_S = 0.3
"""What a run takes behind its last token."""
LEFT_S = 14.0
"""A run is not begun with less time left."""


def main() -> int:
    """Do the steps asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    steps: dict[str, Callable[[argparse.Namespace], None]] = {
        "model": write_model,
        "links": measure_links,
        "turns": take_turns,
    }
    parser.add_argument("steps", nargs="+", choices=steps)
    parser.add_argument("--budget", type=float, default=70.0, help="seconds of the layers, a turn")
    parser.add_argument("--seconds", type=float, default=360.0, help="of a part of the plans")
    parser.add_argument("--turns", type=int, default=3)
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
    with awake_cores() as watch:
        for turn in range(options.turns):
            if not (options.folder / f"layers-{turn}.csv").exists():
                time_layers(options, turn)
            run_plans(options, turn, watch)


def time_layers(options: argparse.Namespace, turn: int) -> None:
    """Time one layer on the planned grid and, in turn with it, on the held-out shapes."""
    cores = len(os.sched_getaffinity(0))
    sizes = [word for name, value in LIMITS.items() for word in (f"--max_{name}", str(value))]
    for name, values in HELD.items():
        sizes += [f"--{name}", *map(str, values)]
    command([
        "llmpq-profile", "layer", "--model", str(options.folder / "model"), "--core", "0", *sizes,
        "--points", str(POINTS), "--companions", str(min(cores - 1, STAGES - 1)),
        "--budget", str(options.budget), "--output", str(options.folder / f"layers-{turn}.csv"),
        "--resume", "--seed", str(turn),
    ])  # fmt: skip
    join_turns(options.folder)


def join_turns(folder: Path) -> None:
    """Make one calm table and one hold-out of all turns: a shape counts by its median over them."""
    tables = [read_latency_table(file) for file in sorted(folder.glob("layers-*.csv"))]
    calm = [at_share(table, -share_of(table)) for table in tables]
    means = {}
    for key in ("stage_s", "company", "disturbed"):
        values = [by_phase(table, key) for table in calm]
        means[key] = words_of({phase: statistics.mean(v[phase] for v in values) for phase in Phase})
    means["disturbed share"] = "0%"
    for phase in Phase:
        for bits in (*BITS, MASTER_BITS):
            key, values_of = slowdown_key(phase, bits), [slowdown_of(t, phase, bits) for t in calm]
            rows = [rows for rows, _ in values_of[0].by_rows]
            mean = tuple((r, statistics.mean(one.at(r) for one in values_of)) for r in rows)
            means[key] = slowdown_words(Slowdown(mean))
    provenance = tuple((key, means.get(key, value)) for key, value in tables[0].provenance)
    for name, is_held in (("calm", False), ("held", True)):
        samples = tuple(one for table in calm for one in table.samples if held_out(one) == is_held)
        table = LatencyTable(samples=samples, provenance=provenance)
        write_latency_table(folder / f"{name}.csv", table)


def held_out(one: LatencySample) -> bool:
    """Say whether a sample is of a held-out shape; all batches of the master's own work are."""
    return one.batch in HELD["batches"]


def measure_links(options: argparse.Namespace) -> None:
    """Time messages between two workers of this machine."""
    (options.folder / "links").mkdir(exist_ok=True)
    command(["llmpq-profile", "link", "--output", str(options.folder / "links" / "links.csv")])


def costs_of(folder: Path, shares: Sequence[float] = (0.0,) * STAGES) -> ClusterCosts:
    """Return the costs of three workers on two cores.

    Args:
        folder: of the benchmark.
        shares: of the time in which each worker's core is disturbed.
    """
    calm = read_latency_table(folder / "calm.csv")
    for share in set(shares):
        write_latency_table(folder / f"table-{share:.2f}.csv", at_share(calm, share))
    groups = [
        {"type": "cpu", "count": 1, "threads": 1, "profile": f"table-{share:.2f}.csv"}
        for share in shares
    ]
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
    """Return the plan of a seed: 1 to 3 stages in turn, mixed bits, unlike micro-batches."""
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


def run_plans(options: argparse.Namespace, turn: int, watch: CoreWatch) -> None:
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
        crowded = len(plan.stages) > len(watch.cores)
        with watch.resting() if crowded else nullcontext():
            found = run(runs / f"plan-{number:02}.json", plan, runs)
        end_s = time.time() - ENDING_S - (WARM_S if crowded else 0.0)
        begin_s = end_s - found["elapsed_s"]
        found["loops_s"] = watch.loops_s(begin_s, end_s, watch.cores[: len(plan.stages)])
        done.write_text(json.dumps(found, indent=2) + "\n")
        latency = found["latency_s"]
        print(
            f"{number:2} {latency['measured']:7.3f} s, on calm cores {latency['predicted']:7.3f}, "
            f"loops {[round(1e3 * statistics.mean(own), 2) for own in found['loops_s'] if own]}",
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


if __name__ == "__main__":
    sys.exit(main())
