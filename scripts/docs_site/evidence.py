"""Benchmark results: one JSON file a topic under ``benchmarks/results``, shown as Markdown tables.

``record`` turns the Markdown tables that a benchmark prints into such a file; ``write`` renews the
tables of README.md. The pages of the site hold markers, ``<!-- evidence: TOPIC -->`` for all tables
of a topic and ``<!-- evidence: TOPIC / TITLE -->`` for one, which are replaced when it is built.

Measurements of speed are kept by processor and instruction set, in a list ``runs``, and shown side
by side: a column for each, where a table says which of its columns are compared.
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
    and versions stand at the top, under ``run``, or in each entry of ``runs``. Where ``runs`` is a
    list, each has its tables, and those of the result are all of them.

    Raises:
        ValueError: the file is no result file.
    """
    file = RESULTS / f"{topic}.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(found.get("runs"), list):
        found |= {
            "tables": [item for run in found["runs"] for item in run["tables"]],
            "machine": "; ".join(label(run) for run in found["runs"]),
            **max(({key: run[key] for key in ("date", "command", "versions")}
                   for run in found["runs"]), key=lambda run: str(run["date"])),
        }  # fmt: skip
        return dict(found)
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
    if isinstance(result.get("runs"), list):
        return by_processor(result["runs"], list(dict.fromkeys(item["title"] for item in tables)))
    parts = [table(item, with_title=len(tables) > 1) for item in tables]
    return "\n\n".join([*parts, origin(result)])


def label(run: Result) -> str:
    """Return the processor of a run, and the vector extension it was held to."""
    isa = run["cpu_isa"]
    return str(run["processor"]) + ("" if isa == "native" else f", held to {isa.upper()}")


def with_run(document: Result, run: Result) -> Result:
    """Return a result file with a run in place of that of the same processor and ``cpu_isa``."""
    same = ("processor", "cpu_isa")
    others = [
        one for one in document.get("runs", []) if any(one[name] != run[name] for name in same)
    ]
    runs = sorted([*others, run], key=lambda one: (one["processor"], one["cpu_isa"] != "native"))
    return {**document, "runs": runs}


def by_processor(runs: Sequence[Result], titles: Sequence[str]) -> str:
    """Return tables with a column for each processor, or a table for each, and their origins."""
    parts = []
    for title in titles:
        found = [(run, item) for run in runs for item in run["tables"] if item["title"] == title]
        head = f"**{title}**\n\n" if len(titles) > 1 and title else ""
        has_ranges = all("ranges" in item for _, item in found)
        if has_ranges:
            parts.append(head + ranges(found))
            head = ""
        if len(found) > 1 and all(item.get("beside") for _, item in found):
            parts.append(head + side_by_side(found))
            continue
        many = len(found) > 1
        parts += [
            table({**item, "title": f"{title}: {label(run)}" if many else title},
                  with_title=many or (len(titles) > 1 and not has_ranges))
            for run, item in found
        ]  # fmt: skip
    used = [run for run in runs if {item["title"] for item in run["tables"]} & set(titles)]
    return "\n\n".join(parts + [origin({**run, "machine": label(run)}) for run in used])


def ranges(found: Sequence[tuple[Result, dict[str, Any]]]) -> str:
    """Return a table of the least and the largest value of a column, by processor and case."""
    of, by = (found[0][1]["ranges"][key] for key in ("of", "by"))
    values: dict[Any, list[list[float]]] = {}
    for number, (_, item) in enumerate(found):
        at, case = item["columns"].index(of), item["columns"].index(by)
        for row in item["rows"]:
            kept = values.setdefault(row[case], [[] for _ in found])
            kept[number] += [] if row[at] in (None, "", "-") else [float(row[at])]
    rows = [
        [case, *(f"{min(one):.2f} to {max(one):.2f}" if one else "-" for one in kept)]
        for case, kept in sorted(values.items(), key=lambda one: (str(type(one[0])), one[0]))
    ]
    shown = {"title": f"{of}, least to most", "columns": [by, *(label(run) for run, _ in found)]}
    return table({**shown, "rows": rows}, with_title=True)


def side_by_side(found: Sequence[tuple[Result, dict[str, Any]]]) -> str:
    """Return one table of several runs: a row for each case, the compared columns in one cell."""
    first = found[0][1]
    keys, beside = first["columns"][: first["keys"]], first["beside"]
    cells: list[dict[tuple[str, ...], str]] = []
    for _, item in found:
        at = [item["columns"].index(name) for name in beside]
        cells.append({
            tuple(map(cell, row[: len(keys)])): "; ".join(short(row[column]) for column in at)
            for row in item["rows"]
        })  # fmt: skip
    rows = [
        [*key, *(one.get(key, "-") for one in cells)]
        for key in dict.fromkeys(key for one in cells for key in one)
    ]
    columns = [*keys, *(label(run) for run, _ in found)]
    notes = dict.fromkeys(item["note"] for _, item in found if item.get("note"))
    shown = {"columns": columns, "rows": rows, "title": "", "note": "\n\n".join(notes)}
    return f"A cell: {'; '.join(beside)}.\n\n{table(shown, with_title=False)}"


def short(value: object) -> str:
    """Return a value as text: three significant digits."""
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1e3 else cell(value)


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
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
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
    where = record.add_mutually_exclusive_group(required=True)
    where.add_argument("--machine")
    where.add_argument("--processor", help="keep these results beside those of other processors")
    record.add_argument("--cpu_isa", default="native", help="that the processor was held to")
    record.add_argument("--versions", nargs="*", default=[], metavar="NAME=VERSION")
    options = parser.parse_args(argv)
    if options.verb == "write":
        README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    result: Result = {
        "command": options.command,
        "date": options.date,
        "versions": dict(entry.split("=", 1) for entry in options.versions),
        "tables": tables_of(sys.stdin.read()),
    }
    if options.processor is None:
        save({"topic": options.topic, "machine": options.machine, **result})
        return 0
    file = RESULTS / f"{options.topic}.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    kept = {"topic": options.topic, "runs": found.get("runs", [])}
    save(with_run(kept, {"processor": options.processor, "cpu_isa": options.cpu_isa, **result}))
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
