"""Benchmark results: one JSON file a topic under ``benchmarks/results``, shown as Markdown tables.

``record`` turns the Markdown tables that a benchmark prints into such a file; ``write`` renews the
tables of README.md. The pages of the site hold markers, ``<!-- evidence: TOPIC -->`` for all tables
of a topic and ``<!-- evidence: TOPIC / TITLE -->`` for one, which are replaced when it is built.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
MARKER = re.compile(r"^<!-- evidence: ([\w-]+)(?: / (.+?))? -->$", re.M)
END = "<!-- end of evidence -->"
REQUIRED = ("topic", "command", "date", "machine", "versions", "tables")

Result = dict[str, Any]


def load(topic: str) -> Result:
    """Read the results of a topic.

    A file has ``tables``, or lists of objects that become one table each. Command, date, machine
    and versions stand at the top, under ``run``, or in each entry of ``runs``.

    Raises:
        ValueError: the file is no result file.
    """
    file = RESULTS / f"{topic}.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    runs = [found.get("run", {}), *found.get("runs", {}).values()]
    result = {"topic": topic} | {key: value for run in reversed(runs) for key, value in run.items()}
    result |= found
    if "tables" not in found or "run" in found:
        result["tables"] = [
            {"title": key.replace("_", " "), "rows": rows}
            for key, rows in found.items()
            if isinstance(rows, list) and rows and isinstance(rows[0], dict)
        ]
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
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    head = [f"**{item['title']}**", ""] if with_title and item["title"] else []
    note = ["", item["note"]] if item.get("note") else []
    return "\n".join([*head, *lines, *note])


def columns_of(item: dict[str, Any]) -> list[str]:
    """Return the columns of a table: stated, or the keys whose values can be shown."""
    if "columns" in item:
        return list(item["columns"])
    first = item["rows"][0]
    return [key for key, value in first.items() if not isinstance(value, dict) or "mean" in value]


def cell(value: object) -> str:
    """Return a value as text: four significant digits, or mean / 95th percentile in percent."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return f"{100 * value['mean']:.2f} / {100 * value['p95']:.1f} %"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def origin(result: Result) -> str:
    """Return one line that says where the figures come from."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    where = f"`{result['command']}`, {result['date']}, {result['machine']}"
    return f"*{where}{f' ({versions})' if versions else ''}.*"


def expand(markdown: str) -> str:
    """Replace the markers of a page by tables."""
    return MARKER.sub(lambda found: render(found[1], found[2]), markdown)


def renewed(markdown: str) -> str:
    """Return a page whose tables stand between a marker and ``END``, with today's tables."""
    pattern = re.compile(f"({MARKER.pattern})\n.*?{re.escape(END)}", re.M | re.S)
    return pattern.sub(lambda found: f"{found[1]}\n{render(found[2], found[3])}\n{END}", markdown)


def tables_of(markdown: str) -> list[dict[str, Any]]:
    """Return the tables of a Markdown text, each with the heading or bold line before it."""
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
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Record results, or renew README.md."""
    parser = argparse.ArgumentParser(prog="scripts.docs_site.evidence", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("write", help="renew the tables of README.md")
    record = verbs.add_parser("record", help="turn Markdown tables on standard input into results")
    record.add_argument("topic")
    record.add_argument("--command", required=True, help="how the figures were made")
    record.add_argument("--date", required=True)
    record.add_argument("--machine", required=True)
    record.add_argument("--versions", nargs="*", default=[], metavar="NAME=VERSION")
    options = parser.parse_args(argv)
    if options.verb == "write":
        README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    result = {
        "topic": options.topic,
        "command": options.command,
        "date": options.date,
        "machine": options.machine,
        "versions": dict(entry.split("=", 1) for entry in options.versions),
        "tables": tables_of(sys.stdin.read()),
    }
    save(result)
    return 0


def save(result: Result) -> None:
    """Write a result file, a table row a line."""
    text = json.dumps(result, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\n\s+((?:[^\[\]{}])*?)\n\s+\]", lambda found: one_line(found[1]), text)
    (RESULTS / f"{result['topic']}.json").write_text(text + "\n", encoding="utf-8")


def one_line(items: str) -> str:
    return "[" + " ".join(line.strip() for line in items.splitlines()) + "]"


if __name__ == "__main__":
    raise SystemExit(main())
