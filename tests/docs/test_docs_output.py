"""What a tutorial shows as the output of a command is what the command prints today."""

from __future__ import annotations

import re
import shlex

import pytest
from helpers.docs_pages import ROOT, blocks

from llmpq.cli.commands import algo

PAGE = ROOT / "docs" / "tutorials" / "plan.md"


def shown_after(command):
    """Return the lines of the text block that follows a command, without those cut to dots."""
    text = PAGE.read_text(encoding="utf-8").split(command)[1]
    lines = text.split("```text\n")[1].split("```")[0].splitlines()
    return [line for line in lines if line.strip() and line != "..."]


@pytest.mark.parametrize(
    "name", ["opt-30b.json", pytest.param("front.json", marks=pytest.mark.slow)]
)
def test_shown_lines_are_printed(name, tmp_path, monkeypatch, capsys):
    (command,) = (
        command
        for block in blocks()
        if block.page == PAGE
        for command in block.commands()
        if command.endswith(f"--output {name}")
    )
    monkeypatch.chdir(tmp_path)
    assert algo.main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out
    for line in shown_after(f"--output {name}"):
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        assert re.search(f"^{pattern}", printed, re.M), line
