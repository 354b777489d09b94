"""Iteration times of whole models at batch sizes that were held out, by both forms of fit.

    python -m benchmarks.iteration_costs --data FOLDER [--json]

FOLDER holds SamuLLM's tables, ``iterations/<model>_tp<degree>.csv.gz``. Three tenths of the batch
sizes of each table, the smallest and the largest apart, are held out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmpq.errors import LlmpqError, SpecError
from llmpq.multillm.cost import Array, Form, IterationModel, read_iterations
from llmpq.spec.precision import Phase

FORMS: tuple[Form, ...] = ("paper", "whole")
HELD_OUT = 0.3


def main(argv: Sequence[str] | None = None) -> int:
    """Fit and print the errors."""
    parser = argparse.ArgumentParser(prog="benchmarks.iteration_costs", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        record = collect(options.data)
    except LlmpqError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    print(json.dumps(record, indent=1) if options.json else report(record))
    return 0


def collect(folder: Path) -> dict[str, Any]:
    """Return the relative errors of all tables, by table, phase and form."""
    pooled: dict[str, list[Array]] = {form: [] for form in FORMS}
    tables = {}
    files = sorted((folder / "iterations").glob("*.csv.gz"))
    if not files:
        raise SpecError(f"{folder}: found no iterations/*.csv.gz, expected SamuLLM's tables")
    for file in files:
        found = errors(file)
        for form in FORMS:
            pooled[form] += [found[phase.value, form] for phase in Phase]
        tables[file.name.removesuffix(".csv.gz")] = {
            f"{phase} {form}": summary(values) for (phase, form), values in found.items()
        } | {"decode overhead share": overhead_share(file)}
    every = {form: summary(np.concatenate(values)) for form, values in pooled.items()}
    return {"all": every, "tables": tables}


def errors(file: Path) -> dict[tuple[str, str], Array]:
    """Return the relative errors on held-out batch sizes of one table, by phase and form."""
    table = read_iterations(file)
    batches = np.unique(table.batch)[1:-1]
    count = int(HELD_OUT * len(batches))
    if not count:
        raise SpecError(f"{file}: found {len(batches) + 2} batch sizes, too few to hold some out")
    unseen = np.random.default_rng(0).choice(batches, count, replace=False)
    is_unseen = np.isin(table.batch, unseen)
    found: dict[tuple[str, str], Array] = {}
    for form in FORMS:
        model = IterationModel(table.select(~is_unseen), form)
        for phase in Phase:
            held = table.select(is_unseen & (table.is_prefill == (phase is Phase.PREFILL)))
            seconds = model.seconds(phase, held.batch, held.tokens, held.longest)
            found[phase.value, form] = np.abs(seconds / held.seconds - 1.0)
    return found


def overhead_share(file: Path) -> float:
    """Return the share of decode time that computation, preparation and sampling leave out."""
    table = read_iterations(file)
    decode = table.select(~table.is_prefill)
    return float(1.0 - decode.parts.sum() / decode.seconds.sum())


def summary(values: Array) -> dict[str, float]:
    """Return mean, median and 95th percentile."""
    places = {"median": np.median(values), "p95": np.quantile(values, 0.95)}
    return {"mean": float(values.mean()), **{name: float(one) for name, one in places.items()}}


def report(record: dict[str, Any]) -> str:
    """Return the errors as Markdown tables: of all tables together, and of each."""
    every = {
        f"all {len(record['tables'])} tables": (record["all"]["paper"], record["all"]["whole"])
    }
    each = {
        f"{name}, {phase.value}": (found[f"{phase.value} paper"], found[f"{phase.value} whole"])
        for name, found in record["tables"].items()
        for phase in Phase
    }
    parts = []
    for title, rows in (("Held-out batch sizes", every), ("Held-out batch sizes by table", each)):
        lines = [f"### {title}: relative error, mean / median / p95", ""]
        lines += ["| tables | SamuLLM's form | ours |", "| --- | --- | --- |"]
        lines += [f"| {name} | {_cell(one)} | {_cell(two)} |" for name, (one, two) in rows.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(found: dict[str, float]) -> str:
    return " / ".join(f"{100 * found[name]:.1f} %" for name in ("mean", "median", "p95"))


if __name__ == "__main__":
    sys.exit(main())
