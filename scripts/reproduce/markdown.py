"""Results as Markdown tables, or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def emit(text: str, record: Mapping[str, object], *, as_json: bool) -> None:
    """Print the text, or the record as JSON."""
    print(json.dumps(record, indent=2, allow_nan=False) if as_json else text)
