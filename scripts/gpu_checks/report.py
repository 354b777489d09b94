"""The report of one run or of several, finished or not: Markdown, to be pasted into an issue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.gpu_checks.harness import Finding, Row, read_finding

MARKS = {"passed": "passed", "failed": "**FAILED**", "skipped": "skipped"}
MOST_ROWS = 60


def report(folders: Sequence[Path], order: Sequence[str]) -> str:
    """Return the report of run folders; of a check that ran several times, the last run.

    Args:
        folders: of the calls, in order.
        order: names of all checks.
    """
    found: dict[str, Finding] = {}
    for folder in folders:
        for file in sorted(folder.glob("*.jsonl")):
            finding = read_finding(file)
            if finding.rows or finding.status != "unfinished":
                found[finding.name] = finding
    known = [name for name in order if name in found]
    findings = [found[name] for name in known] + [
        finding for name, finding in sorted(found.items()) if name not in order
    ]
    if not findings:
        return "no check has written anything yet\n"
    parts = ["## GPU check", _environment(found.get("environment")), _summary(findings)]
    missing = [name for name in order if name not in found]
    if missing:
        parts.append(f"Not run: {', '.join(missing)}.")
    parts += [_failure(one) for one in findings if one.status in ("failed", "unfinished")]
    parts += [_details(one) for one in findings if one.rows and one.name != "environment"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _environment(finding: Finding | None) -> str:
    rows = [] if finding is None else finding.rows
    return "\n".join(f"- {row.get('what')}: {row.get('found')}" for row in rows)


def _summary(findings: Sequence[Finding]) -> str:
    return _table(
        [
            {
                "check": finding.name,
                "outcome": MARKS.get(finding.status, finding.status),
                "seconds": f"{finding.seconds:g}",
                "rows": len(finding.rows),
                "reason": _last_line(finding.reason),
            }
            for finding in findings
        ]
    )


def _failure(finding: Finding) -> str:
    lines = [f"### {finding.name}: {finding.status}"]
    for title, text in (("reason", finding.reason), ("end of standard error", finding.stderr)):
        if text.strip():
            lines += [f"{title}:", "```", text.strip().replace("```", "'''"), "```"]
    return "\n".join(lines)


def _details(finding: Finding) -> str:
    shown = finding.rows[:MOST_ROWS]
    more = len(finding.rows) - len(shown)
    body = _table(shown) + (f"\n\n{more} more rows." if more else "")
    return f"<details><summary>{finding.name}</summary>\n\n{body}\n\n</details>"


def _table(rows: Sequence[Row] | Sequence[Mapping[str, object]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        names,
        ["---"] * len(names),
        *([_cell(row.get(name)) for name in names] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:160] if lines else ""
