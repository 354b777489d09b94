"""The keywords of the Python interface as Markdown, from the classes that declare them."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from llmpq.assigner import PlanRequest
from llmpq.options.declare import explained
from llmpq.options.engine import EngineOptions
from llmpq.options.run import LaunchOptions, RunOptions

MARKER = "<!-- options -->"
KINDS: dict[type[Any], str] = {
    PlanRequest: "`llmpq.plan`",
    RunOptions: "`Pipeline` and `AsyncEngine`",
    LaunchOptions: "`AsyncEngine`",
    EngineOptions: "`AsyncEngine`; `Pipeline` has `speculative_config`",
}


def expand(page: str) -> str:
    """Return a page with one table for each class of options in place of the marker."""
    if MARKER not in page:
        return page
    return page.replace(MARKER, "\n\n".join(map(table, KINDS)))


def table(kind: type[Any]) -> str:
    """Return the keywords of a class that has an explanation for them, without inherited ones."""
    texts, hints = explained(kind), get_type_hints(kind)
    bases = [base for base in kind.__mro__[1:] if base in KINDS]
    inherited = {one.name for base in bases for one in fields(base)}
    rows = [
        f"| `{one.name}` | `{type_name(hints[one.name])}` | {default_of(one)} | "
        f"{escape(texts[one.name])} |"
        for one in fields(kind)
        if one.name in texts and one.name not in inherited
    ]
    head = f"Keywords of {KINDS[kind]} (`{kind.__name__}`):"
    return "\n".join(
        [head, "", "| keyword | type | default | meaning |", "| --- " * 4 + "|", *rows]
    )


def type_name(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    for part in ("typing.", "pathlib.", "llmpq.batching.speculation."):
        text = text.replace(part, "")
    return escape(text)


def default_of(one: Any) -> str:
    return "" if one.default is MISSING else f"`{one.default!r}`"


def escape(words: str) -> str:
    return words.replace("|", "\\|")
