"""Iteration times of whole models at batch sizes that were held out: SamuLLM's form and our law.

    python -m benchmarks.iteration_costs --data FOLDER [--json]

FOLDER holds SamuLLM's tables, ``iterations/<model>_tp<degree>.csv.gz``. Three tenths of the batch
sizes of each table, the smallest and the largest apart, are held out.

SamuLLM, Eq. 5: for every number ``B`` of running requests, computation, preparation and sampling
are linear in FLOPs, ``B s`` and ``S``. For one ``B`` the FLOPs of a decode iteration are linear in
the total length ``S`` and those of prefill nearly so in the padded length ``B s``. Between measured
``B``, seconds are interpolated; beyond them they continue in proportion.
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
from llmpq.multillm.engine.law import (
    Array,
    IterationModel,
    IterationTable,
    read_iterations,
    shapes_of,
)
from llmpq.spec.precision import Phase

FORMS = ("paper", "whole")
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
    try:
        learned, unseen = split_batches(table)
        paper, whole = PaperModel(learned), IterationModel(learned)
    except SpecError as error:
        raise SpecError(f"{file}: {error}") from None
    found: dict[tuple[str, str], Array] = {}
    for phase in Phase:
        held = unseen.select(unseen.is_prefill == (phase is Phase.PREFILL))
        answers = {
            "paper": paper.seconds(phase, held.batch, held.tokens, held.longest),
            "whole": forecast(whole, phase, held),
        }
        for form, seconds in answers.items():
            found[phase.value, form] = np.abs(seconds / held.seconds - 1.0)
    return found


def split_batches(table: IterationTable) -> tuple[IterationTable, IterationTable]:
    """Return the table without, and with only, some batch sizes of both phases.

    Raises:
        SpecError: there are too few of them.
    """
    both = np.intersect1d(table.batch[table.is_prefill], table.batch[~table.is_prefill])
    batches = both[1:-1]
    count = int(HELD_OUT * len(batches))
    if not count:
        raise SpecError(f"found {len(both)} batch sizes of both phases, too few to hold some out")
    unseen = np.random.default_rng(0).choice(batches, count, replace=False)
    is_unseen = np.isin(table.batch, unseen)
    return table.select(~is_unseen), table.select(is_unseen)


def forecast(model: IterationModel, phase: Phase, asked: IterationTable) -> Array:
    """Return the seconds of iterations of one phase."""
    shapes, _ = shapes_of(asked, phase)
    return np.array([model.seconds(phase, *shape) for shape in shapes.T.tolist()])


class PaperModel:
    """SamuLLM's form: the sum of three parts, each ``a[B] x + b[B]``."""

    def __init__(self, table: IterationTable) -> None:
        self._laws = {phase: _paper_law(table, phase) for phase in Phase}

    def seconds(self, phase: Phase, batch: Array, tokens: Array, longest: Array) -> Array:
        """Return the seconds of iterations of these requests, total and longest lengths."""
        batches, weights = self._laws[phase]
        high = np.clip(np.searchsorted(batches, batch), 0, len(batches) - 1)
        low = np.where(batches[high] > batch, np.maximum(high - 1, 0), high)
        gap = np.maximum(batches[high] - batches[low], 1.0)
        share = np.clip((batch - batches[low]) / gap, 0.0, 1.0)[:, None]
        own = weights[low] + (weights[high] - weights[low]) * share
        own = own * np.maximum(1.0, batch / batches[-1])[:, None]
        inputs = np.stack([np.ones_like(tokens), tokens, batch * longest], axis=1)
        found: Array = (own * inputs).sum(axis=1)
        return found


def _paper_law(table: IterationTable, phase: Phase) -> tuple[Array, Array]:
    """Return the batches of a phase [m] and their weights of 1, ``S`` and ``B s`` [m, 3]."""
    own = table.select(table.is_prefill == (phase is Phase.PREFILL))
    batches = np.unique(own.batch)
    # Requests of a prefill have one length: S is B s.
    inputs = (2, 2, 2) if phase is Phase.PREFILL else (1, 2, 1)
    weights = []
    for batch in batches:
        one = own.select(own.batch == batch)
        padded = one.batch * one.longest
        parts = zip(one.parts, inputs, strict=True)
        weights.append(sum(_line(one.tokens, padded, part, place) for part, place in parts))
    return batches, np.stack(weights)


def _line(tokens: Array, padded: Array, seconds: Array, place: int) -> Array:
    """Return non-negative least-squares weights [3] of 1 and of ``S`` (1) or ``B s`` (2)."""
    size = padded if place == 2 else tokens
    design = np.stack([np.ones_like(size), size / size.max()], axis=1)
    constant, slope = np.linalg.lstsq(design, seconds, rcond=None)[0]
    weights = np.zeros(3)
    weights[0] = constant if slope >= 0 else seconds.mean()
    weights[place] = max(0.0, slope) / size.max()
    return weights


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
