"""What every script here shares: options, Markdown tables, one JSON object, notes on progress."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmpq.errors import LlmpqError

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
Record = dict[str, Any]


def run(
    name: str,
    description: str | None,
    collect: Callable[[], Record],
    report: Callable[[Record], str],
    argv: Sequence[str] | None,
) -> int:
    """Parse the options that all scripts have, collect, and print the report or the record."""
    parser = argparse.ArgumentParser(prog=f"reproduce.{name}", description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    options = parser.parse_args(argv)
    try:
        record = collect()
    except LlmpqError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    emit(report(record), record, as_json=options.json)
    return 0


def run_on_data(  # noqa: PLR0913  what scripts differ in
    name: str,
    description: str | None,
    collect: Callable[[Path], Record],
    report: Callable[[Record], str],
    draw: Callable[[Record, Path], None],
    argv: Sequence[str] | None,
    *,
    option: str = "--data",
) -> int:
    """Parse the options of an evaluation on data, collect, draw, and print as ``run`` does."""
    parser = argparse.ArgumentParser(prog=f"reproduce.{name}", description=description)
    parser.add_argument(option, type=Path, required=True, metavar="FOLDER", dest="data")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    options = parser.parse_args(argv)
    try:
        record = collect(options.data)
    except LlmpqError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    if options.picture is not None:
        draw(record, options.picture)
    emit(report(record), record, as_json=options.json)
    return 0


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def number(value: float | None, digits: int = 2, missing: str = "-") -> str:
    """Return a number with that many decimals and thousands apart, or what stands for none."""
    return missing if value is None else f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    """Return a ratio as ``1.82x``."""
    return "-" if value is None else f"{value:.2f}x"


def degradation(value: float | None) -> str:
    """Return an omega to three significant digits."""
    return "-" if value is None else f"{value:.3g}"


def emit(text: str, record: Mapping[str, object], *, as_json: bool) -> None:
    """Print the text, or the record as JSON."""
    print(json.dumps(record, indent=2, allow_nan=False) if as_json else text)


def say(text: str) -> None:
    """Tell on standard error what is being done."""
    print(text, file=sys.stderr, flush=True)
