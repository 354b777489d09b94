"""The options of every command are a promise: they equal the committed snapshot.

After a deliberate change: ``python tests/architecture/test_cli_surface.py`` rewrites the snapshot.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("cli_surface.txt")


def commands() -> dict[str, str]:
    """Return the entry point of every command of the project, and of verbs without one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    verbs = {f"llmpq {verb}": f"llmpq.cli.front.{verb}:main" for verb in ("chat", "run")}
    return dict(project["project"]["scripts"]) | verbs


def options_of(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """Return one line an option, sub-commands included."""
    lines = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, sub in action.choices.items():
                lines += options_of(sub, f"{name} {verb}")
        elif action.help != argparse.SUPPRESS:
            lines.append(f"{name} {' '.join(action.option_strings) or action.dest}")
    return lines


def surface() -> str:
    lines = []
    for name, target in sorted(commands().items()):
        module = importlib.import_module(target.partition(":")[0])
        lines += options_of(module._parser(), name)
    return "\n".join(lines) + "\n"


def test_options_equal_the_snapshot():
    assert surface() == SNAPSHOT.read_text(encoding="utf-8")


def test_every_command_has_json_and_version():
    text = surface()
    for name in commands():
        assert f"{name} --json" in text
        assert f"{name} --version" in text


def test_options_are_declared_in_their_own_layer_alone():
    """Elsewhere a command adds options of ``llmpq/options``, and never one that it makes."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "llmpq").rglob("*.py"))
        if path.parent != ROOT / "llmpq" / "options"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "add_argument"
    ]
    assert found == []


if __name__ == "__main__":
    SNAPSHOT.write_text(surface(), encoding="utf-8")
