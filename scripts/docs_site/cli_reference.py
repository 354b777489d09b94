"""The reference of the commands as Markdown, generated from their argument parsers."""

from __future__ import annotations

import argparse
import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMON = {"help", "version", "json", "verbose"}
"""Options of every command; the page explains them once."""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command of ``pyproject.toml``, and of three verbs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    modules = {
        name: target.partition(":")[0] for name, target in project["project"]["scripts"].items()
    }
    modules["llmpq-dist doctor"] = "llmpq.cli.running.doctor"
    modules |= {f"llmpq {verb}": f"llmpq.cli.front.{verb}" for verb in ("chat", "run")}
    return {
        name: importlib.import_module(module)._parser() for name, module in sorted(modules.items())
    }


def reference() -> str:
    """Return one section for each command."""
    return "\n\n".join(section(name, parser) for name, parser in parsers().items())


def section(name: str, parser: argparse.ArgumentParser, level: int = 2) -> str:
    """Return the heading, the description and the tables of options of a command."""
    parts = [f"{'#' * level} `{name}`"]
    if parser.description:
        parts.append(text(parser.description))
    for title, rows in groups(parser):
        if title:
            parts.append(f"**{title}**")
        parts.append("| option | meaning |\n| --- | --- |\n" + "\n".join(rows))
    for verb, child in children(parser):
        parts.append(section(f"{name} {verb}", child, level + 1))
    return "\n\n".join(parts)


def groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the table rows of every group that has an option to show."""
    for group in parser._action_groups:
        rows = [row(parser, action) for action in group._group_actions if is_shown(action)]
        if rows:
            yield (group.title or "").removesuffix("arguments").capitalize().strip(), rows


def is_shown(action: argparse.Action) -> bool:
    return (
        not isinstance(action, argparse._SubParsersAction)
        and action.dest not in COMMON
        and action.help != argparse.SUPPRESS
    )


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the table row of one option."""
    values = (
        parser._get_formatter()._format_args(action, action.dest) if takes_value(action) else ""
    )
    names = ", ".join(action.option_strings) or values
    shown = f"{names} {values}" if action.option_strings and values else names
    meaning = text((action.help or "") % vars_of(parser, action))
    if action.required and action.option_strings:
        meaning = f"Required. {meaning}"
    return f"| `{escape(shown)}` | {escape(meaning)} |"


def takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0


def vars_of(parser: argparse.ArgumentParser, action: argparse.Action) -> dict[str, object]:
    return vars(action) | {"prog": parser.prog}


def text(words: str) -> str:
    return " ".join(words.split())


def escape(words: str) -> str:
    return words.replace("|", "\\|")


def children(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the sub-commands of a command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


if __name__ == "__main__":
    print(reference())
