"""Time long prompts, and decode steps of one sequence over long contexts.

    python benchmarks/long_contexts.py --folder DIR [--before CHECKOUT] [--rounds 3]

A random Llama of 125 M parameters, one stage, all cores. Every run is a process of its own, and the
contenders run in turn: ours, the same of another checkout (``--before``), and llama.cpp with and
without flash attention where benchmarks/rivals.py built it into DIR/rivals. Ours is the median of
the rounds, theirs the best. Contexts of decode steps are filled with random keys and values;
llama.cpp reads a prompt first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import rivals
import torch
from workbench import PASSIVE, ROOT, make_model

from llmpq.dist.engine.compiled_steps import decode_steps_of
from llmpq.dist.engine.stage import StageRunner
from llmpq.dist.kv.blocks import blocks_of, slot_blocks
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.transport.frames import Row
from llmpq.models import Master, kv_shapes, load_config
from llmpq.quant.loading.loader import load_master, load_stage

SHAPE = {"layers": 12, "hidden": 768, "intermediate": 2048, "heads": 12, "kv_heads": 4}
VOCABULARY, POSITIONS = 32000, 32768
CASE = "long"
PROMPTS = (128, 512, 2048, 8192)
CONTEXTS = (128, 8000, 32000)
STEPS = 16
"""Decode steps of a run."""
LONGEST_RIVAL = 8192
"""Most tokens of a prompt that llama.cpp gets: a longer one takes minutes."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bits", nargs="+", default=["16", "8", "4"])
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.one:
        kind, bits, kv_bits, tokens = options.one
        one = prompt_seconds if kind == "prompt" else decode_seconds
        print(json.dumps(one(folder / CASE, int(bits), int(kv_bits), int(tokens))))
        return 0
    prepare(folder)
    measure(folder, options)
    print(table(folder))
    return 0


def prepare(folder: Path) -> None:
    """Make the models."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / CASE, {**SHAPE, "vocab": VOCABULARY, "max_positions": POSITIONS})
    if rivals.bench_of(folder / "rivals").exists():
        rivals.prepare(folder / "rivals", CASE, tuple(SHAPE.values()), VOCABULARY)


def cases(bits: list[str]) -> list[tuple[str, str, str, int]]:
    """Return kind, bits, bits of keys and values, and tokens of every run."""
    prompts = [("prompt", width, "16", tokens) for width in bits for tokens in PROMPTS]
    decodes = [
        ("decode", width, kv_bits, tokens)
        for width in bits
        for kv_bits in ("16", "8")
        for tokens in CONTEXTS
    ]
    return [*prompts, *decodes]


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Time all runs, round by round; each is kept at once."""
    for _ in range(options.rounds):
        for case in cases(options.bits):
            found = {"ours": ours(folder, case, ROOT)}
            if options.before is not None:
                found["before"] = ours(folder, case, options.before.absolute())
            theirs = llama_cpp(folder, case)
            if theirs is not None:
                found["llama.cpp"] = theirs
            line = {"case": list(case), "seconds": found, "load": os.getloadavg()[0]}
            with (folder / f"{CASE}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


def ours(folder: Path, case: tuple[str, str, str, int], checkout: Path) -> float:
    """Time our layers in a process of their own."""
    words = [sys.executable, __file__, "--folder", str(folder), "--one", *map(str, case)]
    environment = {**os.environ, **PASSIVE, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    environment["PYTHONPATH"] += f":{ROOT / 'benchmarks'}"
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def llama_cpp(folder: Path, case: tuple[str, str, str, int]) -> float | None:
    """Time llama.cpp's batched benchmark, the better of two settings; ``None`` if it has none."""
    kind, bits, kv_bits, tokens = case
    place = folder / "rivals"
    if not rivals.bench_of(place).exists() or bits not in rivals.BITS or tokens > LONGEST_RIVAL:
        return None
    stored = {"16": "f16", "8": "q8_0"}[kv_bits]
    found = []
    for flash in ("on", "off") if kv_bits == "16" else ("on",):
        words = ["-fa", flash, "-ctk", stored, "-ctv", stored]
        one = rivals.llama_cpp(place, CASE, bits, 1, tokens, STEPS, words)
        prompt = one["seconds"] - one["decode"]
        found.append(prompt if kind == "prompt" else one["decode"] / STEPS)
    return min(found)


def _stage(
    model_dir: Path, bits: int, kv_bits: int, tokens: int
) -> tuple[StageRunner, KVCache, Master]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = load_config(model_dir)
    layers = config.num_hidden_layers
    dtype = torch.bfloat16
    stage = load_stage(model_dir, 0, layers, [bits] * layers, dtype=dtype, device="cpu")
    cache = KVCache(
        kv_shapes(config, 0, layers), 0, dtype=dtype, num_blocks=blocks_of(tokens), kv_bits=kv_bits
    )
    runner = StageRunner(
        layers=stage,
        cache=cache,
        device=torch.device("cpu"),
        graphs=decode_steps_of(stage, cache, full_rows=1),
        is_last=True,
    )
    return runner, cache, load_master(model_dir, dtype=dtype, device="cpu")


@torch.inference_mode()
def prompt_seconds(model_dir: Path, bits: int, kv_bits: int, tokens: int) -> float:
    """Run one prompt, the better of two after a warm-up."""
    runner, _, master = _stage(model_dir, bits, kv_bits, tokens)
    ids = (torch.arange(tokens) * 31 % VOCABULARY)[None]
    row = Row(blocks=slot_blocks(0, tokens, tokens), first=0, length=tokens)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        hidden = runner.run(master.embed(ids, torch.arange(tokens)[None]), [row])
        master.logits(hidden[0])
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


@torch.inference_mode()
def decode_seconds(model_dir: Path, bits: int, kv_bits: int, tokens: int) -> float:
    """Run decode steps over a context: the median seconds of one."""
    most = tokens + 2 * STEPS
    runner, cache, master = _stage(model_dir, bits, kv_bits, most)
    for layer in range(SHAPE["layers"]):
        heads = cache.heads_of(layer)
        for part, scales in ((heads.keys, heads.key_scales), (heads.values, heads.value_scales)):
            if scales is None:
                part.normal_()
            else:
                part.random_(-127, 128)
                scales.fill_(0.01)
    seconds = []
    for first in range(tokens, most):
        row = Row(blocks=slot_blocks(0, most, first + 1), first=first, length=first + 1)
        start = time.perf_counter()
        hidden = runner.run(master.embed(torch.tensor([[7]]), torch.tensor([[first]])), [row])
        master.logits(hidden[0])
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[STEPS:])


def table(folder: Path) -> str:
    """Return a Markdown table of what was measured: tokens a second."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for text in (folder / f"{CASE}.jsonl").read_text().splitlines():
        line = json.loads(text)
        for name, seconds in line["seconds"].items():
            found[tuple(map(str, line["case"]))][name].append(seconds)
    names = ("ours", "before", "llama.cpp")
    lines = ["| run | bits | KV bits | tokens | " + " | ".join(names) + " |", "| --- " * 7 + "|"]
    for (kind, bits, kv_bits, tokens), times in found.items():
        count = int(tokens) if kind == "prompt" else 1
        cells = []
        for name in names:
            choose = min if name == "llama.cpp" else statistics.median
            cells.append(f"{count / choose(times[name]):.0f}" if times[name] else "")
        lines.append(f"| {kind} | {bits} | {kv_bits} | {tokens} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
