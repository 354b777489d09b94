#!/usr/bin/env python3
"""LLM-PQ's Table 1 and Figure 4 on a model: perplexity by group of layers, and by bitwidth.

    benchmarks/layer_groups.py --model models/demo --text models/demo/heldout.txt --keep FILE

Table 1 has a third of the layers at fewer bits, the others at 16. Figure 4 has all layers at one
bitwidth, or each at one of two that is drawn (``mixed4-8``, ``mixed3-4``). Perplexities are those
of ``llmpq-eval``, in float32. With ``--keep`` an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from llmpq.spec.huggingface.families import load_model_dir

GROUPS, GROUP_BITS = 3, 4
UNIFORM = (16, 8, 4, 3)
MIXED = {"mixed4-8": (4, 8), "mixed3-4": (3, 4)}
SEEDS = 2
TOGETHER = 3
"""Settings of one call, beside the model at 16 bits."""

RUN = "from llmpq.cli.commands.evals import main; raise SystemExit(main())"

Found = dict[str, dict[str, float]]


def settings(layers: int) -> dict[str, list[int]]:
    """Return the bits of every layer, by name."""
    found = {f"all {bits}": [bits] * layers for bits in UNIFORM if bits < 16}
    size = layers // GROUPS
    for first in range(0, layers, size):
        chosen = range(first, first + size)
        found[f"{first}-{first + size}"] = [
            GROUP_BITS if layer in chosen else 16 for layer in range(layers)
        ]
    for name, widths in MIXED.items():
        for seed in range(SEEDS):
            chance = random.Random(seed)
            found[f"{name} {seed}"] = [chance.choice(widths) for _ in range(layers)]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = _parse(argv)
    layers = load_model_dir(options.model).num_layers
    known: Found = json.loads(options.keep.read_text()) if options.keep.exists() else {}
    left = {name: bits for name, bits in settings(layers).items() if name not in known}
    names = list(left)
    for first in range(0, len(names), TOGETHER):
        chosen = names[first : first + TOGETHER]
        known |= _measured({name: left[name] for name in chosen}, options)
        options.keep.write_text(json.dumps(known))
    print(report(known, layers))
    return 0


def _measured(wanted: Mapping[str, Sequence[int]], options: argparse.Namespace) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for number, (name, bits) in enumerate(wanted.items()):
            path = Path(folder) / f"{number}.json"
            path.write_text(json.dumps(bits))
            files[f"layer_bits:{path}"] = name
        command = [
            *(sys.executable, "-c", RUN, "--model", str(options.model)),
            *("--text", str(options.text), "--dtype", "float32", "--threads", "1", "--json"),
            *("--max_tokens", str(options.max_tokens), "--compare", *files),
        ]
        run = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    rows: list[dict[str, Any]] = json.loads(run.stdout)["compared"]
    return {
        files.get(row["name"], "all 16"): {
            "perplexity": row["perplexity"], "divergence": row["kl_to_16bit"],
            "tokens": row["tokens"],
        }
        for row in rows
    }  # fmt: skip


def report(known: Found, layers: int) -> str:
    """Return the tables."""
    base = known["all 16"]["perplexity"]

    def cells(perplexity: float, divergence: float) -> str:
        return f"{perplexity:.3f} | {100 * (perplexity / base - 1):+.2f} % | {divergence:.4f}"

    lines = [
        f"## Table 1: a third of the layers at {GROUP_BITS} bits; {base:.3f} at 16 bits",
        "",
        "| layers | perplexity | loss | divergence |",
        "| --- | --- | --- | --- |",
    ]
    size = layers // GROUPS
    for first in range(0, layers, size):
        name = f"{first}-{first + size}"
        lines.append(f"| {name} | {cells(**_figures([known[name]]))} |")
    lines += [
        "",
        "## Figure 4: one bitwidth, or two drawn for each layer",
        "",
        "| scheme | perplexity | loss | divergence |",
        "| --- | --- | --- | --- |",
    ]
    for name in ("all 16", "all 8", "mixed4-8", "all 4", "mixed3-4", "all 3"):
        own = [known[f"{name} {seed}"] for seed in range(SEEDS)] if name in MIXED else [known[name]]
        lines.append(f"| {name} | {cells(**_figures(own))} |")
    return "\n".join(lines)


def _figures(own: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: fmean(one[key] for one in own) for key in ("perplexity", "divergence")}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--keep", type=Path, required=True, metavar="FILE")
    parser.add_argument("--max_tokens", type=int, default=32768)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
