"""The whole path on this machine: measure, plan, look, run, compare.

Two workers on two cores become two different devices: one uses the whole processor, the other is
held to an older vector extension, and each gets a memory cap so small that neither holds the model
and both together do not hold it unquantized. Only public commands are used; they are printed as
they run, so that they can be typed again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.errors import LlmpqError
from llmpq.profiler.device import available_cores, cpu_isas, cpu_name
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import Cluster, Device, load_cluster
from llmpq.spec.fields import SCHEMA, dump_json, write_text
from llmpq.spec.plan import MicroBatching
from llmpq.spec.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "demo"
NODE = "here"
BATCH, PROMPT_TOKENS, NEW_TOKENS = 16, 32, 48
NEXT_COMMANDS = (
    "llmpq-check {strategy}  # what limits this plan, and the smallest changes that would help",
    "llmpq-algo --model facebook/opt-30b --device_names T4-16G V100-32G --device_numbers 3 1 "
    "--global_bz 32 --s 512 --n 100  # a plan for GPUs, made on this machine",
    "llmpq-profile layer --model path/to/your/model --device cpu --output cpu.csv"
    "  # measure your own model",
)
# Shares of the unquantized layers that each device may hold. Together 0.29 of them: too little
# for 8 bits everywhere, so the plan mixes bitwidths.
FAST_SHARE, SLOW_SHARE = 0.18, 0.11


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the first failing command's exit status."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "demo", help="where to write"
    )
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of measuring")
    options = parser.parse_args(argv)
    demo = Demo(options.output, quiet=options.json)
    try:
        summary = demo.run(options.budget)
    except subprocess.CalledProcessError as error:
        return error.returncode
    except LlmpqError as error:
        print(f"scripts/demo: error: {error}", file=sys.stderr)
        return error.exit_status
    if options.json:
        print(json.dumps(summary, indent=2))
    return 0


class Demo:
    """One run of the demo; everything it makes lies in one folder."""

    def __init__(self, folder: Path, *, quiet: bool) -> None:
        self.folder = folder
        self.quiet = quiet
        self.cluster_file = folder / "cluster.json"
        self.strategy = folder / "strategy.json"
        self.picture = folder / "strategy.png"
        self.prompts = folder / "prompts.jsonl"
        self.chosen, self.workload = choose_prompts()
        self.answers = folder / "answers.jsonl"

    def run(self, budget_s: float) -> dict[str, Any]:
        """Do all steps and return the summary."""
        start = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        isas = cpu_isas()
        older = isas[-2] if len(isas) > 1 else None
        self.say(f"This machine: {cpu_name()}, {len(available_cores())} cores.")
        self.say(f"Device 1 uses all of it; device 2 is held to {older or 'the same'}.\n")
        self.measure(older, budget_s)
        self.write_cluster(older)
        planned = self.plan()
        ran = self.answer()
        elapsed = time.monotonic() - start
        self.say(f"\nPicture of the plan: {show(self.picture)}")
        self.say(f"Everything: {show(self.folder)}  ({elapsed:.0f} s in all)")
        self.say("\nTry next:")
        for command in NEXT_COMMANDS:
            self.say("   $ " + command.format(strategy=show(self.strategy)))
        return {"plan": planned, "run": ran, "elapsed_s": elapsed, "folder": str(self.folder)}

    def measure(self, older_isa: str | None, budget_s: float) -> None:
        """Profile both devices at the same time, as they will run."""
        self.say("1. Measure one decoder layer at 3, 4, 8 and 16 bits on both devices\n")
        shapes = ["--batches", "1", "4", "16", "--prompt_tokens", "16", "64", "128"]
        shapes += ["--context_tokens", "32", "64", "128", "--budget", str(budget_s)]
        jobs = []
        for index, isa in enumerate((None, older_isa)):
            command = ["llmpq-profile", "layer", "--model", show(MODEL), "--device", "cpu"]
            command += ["--threads", "1", "--core", str(core(index)), "--bits", "3", "4", "8", "16"]
            command += [*shapes, "--output", show(self.table(index))]
            if isa is not None:
                command += ["--cpu_isa", isa]
            # Both measure at once and take equally long: one progress bar is enough.
            stderr = None if index == 0 else subprocess.PIPE
            jobs.append(self.start(command, subprocess.DEVNULL, stderr))
        for job in jobs:
            finish(job)

    def write_cluster(self, older_isa: str | None) -> None:
        """Write the cluster file, its memory caps computed from the model's own sizes."""
        write_text(self.cluster_file, dump_json(cluster_json(None, older_isa)))
        spec, _ = resolve_model(str(MODEL))
        cluster = load_cluster(self.cluster_file)
        costs = build_costs(spec, cluster, dtype=spec.dtype, kv_bits=16)
        caps = memory_caps(costs, cluster, self.workload)
        write_text(self.cluster_file, dump_json(cluster_json(caps, older_isa)))

    def plan(self) -> dict[str, Any]:
        """Make the strategy and draw it."""
        self.say("\n2. Plan: every split, order, bitwidth and micro-batch pair; proven best\n")
        command = ["llmpq-algo", "--model", show(MODEL), "--cluster", show(self.cluster_file)]
        command += [
            "--global_bz",
            str(self.workload.batch),
            "--s",
            str(self.workload.prompt_tokens),
        ]
        command += ["--n", str(self.workload.new_tokens), "--output", show(self.strategy)]
        planned = self.call(command)
        check = ["llmpq-check", show(self.strategy), "--plot", show(self.picture)]
        finish(self.start(check, subprocess.DEVNULL))
        return planned

    def answer(self) -> dict[str, Any]:
        """Run the strategy on the shipped prompts."""
        self.say("\n3. Run it: two processes, weights quantized while they load\n")
        self.answers.unlink(missing_ok=True)
        length = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        prompts = [
            {"id": line["id"], "prompt_token_ids": line["prompt_token_ids"], **length}
            for line in self.chosen
        ]
        write_text(self.prompts, "".join(json.dumps(line) + "\n" for line in prompts))
        command = ["llmpq-dist", "--strat_file_name", show(self.strategy)]
        command += ["--prompts", show(self.prompts), "--output", show(self.answers)]
        ran = self.call(command)
        texts = {line["id"]: line["text"] for line in self.chosen}
        for line in read_lines(self.answers)[:4]:
            self.say(f"\n  > {texts[line['id']]}")
            self.say(f"    ...{' '.join(line['text'].split())[:240]}")
        return ran

    def table(self, index: int) -> Path:
        """Return where the latency table of a device lies."""
        return self.folder / f"device{index + 1}.csv"

    def say(self, text: str) -> None:
        """Print for a person; with ``--json`` standard output is for the object alone."""
        print(text, file=sys.stderr if self.quiet else sys.stdout, flush=True)

    def start(
        self, command: list[str], stdout: int | None, stderr: int | None = None
    ) -> subprocess.Popen[str]:
        """Start a command, its words shown."""
        self.say("   $ " + " ".join(command))
        program = [str(Path(sys.executable).parent / command[0]), *command[1:]]
        return subprocess.Popen(program, cwd=ROOT, stdout=stdout, stderr=stderr, text=True)

    def call(self, command: list[str]) -> dict[str, Any]:
        """Run a command to its end: its text on the screen, or its JSON object returned."""
        if not self.quiet:
            finish(self.start(command, None))
            return {}
        return dict(json.loads(finish(self.start([*command, "--json"], subprocess.PIPE))))


def finish(job: subprocess.Popen[str]) -> str:
    """Wait for a command; raise ``CalledProcessError`` when it failed."""
    text, messages = job.communicate()
    if job.returncode != 0:
        if messages:
            print(messages, end="", file=sys.stderr)
        raise subprocess.CalledProcessError(job.returncode, job.args)
    return text or ""


def choose_prompts() -> tuple[list[dict[str, Any]], Workload]:
    """Return prompts made from the shipped ones, and the workload they make.

    All prompts and all answers have one length, so that the measured batch is the predicted one:
    longer prompts are cut, shorter ones follow the end of the one before (the first, of the last).
    """
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    lines = read_lines(MODEL / "prompts.jsonl")
    encoded = [tokenizer.encode(line["prompt"]).ids for line in lines]
    chosen = []
    for number, (line, ids) in enumerate(zip(lines, encoded, strict=True)):
        missing = max(0, PROMPT_TOKENS - len(ids))
        filling = [token for other in encoded[number - 1 :: -1] for token in reversed(other)]
        whole = [*reversed(filling[:missing]), *ids][:PROMPT_TOKENS]
        if len(whole) == PROMPT_TOKENS:
            chosen.append({"id": line["id"], "prompt_token_ids": whole})
    chosen = [
        line | {"text": tokenizer.decode(line["prompt_token_ids"])} for line in chosen[:BATCH]
    ]
    workload = Workload(batch=len(chosen), prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
    return chosen, workload


def core(index: int) -> int:
    """Return the core of a device; on one core both share it."""
    cores = available_cores()
    return cores[index % len(cores)]


def cluster_json(caps: tuple[int, int] | None, older_isa: str | None) -> dict[str, Any]:
    """Return the cluster file: two CPU workers on this host, each with its own measured table."""
    devices: list[dict[str, Any]] = []
    for index, isa in enumerate((None, older_isa)):
        device: dict[str, Any] = {"type": "cpu", "count": 1, "threads": 1}
        device["profile"] = f"device{index + 1}.csv"
        if isa is not None:
            device["cpu_isa"] = isa
        if caps is not None:
            device["memory_bytes"] = caps[index]
        devices.append(device)
    nodes = [{"name": NODE, "devices": devices}]
    return {"schema": SCHEMA, "name": "two-different-cpus", "nodes": nodes, "links": []}


def memory_caps(costs: ClusterCosts, cluster: Cluster, workload: Workload) -> tuple[int, int]:
    """Return caps under which the unquantized model fits neither device, nor both."""
    fast, slow = cluster.devices
    layers = layers_bytes(costs, fast, workload)
    return (
        fixed_bytes(costs, fast, workload, is_master=True) + round(FAST_SHARE * layers),
        fixed_bytes(costs, slow, workload, is_master=False) + round(SLOW_SHARE * layers),
    )


def fixed_bytes(costs: ClusterCosts, device: Device, workload: Workload, *, is_master: bool) -> int:
    """Return what a device needs before its first layer."""
    # Small prompts at a time: larger micro-batches must find room of their own.
    sizes = MicroBatching(prefill=2, decode=workload.batch)
    total = costs.runtime_bytes(device)
    total += costs.temporary_bytes(device, workload, sizes, is_master)
    return total + (costs.master_bytes() if is_master else 0)


def layers_bytes(costs: ClusterCosts, device: Device, workload: Workload) -> int:
    """Return the bytes of all layers unquantized, with the KV slots of the whole batch."""
    return sum(
        costs.layer_weight_bytes(device, kind, 16)
        + costs.layer_kv_bytes(kind, workload.batch, workload.max_context_tokens)
        for kind in costs.model.layer_kinds
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def show(path: Path) -> str:
    """Return a path as one would type it from the project's folder."""
    return os.path.relpath(path, ROOT)


if __name__ == "__main__":
    sys.exit(main())
