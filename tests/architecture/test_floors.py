"""The import contracts of setup.cfg hold; import-linter decides, not review."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOO_WIDE = {
    "llmpq/cli/commands": 10,
}
"""Rooms that still hold more modules than nine. A number may only fall, and a room only leave."""
LISTS = {"llmpq/spec/families"}
"""Folders with one file for each entry of a list."""
# In a process of its own: import-linter's logging configuration silences every other logger.
PROGRAM = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"


def test_import_contracts_hold():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_test_files_have_names_of_their_own():
    """Without packages, pytest tells two test files of one name apart only by luck."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_a_room_holds_at_most_nine_modules():
    """A folder tells one story: nine files at most, without its ``__init__``."""
    folders = {path.parent for path in (ROOT / "llmpq").rglob("*.py")}
    counts = {
        str(folder.relative_to(ROOT)): len([p for p in folder.glob("*.py") if p.stem != "__init__"])
        for folder in folders
    }
    assert {
        room: count for room, count in counts.items() if count > 9 and room not in LISTS
    } == TOO_WIDE
