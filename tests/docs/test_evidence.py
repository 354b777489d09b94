"""Results of benchmarks are complete, and the documentation shows all of them."""

from __future__ import annotations

import re

import pytest
from helpers.docs_pages import PAGES, ROOT

from scripts.docs_site import catalogue, cli_reference, evidence


@pytest.mark.parametrize("topic", evidence.topics())
def test_results_are_complete(topic):
    result = evidence.load(topic)
    for item in result["tables"]:
        columns = evidence.columns_of(item)
        assert all(len(row) >= len(columns) for row in item["rows"])
    assert re.match(r"20\d\d-\d\d-\d\d", result["date"])


def test_every_topic_is_shown():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {found[0] for found in evidence.MARKER.findall(text)} == set(evidence.topics())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_markers_of_a_page_can_be_replaced(page):
    text = evidence.expand(catalogue.expand(page.read_text(encoding="utf-8")))
    assert "<!-- evidence:" not in text.replace("<!-- end of evidence -->", "")


def test_tables_of_the_readme_are_those_of_the_results():
    """``python -m scripts.docs_site.evidence write`` renews them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert evidence.renewed(text) == text


def test_printed_tables_become_results():
    text = "## Title\n\n| a | b |\n| --- | --- |\n| 1 | x \\| y |\n\n"
    text += "**Other**\n\n| c |\n|---|\n| 2 |\n"
    assert evidence.tables_of(text) == [
        {"title": "Title", "columns": ["a", "b"], "rows": [["1", "x \\| y"]]},
        {"title": "Other", "columns": ["c"], "rows": [["2"]]},
    ]


def test_rows_may_be_objects_with_numbers():
    item = {"title": "t", "rows": [{"what": "x", "seconds": 0.123456}]}
    assert "| x | 0.1235 |" in evidence.table(item, with_title=True)


def test_reference_of_the_commands_has_every_option():
    text = cli_reference.reference()
    surface = (ROOT / "tests" / "architecture" / "cli_surface.txt").read_text(encoding="utf-8")
    for line in surface.splitlines():
        option = line.split()[-1]
        if option.startswith("--") and option.removeprefix("--") not in cli_reference.COMMON:
            assert option in text, line
