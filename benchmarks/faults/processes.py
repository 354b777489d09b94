"""What processes hold: memory and descriptors."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    """Return what a process holds in memory; 0 once it ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def open_files(pid: int) -> list[str]:
    """Return what the descriptors of a process are of, numbers in names left out."""
    found = []
    with contextlib.suppress(OSError):  # it ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                found.append(re.sub(r"[0-9]+", "#", str(link.readlink())))
    return sorted(found)
