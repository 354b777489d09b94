"""Every message that docs/operations/troubleshooting.md explains is still in the sources."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from helpers.docs_pages import ROOT

PAGE = ROOT / "docs" / "operations" / "troubleshooting.md"


def fragments() -> list[str]:
    """Return the quoted parts of messages in the first column of the tables."""
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## "):
        if "| message contains |" in section:
            rows = [line for line in section.splitlines() if line.startswith("| ")]
            found += [
                part for row in rows for part in re.findall(r"`([^`]+)`", row.split(" | ")[0])
            ]
    return found


@cache
def texts_of_the_sources() -> str:
    """Return all strings of the package, those of one expression joined."""
    texts = []
    for path in (ROOT / "llmpq").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                values = (
                    part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
                )
                texts.append("".join(str(value) for value in values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.parametrize("fragment", fragments())
def test_a_message_still_exists(fragment):
    assert fragment in texts_of_the_sources()
