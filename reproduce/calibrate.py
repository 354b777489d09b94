"""Fit device figures to public measurements of single decoder layers.

The measurements are a CSV with the columns ``model,machine,phase,batch_tokens,layer_ms``: tokens of
a prefill micro-batch or sequences of a decode micro-batch, and the milliseconds of ONE layer in
float16. Helix (ASPLOS '25, Apache-2.0) published such tables of LLaMA-30B and LLaMA-2-70B on T4,
V100 and A100; they are read from the path given and never copied here. Fitted per device are the
three figures that such a table can tell: compute efficiency, saturation and memory efficiency. The
launch overhead of a layer drowns in layers this large and stays as it was. What the tables do not
say, the context of a decode step, is fitted once over all devices. Nothing is written: the figures
are printed beside the catalogue's, with both errors.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.spec import catalog
from llmpq.spec.devices.figures import DeviceSpec
from llmpq.spec.huggingface.families import model_from_config
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import Phase
from reproduce.output import emit, table

FIGURES = ("compute_efficiency", "saturation_tokens", "memory_efficiency")
# A saturation at its lower limit, one token, is none.
LIMITS = {
    "compute_efficiency": (0.05, 1.0),
    "saturation_tokens": (1.0, 5000.0),
    "memory_efficiency": (0.05, 1.0),
}
MACHINES = {"t4": "T4-16G", "v100": "V100-32G", "a100": "A100-40G"}
PROMPT_TOKENS = 512
"""Length of a prompt in prefill: not stated, and attention is a few percent of a layer."""
CONTEXTS = tuple(range(300, 1001, 100))
"""Candidates for the context of a decode step."""
MAX_SEQUENCES = 64
"""Decode micro-batches fitted: where reading weights and keys decides, as it does at 32."""

_LLAMA_30B = {
    "model_type": "llama", "hidden_size": 6656, "num_hidden_layers": 60, "num_attention_heads": 52,
    "intermediate_size": 17920, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured layer; ``size`` is tokens in prefill and sequences in decode."""

    model: ModelSpec
    phase: Phase
    size: int
    seconds: float
    quantum_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A device before and after, with relative errors (mean, 95th percentile) by phase."""

    before: DeviceSpec
    after: DeviceSpec
    errors_before: dict[Phase, tuple[float, float]]
    errors_after: dict[Phase, tuple[float, float]]
    samples: int


def main(argv: Sequence[str] | None = None) -> int:
    """Fit and print; return 0."""
    parser = argparse.ArgumentParser(prog="reproduce.calibrate", description=__doc__)
    parser.add_argument("measurements", type=Path, metavar="FILE.csv")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    options = parser.parse_args(argv)
    samples = {name: read_samples(options.measurements, name) for name in MACHINES}
    specs = {name: catalog.device(kind) for name, kind in MACHINES.items()}
    context, fits = fit_all(samples, specs)
    emit(_text(context, fits), _record(context, fits), as_json=options.json)
    return 0


def read_samples(path: Path, machine: str) -> list[Sample]:
    """Return the measurements of one machine, without the empty micro-batch."""
    models = {
        "llama1_30b": model_from_config(_LLAMA_30B, "LLaMA-30B", "calibration"),
        "llama2_70b": catalog.model("meta-llama/Llama-2-70b-hf"),
    }
    phases = {"prompt": Phase.PREFILL, "decode": Phase.DECODE}
    samples = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            size, milliseconds = int(float(row["batch_tokens"])), float(row["layer_ms"])
            phase = phases[row["phase"]]
            too_many = phase is Phase.DECODE and size > MAX_SEQUENCES
            if row["machine"] != machine or milliseconds == 0 or too_many:
                continue
            samples.append(
                Sample(
                    model=models[row["model"]],
                    phase=phase,
                    size=size,
                    seconds=milliseconds * 1e-3,
                    # The tables are rounded: decode to a tenth of a millisecond, prefill to one.
                    quantum_s=1e-4 if phase is Phase.DECODE else 1e-3,
                )
            )
    return samples


def fit_all(
    samples: dict[str, list[Sample]], specs: dict[str, DeviceSpec]
) -> tuple[int, list[Fit]]:
    """Fit every device at every candidate context; return the best context and its fits."""
    best: tuple[float, int, dict[str, DeviceSpec]] | None = None
    for context in CONTEXTS:
        fitted = {name: fit(samples[name], specs[name], context) for name in samples}
        total = sum(loss(samples[name], fitted[name], context) for name in samples)
        if best is None or total < best[0]:
            best = total, context, fitted
    assert best is not None
    _, context, fitted = best
    return context, [
        Fit(
            before=specs[name],
            after=fitted[name],
            errors_before=errors(samples[name], specs[name], context),
            errors_after=errors(samples[name], fitted[name], context),
            samples=len(samples[name]),
        )
        for name in samples
    ]


def fit(samples: Sequence[Sample], spec: DeviceSpec, context: int) -> DeviceSpec:
    """Return the device with the four figures that explain its samples best."""

    def cost(logs: Sequence[float]) -> float:
        return loss(samples, _with_figures(spec, logs), context)

    start = [math.log(max(getattr(spec, name), LIMITS[name][0])) for name in FIGURES]
    return _with_figures(spec, pattern_search(cost, start))


def loss(samples: Sequence[Sample], spec: DeviceSpec, context: int) -> float:
    """Return the mean squared relative error; a phase counts as much as the other.

    A difference of one rounding step of the table is no error of the model's: the step is added to
    what the difference is divided by.
    """
    predicted = predict(samples, spec, context)
    measured = np.array([sample.seconds for sample in samples])
    floor = np.array([sample.quantum_s for sample in samples])
    relative = (predicted - measured) / (measured + floor)
    is_prefill = np.array([sample.phase is Phase.PREFILL for sample in samples])
    return float(np.mean(relative[is_prefill] ** 2) + np.mean(relative[~is_prefill] ** 2))


def predict(samples: Sequence[Sample], spec: DeviceSpec, context: int) -> np.ndarray:
    """Return the roofline's seconds of every sample ``[n]``."""
    roofs = {
        sample.model.name: RooflineLatencyModel(
            model=sample.model, device=spec, dtype="float16", kv_bits=16
        )
        for sample in samples
    }
    seconds = []
    for sample in samples:
        roof = roofs[sample.model.name]
        if sample.phase is Phase.DECODE:
            seconds.append(roof.layer_s(Phase.DECODE, 16, sample.size, context, 0))
            continue
        prompts = max(1, round(sample.size / PROMPT_TOKENS))
        seconds.append(roof.layer_s(Phase.PREFILL, 16, prompts, sample.size / prompts, 0))
    return np.array(seconds)


def errors(
    samples: Sequence[Sample], spec: DeviceSpec, context: int
) -> dict[Phase, tuple[float, float]]:
    """Return mean and 95th percentile of the relative error, by phase."""
    predicted = predict(samples, spec, context)
    measured = np.array([sample.seconds for sample in samples])
    relative = np.abs(predicted / measured - 1)
    found = {}
    for phase in Phase:
        chosen = relative[[sample.phase is phase for sample in samples]]
        found[phase] = float(chosen.mean()), float(np.quantile(chosen, 0.95))
    return found


def pattern_search(cost: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """Minimise by steps along the axes, halved until they are half a percent (logarithms)."""
    best, step = list(start), 0.4
    best_cost = cost(best)
    while step > 0.005:
        improved = False
        for axis in range(len(best)):
            for sign in (1, -1):
                trial = list(best)
                trial[axis] += sign * step
                trial_cost = cost(trial)
                if trial_cost < best_cost:
                    best, best_cost, improved = trial, trial_cost, True
        if not improved:
            step /= 2
    return best


def _with_figures(spec: DeviceSpec, logs: Sequence[float]) -> DeviceSpec:
    figures = {}
    for name, value in zip(FIGURES, logs, strict=True):
        low, high = LIMITS[name]
        figures[name] = min(high, max(low, math.exp(value)))
    if figures["saturation_tokens"] == LIMITS["saturation_tokens"][0]:
        figures["saturation_tokens"] = 0.0
    return replace(spec, **figures)


def _text(context: int, fits: Sequence[Fit]) -> str:
    rows = []
    for item in fits:
        for label, spec, wrong in (
            ("before", item.before, item.errors_before),
            ("after", item.after, item.errors_after),
        ):
            figures = [f"{getattr(spec, name):.3g}" for name in FIGURES]
            shares = [
                f"{100 * mean:.1f} / {100 * p95:.0f}"
                for mean, p95 in (wrong[Phase.PREFILL], wrong[Phase.DECODE])
            ]
            rows.append([spec.type, label, *figures, *shares])
    head = ["device", "", *FIGURES, "prefill error, mean / p95 %", "decode error, mean / p95 %"]
    note = f"Decode context fitted over all devices: {context} tokens."
    return f"## Calibration\n\n{table(head, rows)}\n\n{note}"


def _record(context: int, fits: Sequence[Fit]) -> dict[str, object]:
    return {
        "context_tokens": context,
        "devices": [
            {
                "type": item.before.type,
                "samples": item.samples,
                "before": {name: getattr(item.before, name) for name in FIGURES},
                "after": {name: getattr(item.after, name) for name in FIGURES},
                "errors_before": {str(k): v for k, v in item.errors_before.items()},
                "errors_after": {str(k): v for k, v in item.errors_after.items()},
            }
            for item in fits
        ],
    }


if __name__ == "__main__":
    raise SystemExit(main())
