"""``llmpq VERB``: each verb is a command."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from llmpq.cli.front.program import VERBS, main

ROOT = Path(__file__).resolve().parents[3]


def test_every_verb_is_a_command_and_every_command_has_a_verb():
    modules = {module for module, _ in VERBS.values()}
    assert all(callable(importlib.import_module(module).main) for module in modules)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    commands = {target.partition(":")[0] for target in scripts.values()}
    assert commands - {"llmpq.cli.front.program"} <= modules


def test_a_verb_gets_the_other_words(monkeypatch):
    given = []

    def check(words):
        given.append(words)
        return 7

    monkeypatch.setattr("llmpq.cli.commands.check.main", check)
    assert main(["check", "plan.json", "--json"]) == 7
    assert given == [["plan.json", "--json"]]


def test_help_lists_every_verb(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {verb} " in shown for verb in VERBS)


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "found no verb"), (["cht"], "did you mean chat"), (["-x"], "unrecognized arguments")],
)
def test_other_words_are_one_line_of_error(words, message, capsys):
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_the_package_is_the_program(capfd):
    """``python -m llmpq`` is what a user types where scripts are not in PATH."""
    command = [sys.executable, "-m", "llmpq"]
    assert subprocess.run([*command, "check", "--nothing"], check=False).returncode == 2
    assert capfd.readouterr().err.startswith("llmpq-check: error: unrecognized arguments")
    assert subprocess.run(command, check=False).returncode == 2
    assert capfd.readouterr().err.startswith("llmpq: error: found no verb")
