#!/usr/bin/env python3
"""Forecast and measured peak memory of CPU stages: families x bits x stages, one CSV row a stage.

    benchmarks/memory.py run --models DIR ... --bits 16 8 4 3 --stages 1 2 3 --output rows.csv
    benchmarks/memory.py table rows.csv [--plot errors.png]

Rows already in the file are not measured again, so a run may be stopped at any time. ``table``
prints Markdown with the current forecast against the peaks in the file; it reads the models but
measures nothing. Models come from scripts/make_tiny_model.py, several hundred megabytes a stage.
With ``--requests`` the prompts have random lengths, otherwise all slots are filled once.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmpq.assigner.planner import even_plan
from llmpq.cli.plots import BIT_COLOURS, INK, new_figure
from llmpq.profiler.memory import measure_memory
from llmpq.spec.plan import Plan

KEY = ("model", "bits", "kv_bits", "stages", "shape", "micro_batch", "seed", "requests")
HELD = ("weights", "master", "kv", "buffers", "load_peak")
FIELDS = (*KEY, "rank", "measured", *HELD)
REQUIRED = -1, 12
"""Percent that a forecast may be above what is measured."""
Row = dict[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, or print what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--models", type=Path, nargs="+", required=True)
    run.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4, 3])
    run.add_argument("--kv_bits", type=int)
    run.add_argument("--stages", type=int, nargs="+", default=[1])
    run.add_argument("--shape", type=int, nargs=3, default=[8, 248, 8])
    run.add_argument("--micro_batch", type=int, nargs=2, default=[4, 8])
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--requests", type=int, help="prompts of random lengths from 4 tokens on")
    run.add_argument("--output", type=Path, required=True)
    table = commands.add_parser("table")
    table.add_argument("rows", type=Path)
    table.add_argument("--plot", type=Path)
    options = parser.parse_args(argv)
    if options.command == "run":
        _measure(options)
        return 0
    compared = [(row, *_compared(row)) for row in _read(options.rows)]
    _print(compared)
    if options.plot is not None:
        _plot(_errors(compared), options.plot)
    return 0


def _measure(options: argparse.Namespace) -> None:
    known = {tuple(row.get(name, "") for name in KEY) for row in _read(options.output)}
    for folder in options.models:
        for stages in options.stages:
            for bits in options.bits:
                key = {
                    "model": str(folder),
                    "bits": bits,
                    "kv_bits": options.kv_bits or "",
                    "stages": stages,
                    "shape": _joined(options.shape),
                    "micro_batch": _joined(options.micro_batch),
                    "seed": options.seed,
                    "requests": options.requests or "",
                }
                if tuple(str(key[name]) for name in KEY) not in known:
                    _append(options.output, _rows({name: str(key[name]) for name in KEY}))


def _rows(key: Row) -> list[dict[str, Any]]:
    """Run one plan and return a row for each of its stages."""
    found = []
    chance, longest = random.Random(int(key["seed"])), _numbers(key["shape"])[1]
    lengths = [chance.randint(4, longest) for _ in range(int(key["requests"] or 0))]
    stages = measure_memory(
        _plan(key),
        Path(key["model"]).resolve(),
        lengths=lengths or None,
        seed=int(key["seed"]),
        step_timeout_s=200,
    )
    for stats in stages:
        assert stats.held is not None
        held = {name: getattr(stats.held, name) for name in HELD}
        found.append({**key, "rank": stats.rank, "measured": stats.memory_bytes, **held})
    return found


def _plan(row: Row) -> Plan:
    return even_plan(
        Path(row["model"]),
        bits=(int(row["bits"]),),
        stages=int(row["stages"]),
        shape=_numbers(row["shape"]),
        micro_batch=_numbers(row["micro_batch"]),
        kv_bits=int(row["kv_bits"]) if row["kv_bits"] else None,
    )


def _compared(row: Row) -> tuple[float, float, bool]:
    """Return predicted and measured bytes, and whether the exact parts are."""
    memory = _plan(row).estimate.stages[int(row["rank"])].memory
    names = ("weights", "master", "kv")
    is_exact = all(getattr(memory, name) == int(row[name]) for name in names)
    return memory.total, float(row["measured"]), is_exact


def _print(compared: Iterable[tuple[Row, float, float, bool]]) -> None:
    print(
        "| model | bits | kv | stage | predicted MB | measured MB | error | load MB | exact parts |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    errors = []
    for row, predicted, measured, is_exact in compared:
        errors.append(predicted / measured - 1)
        print(
            f"| {Path(row['model']).name} | {row['bits']} | {row['kv_bits'] or 'dtype'} "
            f"| {int(row['rank']) + 1}/{row['stages']} | {predicted / 1e6:.0f} "
            f"| {measured / 1e6:.0f} | {errors[-1]:+.1%} | {int(row['load_peak']) / 1e6:.0f} "
            f"| {'equal' if is_exact else 'DIFFER'} |"
        )
    if errors:
        low, high = REQUIRED
        good = sum(low <= 100 * error <= high for error in errors)
        print(
            f"\n{len(errors)} stages: {min(errors):+.1%} to {max(errors):+.1%}, mean "
            f"{sum(errors) / len(errors):+.1%}; {good} between {low} % and +{high} %"
        )


def _plot(errors: Mapping[tuple[str, int], Sequence[float]], path: Path) -> None:
    """Draw errors in percent by family (with its prompts) and bits, and what is required."""
    families = list(dict.fromkeys(family for family, _ in errors))
    widths = sorted({bits for _, bits in errors}, reverse=True)
    with new_figure(path, 10, 4) as figure:
        axes = figure.add_subplot()
        for number, (bits, marker) in enumerate(zip(widths, "osD^", strict=False)):
            shift = 0.24 * (number - (len(widths) - 1) / 2)
            points = [
                (families.index(family) + shift, error)
                for (family, own), found in errors.items()
                if own == bits
                for error in found
            ]
            axes.plot(
                *zip(*points, strict=True), marker, color=BIT_COLOURS[bits], label=f"{bits} bits",
                markersize=5, alpha=0.8,
            )  # fmt: skip
        axes.axhspan(*REQUIRED, color=INK, alpha=0.1, zorder=0, label="required")
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xticks(range(len(families)), families)
        axes.set_ylabel("predicted peak of a stage, % above measured")
        axes.legend(ncols=len(widths) + 1, loc="lower right", bbox_to_anchor=(1, 1))


def _errors(
    compared: Iterable[tuple[Row, float, float, bool]],
) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = {}
    for row, predicted, measured, _ in compared:
        family = Path(row["model"]).name.partition("-")[0]
        prompt = _numbers(row["shape"])[1]
        key = f"{family}\n{prompt:,} tokens", int(row["bits"])
        found.setdefault(key, []).append(100 * (predicted / measured - 1))
    return found


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def _joined(numbers: Iterable[int]) -> str:
    return " ".join(str(number) for number in numbers)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())


if __name__ == "__main__":
    sys.exit(main())
