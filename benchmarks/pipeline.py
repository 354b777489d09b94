"""Time whole runs of a random model: our pipeline against transformers' own generate.

    python benchmarks/pipeline.py [--rounds 5] [--json FILE]

Everything runs on the same cores in turn (A B C A B C ...), each run in a process of its own, and
loading is not counted. The table gives medians, and ratios to transformers in bf16 on all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

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
BATCH, PROMPT_TOKENS, NEW_TOKENS = 16, 128, 64
BITS = (16, 8, 4)
Run = Callable[[], dict[str, float]]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate is not None:
        print(json.dumps(run_transformers(options.generate)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.rounds)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return one row a contender, the rival first."""
    model = folder / "model"
    sizes = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
    call(["scripts/make_tiny_model.py", "--family", "llama", *sizes, "--dtype", "bfloat16"], model)
    prompts = folder / "prompts.jsonl"
    prompts.write_text(prompt_lines())
    profile = folder / "cpu.csv"
    command([
        "llmpq-profile", "layer", "--model", str(model), "--bits", *map(str, BITS),
        "--core", "0", "--batches", "1", "4", "8", "16", "--prompt_tokens", "32", "128",
        "--context_tokens", "128", "192", "--budget", "20", "--output", str(profile),
    ])  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    contenders: dict[str, Run] = {"transformers generate": lambda: rival(model)}
    for devices in (1, 2):
        cluster = folder / f"cluster{devices}.json"
        cluster.write_text(cluster_text(devices, max(1, cores // devices), profile))
        for bits in BITS:
            strategy = folder / f"plan-{devices}-{bits}.json"
            plan(model, cluster, bits, strategy)
            contenders[f"{devices} stage(s), {bits} bits"] = pipeline(strategy, prompts, folder)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(run())
    return [row(name, found, times["transformers generate"]) for name, found in times.items()]


def row(name: str, found: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Return a contender's medians and its ratio to the rival, pair by pair."""
    ratios = [rival["measured"] / own["measured"] for own, rival in zip(found, base, strict=True)]
    seconds = [own["measured"] for own in found]
    return {
        "name": name,
        "seconds": statistics.median(seconds),
        "spread": [min(seconds), max(seconds)],
        "predicted": found[0].get("predicted"),
        "tokens_per_s": BATCH * NEW_TOKENS / statistics.median(seconds),
        "ratio": statistics.median(ratios),
    }


def rival(model: Path) -> dict[str, float]:
    """Time transformers in a fresh process."""
    text = call([str(Path(__file__)), "--generate", str(model)])
    return dict(json.loads(text.splitlines()[-1]))


def run_transformers(model_dir: Path) -> dict[str, float]:
    """Generate greedily for the whole batch; the second call counts."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    lines = [json.loads(line) for line in prompt_lines().splitlines()]
    ids = torch.tensor([line["prompt_token_ids"] for line in lines])
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - start
    return {"measured": seconds}


def pipeline(strategy: Path, prompts: Path, folder: Path) -> Run:
    """Return a timer of our runtime."""

    def run() -> dict[str, float]:
        output = folder / "answers.jsonl"
        output.unlink(missing_ok=True)
        text = command([
            "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts),
            "--output", str(output), "--json",
        ])  # fmt: skip
        return dict(json.loads(text)["latency_s"])

    return run


def plan(model: Path, cluster: Path, bits: int, strategy: Path) -> None:
    """Plan with one bitwidth, for latency alone."""
    command([
        "llmpq-algo", "--model", str(model), "--cluster", str(cluster), "--bits", str(bits),
        "--global_bz", str(BATCH), "--s", str(PROMPT_TOKENS), "--n", str(NEW_TOKENS),
        "--theta", "0", "--output", str(strategy),
    ])  # fmt: skip


def cluster_text(devices: int, threads: int, profile: Path) -> str:
    """Return a cluster of equal CPU workers; only single-threaded ones were measured."""
    group: dict[str, Any] = {"type": "cpu", "count": devices, "threads": threads}
    if threads == 1:
        group["profile"] = str(profile)
    nodes = [{"name": "here", "devices": [group]}]
    return json.dumps({"schema": 1, "name": f"cpu{devices}", "nodes": nodes, "links": []})


def prompt_lines() -> str:
    """Return the prompts: arithmetic sequences, all of one length."""
    return "".join(
        json.dumps(
            {
                "id": number,
                "prompt_token_ids": [
                    (number * 997 + place * 31) % SHAPE["vocab"] for place in range(PROMPT_TOKENS)
                ],
                "max_new_tokens": NEW_TOKENS,
                "ignore_eos": True,
            }
        )
        + "\n"
        for number in range(BATCH)
    )


def call(arguments: list[str], output: Path | None = None) -> str:
    """Run one of our Python files; return what it prints."""
    words = [*arguments, "--output", str(output)] if output is not None else arguments
    return _run([sys.executable, *words])


def command(words: list[str]) -> str:
    """Run one of the project's commands; return what it prints."""
    return _run([str(Path(sys.executable).parent / words[0]), *words[1:]])


def _run(words: list[str]) -> str:
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    lines = ["| run | seconds (min-max) | predicted | tokens/s | times transformers |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for one in rows:
        low, high = one["spread"]
        predicted = "" if one["predicted"] is None else f"{one['predicted']:.2f}"
        lines.append(
            f"| {one['name']} | {one['seconds']:.2f} ({low:.2f}-{high:.2f}) | {predicted} "
            f"| {one['tokens_per_s']:.0f} | {one['ratio']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
