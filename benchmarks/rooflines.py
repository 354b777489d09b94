"""How far are the rooflines of catalogue devices from public measurements, by family?

A family is the devices that share efficiencies: one device is fitted, or several together, and the
others are ``like`` them. Seven figures a family are fitted to all of its tables at 16 bits
(``FIGURES``): the sum over tables and phases of the mean absolute logarithm of forecast over
measured is minimised. Then, on all points of the tables, the stated deviation is read off: measured
seconds are at most ``faster`` below and ``slower`` above the forecast for at least four points of
five, by phase. Fewer bits are compared likewise, by family and bitwidth, with factors of their own.

    python -m benchmarks.rooflines [--fit] [--fit_few] [--record] [--vidur FOLDER]
        [--llmservingsim FOLDER]

The tables: speeds of whole models (``benchmarks/scoreboards.py``); the installed
``aiconfigurator-core`` (Apache-2.0); ``--data`` with Helix's layers (Apache-2.0), SamuLLM's
iterations (Apache-2.0) and LLMServingSim's RTX 4090 (MIT); ``data/profiling/compute`` of a clone of
microsoft/vidur (MIT); and ``profiler`` of a clone of casys-kaist/LLMServingSim (MIT). Absent tables
are named and left out. Deviations are printed as JSON, with ``--fit`` and ``--fit_few`` after the
figures that they follow from, else those of the catalogue as it is; ``--record`` writes
``benchmarks/results/rooflines.json``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.fidelity import RESULTS, add_data_options, whole_model, write_tables
from benchmarks.scoreboards import published
from llmpq.costmodel.importers.import_table import (
    VIDUR_PRODUCTS,
    VIDUR_SMALL,
    ImportRequest,
    import_table,
)
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.devices.figures import UNMEASURED, DeviceSpec
from llmpq.spec.huggingface.families import model_from_config
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample
from reproduce.calibrate import pattern_search

FIGURES = {
    "compute_efficiency": (0.05, 1.0),
    "saturation_tokens": (1.0, 2000.0),
    "memory_efficiency": (0.05, 0.95),
    "decode_efficiency": (0.05, 2.0),
    "overlap_loss": (0.01, 1.0),
    "attention_efficiency": (0.02, 1.5),
    "attention_memory_efficiency": (0.02, 1.1),
    "layer_overhead_s": (2e-5, 1e-3),
}
"""What is fitted, and its limits. A saturation of one token is none."""
DEVIATIONS = ("prefill_deviation", "decode_deviation")
COVERED = 0.8
"""Share of the points that the stated deviation covers."""
STATED_STEP, LEAST_STATED = 0.05, 0.15
"""Deviations are stated in multiples of the first, rounded up, and at least as the second: other
cards, models and versions of software differ by more than one table shows."""
LEAST_POINTS = 4
"""Fewest points of a family and phase that more than a factor of two is stated of."""
FITTED_POINTS = 120
"""Points of a table and phase that the figures are fitted to, evenly chosen; all are compared."""
CONTEXT, PROMPT = 512, 512
"""Tokens of a context and of a prompt where a table does not state them: Helix's."""
FEW_ROWS = 256
"""Most rows of products alone that count as a decode step too."""
WIDE, FEW_BITS_HEAD = 16, 8
"""Bits that fewer are compared with, and of the head of models at fewer."""
LEAST_PROMPT = 16
"""Fewest rows of products alone that count as a prompt."""

RATIOS = ("{:.2f}, {:.2f}, {:.2f}", "{:.2f} to {:.2f}")
"""Formats of percentiles, and of what is stated."""
SpeedUps = Mapping[str, tuple[float | None, ...]]
"""By model: how much faster a layer is than at 16 bits, for each of ``SPEED_UP_SHAPES``."""
SPEED_UP_SHAPES = (
    (Phase.PREFILL, 8, 1024), (Phase.DECODE, 1, 512), (Phase.DECODE, 32, 512),
    (Phase.DECODE, 128, 512),
)  # fmt: skip
SPEED_UPS: Mapping[str, Mapping[int, SpeedUps]] = {
    "A100-80G": {
        4: {
            "meta-llama/Llama-3.1-8B": (0.99, 1.98, 1.45, 1.04),
            "meta-llama/Meta-Llama-3-70B": (0.99, 2.97, 2.46, 1.17),
        },
        8: {
            "meta-llama/Llama-3.1-8B": (1.01, 1.55, 1.32, 1.07),
            "meta-llama/Meta-Llama-3-70B": (1.01, 1.94, 1.74, 1.19),
        },
    },
    "L40S": {4: {"meta-llama/Llama-3.1-8B": (1.21, 3.43, 2.19, 1.43)}},
    "H200": {4: {"meta-llama/Llama-3.1-8B": (None, 1.71, 1.01, 0.96)}},
}
"""Of weight-only kernels over bfloat16, measured, by device and bits (aiconfigurator-core)."""
FACTORS = ("compute", "stream", "thin")
"""What is fitted to them, of ``PrecisionCost``."""
PACKED_FACTORS = ("compute", "stream")
"""What is fitted to whole models at one prompt and one answer."""
PACKED = {"overhead": 1.0, "dequantize": 0.0, "thin": 1.0}
"""Of kernels that multiply by packed weights as they lie."""

DATABASE_MODELS = (
    "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-13b-hf",
    "meta-llama/Llama-3.1-70B",
)  # fmt: skip
_LLAMA_30B = {
    "model_type": "llama", "hidden_size": 6656, "num_hidden_layers": 60, "num_attention_heads": 52,
    "intermediate_size": 17920, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
HELIX_MODELS = ("llama1_30b", "llama2_70b")
SAMULLM_MODELS = {
    "Llama-2-13b-hf": "meta-llama/Llama-2-13b-hf",
    "vicuna-13b-v1.5": "meta-llama/Llama-2-13b-hf",
    "mpt-7b-chat": "mosaicml/mpt-7b",
}
VIDUR_MODELS = (
    "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-70b-hf", "codellama/CodeLlama-34b-hf",
)  # fmt: skip
LLAMA_8B = "meta-llama/Llama-3.1-8B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Measured layers, or whole iterations, of one model on one device."""

    name: str
    device: str
    model: ModelSpec
    samples: tuple[LatencySample, ...]
    is_whole: bool = False
    bits: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Devices that share efficiencies, and the readers of their tables.

    ``kept`` are figures that the tables say nothing of: launches beside layers of large models, or
    attention beside products alone.
    """

    name: str
    kept: tuple[str, ...] = ()
    readers: tuple[Callable[[argparse.Namespace], Iterator[Table]], ...]


Array = npt.NDArray[np.float64]
Ratios = dict[Phase, list[list[float]]]
"""Measured over forecast seconds, by phase and table."""
Figures = Mapping[str, float]
Costs = Mapping[int, Figures]
"""Factors by bitwidth."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or fit; return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rooflines", description=__doc__)
    add_data_options(parser)
    parser.add_argument("--vidur", type=Path, help="data/profiling/compute of microsoft/vidur")
    parser.add_argument("--llmservingsim", type=Path, help="profiler of casys-kaist/LLMServingSim")
    parser.add_argument("--fit", action="store_true", help="fit the figures and print them")
    parser.add_argument("--fit_few", action="store_true", help="the same of fewer than 16 bits")
    parser.add_argument("--only", metavar="FAMILY", help="one family alone")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    few: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    fitted: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        tables = [] if options.only not in (None, family.name) else read(family, options)
        wide = [table for table in tables if table.bits == WIDE]
        figures = fit(wide, family.kept) if options.fit and wide else {}
        costs = fit_few(tables, figures) if options.fit_few else {}
        for bits in dict.fromkeys(table.bits for table in tables):
            own = [table for table in tables if table.bits == bits]
            ratios = compared(own, figures, costs)
            samples += report(f"{family.name}, {bits} bits", own, ratios, figures, costs)
            (rows if bits == WIDE else few).append(row_of(family, own, ratios))
            found = fitted.setdefault(family.name, dict(figures))
            found[f"{bits} bits"] = costs.get(bits, {}) | {
                f"{phase.value}_deviation": stated(one) for phase, one in ratios.items()
            }
        for device in SPEED_UPS if options.fit else ():
            if device in {table.device for table in tables}:
                fitted[family.name][device] = fit_speed_ups(device, figures)
    print(json.dumps(fitted, indent=1))
    if options.record:
        write_tables(
            RESULTS / "rooflines.json",
            "python -m benchmarks.rooflines --record --vidur VIDUR --llmservingsim LLMSERVINGSIM",
            [
                {
                    "title": "By family",
                    "rows": rows,
                    "note": "Measured over forecast seconds, at 16 bits: percentiles 10, 50 and "
                    "90; stated: what the catalogue states of four points in five; within: percent "
                    "of the points that are.",
                    "formats": ["", "", *["", *RATIOS, "{:.0f}"] * len(Phase)],
                },
                {
                    "title": "Fewer bits by family",
                    "rows": few,
                    "note": "The same at fewer bits, of whole models: one prompt, one answer. The "
                    f"factors are fitted to these points; of fewer than {LEAST_POINTS} a factor of "
                    "two is stated.",
                    "formats": ["", "", "", *["", *RATIOS, "{:.0f}"] * len(Phase)],
                },
            ],
            samples,
        )
    return 0


def read(family: Family, options: argparse.Namespace) -> list[Table]:
    """Return the tables of a family that are there; the others are named."""
    found: list[Table] = []
    for reader in family.readers:
        try:
            found += reader(options)
        except (SpecError, FileNotFoundError) as error:
            print(f"left out: {family.name}: {error}", file=sys.stderr)
    return found


def report(
    title: str, tables: Sequence[Table], ratios: Ratios, figures: Figures, costs: Costs
) -> list[dict[str, Any]]:
    """Print percentiles of a family and of its tables; return what is recorded of the tables."""
    print(f"{title:35}", *(words(phase, pooled(one)[0]) for phase, one in ratios.items()))
    samples = []
    for table in tables:
        own = {phase: one for phase, (one,) in compared([table], figures, costs).items()}
        samples.append(summary_of(table, own))
        print(f"    {table.name:50}", *(words(phase, one) for phase, one in own.items()))
    return samples


def compared(tables: Iterable[Table], figures: Figures, costs: Costs) -> Ratios:
    """Return measured over forecast seconds of all points, by phase and table."""
    found: Ratios = {phase: [] for phase in Phase}
    for table in tables:
        own: dict[Phase, list[float]] = {}
        spec = device_of(table, figures, costs.get(table.bits, {}))
        for phase, measured, forecast in points(table, spec, table.samples):
            own.setdefault(phase, []).append(measured / forecast)
        for phase, ratios in own.items():
            found[phase].append(ratios)
    return {phase: ratios for phase, ratios in found.items() if ratios}


def device_of(table: Table, figures: Figures, factors: Figures) -> DeviceSpec:
    """Return a table's device, ``figures`` and ``factors`` of its bitwidth replacing some."""
    return with_factors(replace(catalog.device(table.device), **figures), table.bits, factors)


def points(
    table: Table, spec: DeviceSpec, samples: Iterable[LatencySample]
) -> Iterator[tuple[Phase, float, float]]:
    """Yield phase, measured and forecast seconds of samples on a device."""
    roof = RooflineLatencyModel(model=table.model, device=spec, dtype="bfloat16", kv_bits=16)
    kinds = Counter(table.model.layer_kinds) if table.is_whole else {0: 1}
    head_bits = WIDE if table.bits == WIDE else FEW_BITS_HEAD
    for one in samples:
        asked = (one.phase, one.bits, one.batch, one.tokens)
        forecast = sum(count * roof.layer_s(*asked, kind) for kind, count in kinds.items())
        if table.is_whole:
            forecast += roof.master_s(one.phase, one.batch, one.tokens, head_bits)
        yield one.phase, one.seconds, forecast


def fit_few(tables: Sequence[Table], figures: Figures) -> Costs:
    """Return the factors of every bitwidth below 16 that tables have."""
    return {
        bits: fit_packed([table for table in tables if table.bits == bits], figures)
        for bits in dict.fromkeys(table.bits for table in tables)
        if bits != WIDE
    }


def fit(tables: Sequence[Table], kept: Sequence[str] = ()) -> dict[str, float]:
    """Return the figures with the least error; every table and phase counts as much."""
    names = [name for name in FIGURES if name not in kept]
    chosen = [(table, part) for table in tables for part in thinned(table)]

    def cost(logs: Sequence[float]) -> float:
        figures = figures_of(names, logs)
        return mean_error((device_of(table, figures, {}), table, part) for table, part in chosen)

    start = catalog.device(tables[0].device)
    logs = [math.log(max(getattr(start, name), FIGURES[name][0])) for name in names]
    return figures_of(names, pattern_search(cost, logs))


def fit_packed(tables: Sequence[Table], figures: Figures) -> dict[str, float]:
    """Return the factors of one bitwidth with the least error; tables and phases count as much."""
    chosen = [(table, part) for table in tables for part in thinned(table)]

    def cost(logs: Sequence[float]) -> float:
        factors = PACKED | factors_of(PACKED_FACTORS, logs)
        return mean_error(
            (device_of(table, figures, factors), table, part) for table, part in chosen
        )

    start = catalog.device(tables[0].device).precision_cost(tables[0].bits)
    logs = [math.log(getattr(start, name)) for name in PACKED_FACTORS]
    return PACKED | factors_of(PACKED_FACTORS, pattern_search(cost, logs))


def mean_error(parts: Iterable[tuple[DeviceSpec, Table, Sequence[LatencySample]]]) -> float:
    """Return the mean absolute logarithm of measured over forecast, each part counting as much."""
    return float(
        np.mean(
            [
                np.mean([abs(math.log(m / f)) for _, m, f in points(table, spec, samples)])
                for spec, table, samples in parts
            ]
        )
    )


def fit_speed_ups(device: str, figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the factors of bitwidths with which a device reaches its measured speed-ups."""
    found = {}
    for bits, facts in SPEED_UPS[device].items():

        def cost(logs: Sequence[float], bits: int = bits, facts: SpeedUps = facts) -> float:
            factors = factors_of(FACTORS, logs)
            spec = with_factors(replace(catalog.device(device), **figures), bits, factors)
            errors = [
                abs(math.log(found / measured))
                for model, measured_of in facts.items()
                for found, measured in zip(speed_ups(spec, bits, model), measured_of, strict=True)
                if measured is not None
            ]
            return float(np.mean(errors))

        start = catalog.device(device).precision_cost(bits)
        logs = [math.log(getattr(start, name)) for name in FACTORS]
        found[f"{bits} bits"] = factors_of(FACTORS, pattern_search(cost, logs))
    return found


def speed_ups(spec: DeviceSpec, bits: int, model: str) -> list[float]:
    """Return how much faster than 16 bits a layer is at fewer, for ``SPEED_UP_SHAPES``."""
    roof = RooflineLatencyModel(
        model=catalog.model(model), device=spec, dtype="bfloat16", kv_bits=16
    )
    return [
        roof.layer_s(phase, 16, batch, tokens, 0) / roof.layer_s(phase, bits, batch, tokens, 0)
        for phase, batch, tokens in SPEED_UP_SHAPES
    ]


def with_factors(spec: DeviceSpec, bits: int, factors: Mapping[str, float]) -> DeviceSpec:
    """Return a device with other factors of a bitwidth."""
    costs = (replace(one, **factors) if one.bits == bits else one for one in spec.precision_costs)
    return replace(spec, precision_costs=tuple(costs))


def factors_of(names: Sequence[str], logs: Sequence[float]) -> dict[str, float]:
    """Return the factors of the search's logarithms, rounded."""
    pairs = zip(names, logs, strict=True)
    return {name: max(0.01, float(f"{math.exp(value):.3g}")) for name, value in pairs}


def thinned(table: Table) -> Iterator[Sequence[LatencySample]]:
    """Yield the samples of each phase, of many some that are evenly spread."""
    for phase in Phase:
        own = [one for one in table.samples if one.phase is phase]
        if own:
            yield own[:: max(1, len(own) // FITTED_POINTS)]


def figures_of(names: Sequence[str], logs: Sequence[float]) -> dict[str, float]:
    """Return the figures of the search's logarithms, within their limits, rounded."""
    found = {}
    for name, value in zip(names, logs, strict=True):
        low, high = FIGURES[name]
        found[name] = float(f"{min(high, max(low, math.exp(value))):.3g}")
    if found.get("saturation_tokens") == FIGURES["saturation_tokens"][0]:
        found["saturation_tokens"] = 0.0
    return found


def stated(tables: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return by how much at most devices are faster and slower than forecast, ``COVERED`` times.

    As much is left out at either side, of all points as well as of tables that count as much. Of
    few points a factor of two is stated: they say nothing of other cards and models.
    """
    ratios, shares = pooled(tables)
    if len(ratios) < LEAST_POINTS:
        return UNMEASURED
    edges = [(1 - COVERED) / 2, (1 + COVERED) / 2]
    limits = [
        np.quantile(ratios, edges, weights=weights, method="inverted_cdf")
        for weights in (np.ones_like(shares), shares)
    ]
    return (
        rounded_up(1.0 - min(low for low, _ in limits)),
        rounded_up(max(high for _, high in limits) - 1.0),
    )


def pooled(tables: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    """Return the ratios of all tables, and the share of each for tables that count as much."""
    ratios = np.concatenate([np.asarray(one) for one in tables])
    return ratios, np.concatenate([np.full(len(one), 1.0 / len(one)) for one in tables])


def rounded_up(share: float) -> float:
    """Return a share as it is stated."""
    return max(LEAST_STATED, round(math.ceil(share / STATED_STEP) * STATED_STEP, 2))


def within(
    spec: DeviceSpec, phase: Phase, tables: Sequence[Sequence[float]], bits: int = WIDE
) -> float:
    """Return the share of points inside the deviation that the catalogue states.

    It is the smaller of that of all points, and that with tables that count as much.
    """
    faster, slower = spec.deviation(phase, bits)
    ratios, shares = pooled(tables)
    is_inside = (ratios >= 1.0 - faster) & (ratios <= 1.0 + slower)
    return min(float(np.mean(is_inside)), float(np.average(is_inside, weights=shares)))


def row_of(family: Family, tables: Sequence[Table], ratios: Ratios) -> dict[str, Any]:
    """Return the family's row of the table in the documentation."""
    spec, bits = catalog.device(tables[0].device), tables[0].bits
    row: dict[str, Any] = {"family": family.name}
    if bits != WIDE:
        row["bits"] = bits
    row["measured"] = ", ".join(dict.fromkeys(table.device for table in tables))
    for phase in Phase:
        found = ratios[phase]
        every = pooled(found)[0]
        row[f"{phase.value}: points"] = len(every)
        row[f"{phase.value}: ratio"] = [round(float(q), 2) for q in quantiles(every)]
        faster, slower = spec.deviation(phase, bits)
        row[f"{phase.value}: stated"] = [round(1.0 - faster, 2), round(1.0 + slower, 2)]
        row[f"{phase.value}: within"] = math.floor(100 * within(spec, phase, found, bits))
    return row


def summary_of(table: Table, ratios: Mapping[Phase, Sequence[float]]) -> dict[str, Any]:
    """Return what is recorded of a table: its points and their ratios."""
    spec = catalog.device(table.device)
    figures = {name: getattr(spec, name) for name in (*FIGURES, *DEVIATIONS)}
    if table.bits != WIDE:
        figures = asdict(spec.precision_cost(table.bits))
    return {
        "table": table.name,
        "device": table.device,
        "bits": table.bits,
        "figures": figures,
    } | {
        phase.value: {
            "points": len(found),
            "quantiles": [round(float(q), 3) for q in quantiles(found)],
            "within": round(within(spec, phase, [found], table.bits), 3),
        }
        for phase, found in ratios.items()
    }


def quantiles(ratios: Sequence[float] | Array) -> Any:
    """Return the percentiles 10, 50 and 90."""
    return np.quantile(ratios, (0.1, 0.5, 0.9))


def words(phase: Phase, ratios: Sequence[float] | Array) -> str:
    """Return the percentiles of a phase, for the terminal."""
    low, middle, high = quantiles(ratios)
    return f"{phase.value} {len(ratios):5} points {low:.2f} {middle:.2f} {high:.2f}  "


# Readers


def scores(devices: Sequence[str], widths: Sequence[int], _: argparse.Namespace) -> Iterator[Table]:
    """Yield published speeds of whole models."""
    for board, device, bits in published(devices, widths):
        yield Table(
            name=f"{board.source} {device} {bits}", device=device, bits=bits, is_whole=True,
            model=catalog.model(board.model), samples=board.samples(device, bits),
        )  # fmt: skip


def database(name: str, device: str, options: argparse.Namespace) -> Iterator[Table]:
    """Yield layers of a device of aiconfigurator's package."""
    for model in map(catalog.model, DATABASE_MODELS):
        request = ImportRequest(
            model=model, device=name, device_type=device, bits=(16,), path=options.database
        )
        found = import_table("aiconfigurator", request)
        yield Table(
            name=f"aiconfigurator {name} {model.name}", device=device, model=model,
            samples=found.samples,
        )  # fmt: skip


def helix(machine: str, device: str, options: argparse.Namespace) -> Iterator[Table]:
    """Yield Helix's layers of a machine, prompts cut to ``PROMPT`` tokens: it packs many."""
    file = options.data / "helix" / "per_layer_bs2time.csv"
    for name in HELIX_MODELS:
        request = ImportRequest(
            model=helix_model(name), device=f"{name}/{machine}", device_type=device, path=file,
            context_tokens=CONTEXT,
        )  # fmt: skip
        yield Table(
            name=f"Helix {name}/{machine}", device=device, model=request.model,
            samples=tuple(map(packed, import_table("helix", request).samples)),
        )  # fmt: skip


def packed(sample: LatencySample) -> LatencySample:
    """Return a sample of one long prompt as one of several usual ones."""
    prompts = max(1, round(sample.tokens / PROMPT))
    if sample.phase is Phase.DECODE:
        return sample
    return replace(sample, batch=prompts, tokens=max(1, round(sample.tokens / prompts)))


@cache
def helix_model(name: str) -> ModelSpec:
    """Return one of the two models that Helix measured."""
    if name == "llama2_70b":
        return catalog.model("meta-llama/Llama-2-70b-hf")
    return model_from_config(_LLAMA_30B, "LLaMA-30B", "Helix")


def samullm(options: argparse.Namespace) -> Iterator[Table]:
    """Yield SamuLLM's iterations of whole models on one A100."""
    for name, model in SAMULLM_MODELS.items():
        yield Table(
            name=f"SamuLLM {name}", device="A100-80G-SXM", model=catalog.model(model),
            samples=whole_model(options.data / "samullm" / f"iter_{name}_tp1.csv").samples,
            is_whole=True,
        )  # fmt: skip


def rtx_4090(options: argparse.Namespace) -> Iterator[Table]:
    """Yield LLMServingSim's layers of an RTX 4090."""
    stem = options.data / "llmservingsim" / "profile_RTX4090_Llama-3.1-8B_tp1"
    files = Path(f"{stem}_dense.csv"), Path(f"{stem}_attention.csv")
    yield served("RTX4090", "RTX4090", LLAMA_8B, files)


def rtx_pro_6000(options: argparse.Namespace) -> Iterator[Table]:
    """Yield LLMServingSim's layers of an RTX PRO 6000."""
    for model in (LLAMA_8B, "Qwen/Qwen3-32B"):
        folder = clone(options.llmservingsim) / "perf" / "RTXPRO6000" / model / "bf16" / "tp1"
        files = folder / "dense.csv", folder / "attention.csv"
        yield served("RTXPRO6000", "RTX-PRO-6000", model, files)


def served(name: str, device: str, model: str, files: tuple[Path, Path]) -> Table:
    """Return the layers of a profile of LLMServingSim, from products and attention."""
    dense: dict[int, float] = Counter()
    for row in rows(files[0]):
        if row["layer"] not in ("embedding", "final_layernorm"):
            times = 2 if row["layer"] == "layernorm" else 1
            dense[int(row["tokens"])] += times * float(row["time_us"]) * 1e-6
    samples = []
    for row in rows(files[1]):
        prompt, before, batch, context = (
            int(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        )
        is_prefill = batch == before == 0
        if (prompt and not is_prefill) or (prompt or batch) not in dense:
            continue
        samples.append(
            LatencySample(
                phase=Phase.PREFILL if is_prefill else Phase.DECODE,
                bits=16,
                batch=1 if is_prefill else batch,
                tokens=prompt if is_prefill else context,
                seconds=dense[prompt or batch] + float(row["time_us"]) * 1e-6,
            )
        )
    return Table(
        name=f"LLMServingSim {name} {model}", device=device, model=catalog.model(model),
        samples=tuple(samples),
    )  # fmt: skip


def operators(name: str, device: str, options: argparse.Namespace) -> Iterator[Table]:
    """Yield the products and small operators that earlier versions of LLMServingSim measured.

    Without attention: that of decode, where it was measured, reads the same blocks again and again,
    faster than memory does.
    """
    folder = clone(options.llmservingsim) / "v0" / "perf_models" / name / LLAMA_8B / "tp1"
    dense: dict[int, float] = Counter()
    for row in rows(folder / "layers.csv"):
        if row["layer_name"] not in ("embedding", "final_layernorm", "lm_head", "attn"):
            dense[int(row["input"])] += float(row["latency(ns)"]) * 1e-9
    yield products(f"LLMServingSim {name} {LLAMA_8B}", device, catalog.model(LLAMA_8B), dense)


def clone(folder: Path | None) -> Path:
    """Return the folder of an option, which has to be given."""
    if folder is None:
        raise FileNotFoundError("found no folder of its clone, expected one (see --help)")
    return folder


def vidur(folder: str, device: str, options: argparse.Namespace) -> Iterator[Table]:
    """Yield the products of the layers that Vidur measured."""
    for name in VIDUR_MODELS:
        file = clone(options.vidur) / folder / name.replace("34b-hf", "34b-Instruct-hf") / "mlp.csv"
        dense: dict[int, list[float]] = {}
        for row in rows(file):
            if row["num_tensor_parallel_workers"] == "1":
                total = sum(
                    float(row[f"time_stats.{one}.median"])
                    for one in (*VIDUR_PRODUCTS, *VIDUR_SMALL)
                )
                dense.setdefault(int(row["num_tokens"]), []).append(total * 1e-3)
        yield products(
            f"Vidur {folder} {name}", device, catalog.model(name),
            {tokens: min(found) for tokens, found in dense.items()},
        )  # fmt: skip


def products(name: str, device: str, model: ModelSpec, dense: Mapping[int, float]) -> Table:
    """Return a table without attention: as prompts of one token each, and as decode steps."""
    samples = [
        LatencySample(phase=phase, bits=16, batch=rows, tokens=1, seconds=seconds)
        for rows, seconds in dense.items()
        for phase in Phase
        if (rows <= FEW_ROWS if phase is Phase.DECODE else rows >= LEAST_PROMPT)
    ]
    return Table(name=name, device=device, model=model, samples=tuple(samples))


def rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


OF_ATTENTION = ("attention_efficiency", "attention_memory_efficiency")
OF_SMALL_LAYERS = ("layer_overhead_s", "attention_efficiency")
AMPERE_GEFORCE = ("RTX3090", "RTX3060-12G", "RTX3070", "RTX3080-10G", "RTX3080Ti")
BLACKWELL_GEFORCE = ("RTX5060Ti-16G", "RTX5070Ti", "RTX5080", "RTX5090")
RADEON = ("RX7900XTX", "RX9070", "RX9070XT", "R9700", "Strix-Halo")
APPLE = (
    "M1", "M1-Pro", "M1-Max", "M1-Ultra", "M2", "M2-Pro", "M2-Max", "M2-Ultra", "M3", "M3-Pro",
    "M3-Max", "M3-Ultra", "M4", "M4-Pro", "M4-Max", "M5-Max",
)  # fmt: skip
FAMILIES = (
    Family(name="Volta", kept=OF_SMALL_LAYERS, readers=(partial(helix, "v100", "V100-32G"),)),
    Family(name="Turing", kept=OF_SMALL_LAYERS, readers=(partial(helix, "t4", "T4-16G"),)),
    Family(
        name="Ampere, A100",
        readers=(
            partial(database, "a100_sxm", "A100-80G-SXM"),
            partial(helix, "a100", "A100-40G"),
            samullm,
            partial(vidur, "a100", "A100-80G-SXM"),
        ),
    ),
    Family(
        name="Ampere, GeForce",
        kept=OF_ATTENTION,
        readers=(
            partial(operators, "RTX3090", "RTX3090"),
            partial(scores, AMPERE_GEFORCE, (16, 4, 3)),
        ),
    ),
    Family(
        name="Ampere, workstation",
        kept=OF_ATTENTION,
        readers=(partial(operators, "A6000", "RTX-A6000"), partial(vidur, "a40", "A40")),
    ),
    Family(
        name="Ada, GeForce",
        readers=(rtx_4090, partial(scores, ("RTX4090", "RTX4080", "RTX4070Ti"), (16, 4))),
    ),
    Family(name="Ada, L4", kept=OF_SMALL_LAYERS, readers=(partial(helix, "l4", "L4"),)),
    Family(name="Ada, workstation", readers=(partial(database, "l40s", "L40S"),)),
    Family(
        name="Hopper",
        readers=(
            partial(database, "h100_sxm", "H100"),
            partial(database, "h200_sxm", "H200"),
            partial(operators, "H100", "H100"),
            partial(vidur, "h100", "H100"),
        ),
    ),
    Family(
        name="Blackwell, B200",
        readers=(partial(database, "b200_sxm", "B200"), partial(database, "b300_sxm", "B300")),
    ),
    Family(
        name="Blackwell, workstation",
        readers=(
            partial(database, "rtx_pro_6000_server", "RTX-PRO-6000"),
            rtx_pro_6000,
            partial(scores, ("RTX-PRO-6000",), (4,)),
        ),
    ),
    Family(
        name="Arc, Battlemage",
        readers=(
            partial(database, "b60", "Arc-Pro-B60"),
            partial(scores, ("Arc-B580",), (4,)),
        ),
    ),
    Family(
        name="Apple",
        kept=(*OF_ATTENTION, "decode_efficiency", "overlap_loss", "layer_overhead_s"),
        readers=(partial(scores, APPLE, (16, 8, 4)),),
    ),
    Family(name="Pascal", readers=(partial(scores, ("P40",), (4, 3)),)),
    Family(name="Blackwell, GeForce", readers=(partial(scores, BLACKWELL_GEFORCE, (4,)),)),
    Family(name="Blackwell, GB10", readers=(partial(scores, ("GB10",), (8, 4)),)),
    Family(name="Radeon", readers=(partial(scores, RADEON, (4,)),)),
    Family(name="Arc, Alchemist", readers=(partial(scores, ("Arc-A770",), (4,)),)),
)


if __name__ == "__main__":
    sys.exit(main())
