"""Benchmark results: one JSON file a topic under ``benchmarks/results``, shown as Markdown tables.

A file holds numbers. Either it keeps the ``record`` that a script printed with ``--json``, and the
tables are what the script's own ``report`` prints of it; or it has ``tables``, whose ``formats``
say how the numbers of each column are shown. ``record`` makes such a file from what a script
printed, its JSON object or its Markdown tables; ``write`` renews the tables of README.md. The pages
of the site hold markers, ``<!-- evidence: TOPIC -->`` for all tables of a topic and
``<!-- evidence: TOPIC / TITLE -->`` for one, which are replaced when it is built.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
MARKER = re.compile(r"^<!-- evidence: ([\w-]+)(?: / (.+?))? -->$", re.M)
END = "<!-- end of evidence -->"
NUMBER = re.compile(r"(?P<sign>[-+]?)(?P<whole>\d[\d,]*)(?P<decimals>\.\d+)?(?P<end> ?[%x]?)")
REQUIRED = ("topic", "command", "date", "machine", "versions", "tables")
DIGITS = 7
"""Significant digits that are kept of a number in a record."""
SHORT = 160
"""Characters of a list or object that is written on one line."""

Result = dict[str, Any]


def load(topic: str) -> Result:
    """Read the results of a topic.

    A file has ``tables``, or lists of objects that become one table each, or a ``record`` and the
    module of its ``report``. Command, date, machine and versions stand at the top, under ``run``,
    or in each entry of ``runs``.

    Raises:
        ValueError: the file is no result file.
    """
    file = RESULTS / f"{topic}.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    runs = [found.get("run", {}), *found.get("runs", {}).values()]
    result = {"topic": topic} | {key: value for run in reversed(runs) for key, value in run.items()}
    result |= found
    if ("tables" not in found or "run" in found) and "report" not in found:
        result["tables"] = [
            {"title": key.replace("_", " "), "rows": rows}
            for key, rows in found.items()
            if isinstance(rows, list) and rows and isinstance(rows[0], dict)
        ]
    if "report" in found:
        printed = import_module(found["report"]).report(found["record"])
        result["tables"] = [*tables_of(printed), *found.get("tables", [])]
    missing = [field for field in REQUIRED if field not in result]
    if missing or result["topic"] != topic:
        raise ValueError(f"{file.name}: found topic {result['topic']!r}, missing {missing}")
    return result


def topics() -> list[str]:
    """Return the topics that have results."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def render(topic: str, title: str | None = None) -> str:
    """Return the tables of a topic, or the one with that title, with command, date and machine."""
    result = load(topic)
    tables = [item for item in result["tables"] if title in (None, item["title"])]
    if not tables:
        raise ValueError(f"{topic}: found no table {title!r}")
    parts = [table(item, with_title=len(tables) > 1) for item in tables]
    return "\n\n".join([*parts, origin(result)])


def table(item: dict[str, Any], *, with_title: bool) -> str:
    """Return one Markdown table; rows are lists, or objects with the columns as keys."""
    columns = columns_of(item)
    rows = [
        row if isinstance(row, list) else [row.get(key) for key in columns] for row in item["rows"]
    ]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    forms = item.get("formats", [""] * len(columns))
    lines += ["| " + " | ".join(map(cell, row, forms)) + " |" for row in rows]
    head = [f"**{item['title']}**", ""] if with_title and item["title"] else []
    note = ["", item["note"]] if item.get("note") else []
    return "\n".join([*head, *lines, *note])


def columns_of(item: dict[str, Any]) -> list[str]:
    """Return the columns of a table: stated, or the keys whose values can be shown."""
    if "columns" in item:
        return list(item["columns"])
    first = item["rows"][0]
    return [key for key, value in first.items() if not isinstance(value, dict) or "mean" in value]


def cell(value: object, form: str = "") -> str:
    """Return a value as text: by its column's format, or with four significant digits.

    Args:
        value: a number, several of them, a mean with its 95th percentile, a text, or nothing.
        form: a format of Python, with a field for each number or with one for all of a list.
    """
    if value is None:
        return "-"
    numbers = value if isinstance(value, list) else [value]
    if form and not isinstance(value, str) and form.count("{") in (1, len(numbers)):
        is_each = form.count("{") == 1
        return ", ".join(map(form.format, numbers)) if is_each else form.format(*numbers)
    if isinstance(value, dict):
        return f"{100 * value['mean']:.2f} / {100 * value['p95']:.1f} %"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def origin(result: Result) -> str:
    """Return one line that says where the figures come from, and the result's ``note``."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    where = f"`{result['command']}`, {result['date']}, {result['machine']}"
    note = f" {result['note']}" if "note" in result else ""
    return f"*{where}{f' ({versions})' if versions else ''}.{note}*"


def expand(markdown: str) -> str:
    """Replace the markers of a page by tables."""
    return MARKER.sub(lambda found: render(found[1], found[2]), markdown)


def renewed(markdown: str) -> str:
    """Return a page whose tables stand between a marker and ``END``, with today's tables."""
    pattern = re.compile(f"({MARKER.pattern})\n.*?{re.escape(END)}", re.M | re.S)
    return pattern.sub(lambda found: f"{found[1]}\n{render(found[2], found[3])}\n{END}", markdown)


def tables_of(markdown: str) -> list[dict[str, Any]]:
    """Return the tables of a Markdown text, each with the title before and the note after it.

    A title is a heading or a bold line; a note is a line of text.
    """
    found: list[dict[str, Any]] = []
    title = ""
    rows: list[list[str]] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([part.strip() for part in re.split(r"(?<!\\)\|", line.strip()[1:-1])])
            continue
        if rows:
            found.append({"title": title, "columns": rows[0], "rows": rows[2:]})
            rows = []
        heading = re.match(r"#+ (.+)|\*\*(.+?)\*\*$", line)
        if heading:
            title = heading[1] or heading[2]
        elif line and found and found[-1]["title"] == title:
            found[-1]["note"] = f"{found[-1].get('note', '')} {line}".strip()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Record results, or renew README.md."""
    parser = argparse.ArgumentParser(prog="scripts.docs_site.evidence", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("write", help="renew the tables of README.md")
    record = verbs.add_parser("record", help="turn what a script printed into results")
    record.add_argument("topic")
    record.add_argument("--command", required=True, help="how the figures were made")
    record.add_argument("--date", required=True)
    record.add_argument("--machine", required=True)
    record.add_argument("--versions", nargs="*", default=[], metavar="NAME=VERSION")
    record.add_argument(
        "--report", help="module that printed the JSON object; else Markdown tables"
    )
    options = parser.parse_args(argv)
    if options.verb == "write":
        README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    result: Result = {
        "topic": options.topic,
        "command": options.command,
        "date": options.date,
        "machine": options.machine,
        "versions": dict(entry.split("=", 1) for entry in options.versions),
    }
    printed = sys.stdin.read()
    if options.report:
        result |= {"report": options.report, "record": rounded(json.loads(printed))}
    else:
        result["tables"] = [with_numbers(item) for item in tables_of(printed)]
    save(result)
    return 0


def with_numbers(item: dict[str, Any]) -> dict[str, Any]:
    """Return a printed table whose columns of numbers hold numbers, and their formats."""
    columns = [list(column) for column in zip(*item["rows"], strict=True)]
    forms = []
    for column in columns:
        found = [NUMBER.fullmatch(cell) for cell in column if cell not in ("", "-")]
        parts = [part for part in found if part]
        ends = {(part["end"], len(part["decimals"] or ".") - 1) for part in parts}
        form = ""
        if parts and len(parts) == len(found) and len({end for end, _ in ends}) == 1:
            end, decimals = max(ends)
            sign = "+" if any(part["sign"] == "+" for part in parts) else ""
            comma = "," if any("," in part["whole"] for part in parts) else ""
            form = f"{{:{sign}{comma}.{decimals}f}}{end}" if len(ends) == 1 else f"{{:.4g}}{end}"
            column[:] = [None if cell in ("", "-") else value_of(cell) for cell in column]
        forms.append(form)
    rows = [list(row) for row in zip(*columns, strict=True)]
    return item | {"rows": rows, "formats": forms}


def value_of(cell: str) -> float:
    """Return the number of a printed cell."""
    text = cell.rstrip(" %x").replace(",", "")
    return float(text) if "." in text else int(text)


def rounded(value: Any) -> Any:
    """Return a record with ``DIGITS`` significant digits of each number."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def save(result: Result) -> None:
    """Write a result file, a table row or another short value a line."""
    file = RESULTS / f"{result['topic']}.json"
    file.write_text(lines_of(result) + "\n", encoding="utf-8")


def lines_of(value: Any, indent: str = "") -> str:
    """Return JSON with each value on one line that is short or holds no other list or object."""
    flat = json.dumps(value, ensure_ascii=False)
    items = list(value.values() if isinstance(value, dict) else value) if flat[0] in "[{" else []
    if len(flat) <= SHORT or not any(isinstance(item, dict | list) for item in items):
        return flat
    deeper = indent + " "
    keys = [f"{json.dumps(key, ensure_ascii=False)}: " for key in value] if flat[0] == "{" else None
    names = keys or [""] * len(items)
    inner = [
        f"\n{deeper}{name}{lines_of(item, deeper)}" for name, item in zip(names, items, strict=True)
    ]
    return f"{flat[0]}{','.join(inner)}\n{indent}{flat[-1]}"


if __name__ == "__main__":
    raise SystemExit(main())
