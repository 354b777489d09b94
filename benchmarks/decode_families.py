"""Decode steps of several families: milliseconds compiled and operator by operator.

    python benchmarks/decode_families.py --folder DIR --json benchmarks/results/decode-families.json

Steps of one sequence, or of several, through the layers of random models, without embedding and
head. Both ways run in turn, round after round, on a cache of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from workbench import ROOT, SMALL_LLAMA, call, machine, write_results

from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.kv.blocks import blocks_of
from llmpq.dist.kv.cache import KVCache
from llmpq.models import PackedBatch, kv_shapes, load_config
from llmpq.quant.loading.loader import load_stage

FAMILIES = (
    *("llama", "phi3", "gemma2", "gemma3", "granite", "cohere", "opt", "bloom", "gpt_neox"),
    *("mixtral", "qwen3_moe"),
)
EXPERTS = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 384},
}
"""Fields of families with experts."""
BITS = (16, 4)
CONTEXT, STEPS = 32, 31
TITLE = "A decode step through the layers of a random model"


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="for the models")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--layers", type=int, default=SMALL_LLAMA["layers"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load, rows, samples = os.getloadavg()[0], [], {}
    for family in options.families:
        path = options.folder.absolute() / f"{family}-{options.layers}"
        make_model(family, path, options.layers)
        for bits in BITS:
            found, check_s = step_ms(path, bits, options.rounds, options.sequences)
            samples[f"{family}, {bits} bits"] = found
            compiled, plain = (statistics.median(found[name]) for name in found)
            rows.append(
                {
                    "family": family, "bits": bits,
                    "compiled": f"{compiled:.2f} ms",
                    "operator by operator": f"{plain:.2f} ms ({plain / compiled:.1f} times)",
                    "check at load": f"{1e3 * check_s:.0f} ms",
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    document = {
        "topic": "decode-families",
        "command": f"python benchmarks/decode_families.py --folder DIR --layers {options.layers} "
        f"--rounds {options.rounds} --threads {options.threads} --sequences {options.sequences}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{machine()}, {options.threads} threads, load {load:.0f} at the start",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "tables": [
            {
                "title": f"{TITLE} of {options.layers} layers; {options.sequences} sequences",
                "rows": rows,
            }
        ],
        "samples_ms": samples,
    }
    write_results(options.json, document)
    return 0


def make_model(family: str, path: Path, layers: int) -> None:
    """Write a random model of a family, of the sizes of the small Llama, once."""
    if path.exists():
        return
    shape = {**SMALL_LLAMA, "layers": layers}
    sizes = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    for name, value in EXPERTS.get(family, {}).items():
        sizes += ["--set", f"{name}={value}"]
    script = str(ROOT / "scripts" / "make_tiny_model.py")
    call([sys.executable, script, "--family", family, *sizes, "--dtype", "bfloat16",
          "--output", str(path)])  # fmt: skip


@torch.inference_mode()
def step_ms(
    model_dir: Path, bits: int, rounds: int, sequences: int
) -> tuple[dict[str, list[float]], float]:
    """Return milliseconds of steps both ways, and the seconds of ``step_runner_of``."""
    config = load_config(model_dir)
    count = config.num_hidden_layers
    stage = load_stage(model_dir, 0, count, [bits] * count, dtype=torch.bfloat16, device="cpu")
    each = blocks_of(CONTEXT + STEPS)
    tables = [range(i * each, (i + 1) * each) for i in range(sequences)]
    caches = [
        KVCache(kv_shapes(config, 0, count), 0, num_blocks=sequences * each, dtype=torch.bfloat16)
        for _ in range(2)
    ]
    start = time.perf_counter()
    steps = step_runner_of(stage, caches[0])
    check_s = time.perf_counter() - start
    if steps is None:
        raise SystemExit(f"{model_dir}: found no compiled steps at {bits} bits")
    ways = {
        "compiled": steps.forward,
        "operator by operator": lambda hidden, batch: stage(hidden, batch, caches[1]),
    }
    generator = torch.Generator().manual_seed(0)
    hidden = 0.05 * torch.randn(1, sequences * CONTEXT, config.hidden_size, generator=generator)
    hidden = hidden.to(torch.bfloat16)
    prompt = PackedBatch(block_tables=tables, starts=[0] * sequences, counts=[CONTEXT] * sequences)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in ways if number % 2 else reversed(ways):
            ways[name](hidden, prompt)
            start = time.perf_counter()
            for place in range(CONTEXT, CONTEXT + STEPS):
                one = PackedBatch(
                    block_tables=tables, starts=[place] * sequences, counts=[1] * sequences
                )
                ways[name](hidden[:, :sequences], one)
            if number:  # the first round warms up
                found[name].append(1e3 * (time.perf_counter() - start) / STEPS)
    return found, check_s


if __name__ == "__main__":
    sys.exit(main())
