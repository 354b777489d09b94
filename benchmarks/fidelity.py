"""How far forecasts are from measurements on public tables, as JSON for the documentation.

Tables come from an installed (or ``--database``) aiconfigurator-core and from a folder of measured
data (``--data``, or LLMPQ_SHARED_DATA, or ``../shared/data``); tables that are absent are named and
left out. For each, 30 % of the shapes are held out, seeds 0-4, for the paper's regression and for
ours; then the largest 30 %, with the deviations that were claimed. Tables on which ours is worse
than the paper's are listed. ``benchmarks/fit_ablation.py`` has the errors by number of points. Run
``OMP_NUM_THREADS=1 python benchmarks/fidelity.py``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from llmpq.costmodel.importers.imported import DEVICE_TYPES, ImportRequest, import_table
from llmpq.costmodel.tables.fidelity import HELD_SHARE, split_shapes, summarise
from llmpq.costmodel.tables.latency import RegressionLatencyModel
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

DEVICES = ("a100_sxm", "l40s", "h100_sxm", "h200_sxm")
MODELS = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-13b-hf", "meta-llama/Meta-Llama-3-70B")
LAWS = ("paper", "hinged")
FIRST_SEED = 0
SEEDS = 5
"""Splits that figures are reported for; settings were chosen on seeds 100-104 instead."""
MIN_OUTSIDE = 5
"""Shapes outside from which a ratio of error to claim means something."""
WARM_UP_ROWS = 128
"""Iterations a whole-model table starts with: ChatGLM's are half as slow again up to here."""
EVEN = 0.02
"""How far the mean context may lie from the longest: a table has one length for all sequences."""

PAPERS_RANGE = "paper's range"
PAPERS_BATCH, PAPERS_TOKENS = 32, (128, 2048)
"""What LLM-PQ profiled: its regression is at home here."""

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    """Measure every table, print a summary and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_options(parser)
    parser.add_argument("--output", type=Path, default=RESULTS / "fidelity.json")
    parser.add_argument("--first_seed", type=int, default=FIRST_SEED, help="of five splits")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + SEEDS)
    rows: list[dict[str, Any]] = []
    pooled: dict[str, dict[tuple[Phase, str], list[float]]] = {}
    for group, name, table in tables(options.database, options.data):
        errors = held_out(table, seeds)
        more = {} if group == PAPERS_RANGE else {"outside": outside(table)}
        rows.append({"group": group, "table": name, **report(errors), **more})
        for key, found in errors.items():
            pooled.setdefault(group, {}).setdefault(key, []).extend(found)
        print(f"{name}: {words(errors)}", flush=True)
    groups = [{"group": group, **report(errors)} for group, errors in pooled.items()]
    for group, errors in pooled.items():
        print(f"ALL {group}: {words(errors)}")
    worse = worse_than_paper(rows)
    print(f"worse than the paper: {worse or 'none'}")
    record = {
        "run": run_record("python benchmarks/fidelity.py"),
        "groups": groups,
        "tables": rows,
        "worse_than_paper": worse,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the measured data."""
    here = Path(__file__).resolve().parents[2] / "shared" / "data"
    default = Path(os.environ.get("LLMPQ_SHARED_DATA", here))
    parser.add_argument("--database", type=Path, help="folder of aiconfigurator_core")
    parser.add_argument("--data", type=Path, default=default, help="with helix/ and samullm/")


def run_record(command: str) -> dict[str, Any]:
    """Return the command, date, machine and versions of a result."""
    return {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }


def tables(database: Path | None, data: Path) -> Iterator[tuple[str, str, LatencyTable]]:
    """Yield group, name and table of everything that is there."""
    for device in DEVICES:
        for model in MODELS:
            try:
                table = one_layer(database, device, model)
            except SpecError as error:
                print(f"left out: {device} {model}: {error}", file=sys.stderr)
                continue
            yield "one layer", f"{device} {model}", table
            yield PAPERS_RANGE, f"{device} {model} in the {PAPERS_RANGE}", in_papers_range(table)
    for machine in ("t4", "v100", "a100", "l4"):
        for model in ("llama1_30b", "llama2_70b"):
            if (file := data / "helix" / "per_layer_bs2time.csv").is_file():
                yield f"helix {machine}", f"helix {machine} {model}", helix(file, model, machine)
    for file in sorted((data / "samullm").glob("iter_*.csv")):
        yield "whole model", f"whole model {file.stem.removeprefix('iter_')}", whole_model(file)


def one_layer(database: Path | None, device: str, model: str) -> LatencyTable:
    """Return the layer of a model as assembled, only what kernels were measured for."""
    request = ImportRequest(
        model=catalog.model(model),
        device=device,
        device_type=DEVICE_TYPES[device],
        bits=(4, 8, 16),
        path=database,
    )
    table = import_table("aiconfigurator", request)
    filled = {key for key, _ in table.provenance if key.startswith("filled_")}
    samples = (one for one in table.samples if f"filled_{one.bits}_bits" not in filled)
    return LatencyTable(samples=tuple(samples), provenance=table.provenance)


def in_papers_range(table: LatencyTable) -> LatencyTable:
    """Return only the shapes of the paper's range, to be learned and asked there."""
    least, most = PAPERS_TOKENS
    samples = (one for one in table.samples if one.batch <= PAPERS_BATCH)
    return LatencyTable(samples=tuple(one for one in samples if least <= one.tokens <= most))


def helix(file: Path, model: str, machine: str) -> LatencyTable:
    """Return one curve of the Helix file."""
    request = ImportRequest(
        model=catalog.model("meta-llama/Llama-2-70b-hf"),
        device=f"{model}/{machine}",
        device_type=machine,
        path=file,
    )
    return import_table("helix", request)


def whole_model(file: Path) -> LatencyTable:
    """Return the forward passes of a whole model: prefill padded, decode at even lengths."""
    samples = []
    with file.open(encoding="utf-8", newline="") as lines:
        for row in list(csv.DictReader(lines))[WARM_UP_ROWS:]:
            batch, longest = int(row["num_seqs"]), int(row["max_seqlen"])
            mean = int(row["attn_ctx_tokens"]) / batch
            phase = Phase.PREFILL if row["is_prefill"] == "1" else Phase.DECODE
            if phase is Phase.DECODE and abs(mean - longest) > max(1.0, EVEN * longest):
                continue
            tokens = longest if phase is Phase.PREFILL else max(1, round(mean))
            samples.append(
                LatencySample(
                    phase=phase,
                    bits=16,
                    batch=batch,
                    tokens=tokens,
                    seconds=float(row["exec_ms"]) * 1e-3,
                )
            )
    return LatencyTable(samples=tuple(samples))


def held_out(table: LatencyTable, seeds: Sequence[int]) -> dict[tuple[Phase, str], list[float]]:
    """Return the relative errors on held-out shapes, by phase and law."""
    errors: dict[tuple[Phase, str], list[float]] = {}
    for seed in seeds:
        kept, held = split_shapes(table, seed)
        for law in LAWS:
            model = RegressionLatencyModel(kept, law)
            for one in held.samples:
                found = model.seconds(one.phase, one.bits, one.batch, one.tokens)
                errors.setdefault((one.phase, law), []).append(abs(found / one.seconds - 1.0))
    return errors


def outside(table: LatencyTable) -> dict[str, dict[str, float]]:
    """Return mean error, mean claim and their 68th percentile ratio on the largest 30 % shapes."""
    sizes = {
        "batch": lambda one: one.batch,
        "tokens": lambda one: one.tokens,
        "product": lambda one: one.batch * one.tokens,
    }
    found: dict[str, dict[str, float]] = {}
    for phase, (axis, size) in product(Phase, sizes.items()):
        samples = [one for one in table.samples if one.phase is phase and one.bits == 16]
        edge = sorted(size(one) for one in samples)[int((1 - HELD_SHARE) * len(samples))]
        kept = tuple(one for one in samples if size(one) <= edge)
        held = [one for one in samples if size(one) > edge]
        if len(held) < MIN_OUTSIDE:
            continue
        model = RegressionLatencyModel(LatencyTable(samples=kept))
        claimed = [model.estimate(phase, 16, one.batch, one.tokens) for one in held]
        errors = np.array(
            [abs(np.log(it.seconds / one.seconds)) for it, one in zip(claimed, held, strict=True)]
        )
        claims = np.array([it.relative_deviation for it in claimed])
        found[f"{phase.value} {axis}"] = {
            "error": float(errors.mean()),
            "claim": float(claims.mean()),
            "ratio_p68": float(np.quantile(errors / claims, 0.68)),
        }
    return found


def worse_than_paper(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tables and phases whose mean error is above that of the paper's regression."""
    return [
        f"{row['table']}, {phase.value}: {100 * ours:.2f} instead of {100 * theirs:.2f} %"
        for row in rows
        for phase in Phase
        if f"{phase.value} hinged" in row
        for ours, theirs in [[row[f"{phase.value} {law}"]["mean"] for law in ("hinged", "paper")]]
        if ours > theirs
    ]


def report(errors: dict[tuple[Phase, str], list[float]]) -> dict[str, Any]:
    """Return the error figures by phase and law."""
    return {
        f"{phase.value} {law}": asdict(summarise(found)) for (phase, law), found in errors.items()
    }


def words(errors: dict[tuple[Phase, str], list[float]]) -> str:
    """Return mean / 95th percentile by phase and law, in percent."""
    return "  ".join(
        f"{name} {100 * one['mean']:.2f}/{100 * one['p95']:.1f}"
        for name, one in report(errors).items()
    )


if __name__ == "__main__":
    sys.exit(main())
