"""Every table and figure of the paper's evaluation that can be compared, in one run."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version

from llmpq import __version__
from llmpq.errors import LlmpqError
from reproduce import adaptive_only, formula, serving, solving, theta_sweep
from reproduce.output import Record, emit

PARTS = {
    "serving": serving,
    "solving": solving,
    "theta_sweep": theta_sweep,
    "adaptive_only": adaptive_only,
    "formula": formula,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts; print one report or one JSON object."""
    parser = argparse.ArgumentParser(prog="reproduce.run_all", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    options = parser.parse_args(argv)
    try:
        record = collect()
    except LlmpqError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    versions = ", ".join(f"{name} {number}" for name, number in record["made with"].items())
    emit(f"{report(record)}\n\nMade with {versions}.", record, as_json=options.json)
    return 0


def collect() -> Record:
    """Return the record of every part, and what it was made with."""
    made_with = {
        "llmpq": __version__,
        "python": platform.python_version(),
        "highspy": version("highspy"),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
    }
    return {"made with": made_with} | {name: part.collect() for name, part in PARTS.items()}


def report(record: Record) -> str:
    """Return all reports, one after the other."""
    return "\n\n".join(part.report(record[name]) for name, part in PARTS.items())


if __name__ == "__main__":
    raise SystemExit(main())
