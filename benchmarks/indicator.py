#!/usr/bin/env python3
"""Hold the indicators against what quantization really costs, and count what they take.

    benchmarks/indicator.py tables    # the indicators of the shipped model, to notebooks/data
    benchmarks/indicator.py truth     # measured loss by layer and bits
    benchmarks/indicator.py choices   # plans they choose
    benchmarks/indicator.py plans     # the loss of those
    benchmarks/indicator.py report    # correlations and perplexities
    benchmarks/indicator.py seeds     # what twenty random tables say of all random tables
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
from layer_sweep import Sweep, sweep_layers
from torch import Tensor

from llmpq import __version__
from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.constraints.fixed_bits import bits_at_average, quantizable_weights
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.calibration import read_calibration
from llmpq.evals.evaluate import Tally, add_states
from llmpq.evals.windows import WindowBatch, Windows, read_windows
from llmpq.indicator import INDICATORS, IndicatorInput, Random, Variance, sensitivity_table
from llmpq.models import DecoderStage
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.tables import (
    SensitivityTable,
    read_sensitivity,
    weights_digest,
    write_sensitivity,
)
from llmpq.spec.workload import Workload

MODEL = Path("models/demo")
WIDTHS = (16, 8, 4, 3)
AVERAGES = (4.0, 5.0, 6.0)
SEEDS = range(20)
# The text is gone through in pieces of so many tokens: whole windows of 512, four at a time.
PIECE_TOKENS, ROWS = 4096, 4
KINDS = ("divergence", "variance", "hessian")
# Bits by the measured losses themselves: the best choice without measuring whole plans.
TRUTH = "truth"
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
    parser.add_argument("--seeds", type=int, default=1000, help="of seeds, a multiple of 20")
    parser.add_argument("--rounds", type=int, default=1, help="of cost")
    parser.add_argument("--memory", action="store_true", help="of cost: peaks, not seconds")
    parser.add_argument("--trial", nargs=2, metavar=("METHOD", "DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.part == "trial":
        method, folder = options.trial
        print(json.dumps(_trial(method, folder, options.sequences)))
        return 0
    PARTS[options.part](options)
    return 0


def make_tables(options: argparse.Namespace) -> None:
    """Score the shipped model by every indicator, with the default calibration."""
    data = read_calibration(MODEL / "calibration.txt", MODEL)
    subject = IndicatorInput(model_dir=MODEL, calibration=data)
    weights = IndicatorInput(model_dir=MODEL, calibration=None)
    runs: dict[str, tuple[Any, IndicatorInput]] = {
        name: (INDICATORS[name], subject) for name in KINDS
    }
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
    layers = _Layers()
    changed = {_text(key): stage for key, stage in layers.stages.items() if key[1] != 16}

    def score(keys: Sequence[str], piece: Windows) -> Sweep[str]:
        wanted = {key: changed[key] for key in keys}
        return sweep_layers(layers.whole((16,) * layers.count), wanted, layers.master, piece)

    _through_text(options.folder / "truth.json", list(changed), score, options)


def choose_plans(options: argparse.Namespace) -> None:
    """Let every indicator choose, and the truth itself."""
    _write(options.folder / "choices.json", _choose(options.folder))


def measure_plans(options: argparse.Namespace) -> None:
    """Run what was chosen; a plan that several chose is run once."""
    choices = json.loads((options.folder / "choices.json").read_text())
    plans = sorted({_text(bits) for bits in _all_bits(choices)})
    _through_text(options.folder / "plans.json", plans, _Layers().score, options)


class _Layers:
    """The demo's layers at every bitwidth, loaded once."""

    def __init__(self) -> None:
        self.count = load_model_dir(MODEL).num_layers
        self.stages = {
            (layer, width): load_stage(
                MODEL, layer, layer + 1, [width], dtype=torch.float32, device="cpu"
            )
            for layer in range(self.count)
            for width in WIDTHS
        }
        self.master = load_master(MODEL, dtype=torch.float32, device="cpu")

    def whole(self, bits: Bits) -> DecoderStage:
        chosen = [self.stages[layer, width].layers[0] for layer, width in enumerate(bits)]
        return DecoderStage(self.stages[0, 16].config, chosen, 0)

    def score(self, plans: Sequence[str], piece: Windows) -> Sweep[str]:
        """Score whole models; those that begin alike are one until they part."""
        base, tallies = Tally(), {plan: Tally() for plan in plans}
        for batch in piece.batches():
            expected = self._outputs(["16 " * self.count], batch).popitem()[1]
            finals = {**self._outputs(plans, batch), "": expected}
            known = {**tallies, "": base}
            add_states(self.master, batch.targets, finals, (self.master, expected), known)
        changed = {plan: tally.quality() for plan, tally in tallies.items()}
        return Sweep(base=base.quality(), changed=changed)

    def _outputs(self, plans: Sequence[str], batch: WindowBatch) -> dict[str, Tensor]:
        states = [self.master.embed(batch.inputs, batch.positions)]
        before: Bits = ()
        finals = {}
        for plan in sorted(plans):
            bits = _bits(plan)
            pairs = enumerate(zip(before, bits, strict=False))
            alike = next((layer for layer, (a, b) in pairs if a != b), len(before))
            del states[alike + 1 :]
            for key in list(enumerate(bits))[alike:]:
                states.append(self.stages[key].run_whole(states[-1]))
            finals[plan], before = states[-1], bits
        return finals


def _through_text(
    path: Path,
    keys: Sequence[str],
    score: Callable[[Sequence[str], Windows], Sweep[str]],
    options: argparse.Namespace,
) -> None:
    """Score what is not yet known on piece after piece of the held-out text."""
    tokens = read_windows(MODEL, MODEL / "heldout.txt").token_ids
    known = json.loads(path.read_text()) if path.exists() else {**_provenance(), "pieces": {}}
    starts = list(range(0, len(tokens), PIECE_TOKENS))
    begun = time.monotonic()
    for start in (starts[::2] + starts[1::2])[: options.pieces]:
        found = known["pieces"].setdefault(str(start), {"tokens": 0, "changed": {}})
        missing = [key for key in keys if key not in found["changed"]]
        if not missing:
            continue
        if time.monotonic() - begun > options.seconds:
            break
        started = time.monotonic()
        piece = Windows.cut(tokens[start : start + PIECE_TOKENS].tolist(), rows=ROWS)
        sweep = score(missing, piece)
        found["tokens"] = sweep.base.tokens
        found["base_nats"] = _round(math.log(sweep.base.perplexity))
        for key, quality in sweep.changed.items():
            nats = math.log(quality.perplexity)
            found["changed"][key] = [_round(nats), _round(quality.kl_to_16bit or 0.0)]
        _write(path, known)
        print(f"{path.name}: from token {start}: {time.monotonic() - started:.0f} s", flush=True)


def _round(nats: float) -> float:
    return float(f"{nats:.9g}")


def pooled(known: Mapping[str, Any]) -> tuple[float, dict[str, tuple[float, float]], int]:
    """Return the base's nats a token, those and the divergence of every change, and the tokens."""
    pieces = [piece for piece in known["pieces"].values() if piece["tokens"]]
    shares = [piece["tokens"] for piece in pieces]
    base = float(np.average([piece["base_nats"] for piece in pieces], weights=shares))
    changed = {}
    for key in set(pieces[0]["changed"]).intersection(*(piece["changed"] for piece in pieces)):
        pairs = np.array([piece["changed"][key] for piece in pieces])
        nats, divergence = np.average(pairs, axis=0, weights=shares)
        changed[key] = float(nats), float(divergence)
    return base, changed, sum(shares)


def _choose(folder: Path) -> dict[str, Any]:
    """Bits by every indicator: at an average, at a latency, and exhaustively for a few layers."""
    tables = {kind: read_sensitivity(folder / f"omega_{kind}.json") for kind in KINDS}
    of = IndicatorInput(model_dir=MODEL, calibration=None)
    for seed in SEEDS:
        tables[f"random {seed}"] = sensitivity_table(of, "random", Random(seed=seed).score(of))
    tables[TRUTH] = sensitivity_table(of, "divergence", _measured(folder))
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


def _measured(folder: Path) -> dict[int, tuple[float, ...]]:
    """The measured divergences as an indicator would give them."""
    truth = _truth(folder)
    count = load_model_dir(MODEL).num_layers
    return {
        width: tuple(truth[_text((layer, width))][1] for layer in range(count))
        for width in WIDTHS
        if width != 16
    }


def _truth(folder: Path) -> dict[str, tuple[float, float]]:
    return pooled(json.loads((folder / "truth.json").read_text()))[1]


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
    for name in (*KINDS, TRUTH):
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
    plans = json.loads((options.folder / "plans.json").read_text())
    base, found, tokens = pooled(plans)
    choices = json.loads((options.folder / "choices.json").read_text())
    print(f"perplexity (divergence) on {tokens} tokens, 16 bits {math.exp(base):.3f}")
    for kind in ("average", "latency"):
        for at, rows in choices[kind].items():
            chosen = {
                name: _text(row["bits"] if kind == "latency" else row) for name, row in rows.items()
            }
            print(f"  {kind} {at}:")
            _report_setting(chosen, found, plans)
    few = choices["few_layers"]
    ranked = sorted(few["all"], key=lambda bits: found[_text(bits)][1])
    print(f"layers {few['layers']} at {few['average']} bits: {len(ranked)} choices, divergences")
    for name, bits in {"best": ranked[0], "worst": ranked[-1], **few["chosen"]}.items():
        print(f"  {name:<12}{found[_text(bits)][1]:.5f}  rank {ranked.index(bits) + 1}")


def _report_setting(
    chosen: Mapping[str, str],
    found: Mapping[str, tuple[float, float]],
    plans: Mapping[str, Any],
) -> None:
    drawn = [math.exp(found[chosen[f"random {seed}"]][0]) for seed in SEEDS]
    nats = [found[chosen[f"random {seed}"]][1] for seed in SEEDS]
    bound = fmean(drawn) - stdev(drawn)
    print(
        f"    random {fmean(drawn):.3f} +- {stdev(drawn):.3f}, best {min(drawn):.3f}, divergence "
        f"{fmean(nats):.5f} +- {stdev(nats):.5f}, best {min(nats):.5f}; less a deviation "
        f"{bound:.3f}, {fmean(nats) - stdev(nats):.5f}"
    )
    for name in (*KINDS, TRUTH):
        perplexity = math.exp(found[chosen[name]][0])
        ours, error = difference(plans, chosen[name], chosen["divergence"])
        print(
            f"    {name:<12}{perplexity:.3f} ({found[chosen[name]][1]:.5f})"
            f"{'' if perplexity <= bound else ' above the bound'}, {100 * ours:+.2f} +- "
            f"{100 * error:.2f} % of divergence's; {chosen[name]}"
        )


def difference(plans: Mapping[str, Any], one: str, other: str) -> tuple[float, float]:
    """Mean difference in nats a token over pieces of text, and its standard error."""
    pieces = [piece for piece in plans["pieces"].values() if piece["tokens"]]
    apart = [piece["changed"][one][0] - piece["changed"][other][0] for piece in pieces]
    return fmean(apart), stdev(apart) / math.sqrt(len(apart))


def correlations(
    omega: Mapping[int, Sequence[float]], truth: Mapping[str, tuple[float, float]]
) -> list[float]:
    """Spearman's rank correlation over all layers and bits, and over layers at 3, 4, 8 bits."""
    pairs = {
        width: [(value, truth[f"{layer} {width}"][1]) for layer, value in enumerate(omega[width])]
        for width in (3, 4, 8)
    }
    together = [pair for width in pairs for pair in pairs[width]]
    return [_spearman(group) for group in (together, *pairs.values())]


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    ranks = np.array(pairs).argsort(axis=0).argsort(axis=0)
    return float(np.corrcoef(ranks.T)[0, 1])


def forecast_seeds(options: argparse.Namespace) -> None:
    """Forecast the perplexity at equal memory with many random tables.

    A plan's divergence is taken to be the sum of what its layers lose alone, as measured.
    """
    base, found, _ = pooled(json.loads((options.folder / "plans.json").read_text()))
    alone = {key: lost for key, (_, lost) in _truth(options.folder).items()}
    choices = json.loads((options.folder / "choices.json").read_text())
    weights = quantizable_weights(load_model_dir(MODEL))

    def lost(bits: Sequence[int]) -> float:
        keys = (_text(key) for key in enumerate(bits) if key[1] != 16)
        return sum(alone[key] for key in keys)

    ratios = [found[key][1] / lost(_bits(key)) for key in found]
    print(
        f"measured over summed divergence of {len(ratios)} plans: {min(ratios):.2f} to "
        f"{max(ratios):.2f}, median {np.median(ratios):.3f}"
    )
    of = IndicatorInput(model_dir=MODEL, calibration=None)
    for average in AVERAGES:
        drawn = []
        for seed in range(options.seeds):
            table = sensitivity_table(of, "random", Random(seed=seed).score(of))
            omega = np.array(table.normalised(WIDTHS))
            drawn.append(lost(bits_at_average(omega, WIDTHS, weights, average)))
        scores = np.exp(base + np.array(drawn)).reshape(-1, len(SEEDS))
        bounds = scores.mean(axis=1) - scores.std(axis=1, ddof=1)
        print(
            f"average {average:g}: {scores.mean():.3f} +- {scores.std():.3f}; the mean "
            f"less a deviation {scores.mean() - scores.std():.3f}, of {len(SEEDS)} seeds "
            f"{np.median(bounds):.3f} ({np.quantile(bounds, 0.05):.3f} to "
            f"{np.quantile(bounds, 0.95):.3f} in nine of ten)"
        )
        for name, bits in choices["average"][f"{average:g}"].items():
            if not name.startswith("random"):
                better = np.mean(np.array(drawn) < lost(bits) - 1e-12)
                print(f"    {name:<12}{math.exp(base + lost(bits)):.3f}, better: {better:.1%}")


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
    subject = IndicatorInput(model_dir=model_dir, calibration=data)
    small = synthetic_calibration(8192, num_sequences=1, sequence_tokens=64)
    warm = IndicatorInput(model_dir=model_dir, calibration=small)

    def run(of: IndicatorInput) -> None:
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
        "command": f"benchmarks/indicator.py {sys.argv[1]}",
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
    "choices": choose_plans,
    "plans": measure_plans,
    "report": report,
    "seeds": forecast_seeds,
    "cost": measure_cost,
}

if __name__ == "__main__":
    sys.exit(main())
