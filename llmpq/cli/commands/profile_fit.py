"""llmpq-profile fit: how far the latency model is from a table it has not seen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmpq.cli.common import print_json
from llmpq.costmodel.tables.fidelity import fidelity
from llmpq.spec.tables import read_latency_table


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``fit`` to the commands."""
    fit = commands.add_parser("fit", help="errors of the latency model on unseen shapes")
    fit.add_argument("--table", required=True, type=Path, help="latency table to fit (CSV)")
    fit.add_argument("--holdout", type=Path, help="latency table to compare with (CSV)")
    fit.add_argument("--law", choices=("hinged", "paper"), default="hinged")
    fit.add_argument("--seed", type=int, default=0, help="of the 30 %% held back otherwise")
    fit.add_argument("--json", action="store_true", default=argparse.SUPPRESS)


def run(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Fit a table, print its errors on the hold-out."""
    del argv
    held = read_latency_table(options.holdout) if options.holdout else None
    table = read_latency_table(options.table)
    reports = fidelity(table, held, seed=options.seed, law=options.law)
    if options.json:
        print_json({phase.value: asdict(report) for phase, report in reports.items()})
        return 0
    for phase, report in reports.items():
        print(
            f"{phase.value:8} mean {report.mean:.2%}  median {report.median:.2%}  "
            f"p95 {report.p95:.2%}  of {report.points} points"
        )
    return 0
