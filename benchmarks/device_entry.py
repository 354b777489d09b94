"""How well does ``llmpq-profile device`` predict layers of a model it has never seen?

Measures this machine as the command does, then times single decoder layers of a random model with
the runtime's own stages, and prints predicted against measured seconds.

    python benchmarks/device_entry.py [--budget 40] [--threads 1]

``python -m scripts.docs_site.evidence record device-entry`` turns what it prints into results.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmpq.costmodel import build_costs
from llmpq.costmodel.device_fit import fit_device
from llmpq.profiler.bench import LayerJob
from llmpq.profiler.grid import Shape
from llmpq.profiler.layer import profile_layer
from llmpq.profiler.whole_device import FORMATS, DeviceJob, measure_device
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.precision import BITS, DTYPE_BYTES, Phase
from llmpq.spec.tables import MASTER_BITS

SHAPES = (
    *(Shape(phase=Phase.PREFILL, batch=b, tokens=s) for b, s in ((1, 64), (1, 256), (4, 128))),
    *(Shape(phase=Phase.DECODE, batch=b, tokens=s) for b, s in ((1, 128), (4, 128), (16, 256))),
)
MODELS = {
    "1024 x 2816": (1024, 2816, 8),
    "1536 x 8960": (1536, 8960, 4),
    "2048 x 5632": (2048, 5632, 16),
}
"""Hidden size, width of the MLP, and heads of keys and values."""
LIMIT = 0.15
"""Relative error that the project allows."""


def main() -> None:
    """Measure, predict and print one table a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of each measurement")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    timings = measure_device(DeviceJob(device=device, budget_s=options.budget))
    entry = fit_device(timings, "here", "benchmarks/device_entry.py")
    formats = [one.dtype for one in timings.layers]
    dtype = max(formats, key=formats.count)
    print(f"{dtype}, {entry.flops}, {entry.memory_bytes_per_s:.4g} B/s")
    errors: list[float] = []
    for title, sizes in MODELS.items():
        print(f"\n## {title}\n\n| phase | bits | shape | measured ms | predicted ms | error |")
        print("| --- | --- | --- | --- | --- | --- |")
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder), *sizes, dtype)
            job = LayerJob(
                model_dir=Path(folder), bits=BITS, shapes=SHAPES, dtype=FORMATS[dtype],
                device=device, budget_s=options.budget,
            )  # fmt: skip
            table = profile_layer(job)
            model = load_model_dir(Path(folder))
        cluster = replace(cluster_of_types({"here": 1}), device_types=(entry,))
        (group,) = cluster.nodes[0].devices
        group = replace(group, threads=options.threads)
        cluster = replace(cluster, nodes=(replace(cluster.nodes[0], devices=(group,)),))
        costs = build_costs(
            model, cluster, dtype=dtype, kv_bits=8 * DTYPE_BYTES[dtype], latency="roofline"
        )  # type: ignore[arg-type]
        for one in table.samples:
            if one.bits <= MASTER_BITS:
                continue
            predicted_s = costs.layer_s(
                costs.cluster.devices[0], one.phase, one.bits, one.batch, one.tokens, 0
            )
            error = predicted_s / one.seconds - 1
            errors.append(abs(error))
            print(
                f"| {one.phase} | {one.bits} | {one.batch} x {one.tokens} | "
                f"{one.seconds * 1e3:.3f} | {predicted_s * 1e3:.3f} | {error:+.1%} |"
            )
    worst = sorted(errors)[int(0.95 * len(errors))]
    mean = sum(errors) / len(errors)
    within = sum(error <= LIMIT for error in errors)
    print(
        f"\n## Summary\n\n| layers | within {LIMIT:.0%} | mean error | median | 95th percentile |"
    )
    print("| --- | --- | --- | --- | --- |")
    print(f"| {len(errors)} | {within} | {mean:.1%} | {median(errors):.1%} | {worst:.1%} |")


def save(folder: Path, hidden: int, wide: int, kv_heads: int, dtype: str) -> None:
    """Write a random model of six layers."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=wide, num_attention_heads=hidden // 64,
        num_key_value_heads=kv_heads, num_hidden_layers=6, vocab_size=1024,
        max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(FORMATS[dtype]).save_pretrained(folder)


if __name__ == "__main__":
    main()
