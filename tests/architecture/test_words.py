"""No sentence of the project uses the words and phrases that are hard to read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PHRASES = {
    "whoever": "the user, the caller, the process that",
    "nobody": "no one, or the passive: is not watched",
    "is told": "receives, reads, is passed",
    "are told": "receive, read, are passed",
    "tells of": "reports, says",
    "tell of": "report, say",
    "refuses to": "does not, raises, rejects",
    "one has": "you have",
    "of before": "earlier, previous",
    "unlike": "different, mixed, differing",
}
"""Each phrase with what to write instead."""
PATTERN = re.compile("|".join(rf"\b{phrase}\b" for phrase in PHRASES), re.I)
HERE = "tests/architecture/test_words.py"
PLACES = (
    "*.py",
    "*.pyi",
    "*.md",
    "*.c",
    "*.h",
    "*.yml",
    "*.toml",
    "*.cfg",
    "scripts/*",
    "benchmarks/results",
)
IGNORED = ("models/", "notebooks/", "inputs/", "strategies/", "tests/cli/fixtures/", HERE)


def files() -> list[str]:
    """Return the files under version control that people read or write."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *PLACES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    readmes = ["inputs/README.md", "notebooks/README.md", "strategies/README.md"]
    return sorted({name for name in listed if not name.startswith(IGNORED)} | set(readmes))


def found_in(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [
        f"{name}:{number}: {found[0]!r}: write {PHRASES[found[0].lower()]}"
        for number, line in enumerate(lines, 1)
        for found in PATTERN.finditer(line)
    ]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="lists files through git")
def test_no_file_uses_a_phrase_that_is_hard_to_read():
    hits = [hit for name in files() for hit in found_in(name)]
    assert not hits, "\n".join(hits)
