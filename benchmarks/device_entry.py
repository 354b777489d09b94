"""How well does ``llmpq-profile device`` predict layers of a model it has never seen?

Measures this machine as the command does, then times decoder layers of a random model with the
runtime's own stages, and prints predicted against measured seconds; both anew for each model,
because the speed of a shared host changes. A stage has more weights than caches hold, as the
measured device's decode: where fewer fit, decode is up to twice as fast.

    python benchmarks/device_entry.py [--cpu_isa avx2] [--budget 40] [--threads 1] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from workbench import ROOT, add_isa_option, keep_run, restrict, run_of

from llmpq.costmodel import build_costs
from llmpq.costmodel.device_fit import fit_device
from llmpq.profiler.bench import LEAST_LAYERS, LayerJob, layers_beyond_caches
from llmpq.profiler.grid import Shape
from llmpq.profiler.layer import profile_layer
from llmpq.profiler.whole_device import FORMATS, DeviceJob, measure_device
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.precision import BITS, DTYPE_BYTES, Phase
from llmpq.spec.tables import MASTER_BITS

sys.path.append(str(ROOT))

from scripts.docs_site.evidence import table

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
COLUMNS = ["phase", "bits", "batch", "tokens", "measured ms", "predicted ms", "error"]
SUMMARY = ["layers", f"within {LIMIT:.0%}", "mean error", "median", "95th percentile"]


def main() -> int:
    """Measure, predict, and print a table for each model and one of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_isa_option(parser)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of each measurement")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    restrict(options.cpu_isa)
    torch.set_num_threads(options.threads)
    tables, errors = [], []
    for title, sizes in MODELS.items():
        timings = measure_device(DeviceJob(device=torch.device("cpu"), budget_s=options.budget))
        entry = fit_device(timings, "here", "benchmarks/device_entry.py")
        formats = [one.dtype for one in timings.layers]
        dtype = max(formats, key=formats.count)
        print(f"{dtype}, {entry.flops}, {entry.memory_bytes_per_s:.4g} B/s")
        rows = compare(entry, sizes, dtype, options.threads, options.budget)
        errors += [abs(row[-1]) for row in rows]
        tables.append(
            {
                "title": title,
                "columns": COLUMNS,
                "rows": rows,
                "formats": ["", "", "", "", "{:.3f}", "{:.3f}", "{:+.1%}"],
            }
        )
        print(table(tables[-1], with_title=True), flush=True)
    worst = sorted(errors)[int(0.95 * len(errors))]
    within = sum(error <= LIMIT for error in errors)
    row = [len(errors), within, fmean(errors), median(errors), worst]
    summary = {"title": "Summary", "columns": SUMMARY, "rows": [row]}
    tables.append({**summary, "formats": ["", "", "{:.1%}", "{:.1%}", "{:.1%}"]})
    print(table(tables[-1], with_title=True))
    if options.output is not None:
        words = f"python benchmarks/device_entry.py --cpu_isa {options.cpu_isa}"
        words += f" --budget {options.budget:g} --threads {options.threads}"
        run = {**run_of(options.cpu_isa, words), "dtype": dtype, "tables": tables}
        keep_run(options.output, "device-entry", run)
    return 0


def compare(
    entry: DeviceEntry, sizes: tuple[int, int, int], dtype: str, threads: int, budget_s: float
) -> list[list[Any]]:
    """Time layers of a random model; return their rows, in ``COLUMNS``."""
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), *sizes, dtype, most_layers(*sizes))
        job = LayerJob(
            model_dir=Path(folder), bits=BITS, shapes=SHAPES, dtype=FORMATS[dtype],
            device=device, budget_s=budget_s,
        )  # fmt: skip
        found = profile_layer(job)
        model = load_model_dir(Path(folder))
    cluster = replace(cluster_of_types({"here": 1}), device_types=(entry,))
    (group,) = cluster.nodes[0].devices
    group = replace(group, threads=threads)
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], devices=(group,)),))
    costs = build_costs(
        model, cluster, dtype=dtype, kv_bits=8 * DTYPE_BYTES[dtype], latency="roofline"
    )  # type: ignore[arg-type]
    rows = []
    for one in found.samples:
        if one.bits <= MASTER_BITS:
            continue
        predicted_s = costs.layer_s(
            costs.cluster.devices[0], one.phase, one.bits, one.batch, one.tokens, 0
        )
        times = one.seconds * 1e3, predicted_s * 1e3
        error = predicted_s / one.seconds - 1
        rows.append([str(one.phase), one.bits, one.batch, one.tokens, *times, error])
    return rows


def most_layers(hidden: int, wide: int, kv_heads: int) -> int:
    """Return how many layers are timed at the fewest bits."""
    weights = hidden * (2 * hidden + 2 * 64 * kv_heads + 3 * wide)
    return max(LEAST_LAYERS, layers_beyond_caches(weights * min(BITS) / 8))


def save(folder: Path, hidden: int, wide: int, kv_heads: int, dtype: str, layers: int) -> None:
    """Write a random model."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=wide, num_attention_heads=hidden // 64,
        num_key_value_heads=kv_heads, num_hidden_layers=layers, vocab_size=1024,
        max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(FORMATS[dtype]).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
