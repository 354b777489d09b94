"""What keys and values of 16, 8 and 4 bits cost: divergence on text, and time of decode steps.

    python benchmarks/kv_bits.py --folder DIR --rounds 3

Divergence is that of the shipped model on its held-out text, in float32, and of the same model with
an outlier in each head of keys: a pair of rotated features 16 times as large, of queries as much
smaller, which changes no answer at full width. Without the rotation torch's own code attends.

Speed is that of a random Llama of 125 M parameters at 16 bits, one stage, all threads, whose keys
and values are random: the median of decode steps, bits in turn. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from sizes import make_models

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.cli.commands import evals
from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.engine.executor import StageRunner
from llmpq.dist.kv import cache as kv_cache
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.transport.frames import Row
from llmpq.models import kv_shapes, load_config
from llmpq.quant.loading.loader import load_stage

DEMO = Path(__file__).parents[1] / "models" / "demo"
MODEL, STEPS = "125M", 12
CONTEXTS, BATCHES, WIDTHS = (4096, 8192), (1, 8), (16, 8, 4)
OUTLIER = 16


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where models are made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max_tokens", type=int, default=16_384, help="of the held-out text")
    parser.add_argument("--only", choices=("quality", "speed"))
    options = parser.parse_args()
    if options.only != "speed":
        _print_quality(options.folder, options.max_tokens)
    if options.only != "quality":
        _print_speed(options.folder, options.rounds)
    return 0


def _print_quality(folder: Path, max_tokens: int) -> None:
    print("**Divergence of fewer bits**\n")
    print("| shipped model | bits | rotated | KL divergence | perplexity | at full width |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, model in (("as it is", DEMO), ("with outliers", _with_outliers(folder))):
        for bits, rotates in ((8, False), (4, True), (4, False)):
            found = _quality(model, bits, rotates, max_tokens)
            words = [name, bits, "yes" if rotates else "no", *(f"{one:.6f}" for one in found)]
            print(f"| {' | '.join(map(str, words))} |", flush=True)


def _quality(model: Path, bits: int, rotates: bool, max_tokens: int) -> tuple[float, float, float]:
    words = ["--model", str(model), "--text", str(DEMO / "heldout.txt"), "--bits", "16", "--json"]
    words += ["--dtype", "float32", "--kv_bits", str(bits), "--max_tokens", str(max_tokens)]
    printed, changes = io.StringIO(), contextlib.ExitStack()
    if bits == 4 and not rotates:
        changes.enter_context(mock.patch.object(kv_cache, "rotated", lambda x: x))
        changes.enter_context(mock.patch.object(KVCache, "attends", new=False))
    with changes, contextlib.redirect_stdout(printed):
        evals.main(words)
    found = json.loads(printed.getvalue())
    return found["kl_to_16bit"], found["perplexity"], found["perplexity_16bit"]


def _with_outliers(folder: Path) -> Path:
    """Write the shipped model with a large pair of features in each head of keys."""
    target, config = folder / "demo-outliers", load_config(DEMO)
    shutil.copytree(DEMO, target, dirs_exist_ok=True)
    tensors, rng = load_file(DEMO / "model.safetensors"), torch.Generator().manual_seed(0)
    group = config.num_attention_heads // config.num_key_value_heads
    for name in [one for one in tensors if one.endswith("self_attn.k_proj.weight")]:
        keys = tensors[name].unflatten(0, (-1, 2, config.head_dim // 2)).clone()
        other = name.replace("k_proj", "q_proj")
        queries = tensors[other].unflatten(0, (-1, 2, config.head_dim // 2)).clone()
        for head in range(config.num_key_value_heads):
            feature = int(torch.randint(config.head_dim // 2, (1,), generator=rng))
            keys[head, :, feature] *= OUTLIER
            queries[head * group : (head + 1) * group, :, feature] /= OUTLIER
        tensors[name], tensors[other] = keys.flatten(0, 2), queries.flatten(0, 2)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@torch.inference_mode()
def _print_speed(folder: Path, rounds: int) -> None:
    make_models(folder, [MODEL])
    stage = load_stage(folder / MODEL, 0, 12, [16] * 12, dtype=torch.bfloat16, device="cpu")
    print("\n**Decode steps, 125 M parameters, bfloat16**\n")
    print("| context | sequences | ms, 16 bits | 8 bits | 4 bits | 4 / 16 | 4 / 8 | 4-bit MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for tokens in CONTEXTS:
        for batch in BATCHES:
            found: dict[int, list[float]] = {bits: [] for bits in WIDTHS}
            for _ in range(rounds):
                for bits in WIDTHS:
                    seconds, held = _step_s(stage, folder / MODEL, tokens, batch, bits)
                    found[bits].append(seconds)
            ms = {bits: 1000 * statistics.median(one) for bits, one in found.items()}
            cells = [tokens, batch, *(f"{ms[bits]:.1f}" for bits in WIDTHS)]
            cells += [f"{ms[4] / ms[16]:.2f}", f"{ms[4] / ms[8]:.2f}", f"{held / 2**20:.0f}"]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _step_s(
    stage: object, model_dir: Path, tokens: int, batch: int, bits: int
) -> tuple[float, int]:
    """Return the median seconds of a decode step of all layers, and the bytes of the cache."""
    config, most = load_config(model_dir), tokens + 2 * STEPS
    cache = KVCache(
        kv_shapes(config, 0, 12), 0, dtype=torch.bfloat16, num_blocks=batch * blocks_of(most),
        kv_bits=bits,
    )  # fmt: skip
    for layer in range(12):
        heads = cache.heads_of(layer)
        for part, scales in ((heads.keys, heads.key_scales), (heads.values, heads.value_scales)):
            if scales is None:
                part.normal_()
            else:
                part.random_(0, 127)
                scales.fill_(0.01)
    runner = StageRunner(
        layers=stage, cache=cache, device=torch.device("cpu"), is_last=True,
        steps=step_runner_of(stage, cache),
    )  # fmt: skip
    hidden, seconds = torch.randn(1, batch, config.hidden_size).bfloat16(), []
    for first in range(tokens, tokens + STEPS):
        rows = [
            Row(blocks=slot_blocks(slot, most, first + 1), first=first, length=first + 1)
            for slot in range(batch)
        ]
        start = time.perf_counter()
        runner.run(hidden, rows)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:]), cache.nbytes


if __name__ == "__main__":
    sys.exit(main())
