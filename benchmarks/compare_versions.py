"""Compare two checkouts of the project on this machine, interleaved, as ratios of medians.

    python benchmarks/compare_versions.py --before DIR --folder WORK --rounds 5 --json FILE

Every round runs each topic in the checkout ``--before`` and in this one, in turn, with this
process's Python. A topic is a benchmark of the project that both checkouts have; seconds are
collected under one name for each figure. Ratios are after / before: below 1 is faster.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import loader
from pipeline import NEW_TOKENS, PROMPT_TOKENS
from workbench import machine, write_prompts

from llmpq.spec.workload import load_trace

ROOT = Path(__file__).resolve().parents[1]
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
Figures = dict[str, float]


def main() -> int:
    """Run the rounds and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, required=True, help="the older checkout")
    parser.add_argument("--folder", type=Path, required=True, help="for models and plans")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--topics", nargs="+", choices=TOPICS, default=list(TOPICS))
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    folder = options.folder.absolute()
    sides = {"before": options.before.absolute(), "after": ROOT}
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    if {"pipeline", "ragged", "single"} & set(options.topics) and not (
        folder / "plan-1-16.json"
    ).exists():
        script(ROOT, "pipeline.py", "--folder", str(folder), "--prepare", threads=2)
    for number in range(options.rounds):
        # Which side goes first alternates, so that a drift of the machine hits both alike.
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for topic in options.topics:
            for side in order:
                for name, seconds in TOPICS[topic](sides[side], folder).items():
                    samples[name][side].append(seconds)
                print(f"round {number + 1}: {topic}, {side}", file=sys.stderr, flush=True)
    rows = [row(name, found) for name, found in samples.items()]
    document = {
        "command": "python benchmarks/compare_versions.py --before DIR --folder WORK "
        f"--rounds {options.rounds} --topics {' '.join(options.topics)}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
        },
        "rows": rows,
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    for one in rows:
        print(f"{one['figure']:32} {one['before_s']:10.4g} {one['after_s']:10.4g} "
              f"{one['ratio']:6.3f}")  # fmt: skip
    return 0


def row(name: str, found: dict[str, list[float]]) -> dict[str, object]:
    """Return the medians of one figure and their ratio."""
    before, after = (statistics.median(found[side]) for side in ("before", "after"))
    return {
        "figure": name,
        "before_s": before,
        "after_s": after,
        "ratio": after / before,
        "samples_before_s": found["before"],
        "samples_after_s": found["after"],
    }


def planning(checkout: Path, folder: Path) -> Figures:
    """Mean planning time of the paper's 11 clusters, every order of device types."""
    output = folder / "planning.json"
    script(checkout, "exact_planner.py", "--repeats", "3", "--only", "paper", "--json", str(output))
    figures = json.loads(output.read_text())["figures"]
    seconds = [one["planning_s"] for one in figures if one["orders"] == "types"]
    return {"planning, 11 clusters": statistics.mean(seconds)}


def kernels(checkout: Path, folder: Path) -> Figures:
    """Products at 1, 32 and 512 rows by the default kernels, one thread."""
    output = folder / "kernels.json"
    names = ("kernel_times.py", "kernels.py")  # the newer name first
    name = next(name for name in names if (checkout / "benchmarks" / name).exists())
    script(checkout, name, "--sizes", "2048", "--rows", "1", "32", "512", "--repeats", "7",
           "--json", str(output))  # fmt: skip
    wanted = ("cpu_bf16 16", "cpu_llm_int8 8", "cpu_packed 4", "cpu_packed 3")
    return {
        f"kernel {one['kernel']}, {one['rows']} rows": one["median_ms"] / 1e3
        for one in json.loads(output.read_text())["samples"]
        if one["kernel"] in wanted
    }


def single(checkout: Path, folder: Path) -> Figures:
    """31 decode steps of one sequence, 125 M parameters, two threads."""
    found = {}
    for bits in (16, 8, 4):
        words = ("--folder", str(folder), "--one", "single", f"{bits} x1")
        text = script(checkout, "pipeline.py", *words, threads=2)
        found[f"one sequence, {bits} bits"] = json.loads(text.splitlines()[-1])["seconds"]
    return found


def pipeline(checkout: Path, folder: Path) -> Figures:
    """A batch of 16 in one and two stages, 125 M parameters."""
    found = _runs(checkout, folder, folder / "prompts.jsonl")
    return {f"batch 16, {name}": seconds for name, seconds in found.items()}


def _runs(checkout: Path, folder: Path, prompts: Path) -> Figures:
    """Answer prompts in one and two stages at 16 and 8 bits."""
    found = {}
    has_rooms = (checkout / "llmpq" / "cli" / "commands").exists()  # since version 0.2
    module = "llmpq.cli.commands.dist" if has_rooms else "llmpq.cli.dist"
    for name in ("1-16", "1-8", "2-16", "2-8"):
        output = folder / "answers.jsonl"
        output.unlink(missing_ok=True)
        words = ["-m", module, "--strat_file_name", str(folder / f"plan-{name}.json")]
        words += ["--prompts", str(prompts), "--output", str(output), "--json"]
        text = run(checkout, words)
        stages, bits = name.split("-")
        found[f"{stages} stage(s), {bits} bits"] = json.loads(text)["latency_s"]["measured"]
    return found


def ragged(checkout: Path, folder: Path) -> Figures:
    """64 requests with the lengths of Azure's chat trace divided by 16, 125 M parameters."""
    prompts = folder / "ragged.jsonl"
    if not prompts.exists():
        trace = ROOT.parent / "shared" / "data" / "azure" / "AzureLLMInferenceTrace_conv.csv"
        lengths = [
            (min(PROMPT_TOKENS, max(4, item.prompt_tokens // 16)),
             min(NEW_TOKENS, max(2, item.new_tokens // 16)))
            for item in load_trace(trace)[:64]
        ]  # fmt: skip
        write_prompts(prompts, lengths)
    return {
        f"64 ragged requests, {name}": seconds
        for name, seconds in _runs(checkout, folder, prompts).items()
    }


def loading(checkout: Path, folder: Path) -> Figures:
    """A model of 550 M parameters at 4 bits: first load, first and second start with a cache."""
    place = folder / "loading"
    if not (place / "model").exists():
        place.mkdir(parents=True, exist_ok=True)
        options = argparse.Namespace(layers=10, hidden=2048)
        loader.make_model(place / "model", options)
    found = {}
    for trial in ("load", "store"):
        text = script(
            checkout, "loader.py", "--bits", "4", "--folder", str(place), "--trial", trial
        )
        figures = json.loads(text.splitlines()[-1])
        found |= {
            f"load at 4 bits, {name}": figures[name]
            for name in ("seconds", "first_s", "second_s")
            if name in figures
        }
    return found


TOPICS: dict[str, Callable[[Path, Path], Figures]] = {
    "planning": planning,
    "kernels": kernels,
    "single": single,
    "pipeline": pipeline,
    "ragged": ragged,
    "loading": loading,
}


def script(checkout: Path, name: str, *arguments: str, threads: int = 1) -> str:
    """Run a benchmark of a checkout."""
    return run(checkout, [str(checkout / "benchmarks" / name), *arguments], threads)


def run(checkout: Path, arguments: list[str], threads: int = 1) -> str:
    """Run Python in a checkout; return its standard output."""
    variables = {**QUIET, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{arguments[:3]}: status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
