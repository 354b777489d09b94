"""Benchmark results: one JSON file a topic under ``benchmarks/results``, shown as Markdown tables.

A file holds numbers. Either it keeps the ``record`` that a script printed with ``--json``, and the
tables are what the script's own ``report`` prints of it; or it has ``tables``, whose ``formats``
say how the numbers of each column are shown. Measurements of speed are kept by processor and
instruction set, in a list ``runs``, each of which has these fields. Runs are shown side by side: a
column for each, where a table says which of its columns are compared.

``record`` makes such a file from what a script printed, its JSON object or its Markdown tables;
``write`` renews the tables of README.md. The pages of the site hold markers,
``<!-- evidence: TOPIC -->`` for all tables of a topic and ``<!-- evidence: TOPIC / TITLE -->`` for
one, which are replaced when it is built.
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
NUMBER = re.compile(r"(?P<sign>(?<!\d)[-+])?(?P<whole>\d[\d,]*)(?P<decimals>\.\d+)?")
ONE = r"[-+]?\d[\d,]*(?:\.\d+)?"
PRINTED = re.compile(rf"{ONE}(?:-{ONE})?(?: \({ONE}-{ONE}\))? ?[%x]?")
"""A number, a range, or a median with its range."""
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
    or in each entry of ``runs``. Where ``runs`` is a list, each has its tables or record, and the
    tables of the result are all of them.

    Raises:
        ValueError: the file is no result file.
    """
    file = RESULTS / f"{topic}.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(found.get("runs"), list):
        found["runs"] = [run | {"tables": tables_in(run)} for run in found["runs"]]
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
    if ("tables" not in found or "run" in found) and "report" not in found:
        result["tables"] = [
            {"title": key.replace("_", " "), "rows": rows}
            for key, rows in found.items()
            if isinstance(rows, list) and rows and isinstance(rows[0], dict)
        ]
    if "report" in found:
        result["tables"] = tables_in(found)
    missing = [field for field in REQUIRED if field not in result]
    if missing or result["topic"] != topic:
        raise ValueError(f"{file.name}: found topic {result['topic']!r}, missing {missing}")
    return result


def tables_in(found: Result) -> list[dict[str, Any]]:
    """Return the tables of a result or a run: those that its record's script prints come first."""
    printed = import_module(found["report"]).report(found["record"]) if "report" in found else ""
    return [*tables_of(printed), *found.get("tables", [])]


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
            kept[number] += [] if row[at] in (None, "", "-") else map(float, listed(row[at]))
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
    cells: list[dict[tuple[Any, ...], str]] = []
    for _, item in found:
        forms = formats_of(item)
        columns = item["columns"]  # older runs may lack one that was added
        at = [columns.index(name) if name in columns else None for name in beside]
        cells.append({
            tuple(row[: len(keys)]): "; ".join(
                "-" if column is None else short(row[column], forms[column]) for column in at
            )
            for row in item["rows"]
        })  # fmt: skip
    rows = [
        [*map(cell, key, formats_of(first)), *(one.get(key, "-") for one in cells)]
        for key in dict.fromkeys(key for one in cells for key in one)
    ]
    columns = [*keys, *(label(run) for run, _ in found)]
    notes = dict.fromkeys(item["note"] for _, item in found if item.get("note"))
    shown = {"columns": columns, "rows": rows, "title": "", "note": "\n\n".join(notes)}
    return f"A cell: {'; '.join(beside)}.\n\n{table(shown, with_title=False)}"


def short(value: object, form: str = "") -> str:
    """Return a value as text: by its column's format, or with three significant digits."""
    has_no_form = isinstance(value, float) and abs(value) < 1e3 and not form
    return f"{value:.3g}" if has_no_form else cell(value, form)


def table(item: dict[str, Any], *, with_title: bool) -> str:
    """Return one Markdown table; rows are lists, or objects with the columns as keys."""
    columns = columns_of(item)
    rows = [
        row if isinstance(row, list) else [row.get(key) for key in columns] for row in item["rows"]
    ]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    forms = formats_of(item)
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


def formats_of(item: dict[str, Any]) -> list[str]:
    """Return the format of each column of a table, empty where none is stated."""
    return list(item.get("formats") or [""] * len(columns_of(item)))


def listed(value: Any) -> list[Any]:
    """Return the numbers of a cell."""
    return value if isinstance(value, list) else [value]


def cell(value: object, form: str = "") -> str:
    """Return a value as text: by its column's format, or with four significant digits.

    Args:
        value: a number, several of them, a mean with its 95th percentile, a text, or nothing.
        form: a format of Python, with a field for each number or with one for all of a list.
    """
    if value is None:
        return "-"
    numbers = listed(value)
    if form and not isinstance(value, str) and form.count("{") in (1, len(numbers)):
        is_each = form.count("{") == 1
        return ", ".join(map(form.format, numbers)) if is_each else form.format(*numbers)
    if isinstance(value, dict):
        return f"{100 * value['mean']:.2f} / {100 * value['p95']:.1f} %"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
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
    where = record.add_mutually_exclusive_group(required=True)
    where.add_argument("--machine")
    where.add_argument("--processor", help="keep these results beside those of other processors")
    record.add_argument("--cpu_isa", default="native", help="that the processor was held to")
    record.add_argument("--versions", nargs="*", default=[], metavar="NAME=VERSION")
    record.add_argument(
        "--report", help="module that printed the JSON object; else Markdown tables"
    )
    options = parser.parse_args(argv)
    if options.verb == "write":
        README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    result: Result = {
        "command": options.command,
        "date": options.date,
        "versions": dict(entry.split("=", 1) for entry in options.versions),
    }
    printed = sys.stdin.read()
    if options.report:
        result |= {"report": options.report, "record": rounded(json.loads(printed))}
    else:
        result["tables"] = [with_numbers(item) for item in tables_of(printed)]
    if options.processor is None:
        save({"topic": options.topic, "machine": options.machine, **result})
        return 0
    file = RESULTS / f"{options.topic}.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    kept = {"topic": options.topic, "runs": found.get("runs", [])}
    save(with_run(kept, {"processor": options.processor, "cpu_isa": options.cpu_isa, **result}))
    return 0


def with_numbers(item: dict[str, Any]) -> dict[str, Any]:
    """Return a table whose columns of printed numbers hold numbers, and their formats.

    A cell has one number, two of a range, or a median with its range.
    """
    columns = [list(column) for column in zip(*item["rows"], strict=True)]
    forms = formats_of(item)
    for at, column in enumerate(columns):
        is_empty = [value in (None, "", "-") for value in column]
        texts = [value for value, empty in zip(column, is_empty, strict=True) if not empty]
        form = format_of(texts) if all(isinstance(text, str) for text in texts) else ""
        if form:
            forms[at] = form
            column[:] = [
                None if empty else values_of(value)
                for value, empty in zip(column, is_empty, strict=True)
            ]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return item | {"rows": rows} | ({"formats": forms} if any(forms) else {})


def format_of(texts: Sequence[str]) -> str:
    """Return the format in which numbers were printed, empty where a text is none."""
    found = [PRINTED.fullmatch(text) for text in texts]
    if not texts or not all(found) or len({NUMBER.sub("", text) for text in texts}) > 1:
        return ""
    printed = [list(NUMBER.finditer(text)) for text in texts]
    forms = []
    for parts in zip(*printed, strict=True):
        decimals = {len(part["decimals"] or ".") - 1 for part in parts}
        sign = "+" if any(part["sign"] == "+" for part in parts) else ""
        comma = "," if any("," in part["whole"] for part in parts) else ""
        forms.append(f"{{:{sign}{comma}.{max(decimals)}f}}" if len(decimals) == 1 else "{:.4g}")
    fields = iter(forms)
    return NUMBER.sub(lambda _: next(fields), texts[0])


def values_of(text: str) -> float | list[float]:
    """Return the number of a printed cell, or its numbers."""
    parts = [part[0].replace(",", "") for part in NUMBER.finditer(text)]
    values = [float(part) if "." in part else int(part) for part in parts]
    return values if len(values) > 1 else values[0]


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
