"""Columns of numbers of the site's tables are at the right, and every row is part of its table."""

from __future__ import annotations

import re

import pytest
from helpers.docs_pages import ROOT

from scripts.docs_site.alignment import expand

PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_columns_of_numbers_are_at_the_right():
    table = (
        "| name | a | b | c |\n| --- | --- | --- | --- |\n| x | 1,234 | 5.3 (5.3-6.8) | 8 bits |"
    )
    wanted = table.replace("| --- | --- | --- | --- |", "| --- | ---: | ---: | --- |")
    assert expand(f"Text.\n\n{table}\n\nMore.") == f"Text.\n\n{wanted}\n\nMore."
    assert expand(f"```text\n{table}\n```") == f"```text\n{table}\n```"
    assert expand("| a |\n| b |") == "| a |\n| b |"


def test_an_empty_cell_says_nothing_about_its_column():
    table = "| a | b |\n| --- | --- |\n| - |  |\n| 3 % | - |"
    assert "| ---: | --- |" in expand(table)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_row_stands_outside_its_table(page):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for block in re.split(r"\n\s*\n", text):
        rows = [line for line in block.splitlines() if line.lstrip().startswith("|")]
        if rows:
            assert len(rows) > 2, rows
            assert re.fullmatch(r" *\|(?: *:?-+:? *\|)+", rows[1]), rows[:2]
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
            assert len(cells) == 1, rows
