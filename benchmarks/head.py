"""Heads of fewer bits: milliseconds a decode step, and the perplexity that they cost.

    python benchmarks/head.py --folder DIR --json benchmarks/results/head.json

Steps are those of the 125 M model of ``workbench``, one stage with its master in this process:
every pair of layers' and head's bits in turn, round after round. Perplexities are those of the
shipped model on its held-out text in float32, with only the head (and its tied embedding) at the
numbers that its codes stand for, so that no kernel's error is included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compare_versions import machine
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from workbench import ROOT, make_model

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.calibration import Hessian
from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.engine.engine import Choice, SamplingState, ScoredRows
from llmpq.dist.engine.executor import StageRunner
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.transport.frames import Row
from llmpq.models import Master, kv_shapes, load_config
from llmpq.quant import quantize
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.quant.quantizers.gptq import gptq
from llmpq.spec.precision import default_precision

LAYER_BITS, HEAD_BITS = (16, 8, 4), (16, 8, 4)
PROMPT_TOKENS, STEPS = 32, 31
WINDOW, CALIBRATION_WINDOWS = 512, 100
GPTQ = "GPTQ, embedding at 16"
METHODS = {"rounded with its embedding": True, "rounded, embedding at 16": False, GPTQ: False}
"""Ways to quantize a tied head, and whether the embedding changes with it."""
STEP = "A decode step of one sequence, 125 M parameters"
PERPLEXITY = "Perplexity of the shipped model, its layers at 16 bits"


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="for the model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, help=f"of {WINDOW} tokens to score (default: all)")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    samples = steps(options.folder.absolute() / "model", options.rounds)
    rows, tokens = perplexities(ROOT / "models" / "demo", options.windows)
    document: dict[str, Any] = {
        "topic": "head",
        "command": "python benchmarks/head.py --folder DIR "
        f"--rounds {options.rounds} --threads {options.threads}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{machine()}, {options.threads} threads, load {load:.0f} at the start",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "tables": [steps_table(samples), {"title": PERPLEXITY, "rows": rows}],
        "scored_tokens": tokens,
        "samples_ms": {f"layers {a}, head {b}": found for (a, b), found in samples.items()},
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    for item in document["tables"]:
        print(json.dumps(item, indent=1))
    return 0


def steps_table(samples: dict[tuple[int, int], list[float]]) -> dict[str, object]:
    """Return the medians, and ratios to a head of 16 bits."""
    rows = []
    for layers in LAYER_BITS:
        row: dict[str, object] = {"bits of layers": layers}
        plain = statistics.median(samples[layers, 16])
        for head in HEAD_BITS:
            middle = statistics.median(samples[layers, head])
            ratio = "" if head == 16 else f" ({middle / plain:.2f})"
            row[f"head at {head} bits"] = f"{middle:.2f} ms{ratio}"
        rows.append(row)
    return {"title": STEP, "rows": rows}


def steps(model_dir: Path, rounds: int) -> dict[tuple[int, int], list[float]]:
    """Return milliseconds of a decode step for each pair of bits, of layers and of the head."""
    make_model(model_dir)
    config = load_config(model_dir)
    count = config.num_hidden_layers
    cache = KVCache(
        kv_shapes(config, 0, count), 0, num_blocks=blocks_of(PROMPT_TOKENS + STEPS + 1),
        dtype=torch.bfloat16,
    )  # fmt: skip
    runners = {}
    for bits in LAYER_BITS:
        stage = load_stage(model_dir, 0, count, [bits] * count, dtype=torch.bfloat16, device="cpu")
        runners[bits] = StageRunner(
            layers=stage, cache=cache, device=torch.device("cpu"), is_last=True,
            steps=step_runner_of(stage, cache),
        )  # fmt: skip
    masters = {
        bits: load_master(model_dir, dtype=torch.bfloat16, device="cpu", head_bits=bits)
        for bits in HEAD_BITS
    }
    samples: dict[tuple[int, int], list[float]] = defaultdict(list)
    pairs = list(itertools.product(LAYER_BITS, HEAD_BITS))
    for number in range(rounds + 1):
        for pair in pairs if number % 2 else reversed(pairs):
            seconds = decode(runners[pair[0]], masters[pair[1]])
            if number:  # the first round warms up
                samples[pair].append(1e3 * seconds / STEPS)
    return dict(samples)


@torch.inference_mode()
def decode(runner: StageRunner, master: Master) -> float:
    """Answer one prompt greedily; return the seconds of all steps after the prefill."""
    state = SamplingState()
    newest = torch.arange(PROMPT_TOKENS)[None]
    table = slot_blocks(0, PROMPT_TOKENS + STEPS + 1, PROMPT_TOKENS + STEPS + 1)
    first, start = 0, 0.0
    for _ in range(1 + STEPS):
        end = first + newest.shape[1]
        positions = torch.arange(first, end)[None]
        rows = [Row(blocks=table, first=first, length=end)]
        hidden = runner.run(master.embed(newest, positions), rows)
        scored = ScoredRows(master.logits(hidden[0]), [Choice(0, state)])
        token = scored.sample(0, state)
        newest = torch.tensor([[token.token_id]])
        if not first:
            start = time.perf_counter()
        first = end
    return time.perf_counter() - start


def perplexities(model_dir: Path, most: int | None) -> tuple[list[dict[str, object]], int]:
    """Return the perplexity with the head at each bitwidth, and how many tokens are scored.

    Rounded with the embedding, as a plan does it; alone, and by GPTQ, as a checkpoint has it.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    windows = windows_of(model_dir, "heldout.txt", most)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = head.weight.detach().clone()
    hessian = Hessian(plain.shape[1])
    hook = head.register_forward_pre_hook(lambda _, x: hessian.add(x[0].flatten(0, -2)))
    perplexity(model, windows_of(model_dir, "calibration.txt", CALIBRATION_WINDOWS))
    hook.remove()
    base = perplexity(model, windows)
    rows: list[dict[str, object]] = [{"head": "16 bits", "perplexity": f"{base:.3f}", "change": ""}]
    for bits, (name, with_embedding) in itertools.product((8, 4, 3), METHODS.items()):
        precision = default_precision(bits)
        if name == GPTQ:
            weight = gptq(plain, hessian.matrix, replace(precision, method="gptq")).dequantize()
        else:
            weight = quantize(plain, precision, torch.bfloat16).dequantize(torch.float32)
        head.weight = torch.nn.Parameter(weight)
        embedding.weight = torch.nn.Parameter(weight if with_embedding else plain)
        found = perplexity(model, windows)
        row = {"head": f"{bits} bits, {name}", "perplexity": f"{found:.3f}"}
        rows.append({**row, "change": f"{found / base - 1:+.2%}"})
    return rows, windows[:, 1:].numel()


def windows_of(model_dir: Path, text: str, most: int | None) -> torch.Tensor:
    """Return a text of the shipped model as tokens ``[R, WINDOW]``."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    content = (model_dir / text).read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer(content, verbose=False)["input_ids"])
    return tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)[:most]


@torch.inference_mode()
def perplexity(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """Return the perplexity over every token but the first of each window ``[R, T]``."""
    total = 0.0
    for rows in windows.split(8):
        scores = model(rows).logits[:, :-1].flatten(0, 1)
        total += F.cross_entropy(scores, rows[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / windows[:, 1:].numel())


if __name__ == "__main__":
    sys.exit(main())
