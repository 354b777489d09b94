"""Unlike clusters in one box: every planner's plan, predicted and measured; and the edge of memory.

    sudo .venv/bin/python benchmarks/hetbox.py FOLDER model tables plans run report --picture FILE
    sudo .venv/bin/python benchmarks/hetbox.py FOLDER model edge

Needs root and two cores (``scripts/hetbox``). Devices differ in speed (a share of a core's time,
an older vector extension), in memory and in how far away they are. Every kind of device is profiled
in its own box, ``llmpq-algo --method all`` plans each cluster, and every distinct plan is run
``--repeats`` times, all plans of a cluster once before any a second time. ``edge`` runs plans with
a little less and a little more memory than they are forecast to need. Every step goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import json
import math
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

from llmpq.cli.profile_memory import even_plan
from llmpq.spec.plan import Plan
from llmpq.spec.plan_io import read_plan, write_plan

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
WORK = {"global_bz": 16, "s": 128, "n": 32}
LIMITS = {"batch": 16, "prompt": 128, "context": 160, "prefill": 2048}
METHODS = (
    "llmpq", "pipeedge", "uniform", "adaptive_even", "memory_proportional", "speed_proportional",
    "fastest", "adabits", "heuristic",
)  # fmt: skip
LEFT_S = 30.0
"""A run is not begun with less time left."""
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
        "model": make_model,
        "tables": measure_tables,
        "plans": make_plans,
        "run": run_plans,
        "report": report,
        "edge": find_edge,
    }
    parser.add_argument("steps", nargs="+", choices=steps)
    parser.add_argument("--budget", type=float, default=50.0, help="seconds of one table")
    parser.add_argument("--seconds", type=float, default=1e9, help="of a part of the runs")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every plan")
    parser.add_argument("--cases", type=int, default=20, help="on either side of the edge")
    parser.add_argument("--margin", type=float, default=0.04, help="how far from the edge")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for step in options.steps:
        steps[step](options)
    return 0


def make_model(options: argparse.Namespace) -> None:
    """Write the random model."""
    if (options.folder / "model").exists():
        return
    sizes = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
    script = str(ROOT / "scripts" / "make_tiny_model.py")
    call([sys.executable, script, "--family", "llama", *sizes, "--dtype", "bfloat16",
          "--output", str(options.folder / "model")])  # fmt: skip


def measure_tables(options: argparse.Namespace) -> None:
    """Profile every kind of device in its own box."""
    folder = options.folder / "tables"
    folder.mkdir(exist_ok=True)
    for kind in KINDS:
        table = folder / f"{kind.name}.csv"
        if table.exists():
            continue
        alone = {"schema": 1, "name": "one", "links": []}
        alone["nodes"] = [{"name": "here", "devices": [kind.entry(profile=False)]}]
        cluster = folder / f"{kind.name}.json"
        cluster.write_text(json.dumps(alone))
        words = [word for name, value in LIMITS.items() for word in (f"--max_{name}", str(value))]
        words += ["--cpu_isa", kind.isa] if kind.isa else []
        words += ["--cpu_share", str(kind.share)] if kind.share else []
        boxed("device", str(cluster), "here/cpu#0", "llmpq-profile", "layer", "--resume",
              "--model", str(options.folder / "model"), "--points", "10", "--layers", "6", *words,
              "--budget", str(options.budget), "--output", str(table))  # fmt: skip


def make_plans(options: argparse.Namespace) -> None:
    """Plan every cluster by every method."""
    for name, (nodes, wire) in CLUSTERS.items():
        folder = options.folder / slug(name)
        folder.mkdir(exist_ok=True)
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
        words = [word for key, value in WORK.items() for word in (f"--{key}", str(value))]
        text = call([
            str(Path(sys.executable).parent / "llmpq-algo"), "--model",
            str(options.folder / "model"), "--cluster", str(folder / "cluster.json"), *words,
            "--method", "all", "--no_explain", "--output", str(folder / "plan.json"),
        ])  # fmt: skip
        print(f"{name}\n{text}")


def distinct(folder: Path) -> dict[str, list[str]]:
    """Return the methods that planned, those with the same plan together under the first."""
    found: dict[str, list[str]] = {}
    for method in METHODS:
        file = folder / f"plan__{method}.json"
        if not file.exists():
            continue
        plan = read_plan(file)
        alike = [
            first
            for first in found
            if decisions(read_plan(folder / f"plan__{first}.json")) == decisions(plan)
        ]
        found.setdefault(alike[0] if alike else method, []).append(method)
    return found


def decisions(plan: Plan) -> object:
    """Return what makes two plans run alike: equal devices may change places."""
    devices = [replace(plan.device_of(stage), local_index=0, ordinal=0) for stage in plan.stages]
    layers = [(stage.first_layer, stage.end_layer, stage.bits) for stage in plan.stages]
    return devices, layers, plan.micro_batching


def run_plans(options: argparse.Namespace) -> None:
    """Run every distinct plan, as often as asked, while there is time."""
    start = time.monotonic()
    prompts = write_prompts(
        options.folder / "prompts.jsonl", WORK["global_bz"], WORK["s"], WORK["n"]
    )
    for name in CLUSTERS:
        folder = options.folder / slug(name)
        for turn in range(options.repeats):
            for method in distinct(folder):
                done = folder / f"run__{method}__{turn}.json"
                if done.exists():
                    continue
                if time.monotonic() - start > options.seconds - LEFT_S:
                    return
                found = run(folder / f"plan__{method}.json", prompts, CLUSTERS[name][1] is not None)
                done.write_text(json.dumps(found, indent=2) + "\n")
                latency = found["latency_s"]
                print(f"{name}, {method}: {latency['measured']:.3f} s, "
                      f"predicted {latency['predicted']:.3f}")  # fmt: skip


def run(plan: Path, prompts: Path, has_links: bool) -> dict[str, Any]:
    """Run a plan in the box; return its report."""
    answers = prompts.with_name("answers.jsonl")
    answers.unlink(missing_ok=True)
    links = ["--links"] if has_links else []
    done = boxed("run", *links, "llmpq-dist", "--strat_file_name", str(plan), "--prompts",
                 str(prompts), "--output", str(answers), "--no_pin", "--max_restarts", "0",
                 "--json")  # fmt: skip
    return dict(json.loads(done))


def write_prompts(file: Path, batch: int, prompt: int, new: int) -> Path:
    """Write prompts of exactly these lengths."""
    lines = [
        json.dumps({
            "id": number,
            "prompt_token_ids": [(number * 997 + i * 31) % SHAPE["vocab"] for i in range(prompt)],
            "max_new_tokens": new,
            "ignore_eos": True,
        })
        for number in range(batch)
    ]  # fmt: skip
    file.write_text("\n".join(lines) + "\n")
    return file


def report(options: argparse.Namespace) -> None:
    """Print a table, and draw it."""
    rows = [row for name in CLUSTERS for row in rows_of(options.folder, name)]
    print("| cluster | plan by | bits | layers | predicted | measured (spread) | error | x llmpq |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['cluster']} | {', '.join(row['methods'])} | {row['bits']} | {row['layers']} | "
            f"{row['predicted']:.2f} s | {row['measured']:.2f} s ({row['spread']:.0%}) | "
            f"{row['predicted'] / row['measured'] - 1:+.0%} | {row['ratio']:.2f} |"
        )
    for method in METHODS[1:]:
        gains = [row["ratio"] for row in rows if method in row["methods"]]
        if gains:
            mean = math.exp(statistics.mean(map(math.log, gains)))
            span = f"{min(gains):.2f} to {max(gains):.2f}"
            print(f"{method}: {mean:.2f}x over {len(gains)} clusters, {span}")
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    if errors:
        print(f"forecasts: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}")
    if options.picture is not None:
        draw(options.picture, rows)


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return a row for every distinct plan of a cluster that has run."""
    found = []
    place = folder / slug(name)
    best = None
    for method, methods in distinct(place).items():
        files = sorted(place.glob(f"run__{method}__*.json"))
        if not files:
            continue
        seconds = [json.loads(file.read_text())["latency_s"]["measured"] for file in files]
        plan = read_plan(place / f"plan__{method}.json")
        measured = statistics.median(seconds)
        best = best or measured
        found.append(
            {
                "cluster": name,
                "methods": methods,
                "bits": f"{statistics.mean(plan.bits):.1f}",
                "layers": "+".join(str(stage.num_layers) for stage in plan.stages),
                "predicted": plan.estimate.predicted_s,
                "measured": measured,
                "spread": (max(seconds) - min(seconds)) / measured,
                "ratio": measured / best,
            }
        )
    return found


def draw(picture: Path, rows: list[dict[str, Any]]) -> None:
    """Draw measured against predicted latency of every plan, a panel a cluster."""
    import matplotlib as mpl  # noqa: PLC0415  only for the picture

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    names = [name for name in CLUSTERS if any(row["cluster"] == name for row in rows)]
    columns = 2
    lines = -(-len(names) // columns)
    figure, panels = plt.subplots(
        lines, columns, figsize=(11, 2.5 * lines), layout="constrained", squeeze=False
    )
    for place, panel in enumerate(panels.flat):
        if place >= len(names):
            panel.axis("off")
            continue
        own = [row for row in rows if row["cluster"] == names[place]][::-1]
        bars = panel.barh(
            range(len(own)), [row["measured"] for row in own],
            color=["#1f6f8b" if "llmpq" in row["methods"] else "#b8c4cc" for row in own],
        )  # fmt: skip
        panel.scatter([row["predicted"] for row in own], range(len(own)), color="black", marker="|",
                      s=120, label="predicted", zorder=3)  # fmt: skip
        panel.bar_label(bars, [f"{row['ratio']:.2f}x" for row in own], padding=6, fontsize=8)
        labels = [
            ", ".join(row["methods"][:2]) + (" ..." if row["methods"][2:] else "") for row in own
        ]
        panel.set_yticks(range(len(own)), labels, fontsize=8)
        panel.set_title(names[place], fontsize=10)
        panel.margins(x=0.15)
        panel.set_xlabel("seconds", fontsize=8)
    panels.flat[0].legend(fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


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
        prompts = write_prompts(folder / "prompts.jsonl", batch, prompt, new)
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


def slug(name: str) -> str:
    """Return a name as a folder's."""
    return "".join(char if char.isalnum() else "-" for char in name)


def boxed(*words: str) -> str:
    """Run scripts/hetbox with this very interpreter; return what it prints."""
    return call([str(ROOT / "scripts" / "hetbox"), *words])


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
