"""The page of the Python interface has every keyword that a call takes, from its class."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from llmpq import AsyncEngine, Pipeline
from scripts.docs_site import options_reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "python.md"
OWN = {"plan", "model_dir", "strategy", "model", "progress", "clock", "hosts", "monitor"}
"""Parameters that the documentation of the function itself explains."""


@pytest.mark.parametrize("function", [AsyncEngine.launch, Pipeline])
def test_every_keyword_has_a_row_with_its_default(function):
    page = options_reference.expand(PAGE.read_text(encoding="utf-8"))
    assert options_reference.MARKER not in page
    rows = dict(line.split(" | ", 1) for line in page.splitlines() if line.startswith("| `"))
    keywords = inspect.signature(function).parameters.values()
    for keyword in keywords:
        if keyword.name not in OWN:
            assert f"| `{keyword.default!r}` |" in rows[f"| `{keyword.name}`"]
    assert len(keywords) > len(OWN)
