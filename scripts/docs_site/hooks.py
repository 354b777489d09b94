"""What the site's build adds to a page: results, the catalogue, commands, public classes."""

from __future__ import annotations

from typing import Any

from scripts.docs_site import catalogue, cli_reference, evidence, glossary

COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page by what is generated."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, cli_reference.reference())
    return glossary.expand(evidence.expand(catalogue.expand(markdown)))
