"""Rows of CSV files that others wrote: columns by name, and errors that say where."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from llmpq.errors import SpecError
from llmpq.spec.fields import encoding_of_file


def csv_rows(file: Path, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a file with their line numbers.

    Raises:
        SpecError: the file cannot be read, or lacks one of the ``needed`` columns.
    """
    try:
        with file.open(encoding=encoding_of_file(file), newline="") as lines:
            reader = csv.DictReader(lines)
            rows = list(enumerate(reader, start=2))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: cannot be read: {error}") from None
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise SpecError(f"{file}: found no column '{missing[0]}', expected {', '.join(needed)}")
    return rows


def number(file: Path, line: int, text: str) -> float:
    """Return a cell as a number; raises ``SpecError`` if it is none."""
    try:
        return float(text)
    except (TypeError, ValueError):
        raise SpecError(f"{file}: line {line}: found '{text}', expected a number") from None
