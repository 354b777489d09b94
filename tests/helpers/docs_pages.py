"""The pages of the documentation and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / name / "README.md" for name in ("inputs", "notebooks", "strategies")),
    ]
)
BLOCK = re.compile(
    r"(?:^ *<!-- test: (?P<mode>\w+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>bash|python)\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
HEREDOC = re.compile(r"cat > (\S+) <<'EOF'\n(.*?)^EOF$", re.M | re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of shell commands or Python.

    Attributes:
        page: the page.
        language: ``bash`` or ``python``.
        mode: ``run``, ``parse`` or ``none``; blocks without a mark are parsed.
        text: the commands.
    """

    page: Path
    language: str
    mode: str
    text: str

    def files(self) -> list[tuple[str, str]]:
        """Return name and text of the files that the block writes."""
        return HEREDOC.findall(self.text)

    def commands(self) -> list[str]:
        """Return the shell commands, continued lines joined, comments removed."""
        text = HEREDOC.sub("", self.text).replace("\\\n", " ")
        lines = (line.partition(" #")[0].strip() for line in text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks() -> Iterator[Block]:
    """Yield every block of every page."""
    for page in PAGES:
        for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
            indent = len(found["indent"])
            text = "".join(line[indent:] for line in found["text"].splitlines(keepends=True))
            mode = found["mode"] or "parse"
            yield Block(page=page, language=found["language"], mode=mode, text=text)


def name_of(page: Path) -> str:
    """Return the page's path inside the repository."""
    return str(page.relative_to(ROOT))
