"""Every table and figure of the paper's evaluation that can be compared, in one run."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from llmpq import __version__
from llmpq.errors import LlmpqError, SpecError
from llmpq.spec.fields import write_text
from scripts.reproduce import adaptive_only, formula, serving, solving, theta_sweep
from scripts.reproduce.output import Record, emit

PARTS = {
    "serving": serving,
    "solving": solving,
    "theta_sweep": theta_sweep,
    "adaptive_only": adaptive_only,
    "formula": formula,
}
BEGIN, END = "<!-- begin: scripts.reproduce.run_all -->", "<!-- end: scripts.reproduce.run_all -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts; print one report or one JSON object, or put the report into a page."""
    parser = argparse.ArgumentParser(prog="scripts.reproduce.run_all", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    parser.add_argument(
        "--page", type=Path, metavar="FILE.md", help="put the report between its two marks"
    )
    options = parser.parse_args(argv)
    try:
        record = collect()
        if options.page is not None:
            write_text(options.page, with_report(options.page.read_text(), report(record)))
    except LlmpqError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    if options.page is None:
        emit(report(record), record, as_json=options.json)
    return 0


def collect() -> Record:
    """Return the record of every part, and what it was made with."""
    made_with = {
        "llmpq": __version__,
        "python": platform.python_version(),
        "highspy": version("highspy"),
        "pulp": version("pulp"),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
    }
    return {"made with": made_with} | {name: part.collect() for name, part in PARTS.items()}


def report(record: Record) -> str:
    """Return all reports, one after the other."""
    parts = [part.report(record[name]) for name, part in PARTS.items()]
    parts.append("Made with " + ", ".join(f"{k} {v}" for k, v in record["made with"].items()) + ".")
    return "\n\n".join(parts)


def with_report(page: str, text: str) -> str:
    """Return a page with the text between its marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise SpecError(f"page: found no '{BEGIN}' before '{END}', expected one of each")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    raise SystemExit(main())
