"""Every table and figure of the paper's evaluation that can be compared, in one run."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.reproduce import adaptive_only, formula, serving, solving, theta_sweep
from scripts.reproduce.output import Record, run

PARTS = {
    "serving": serving,
    "solving": solving,
    "theta_sweep": theta_sweep,
    "adaptive_only": adaptive_only,
    "formula": formula,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts; print one report or one JSON object."""
    return run("run_all", __doc__, collect, report, argv)


def collect() -> Record:
    """Return the record of every part."""
    return {name: part.collect() for name, part in PARTS.items()}


def report(record: Record) -> str:
    """Return all reports, one after the other."""
    return "\n\n".join(part.report(record[name]) for name, part in PARTS.items())


if __name__ == "__main__":
    raise SystemExit(main())
