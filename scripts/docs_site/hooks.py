"""What the site's build adds to a page: results, catalogues, kernels, commands, classes."""

from __future__ import annotations

from typing import Any

from scripts.docs_site import (
    alignment,
    catalogue,
    cli_reference,
    evidence,
    glossary,
    kernels,
    options_reference,
)

COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page by what is generated."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, cli_reference.reference())
    for module in (catalogue, kernels, evidence, glossary, alignment, options_reference):
        markdown = module.expand(markdown)
    return markdown
