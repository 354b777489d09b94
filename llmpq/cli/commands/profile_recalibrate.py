"""llmpq-profile recalibrate: correct a latency table by runs of plans that were priced from it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.cli.common import command_line, print_json
from llmpq.costmodel.tables.recalibrate import recalibrated_table
from llmpq.errors import SpecError
from llmpq.spec.fields import digest_of, read_json
from llmpq.spec.tables import write_latency_table

NAME = "llmpq-profile"


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``recalibrate`` to the commands."""
    again = commands.add_parser(
        "recalibrate", help="correct a latency table by what runs of plans measured"
    )
    again.add_argument(
        "--report", required=True, type=Path, nargs="+",
        help="what llmpq-dist --report (or --json) wrote of a run; several runs count together",
    )  # fmt: skip
    again.add_argument(
        "--strat_file_name", required=True, type=Path, nargs="+",
        help="the plan that ran: one for all reports, or one each",
    )  # fmt: skip
    again.add_argument("--table", required=True, type=Path, help="latency table to correct (CSV)")
    again.add_argument("--output", required=True, type=Path, help="corrected table (CSV)")
    again.add_argument(
        "--node", help="only what ran on this node (default: every stage the table matches)"
    )
    again.add_argument("--model", help="directory or name (default: the plan's own)")
    again.add_argument("--json", action="store_true", default=argparse.SUPPRESS)


def run(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Correct the table, write it, and print the factors."""
    new, factors = recalibrated_table(
        options.table, _runs(options), node=options.node, model=options.model
    )
    origin = [line for line in new.provenance if line[0] not in ("command", "recalibrated by")]
    digests = ", ".join(digest_of(read_json(file)) for file in options.report)
    first = (
        ("command", command_line(NAME, argv)),
        ("recalibrated by", f"{'report' if len(options.report) == 1 else 'reports'} {digests}"),
    )
    write_latency_table(options.output, replace(new, provenance=(*first, *origin)))
    named = {f"{phase.value} {bits or 'master'}": value for (phase, bits), value in factors.items()}
    if options.json:
        print_json({"output": str(options.output), "factors": named})
        return 0
    for name, value in sorted(named.items()):
        print(f"{name:16} x {value:.3f}")
    print(f"{len(new.samples)} points written to {options.output}")
    return 0


def _runs(options: argparse.Namespace) -> list[tuple[Path, Path]]:
    """Return every report with the plan that ran."""
    reports, plans = options.report, options.strat_file_name
    if len(plans) == 1:
        plans = plans * len(reports)
    if len(plans) != len(reports):
        raise SpecError(
            f"--strat_file_name: found {len(plans)} plans for {len(reports)} reports, expected one "
            "for all or one each"
        )
    return list(zip(reports, plans, strict=True))
