"""The public classes of the package as Markdown, from the first lines of their docstrings."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "llmpq"
MARKER = "<!-- classes -->"
ROLE = re.compile(r":\w+:`[~.]*([^`]+)`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A public class.

    Attributes:
        name: name of the class.
        module: dotted module that defines it.
        meaning: first line of its docstring, or an empty text.
    """

    name: str
    module: str
    meaning: str


@cache
def rooms() -> tuple[str, ...]:
    """Return the packages of ``llmpq`` that define public classes."""
    names = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    return tuple(name for name in names if entries(name))


@cache
def entries(room: str) -> tuple[Entry, ...]:
    """Return the public classes of a package by name; an error explains itself by its message."""
    found = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and is_shown(node.name):
                lines = (ast.get_docstring(node) or "").splitlines()
                meaning = lines[0] if lines else ""
                found.append(Entry(name=node.name, module=module, meaning=meaning))
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.module)))


def is_shown(name: str) -> bool:
    return not name.startswith("_") and not name.endswith("Error")


def classes() -> str:
    """Return one table for each package."""
    return "\n\n".join(f"## Classes of `llmpq.{room}`\n\n{table(room)}" for room in rooms())


def table(room: str) -> str:
    """Return the table of one package."""
    lines = ["| class | module | meaning |", "| --- | --- | --- |"]
    for entry in entries(room):
        module = entry.module.removeprefix(f"llmpq.{room}").removeprefix(".")
        lines.append(f"| `{entry.name}` | `{module}` | {markdown(entry.meaning)} |")
    return "\n".join(lines)


def markdown(meaning: str) -> str:
    """Return a docstring's line as the cell of a table."""
    return ROLE.sub(r"`\1`", meaning).replace("``", "`").replace("|", "\\|")


def expand(page: str) -> str:
    """Replace the marker of a page."""
    return page.replace(MARKER, classes()) if MARKER in page else page
