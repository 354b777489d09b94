"""Time long prompts, and decode steps of one sequence over long contexts.

    python benchmarks/long_contexts.py --folder DIR --prepare      # models: nothing is timed
    python benchmarks/long_contexts.py --folder DIR --rounds 2 --results benchmarks/results

A random Llama of 125 M parameters, one stage, all cores. Every run is a process of its own, and the
contenders run in turn: ours, transformers at 16 bits, and llama.cpp with and without flash
attention where benchmarks/rivals.py built it into DIR/rivals. Ours is the median of the rounds,
theirs the best. Layers and head have the same bits. Decode steps follow the prompt; of ours, the
longest context and 8-bit keys and values are filled with random ones instead. Runs are kept one by
one in DIR, so that an interrupted round goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import rivals
import torch
from sizes import MODELS, make_models
from transformers import AutoModelForCausalLM
from workbench import (
    add_isa_option,
    call,
    here,
    keep_run,
    restrict,
    run_of,
    run_rounds,
    text_of,
    unset_threading,
)

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.engine.executor import StageRunner
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.dist.transport.frames import Row
from llmpq.models import kv_shapes, load_config
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master

MODEL = "125M"
CONTEXTS = (128, 512, 2048, 8192, 32000)
LONGEST_PROMPT = 8192
STEPS = 16
"""Decode steps of a run."""
OURS, TRANSFORMERS, LLAMA_CPP = "llmpq", "transformers", "llama.cpp"
PASSES = {"prompt_s": "prompt", "step_s": "decode"}
KEYS = 4
"""First columns of the table that tell its rows apart."""
NOTE = (
    "Tokens a second of one sequence, 125 M parameters, all cores. Decode: steps after so many "
    "tokens. llmpq: median of the rounds; others: their best run, llama.cpp's with or without "
    "flash attention. The head has the bits of the layers."
)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prepare", action="store_true", help="make models and exit")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bits", nargs="+", default=["16", "8", "4"])
    parser.add_argument("--longest", type=int, default=CONTEXTS[-1], help="context")
    add_isa_option(parser)
    parser.add_argument("--results", type=Path, help="folder of result files")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.one:
        name, *sizes = options.one
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        one = ours if name == OURS else transformers
        print(json.dumps(one(folder / MODEL, *map(int, sizes))))
        return 0
    restrict(options.cpu_isa)
    make_models(folder, [MODEL])
    rivals.prepare(folder / "rivals", MODEL, MODELS[MODEL])
    if options.prepare:
        return 0
    wanted = [one for one in cases(options.bits) if one["tokens"] <= options.longest]
    kept, timed = folder / "long.jsonl", partial(run, folder, options.cpu_isa)
    runs = run_rounds(kept, wanted, options.rounds, timed, here(options.cpu_isa))
    table = table_of(runs)
    print(text_of(table))
    if options.results is not None:
        topic, cpu_isa = "long-contexts", options.cpu_isa
        words = f"python benchmarks/long_contexts.py --folder DIR --cpu_isa {cpu_isa}"
        head = run_of(cpu_isa, words, **{"llama.cpp": rivals.PACKAGE})
        found = {**head, "samples": runs, "tables": [table]}
        keep_run(options.results / f"{topic}.json", topic, found)
    return 0


def cases(widths: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs of a round, in turn: 8-bit keys and values with the longest contexts only."""
    found = []
    for bits in widths:
        for tokens in CONTEXTS:
            for kv_bits in ("16", "8") if tokens >= LONGEST_PROMPT else ("16",):
                names = [OURS]
                if tokens <= LONGEST_PROMPT:
                    names += [TRANSFORMERS] * (bits == kv_bits == "16") + [LLAMA_CPP]
                case = {"bits": bits, "kv_bits": kv_bits, "tokens": tokens}
                found += [{**case, "run": name} for name in names]
    return found


def run(folder: Path, cpu_isa: str, case: Mapping[str, Any]) -> dict[str, float]:
    """Time the prompt and the decode steps of a case, in seconds."""
    sizes = [str(case[name]) for name in ("bits", "kv_bits", "tokens")]
    if case["run"] == LLAMA_CPP:
        bits, kv_bits, tokens = sizes
        return llama_cpp(folder / "rivals", bits, kv_bits, tokens, cpu_isa)
    words = [sys.executable, __file__, "--folder", str(folder), "--one", case["run"], *sizes]
    threads = len(os.sched_getaffinity(0))
    environment = cpu_environment(threads) if case["run"] == OURS else unset_threading()
    return dict(json.loads(call(words, environment).splitlines()[-1]))


def llama_cpp(place: Path, bits: str, kv_bits: str, tokens: str, cpu_isa: str) -> dict[str, float]:
    """Time llama.cpp's batched benchmark, the better of its settings."""
    stored = {"16": "f16", "8": "q8_0"}[kv_bits]
    found = []
    for flash in ("on", "off") if kv_bits == "16" else ("on",):
        words = ["-fa", flash, "-ctk", stored, "-ctv", stored]
        one = rivals.llama_cpp(place, MODEL, bits, 1, int(tokens), STEPS, words, cpu_isa)
        found.append((one["seconds"] - one["decode"], one["decode"] / STEPS))
    return {name: min(one) for name, one in zip(PASSES, zip(*found, strict=True), strict=True)}


@torch.inference_mode()
def ours(model_dir: Path, bits: int, kv_bits: int, tokens: int) -> dict[str, float]:
    """Time a prompt, unless it is too long, and decode steps after it."""
    config, dtype, most = load_config(model_dir), torch.bfloat16, tokens + 2 * STEPS
    layers = config.num_hidden_layers
    stage = load_stage(model_dir, 0, layers, [bits] * layers, dtype=dtype, device="cpu")
    master = load_master(model_dir, dtype=dtype, device="cpu", head_bits=bits)
    shapes = kv_shapes(config, 0, layers)
    cache = KVCache(shapes, 0, dtype=dtype, num_blocks=blocks_of(most), kv_bits=kv_bits,
                    states=stage.new_states(1))  # fmt: skip
    runner = StageRunner(
        layers=stage, cache=cache, device=torch.device("cpu"), is_last=True,
        steps=step_runner_of(stage, cache),
    )  # fmt: skip

    def step(ids: torch.Tensor, first: int) -> None:
        end = first + ids.shape[1]
        row = Row(blocks=slot_blocks(0, most, end), first=first, length=end)
        master.logits(runner.run(master.embed(ids, torch.arange(first, end)[None]), [row])[0])

    is_filled = kv_bits == 8 or tokens > LONGEST_PROMPT
    if is_filled:
        _fill(cache, layers)
    return _timed(step, tokens, has_prompt=not is_filled)


def _fill(cache: KVCache, layers: int) -> None:
    for heads in map(cache.heads_of, range(layers)):
        for part, scales in ((heads.keys, heads.key_scales), (heads.values, heads.value_scales)):
            if scales is None:
                part.normal_()
            else:
                part.random_(-127, 128)
                scales.fill_(0.01)


@torch.inference_mode()
def transformers(model_dir: Path, _bits: int, _kv_bits: int, tokens: int) -> dict[str, float]:
    """Time transformers' own model in bfloat16: a prompt and decode steps after it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    cache = None

    def step(ids: torch.Tensor, first: int) -> None:
        nonlocal cache
        before = cache if first else None
        cache = model(ids, past_key_values=before, logits_to_keep=1).past_key_values

    return _timed(step, tokens)


def _timed(
    step: Callable[[torch.Tensor, int], None], tokens: int, *, has_prompt: bool = True
) -> dict[str, float]:
    """Return the time of a prompt after a warm-up, and the median of the later steps.

    Shorter prompts run twice, and the better one counts.
    """
    prompts, steps = [], []
    ids = (torch.arange(tokens) * 31 % MODELS[MODEL]["vocab"])[None]
    lengths = (128, tokens) if tokens == LONGEST_PROMPT else (128, tokens, tokens)
    for length in lengths if has_prompt else ():
        start = time.perf_counter()
        step(ids[:, :length], 0)
        prompts.append(time.perf_counter() - start)
    for first in range(tokens, tokens + 2 * STEPS):
        start = time.perf_counter()
        step(ids[:, :1], first)
        steps.append(time.perf_counter() - start)
    found = {"prompt_s": min(prompts[1:])} if prompts else {}
    return {**found, "step_s": statistics.median(steps[STEPS:])}


def rounded(value: float | None) -> float | None:
    """Return a value with four significant digits; the samples have all."""
    return None if value is None else float(f"{value:.4g}")


def table_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return tokens a second of what was measured, and ours over the others'."""
    names, rows = (OURS, LLAMA_CPP, TRANSFORMERS), []
    sizes = sorted(
        {(one["bits"], one["kv_bits"], one["tokens"]) for one in runs},
        key=lambda size: (-int(size[0]), size[2], -int(size[1])),
    )
    for (field, title), size in ((pair, one) for pair in PASSES.items() for one in sizes):
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for one in runs:
            if (one["bits"], one["kv_bits"], one["tokens"]) == size and field in one:
                seconds[one["run"]].append(one[field])
        if not seconds[OURS]:
            continue
        count = size[2] if title == "prompt" else 1
        speeds = {
            name: count / (statistics.median(found) if name == OURS else min(found))
            for name, found in seconds.items()
            if found
        }
        cells = [speeds.get(name) for name in names]
        cells += [speeds[OURS] / speeds[name] if name in speeds else None
                  for name in names[1:]]  # fmt: skip
        rows.append([title, int(size[0]), int(size[1]), size[2], *map(rounded, cells)])
    columns = ["phase", "bits", "KV bits", "tokens", *names]
    columns += [f"{OURS} / {name}" for name in names[1:]]
    return {
        "title": "Long contexts", "columns": columns, "keys": KEYS, "beside": columns[-2:],
        "ranges": {"of": "llmpq / llama.cpp", "by": "phase"}, "rows": rows, "note": NOTE,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
