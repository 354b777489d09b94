"""Every public class has a docstring whose first line explains it; the glossary shows them all."""

from __future__ import annotations

import re

import pytest
from helpers.docs_pages import ROOT

from scripts.docs_site import glossary

PAGE = ROOT / "docs" / "reference" / "glossary.md"
FILLERS = re.compile(r"(?:a|all|an|and|at|by|for|in|is|its?|of|on|one|or|that|the|to|what|which)$")


def words_that_explain(entry):
    """Return the words of an entry's line that its name does not say already."""
    name = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", entry.name)}
    words = set(re.findall(r"[a-z0-9][a-z0-9_-]*", entry.meaning.lower()))
    said = {part.rstrip("s") for part in name}
    return {word for word in words if word.rstrip("s") not in said and not FILLERS.match(word)}


@pytest.mark.parametrize("room", glossary.rooms())
def test_every_public_class_is_explained_by_the_first_line_of_its_docstring(room):
    unclear = {
        f"{entry.module}.{entry.name}": entry.meaning
        for entry in glossary.entries(room)
        if not entry.meaning.endswith(".") or len(words_that_explain(entry)) < 2
    }
    assert not unclear


def test_generated_page_has_every_public_class_with_its_line():
    page = glossary.expand(PAGE.read_text(encoding="utf-8"))
    assert glossary.MARKER not in page
    for room in glossary.rooms():
        section = page.split(f"## Classes of `llmpq.{room}`\n")[1].split("\n## ")[0]
        for entry in glossary.entries(room):
            row = f"| `{entry.name}` | "
            assert any(
                line.startswith(row) and line.endswith(f"{glossary.markdown(entry.meaning)} |")
                for line in section.splitlines()
            ), entry


def test_no_package_is_left_out():
    classes = {"llmpq"}
    for path in (ROOT / "llmpq").rglob("*.py"):
        if re.search(r"^class [A-Z]\w*(?<!Error)\b", path.read_text(encoding="utf-8"), re.M):
            classes.add(path.relative_to(ROOT / "llmpq").parts[0])
    modules = {path.name for path in (ROOT / "llmpq").glob("*.py")}
    assert classes - modules - {"llmpq"} == set(glossary.rooms())


def test_roles_and_bars_become_markdown():
    line = "Starts ``a | b``; see :meth:`~llmpq.api.Pipeline.start`."
    assert glossary.markdown(line) == r"Starts `a \| b`; see `llmpq.api.Pipeline.start`."
