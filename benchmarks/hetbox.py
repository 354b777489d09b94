"""Mixed clusters in one box: every planner's plan, predicted and measured; and the edge of memory.

    sudo .venv/bin/python benchmarks/hetbox.py FOLDER model tables plans run
    sudo .venv/bin/python benchmarks/hetbox_report.py FOLDER --picture FILE
    sudo .venv/bin/python benchmarks/hetbox.py FOLDER model edge

Needs root and two cores (``tools/hetbox``). Devices differ in speed (a share of a core's time,
an older vector extension), in memory and in how far away they are. Whole devices are profiled,
slowed ones compared with them in their box; ``llmpq-algo --method all`` plans each cluster, and the
search plans again at the quality of every rival that loses more or less of it. Distinct plans are
run: all of all clusters once before any a second time, and again only where it is close. ``edge``
runs plans with a little less and a little more memory than they are forecast to need. Every step
goes on where it stopped; ``hetbox_report.py`` tells what came out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetbox_report import AS, METHODS, SAME_QUALITY, close_ones, distinct, slug
from workbench import ROOT, make_model, write_prompts

from llmpq.assigner.planner import even_plan
from llmpq.spec.plan import Plan, read_plan, write_plan
from llmpq.spec.tables import read_latency_table, write_latency_table

WORK = {"global_bz": 16, "s": 128, "n": 32}
LIMITS = {"batch": 16, "prompt": 128, "context": 160, "prefill": 2048}
LEFT_S = 30.0
"""A run is not begun with less time left."""
PAIRS, PAIR_S = 5, 2
"""How often and how long a slowed device is compared with a whole one."""
STAGE_KEY = "stage_s"
PRODUCTS = """
import sys, time
import numpy
ones = numpy.ones((96, 96), numpy.float32)
end, count = time.perf_counter() + int(sys.argv[1]), 0
while time.perf_counter() < end:
    ones @ ones
    count += 1
print(count)
"""
MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of device: its share of a core, and its newest vector extension."""

    share: float | None = None
    isa: str | None = None

    @property
    def name(self) -> str:
        """Of its table."""
        return f"cpu-{self.isa or 'native'}-{round(100 * (self.share or 1.0))}"

    def entry(self, memory_mb: int | None = None, profile: bool = True) -> dict[str, Any]:
        """Return its entry of a cluster file."""
        found: dict[str, Any] = {"type": "cpu", "count": 1, "threads": 1}
        if self.share is not None:
            found["cpu_share"] = self.share
        if self.isa is not None:
            found["cpu_isa"] = self.isa
        if memory_mb is not None:
            found["memory_bytes"] = memory_mb * MB
        if profile:
            found["profile"] = f"../tables/{self.name}.csv"
        return found


FULL, HALF, QUARTER, OLD = Kind(), Kind(share=0.5), Kind(share=0.25), Kind(isa="avx2")
KINDS = (FULL, HALF, QUARTER, OLD)
SLOW_WIRE = {"bytes_per_s": 12.5e6, "latency_s": 0.005}
FAST_WIRE = {"bytes_per_s": 125e6, "latency_s": 0.001}
Devices = list[tuple[Kind, int | None]]
CLUSTERS: dict[str, tuple[list[Devices], dict[str, float] | None]] = {
    "a fast and a slow one": ([[(FULL, None), (QUARTER, None)]], None),
    "three speeds": ([[(FULL, None), (HALF, None), (QUARTER, None)]], None),
    "new and old instructions": ([[(FULL, None), (OLD, None)]], None),
    "the fast one is small": ([[(FULL, 530), (HALF, None)]], None),
    "all small": ([[(FULL, 520), (HALF, 430), (HALF, 430)]], None),
    "four, half speed": ([[(HALF, 530), (HALF, 530), (HALF, None), (HALF, None)]], None),
    "a gigabit away": ([[(FULL, 530)], [(HALF, None)]], FAST_WIRE),
    "100 Mbit/s away": ([[(FULL, None)], [(HALF, None)]], SLOW_WIRE),
}
"""By name: nodes of devices with their memory in MB, and the wire between two nodes."""


def main() -> int:
    """Do the steps asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    steps: dict[str, Callable[[argparse.Namespace], None]] = {
        "model": write_model,
        "tables": measure_tables,
        "plans": make_plans,
        "run": run_plans,
        "edge": find_edge,
    }
    parser.add_argument("steps", nargs="+", choices=steps)
    parser.add_argument("--budget", type=float, default=50.0, help="seconds of one table")
    parser.add_argument("--seconds", type=float, default=1e9, help="of a part of the runs")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every plan")
    parser.add_argument("--cases", type=int, default=20, help="on either side of the edge")
    parser.add_argument("--margin", type=float, default=0.04, help="how far from the edge")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for step in options.steps:
        steps[step](options)
    return 0


def write_model(options: argparse.Namespace) -> None:
    """Write the random model."""
    make_model(options.folder / "model")


def measure_tables(options: argparse.Namespace) -> None:
    """Profile whole devices beside a companion; a slowed one's table follows from a whole one's."""
    folder = options.folder / "tables"
    folder.mkdir(exist_ok=True)
    for kind in KINDS:
        table = folder / f"{kind.name}.csv"
        if table.exists():
            continue
        if kind.share is not None:
            slow_down(folder, kind)
            continue
        words = [word for name, value in LIMITS.items() for word in (f"--max_{name}", str(value))]
        words += ["--cpu_isa", kind.isa] if kind.isa else []
        call([sys.executable, "-m", "llmpq.cli.commands.profile", "layer", "--resume", "--model",
              str(options.folder / "model"), "--points", "10", "--layers", "6", *words, "--core",
              str(min(os.sched_getaffinity(0))), "--budget",
              str(options.budget), "--output", str(table)])  # fmt: skip


def slow_down(folder: Path, kind: Kind) -> None:
    """Write a slowed device's table: a whole one's seconds times what its box costs.

    A layer takes a few milliseconds, as long as the device's turns: single timings in the box come
    in steps of a pause, and their median lies up to a sixth off the mean that a run adds up.
    Thousands of turns on end have no such error.
    """
    whole = replace(kind, share=None)
    table = read_latency_table(folder / f"{whole.name}.csv")
    ratios = [speed(folder, whole) / speed(folder, kind) for _ in range(PAIRS)]
    factor = statistics.median(ratios)
    samples = tuple(replace(one, seconds=factor * one.seconds) for one in table.samples)
    told = {
        **dict(table.provenance),
        "cpu_share": str(kind.share),
        "slowed": f"{factor:.4f} times {whole.name}.csv, {min(ratios):.3f} to {max(ratios):.3f} "
        f"in {PAIRS} pairs of {PAIR_S} s",
    }
    words = told[STAGE_KEY].split()
    words[1::2] = [repr(factor * float(seconds)) for seconds in words[1::2]]
    told[STAGE_KEY] = " ".join(words)
    slowed = replace(table, samples=samples, provenance=tuple(told.items()))
    write_latency_table(folder / f"{kind.name}.csv", slowed)


def speed(folder: Path, kind: Kind) -> int:
    """Return how many small products a device computes in its box in a while."""
    file = folder / f"{kind.name}.json"
    nodes = [{"name": "here", "devices": [kind.entry(profile=False)]}]
    file.write_text(json.dumps({"schema": 1, "name": "one", "nodes": nodes, "links": []}))
    return int(boxed("device", str(file), "here/cpu#0", "env", "OPENBLAS_NUM_THREADS=1",
                     sys.executable, "-c", PRODUCTS, str(PAIR_S)))  # fmt: skip


def make_plans(options: argparse.Namespace) -> None:
    """Plan every cluster by every method."""
    for name, (nodes, wire) in CLUSTERS.items():
        folder = options.folder / slug(name)
        folder.mkdir(exist_ok=True)
        if (folder / "plan__llmpq.json").exists():
            continue
        names = [f"n{number}" for number in range(len(nodes))]
        cluster = {
            "schema": 1,
            "name": slug(name),
            "nodes": [
                {"name": one, "devices": [kind.entry(memory) for kind, memory in devices]}
                for one, devices in zip(names, nodes, strict=True)
            ],
            "links": [] if wire is None else [{"between": names, **wire}],
        }
        (folder / "cluster.json").write_text(json.dumps(cluster))
        print(f"{name}\n{algo(folder, '--method', 'all', '--output', str(folder / 'plan.json'))}")
        at_equal_quality(folder)


def at_equal_quality(folder: Path) -> None:
    """Plan as fast as possible at the quality of every rival that differs from ours in it."""
    planned = read_plan(folder / "plan__llmpq.json")
    known = [planned.estimate.quality]
    for rival in METHODS[1:]:
        file = folder / f"plan__{rival}.json"
        if not file.exists():
            continue
        quality = read_plan(file).estimate.quality
        if any(abs(quality - other) <= SAME_QUALITY for other in known):
            continue
        known.append(quality)
        algo(folder, "--quality_budget", repr(quality + SAME_QUALITY),
             "--output", str(folder / f"plan__{AS}{rival}.json"))  # fmt: skip


def algo(folder: Path, *words: str) -> str:
    """Plan a cluster; return what is printed."""
    work = [word for key, value in WORK.items() for word in (f"--{key}", str(value))]
    return call([
        str(Path(sys.executable).parent / "llmpq-algo"), "--model", str(folder.parent / "model"),
        "--cluster", str(folder / "cluster.json"), *work, "--no_explain", *words,
    ])  # fmt: skip


def run_plans(options: argparse.Namespace) -> None:
    """Run every distinct plan, as often as asked, while there is time."""
    start = time.monotonic()
    prompts = options.folder / "prompts.jsonl"
    write_prompts(prompts, [(WORK["s"], WORK["n"])] * WORK["global_bz"])
    for turn in range(options.repeats):
        for name, (_, wire) in CLUSTERS.items():
            folder = options.folder / slug(name)
            methods = list(distinct(folder) if turn == 0 else close_ones(folder))
            # Back and forth, so that a machine that slows down favours no plan.
            for method in methods if turn % 2 == 0 else methods[::-1]:
                done = folder / f"run__{method}__{turn}.json"
                if done.exists():
                    continue
                if time.monotonic() - start > options.seconds - LEFT_S:
                    return
                found = run_or_fail(folder / f"plan__{method}.json", prompts, wire is not None)
                done.write_text(json.dumps(found, indent=2) + "\n")
                print(f"{name}, {method}: {outcome(found)}", flush=True)


def run_or_fail(plan: Path, prompts: Path, has_links: bool) -> dict[str, Any]:
    """Run a plan; return its report, or the exit status it failed with."""
    try:
        return run(plan, prompts, has_links)
    except subprocess.CalledProcessError as error:
        return {"failed": error.returncode}


def outcome(found: dict[str, Any]) -> str:
    """Say what a run took."""
    if "failed" in found:
        return f"failed with status {found['failed']}"
    seconds = found["latency_s"]
    return f"{seconds['measured']:.3f} s, predicted {seconds['predicted']:.3f}"


def run(plan: Path, prompts: Path, has_links: bool) -> dict[str, Any]:
    """Run a plan in the box; return its report."""
    answers = prompts.with_name("answers.jsonl")
    answers.unlink(missing_ok=True)
    links = ["--links"] if has_links else []
    done = boxed("run", *links, "llmpq-dist", "--strat_file_name", str(plan), "--prompts",
                 str(prompts), "--output", str(answers), "--no_pin", "--max_restarts", "0",
                 "--json")  # fmt: skip
    return dict(json.loads(done))


def find_edge(options: argparse.Namespace) -> None:
    """Run plans with a little more memory than they need, and with a little less."""
    folder = options.folder / "edge"
    folder.mkdir(exist_ok=True)
    wrong, count = [], 0
    for number in range(options.cases):
        chance = random.Random(number)
        batch, prompt, new = chance.randint(2, 16), chance.randint(64, 320), 4
        plan = even_plan(
            options.folder / "model",
            bits=(chance.choice((3, 4, 8, 16)),),
            stages=1,
            shape=(batch, prompt, new),
            micro_batch=(chance.randint(1, min(batch, 4)), batch),
        )
        need = plan.estimate.stages[0].memory.total
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, [(prompt, new)] * batch)
        for fits in (True, False):
            done = folder / f"{number:02}-{'above' if fits else 'below'}.json"
            if not done.exists():
                share = 1.0 + (options.margin if fits else -options.margin)
                has_run = survives(plan, round(share * need), prompts)
                done.write_text(json.dumps({"need": need, "fits": fits, "has_run": has_run}))
            found = json.loads(done.read_text())
            count += 1
            if found["fits"] != found["has_run"]:
                wrong.append(f"{done.stem} ({need / MB:.0f} MB)")
    print(f"{count} runs {options.margin:.0%} off the edge of memory: {len(wrong)} ended otherwise "
          f"than forecast: {', '.join(wrong) or 'none'}")  # fmt: skip


def survives(plan: Plan, memory_bytes: int, prompts: Path) -> bool:
    """Say whether a plan runs to its end in that much memory."""
    node = plan.cluster.nodes[0]
    group = replace(node.devices[0], memory_bytes=memory_bytes)
    cluster = replace(plan.cluster, nodes=(replace(node, devices=(group, *node.devices[1:])),))
    file = prompts.with_name("plan.json")
    write_plan(file, replace(plan, cluster=cluster))
    try:
        run(file, prompts, has_links=False)
    except subprocess.CalledProcessError:
        return False
    return True


def boxed(*words: str) -> str:
    """Run tools/hetbox with this very interpreter; return what it prints."""
    return call([str(ROOT / "tools" / "hetbox"), *words])


def call(words: list[str]) -> str:
    """Run a command; return what it prints."""
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHON": sys.executable,
        "LLMPQ_STORE": "off",  # a first start, every time
    }
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
