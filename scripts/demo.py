"""The whole path on this machine: measure, plan, look, run, compare.

Two workers on two cores become two different devices. Each gets a memory cap so small that neither
holds the model and both together do not hold it unquantized, the second a smaller one; where the
processor has AVX-512, the second is also held to AVX2. Only public commands are used; they are
printed as they run, so that they can be typed again. Seconds are compared only if other programs
left the processor to the demo.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.dist.launch.process_environment import allowed_isa
from llmpq.dist.metrics.measurement import busy_text, is_busy, share_in
from llmpq.errors import LlmpqError
from llmpq.profiler.device import available_cores, cpu_isas, cpu_name
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import CPU_ISAS, Cluster, Device, load_cluster
from llmpq.spec.fields import SCHEMA, dump_json, read_json, write_text
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencyTable, read_latency_table
from llmpq.spec.workload import Workload
from llmpq.units import format_bytes, format_seconds

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "demo"
NODE = "here"
DEVICES = (f"{NODE}/cpu#0", f"{NODE}/cpu#1")
"""As plans name them."""
BATCH, PROMPT_TOKENS, NEW_TOKENS = 16, 32, 48
SHOWN_ANSWERS = 4
WIDTH = 96
SENTENCE = re.compile(r"(?:^|(?<=[.?!] ))[A-Z][\w ,;'()-]+\.(?= |$)", re.M)
NEXT_COMMANDS = (
    "llmpq-check {strategy}  # what limits this plan, and the smallest changes that would help",
    "llmpq-algo --model facebook/opt-30b --device_names T4-16G V100-32G --device_numbers 3 1 "
    "--global_bz 32 --s 512 --n 100  # a plan for GPUs, made on this machine",
    "llmpq-profile layer --model path/to/your/model --device cpu --output cpu.csv"
    "  # measure your own model",
)
# Shares of the unquantized layers that each device may hold. Together 0.29 of them: too little
# for 8 bits everywhere, so the plan mixes bitwidths.
CAP_SHARES = (0.38, 0.24)
# Points of the tables that are printed, of layers at 8 bits: batch and tokens.
SHOWN_POINTS = {Phase.PREFILL: (1, 64), Phase.DECODE: (16, 64)}

Shares = Mapping[str, float | None]
"""Share of the CPU time of a device's thread that other programs took, by the device's name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the first failing command's exit status."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "demo", help="where to write"
    )
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of measuring")
    options = parser.parse_args(argv)
    isa = second_isa(cpu_isas(), allowed_isa(os.environ))
    demo = Demo(options.output, isa, quiet=options.json)
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


def second_isa(isas: Sequence[str], allowed: str | None) -> str | None:
    """Return the vector extension that the second device is held to, ``None`` to let it use all.

    Without AVX2 neither this package's kernels nor torch's products of bfloat16 are fast, so a
    processor whose newest extension is AVX2 makes devices that differ in memory alone. ``allowed``
    is the newest extension that the environment allows, ``None`` for all.
    """
    newest = CPU_ISAS.index(allowed or CPU_ISAS[-1])
    return "avx2" if "avx512" in isas and newest > CPU_ISAS.index("avx2") else None


class Demo:
    """One run of the demo; everything it makes lies in one folder."""

    def __init__(self, folder: Path, isa: str | None, *, quiet: bool) -> None:
        self.folder = folder
        self.isas = (None, isa)
        self.quiet = quiet
        self.cluster_file = folder / "cluster.json"
        self.strategy = folder / "strategy.json"
        self.picture = folder / "strategy.png"
        self.prompts = folder / "prompts.jsonl"
        self.answers = folder / "answers.jsonl"
        self.report = folder / "report.json"
        self.texts, self.workload = choose_prompts()

    def run(self, budget_s: float) -> dict[str, Any]:
        """Do all steps and return the summary."""
        start = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.say(f"This machine: {cpu_name()}, {len(available_cores())} cores.")
        held = "" if self.isas[1] is None else f"is held to {self.isas[1].upper()} and "
        self.say(f"Device {DEVICES[0]} is one core of it, {DEVICES[1]} another one.")
        self.say(f"The second {held}may use less memory.\n")
        measuring = self.measure(budget_s)
        self.write_cluster()
        planned = self.plan(measuring)
        ran = self.answer()
        running = {stage["device"]: stage.get("cpu_taken") for stage in ran["stages"]}
        for line in comparison(ran, measuring, running):
            self.say(f"   {line}".rstrip())
        self.show_answers()
        elapsed = time.monotonic() - start
        self.say(f"\nPicture of the plan: {show(self.picture)}")
        self.say(f"Everything: {show(self.folder)}  ({elapsed:.0f} s in all)")
        self.say("\nTry next:")
        for command in NEXT_COMMANDS:
            self.say("   $ " + command.format(strategy=show(self.strategy)))
        return {
            "plan": planned,
            "run": ran,
            "cpu_taken": {"measuring": measuring, "running": running},
            "is_comparable": not any(map(is_busy, [*measuring.values(), *running.values()])),
            "elapsed_s": elapsed,
            "folder": str(self.folder),
        }

    def measure(self, budget_s: float) -> Shares:
        """Profile both devices at the same time, as they will run; return what others took."""
        self.say("1. Measure one decoder layer at 3, 4, 8 and 16 bits on both devices\n")
        shapes = ["--batches", "1", "4", "16", "--prompt_tokens", "16", "64", "128"]
        shapes += ["--context_tokens", "32", "64", "128", "--budget", f"{budget_s:g}"]
        jobs = []
        for index, isa in enumerate(self.isas):
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
        tables = [read_latency_table(self.table(index)) for index in range(len(self.isas))]
        self.say("")
        for line in measured_lines(tables):
            self.say(f"   {line}")
        return {
            name: share_in(dict(table.provenance))
            for name, table in zip(DEVICES, tables, strict=True)
        }

    def write_cluster(self) -> None:
        """Write the cluster file, its memory caps computed from the model's own sizes."""
        write_text(self.cluster_file, dump_json(cluster_json(None, self.isas)))
        spec, _ = resolve_model(str(MODEL))
        cluster = load_cluster(self.cluster_file)
        costs = build_costs(spec, cluster, dtype=spec.dtype, kv_bits=16)
        layers = layers_bytes(costs, cluster.devices[0], self.workload)
        caps = memory_caps(costs, cluster, self.workload, layers)
        write_text(self.cluster_file, dump_json(cluster_json(caps, self.isas)))
        rooms = " and ".join(format_bytes(round(share * layers)) for share in CAP_SHARES)
        self.say(
            f"\n   Layers, keys and values need {format_bytes(layers)} unquantized; "
            f"the devices are left {rooms}."
        )

    def plan(self, measuring: Shares) -> dict[str, Any]:
        """Make the strategy and draw it."""
        self.say("\n2. Plan: every split, order, bitwidth and micro-batch pair; proven best\n")
        if any(map(is_busy, measuring.values())):
            self.say(f"   {busy_text(measuring, 'while measuring')}:")
            self.say("   the seconds below are no forecast.\n")
        command = ["llmpq-algo", "--model", show(MODEL), "--cluster", show(self.cluster_file)]
        command += ["--global_bz", str(self.workload.batch)]
        command += ["--s", str(self.workload.prompt_tokens)]
        command += ["--n", str(self.workload.new_tokens), "--output", show(self.strategy)]
        planned = self.call(command)
        check = ["llmpq-check", show(self.strategy), "--plot", show(self.picture)]
        finish(self.start(check, subprocess.DEVNULL))
        return planned

    def answer(self) -> dict[str, Any]:
        """Run the strategy on sentences of the shipped text; return the report."""
        self.say("\n3. Run it: two processes, weights quantized while they load\n")
        self.answers.unlink(missing_ok=True)
        length = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        prompts = [{"id": name, "prompt": text, **length} for name, text in self.texts.items()]
        write_text(self.prompts, "".join(json.dumps(line) + "\n" for line in prompts))
        command = ["llmpq-dist", "--strat_file_name", show(self.strategy)]
        command += ["--prompts", show(self.prompts), "--output", show(self.answers)]
        command += ["--report", show(self.report)]
        finish(self.start(command, subprocess.DEVNULL))
        return read_json(self.report)

    def show_answers(self) -> None:
        """Print some prompts and what the model made of them."""
        self.say(f"\n   {SHOWN_ANSWERS} of {len(self.texts)} prompts, and how the model goes on:")
        for line in read_lines(self.answers)[:SHOWN_ANSWERS]:
            self.say("")
            self.say(paragraph(self.texts[line["id"]], first="   > ", other="     "))
            self.say(paragraph(line["text"], first="     ... ", other="         "))

    def table(self, index: int) -> Path:
        """Return where the latency table of a device lies."""
        return self.folder / table_name(index)

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


def choose_prompts() -> tuple[dict[str, str], Workload]:
    """Return sentences of the held-out text by id, and the workload they make.

    All prompts and all answers have one length, so that the measured batch is the predicted one:
    the sentences are those of exactly so many tokens, from all over the text.
    """
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    fitting = [one for one in sentences(text) if len(tokenizer.encode(one).ids) == PROMPT_TOKENS]
    step = len(fitting) / BATCH
    chosen = {f"sentence-{n + 1:02}": fitting[int(n * step)] for n in range(BATCH)}
    return chosen, Workload(batch=BATCH, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)


def sentences(text: str) -> Iterator[str]:
    """Return the whole sentences of a text that are of words alone."""
    for found in SENTENCE.finditer(text):
        sentence = found.group()
        if sentence.count("(") == sentence.count(")"):
            yield sentence


def paragraph(text: str, *, first: str, other: str) -> str:
    """Return text in lines of a terminal's width."""
    words = " ".join(text.split())
    return textwrap.fill(words, WIDTH, initial_indent=first, subsequent_indent=other)


def measured_lines(tables: Sequence[LatencyTable]) -> list[str]:
    """Return what was measured of one layer at 8 bits, on each device."""
    lines = [f"one layer at 8 bits on {' and '.join(DEVICES)}:"]
    for phase, what in (
        (Phase.PREFILL, "a prompt of {tokens} tokens"),
        (Phase.DECODE, "a decode step of {batch} sequences of {tokens} tokens"),
    ):
        batch, tokens = SHOWN_POINTS[phase]
        seconds = [
            format_seconds(sample.seconds)
            for table in tables
            for sample in table.samples
            if (sample.phase, sample.bits) == (phase, 8)
            and (sample.batch, sample.tokens) == (batch, tokens)
        ]
        lines.append(f"  {what.format(batch=batch, tokens=tokens)}: {' and '.join(seconds)}")
    return lines


def comparison(ran: Mapping[str, Any], measuring: Shares, running: Shares) -> list[str]:
    """Return the comparison of forecast and run, without the forecast's seconds if it is void."""
    busy = any(map(is_busy, [*measuring.values(), *running.values()]))
    rows = [("", "predicted", "measured", "difference")]
    for name, pair in ran["phases"].items():
        predicted, measured = pair["predicted"], pair["measured"]
        cells = (format_seconds(predicted), format_seconds(measured))
        off = f"{predicted / measured - 1:+.0%}"
        rows.append((name, "withheld", cells[1], "") if busy else (name, *cells, off))
    for stage in ran["stages"]:
        predicted, measured = stage["memory_bytes"].values()
        cells = (format_bytes(predicted), format_bytes(measured))
        rows.append((f"memory of {stage['device']}", *cells, f"{predicted / measured - 1:+.0%}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{ran['requests']} answers of {NEW_TOKENS} tokens in {format_seconds(ran['elapsed_s'])}: "
        f"{ran['throughput_tokens_per_s']:,.0f} tokens/s",
        "",
        *(
            row[0].ljust(widths[0])
            + "".join(
                "  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
            )
            for row in rows
        ),
        "",
        busy_text(measuring, "while measuring"),
        busy_text(running, "while running"),
    ]
    if busy:
        lines += [
            "",
            "Other programs took so much that the forecast cannot hold: its seconds are withheld.",
            "Close them, or wait until they end, and run scripts/demo again.",
        ]
    return lines


def table_name(index: int) -> str:
    """Return the name of the file of a device's latency table."""
    return f"cpu{index}.csv"


def core(index: int) -> int:
    """Return the core of a device; on one core both share it."""
    cores = available_cores()
    return cores[index % len(cores)]


def cluster_json(
    caps: tuple[int, int] | None, isas: tuple[str | None, str | None]
) -> dict[str, Any]:
    """Return the cluster file: two CPU workers on this host, each with its own measured table."""
    devices: list[dict[str, Any]] = []
    for index, isa in enumerate(isas):
        device: dict[str, Any] = {"type": "cpu", "count": 1, "threads": 1}
        device["profile"] = table_name(index)
        if isa is not None:
            device["cpu_isa"] = isa
        if caps is not None:
            device["memory_bytes"] = caps[index]
        devices.append(device)
    nodes = [{"name": NODE, "devices": devices}]
    return {"schema": SCHEMA, "name": "two-different-cpus", "nodes": nodes, "links": []}


def memory_caps(
    costs: ClusterCosts, cluster: Cluster, workload: Workload, layers: int
) -> tuple[int, int]:
    """Return caps under which the unquantized model fits neither device, nor both.

    ``layers`` are the bytes of its layers.
    """
    first, second = cluster.devices
    return (
        fixed_bytes(costs, first, workload, is_master=True) + round(CAP_SHARES[0] * layers),
        fixed_bytes(costs, second, workload, is_master=False) + round(CAP_SHARES[1] * layers),
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
    """Return a path as one would type it in the project's folder."""
    whole = path.resolve()
    return str(whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole)


if __name__ == "__main__":
    sys.exit(main())
