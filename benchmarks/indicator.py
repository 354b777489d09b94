#!/usr/bin/env python3
"""Hold the indicators against what quantization really costs, and count what they take.

    benchmarks/indicator.py tables    # the indicators of the shipped model, to notebooks/data
    benchmarks/indicator.py truth     # measured loss by layer and bits
    benchmarks/indicator.py plans     # plans they choose, and their loss
    benchmarks/indicator.py report    # correlations and perplexities
    benchmarks/indicator.py cost      # seconds and memory on a random model of 105 M parameters

``truth`` and ``plans`` go through the held-out text a piece at a time and keep every piece:
stopped, they go on where they were. Everything is float32, by the kernels that a float32 run uses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from llmpq import __version__
from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.average import bits_at_average, quantizable_weights
from llmpq.assigner.decisions.overrides import Overrides
from llmpq.calibration import read_calibration
from llmpq.evals import Windows, read_windows, sweep_layers
from llmpq.indicator import INDICATORS, Random, Subject, Variance, sensitivity_table
from llmpq.models import DecoderStage
from llmpq.quant.loader import load_master, load_stage
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.families import load_model_dir
from llmpq.spec.identity import weights_digest
from llmpq.spec.tables import SensitivityTable, read_sensitivity, write_sensitivity
from llmpq.spec.workload import Workload

MODEL = Path("models/demo")
WIDTHS = (16, 8, 4, 3)
AVERAGES = (4.0, 5.0, 6.0)
SEEDS = range(20)
# A piece of text begins every so many tokens; of each, the first so many are used.
PIECE_STEP, TRUTH_TOKENS, PLAN_TOKENS = 4096, 4096, 1024
KINDS = ("divergence", "variance", "hessian")
# Layers of every kind of sensitivity, for the exhaustive search.
FEW_LAYERS, FEW_AVERAGE, FEW_WIDTHS = (0, 1, 4, 8, 10), 5.2, (8, 4, 3)
# A fast device too small for the model at 16 bits, and a slow one with room.
CLUSTER, FAST, CAP_BYTES = {"cpu": 1, "T4-16G": 1}, "T4-16G", 1_319_000_000
WORKLOAD = Workload(batch=8, prompt_tokens=64, new_tokens=64)
LATENCY_SHARES = (0.15, 0.25, 0.4)  # from the fastest to the unquantized plan
Bits = tuple[int, ...]


def main() -> int:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=[*PARTS, "trial"])
    parser.add_argument("--folder", type=Path, default=Path("notebooks/data"))
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no piece after")
    parser.add_argument("--pieces", type=int, default=10**6, help="pieces of text at most")
    parser.add_argument("--sequences", type=int, default=32, help="of 512 tokens, for cost")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="of cost")
    parser.add_argument("--memory", action="store_true", help="of cost: peaks, not seconds")
    parser.add_argument("--trial", nargs=2, metavar=("METHOD", "DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.part == "trial":
        print(json.dumps(_trial(*options.trial, options.sequences)))
        return 0
    PARTS[options.part](options)
    return 0


def make_tables(options: argparse.Namespace) -> None:
    """Score the shipped model by every indicator, with the default calibration."""
    data = read_calibration(MODEL / "calibration.txt", MODEL)
    subject = Subject(model_dir=MODEL, calibration=data)
    weights = Subject(model_dir=MODEL, calibration=None)
    runs: dict[str, tuple[Any, Subject]] = {name: (INDICATORS[name], subject) for name in KINDS}
    runs["stochastic"] = Variance(rounding="stochastic"), subject
    runs["weights"] = Variance(), weights
    runs["random"] = Random(), weights
    for name, (indicator, of) in runs.items():
        path = options.folder / f"omega_{name}.json"
        if path.exists():
            continue
        started = time.monotonic()
        scores = indicator.score(of)
        notes = {"elapsed_s": f"{time.monotonic() - started:.1f}", "threads": str(options.threads)}
        kind = "variance" if name in ("stochastic", "weights") else name
        write_sensitivity(path, sensitivity_table(of, kind, scores, notes))
        print(f"{name}: {notes['elapsed_s']} s", flush=True)


def measure_truth(options: argparse.Namespace) -> None:
    """Quantize one layer at a time."""
    count = load_model_dir(MODEL).num_layers
    layers = _Layers()
    changed = {
        f"{layer},{width}": layers.one(layer, width)
        for layer in range(count)
        for width in WIDTHS
        if width != 16
    }
    _through_text(options.folder / "truth.json", layers, changed, TRUTH_TOKENS, options)


def measure_plans(options: argparse.Namespace) -> None:
    """Let every indicator choose, and run what they chose."""
    path = options.folder / "plans.json"
    choices = options.folder / "choices.json"
    if not choices.exists():
        _write(choices, _choose(options.folder))
    found = json.loads(choices.read_text())
    layers = _Layers()
    wanted = {_text(tuple(bits)) for bits in _all_bits(found)}
    changed = {text: layers.whole(_bits(text)) for text in sorted(wanted)}
    _through_text(path, layers, changed, PLAN_TOKENS, options)


class _Layers:
    """The demo's layers at every bitwidth, loaded once."""

    def __init__(self) -> None:
        count = load_model_dir(MODEL).num_layers
        self.stages = {
            (layer, width): load_stage(
                MODEL, layer, layer + 1, [width], dtype=torch.float32, device="cpu"
            )
            for layer in range(count)
            for width in WIDTHS
        }
        self.base = self.whole((16,) * count)
        self.master = load_master(MODEL, dtype=torch.float32, device="cpu")

    def one(self, layer: int, width: int) -> DecoderStage:
        return self.stages[layer, width]

    def whole(self, bits: Bits) -> DecoderStage:
        chosen = [self.stages[layer, width].layers[0] for layer, width in enumerate(bits)]
        return DecoderStage(self.stages[0, 16].config, chosen, 0)


def _through_text(
    path: Path,
    layers: _Layers,
    changed: Mapping[str, DecoderStage],
    piece_tokens: int,
    options: argparse.Namespace,
) -> None:
    """Score all changes on piece after piece of the held-out text; every second piece first."""
    tokens = read_windows(MODEL, MODEL / "heldout.txt").token_ids
    known = json.loads(path.read_text()) if path.exists() else {**_provenance(), "pieces": {}}
    starts = list(range(0, len(tokens) - 512, PIECE_STEP))
    begun = time.monotonic()
    for start in (starts[::2] + starts[1::2])[: options.pieces]:
        if str(start) in known["pieces"]:
            continue
        if time.monotonic() - begun > options.seconds:
            break
        started = time.monotonic()
        piece = Windows.cut(tokens[start : start + piece_tokens].tolist(), rows=4)
        sweep = sweep_layers(layers.base, changed, layers.master, piece)
        known["pieces"][str(start)] = {
            "tokens": sweep.base.tokens,
            "base_nats": math.log(sweep.base.perplexity),
            "changed": {
                key: [math.log(quality.perplexity), quality.kl_to_16bit]
                for key, quality in sweep.changed.items()
            },
        }
        _write(path, known)
        print(f"{path.name}: from token {start}: {time.monotonic() - started:.0f} s", flush=True)


def pooled(known: Mapping[str, Any]) -> tuple[float, dict[str, tuple[float, float]], int]:
    """Return the base's nats a token, those and the divergence of every change, and the tokens."""
    pieces = list(known["pieces"].values())
    shares = [piece["tokens"] for piece in pieces]
    base = float(np.average([piece["base_nats"] for piece in pieces], weights=shares))
    changed = {}
    for key in pieces[0]["changed"]:
        pairs = np.array([piece["changed"][key] for piece in pieces])
        nats, divergence = np.average(pairs, axis=0, weights=shares)
        changed[key] = float(nats), float(divergence)
    return base, changed, sum(shares)


def _choose(folder: Path) -> dict[str, Any]:
    """Bits by every indicator: at an average, at a latency, and exhaustively for a few layers."""
    tables = {kind: read_sensitivity(folder / f"omega_{kind}.json") for kind in KINDS}
    of = Subject(model_dir=MODEL, calibration=None)
    for seed in SEEDS:
        tables[f"random {seed}"] = sensitivity_table(of, "random", Random(seed=seed).score(of))
    model = load_model_dir(MODEL)
    weights = quantizable_weights(model)
    averages: dict[str, dict[str, Bits]] = {}
    for average in AVERAGES:
        averages[f"{average:g}"] = {
            name: bits_at_average(np.array(table.normalised(WIDTHS)), WIDTHS, weights, average)
            for name, table in tables.items()
        }
    return {
        **_provenance(),
        "average": averages,
        "latency": _at_latencies(tables),
        "few_layers": _few_layers(tables, weights),
    }


def _at_latencies(tables: Mapping[str, SensitivityTable]) -> dict[str, Any]:
    """Of the plans within a latency, that of least omega, by every indicator."""
    any_table = tables["variance"]
    fastest = _plan(any_table, None).estimate.latency_s
    slowest = _plan(any_table, 0.0).estimate.latency_s
    found: dict[str, Any] = {}
    for share in LATENCY_SHARES:
        limit = fastest + share * (slowest - fastest)
        rows = {}
        for name, table in tables.items():
            plan = _within(table, limit)
            rows[name] = {"bits": plan.bits, "latency_s": plan.estimate.latency_s}
        found[f"{limit:.5f}"] = rows
    return found


def _within(table: SensitivityTable, limit_s: float) -> Any:
    low, high = 0.0, 8.0
    best = _plan(table, None)
    for _ in range(11):
        middle = math.sqrt(low * high) if low > 0 else high / 8
        plan = _plan(table, middle)
        if plan.estimate.latency_s <= limit_s * (1 + 1e-9):
            best, high = plan, min(middle, plan.estimate.quality)
        else:
            low = middle
    return best


def _plan(table: SensitivityTable, budget: float | None) -> Any:
    return make_plan(
        PlanRequest(
            model=load_model_dir(MODEL),
            cluster=cluster_of_types(CLUSTER),
            workload=WORKLOAD,
            dtype="bfloat16",
            kv_bits=16,
            sensitivity=table,
            quality_budget=budget,
            theta_s=0.0,
            overrides=Overrides(memory=((FAST, CAP_BYTES),)),
        )
    )


def _few_layers(tables: Mapping[str, SensitivityTable], weights: Sequence[int]) -> dict[str, Any]:
    """All undominated choices for a few layers within an average, and those of the indicators."""
    few = [weights[layer] for layer in FEW_LAYERS]
    budget = FEW_AVERAGE * sum(few)

    def bits_of(widths: Sequence[int]) -> Bits:
        chosen = dict(zip(FEW_LAYERS, widths, strict=True))
        return tuple(chosen.get(layer, 16) for layer in range(len(weights)))

    def size(widths: Sequence[int]) -> int:
        return sum(map(math.prod, zip(widths, few, strict=True)))

    fitting = [w for w in product(FEW_WIDTHS, repeat=len(few)) if size(w) <= budget]
    best = [w for w in fitting if not any(_dominates(other, w) for other in fitting)]
    chosen = {}
    for name in KINDS:
        omega = np.array(tables[name].normalised(FEW_WIDTHS))[list(FEW_LAYERS)]
        chosen[name] = bits_of(bits_at_average(omega, FEW_WIDTHS, few, FEW_AVERAGE))
    return {
        "layers": FEW_LAYERS,
        "average": FEW_AVERAGE,
        "all": [bits_of(w) for w in best],
        "chosen": chosen,
    }


def _dominates(one: Sequence[int], other: Sequence[int]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def _all_bits(choices: Mapping[str, Any]) -> Iterator[Sequence[int]]:
    for rows in choices["average"].values():
        yield from rows.values()
    for rows in choices["latency"].values():
        yield from (row["bits"] for row in rows.values())
    yield from choices["few_layers"]["all"]
    yield from choices["few_layers"]["chosen"].values()


def report(options: argparse.Namespace) -> None:
    """Print what the files say."""
    _, truth, tokens = pooled(json.loads((options.folder / "truth.json").read_text()))
    names = (*KINDS, "stochastic", "weights", "random")
    print(f"Spearman with the divergence measured on {tokens} tokens: all, at 3, 4, 8 bits")
    for name in names:
        omega = dict(read_sensitivity(options.folder / f"omega_{name}.json").omega)
        print(f"  {name:<12}" + " ".join(f"{value:7.3f}" for value in correlations(omega, truth)))
    base, found, tokens = pooled(json.loads((options.folder / "plans.json").read_text()))
    choices = json.loads((options.folder / "choices.json").read_text())
    print(f"perplexity (divergence) on {tokens} tokens, 16 bits {math.exp(base):.3f}")
    for kind in ("average", "latency"):
        for at, rows in choices[kind].items():
            lost = {
                name: found[_text(row["bits"] if kind == "latency" else row)]
                for name, row in rows.items()
            }
            drawn = [math.exp(lost[f"random {seed}"][0]) for seed in SEEDS]
            nats = fmean(lost[f"random {seed}"][1] for seed in SEEDS)
            text = ", ".join(
                f"{name} {math.exp(lost[name][0]):.3f} ({lost[name][1]:.5f})" for name in KINDS
            )
            spread = f"{fmean(drawn):.3f} +- {stdev(drawn):.3f} ({nats:.5f})"
            print(f"  {kind} {at}: {text}, random {spread}")
    few = choices["few_layers"]
    ranked = sorted(few["all"], key=lambda bits: found[_text(bits)][1])
    print(f"layers {few['layers']} at {few['average']} bits: {len(ranked)} choices, divergences")
    for name, bits in {"best": ranked[0], "worst": ranked[-1], **few["chosen"]}.items():
        print(f"  {name:<12}{found[_text(bits)][1]:.5f}  rank {ranked.index(bits) + 1}")


def correlations(
    omega: Mapping[int, Sequence[float]], truth: Mapping[str, tuple[float, float]]
) -> list[float]:
    """Spearman's rank correlation over all layers and bits, and over layers at 3, 4, 8 bits."""
    pairs = {
        width: [(value, truth[f"{layer},{width}"][1]) for layer, value in enumerate(omega[width])]
        for width in (3, 4, 8)
    }
    together = [pair for width in pairs for pair in pairs[width]]
    return [_spearman(group) for group in (together, *pairs.values())]


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    ranks = np.array(pairs).argsort(axis=0).argsort(axis=0)
    return float(np.corrcoef(ranks.T)[0, 1])


def measure_cost(options: argparse.Namespace) -> None:
    """Time every indicator on a random model, each trial in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        _make_model(model_dir)
        for number in range(options.rounds):
            for method in ("forward", *KINDS):
                command = [sys.executable, __file__, "trial", "--trial", method, folder]
                command += [f"--sequences={options.sequences}", f"--threads={options.threads}"]
                environment = dict(os.environ)
                if options.memory:  # what is freed leaves the process at once, which takes time
                    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
                done = subprocess.run(
                    command, check=True, capture_output=True, text=True, env=environment
                )
                print(f"round {number} {method}: {done.stdout.strip()}", flush=True)


def _make_model(model_dir: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  seldom needed

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=768,
        intermediate_size=2560,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model_dir)


def _trial(method: str, folder: str, sequences: int) -> dict[str, float]:
    from llmpq.calibration import LayerWalk, synthetic_calibration  # noqa: PLC0415

    model_dir = Path(folder)
    data = synthetic_calibration(8192, num_sequences=sequences, sequence_tokens=512)
    subject = Subject(model_dir=model_dir, calibration=data)
    small = synthetic_calibration(8192, num_sequences=1, sequence_tokens=64)
    warm = Subject(model_dir=model_dir, calibration=small)

    def run(of: Subject) -> None:
        if method != "forward":
            INDICATORS[method].score(of)
            return
        assert of.calibration is not None
        for layer in LayerWalk(model_dir, of.calibration, batch_tokens=of.batch_tokens):
            layer.advance()
            del layer  # before the walk loads the next

    run(warm)  # what is imported, compiled and cached on the way is not what is measured
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started, used = time.perf_counter(), time.process_time()
    run(subject)
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_s": round(time.process_time() - used, 2),
        "peak_mib": round((_memory("VmHWM") - before) / 1024),
        "layer_mib": round(4 * (4 * 768 * 768 + 3 * 768 * 2560) / 2**20, 1),
        "activations_mib": round(data.tokens * 768 * 4 / 2**20, 1),
    }


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def _provenance() -> dict[str, Any]:
    return {
        "command": " ".join(["benchmarks/indicator.py", *sys.argv[1:]]),
        "version": __version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "model": MODEL.name,
        "weights_sha256": weights_digest(MODEL),
        "text": "heldout.txt, windows of 512",
        "dtype": "float32",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def _write(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, separators=(",", ":")) + "\n")
    part.rename(path)


def _text(bits: Sequence[int]) -> str:
    return " ".join(map(str, bits))


def _bits(text: str) -> Bits:
    return tuple(map(int, text.split()))


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "tables": make_tables,
    "truth": measure_truth,
    "plans": measure_plans,
    "report": report,
    "cost": measure_cost,
}

if __name__ == "__main__":
    sys.exit(main())
