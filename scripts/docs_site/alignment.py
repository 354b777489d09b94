"""Columns of numbers: the tables of a page show them at the right, so that digits line up."""

from __future__ import annotations

import re
from collections.abc import Sequence

ROW = re.compile(r"^ *\|.*\| *$")
RULE = re.compile(r"^:?-+:?$")
_ONE = r"[-+]?\d[\d,]*(?:\.\d+)?"
_SEVERAL = rf"{_ONE}(?:(?:-|, | to | / ){_ONE})*(?: \({_ONE}(?:-| to ){_ONE}\))? ?[%x]?"
NUMBER = re.compile(rf"^(?:\*\*)?{_SEVERAL}(?:\*\*)?$")
"""A number, several, a range, or a median with its range."""
NOTHING = ("", "-")


def expand(markdown: str) -> str:
    """Align the columns of numbers of every table of a page; fenced text stays as it is."""
    lines = markdown.split("\n")
    is_fenced = False
    start = 0
    for number, line in enumerate([*lines, ""]):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        if not is_fenced and ROW.match(line):
            continue
        if number - start > 2:
            lines[start + 1] = _rule(lines[start:number])
        start = number + 1
    return "\n".join(lines)


def _rule(rows: Sequence[str]) -> str:
    """Return the line below the head of a table."""
    indent = rows[1][: len(rows[1]) - len(rows[1].lstrip())]
    cells = [_cells(row) for row in rows]
    if not all(RULE.match(cell) for cell in cells[1]):
        return rows[1]
    rules = [
        "---:" if _is_number([row[column] for row in cells[2:] if column < len(row)]) else rule
        for column, rule in enumerate(cells[1])
    ]
    return f"{indent}| {' | '.join(rules)} |"


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip()[1:-1])]


def _is_number(cells: Sequence[str]) -> bool:
    found = [cell for cell in cells if cell not in NOTHING]
    return bool(found) and all(NUMBER.match(cell) for cell in found)
