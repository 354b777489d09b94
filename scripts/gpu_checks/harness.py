"""Checks that cannot harm each other: what one is, how it is run, what is written about it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where checks run.

    Attributes:
        device: what is checked.
        is_quick: small shapes and few of them, to try the checks themselves.
        folder: for what a check writes; removed afterwards.
    """

    device: torch.device
    is_quick: bool
    folder: Path


Check = Callable[[Setting], list[Row]]


class SkippedError(Exception):
    """This machine lacks what the check needs; the message says what."""


class FailedError(Exception):
    """Something is wrong; the rows found so far come with it."""

    def __init__(self, reason: str, rows: Sequence[Row] = ()) -> None:
        super().__init__(reason)
        self.rows = list(rows)


@dataclass(slots=True, kw_only=True)
class Finding:
    """What came of a check.

    Attributes:
        name: of the check.
        status: ``passed``, ``failed`` or ``skipped``.
        seconds: it took.
        reason: why it failed or was skipped.
        rows: its figures.
    """

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    rows: list[Row] = field(default_factory=list)


def run_here(name: str, check: Check, setting: Setting) -> Finding:
    """Run a check in this process."""
    start = time.perf_counter()
    finding = Finding(name=name, status="passed")
    try:
        finding.rows = check(setting)
    except SkippedError as skipped:
        finding.status, finding.reason = "skipped", str(skipped)
    except FailedError as failed:
        finding.status, finding.reason, finding.rows = "failed", str(failed), failed.rows
    except Exception:
        finding.status, finding.reason = "failed", traceback.format_exc(limit=-4)
    finding.seconds = round(time.perf_counter() - start, 1)
    return finding


def run_apart(name: str, options: Sequence[str], limit_s: float) -> Finding:
    """Run a check in a process of its own, which a broken GPU context or a hang ends with.

    Args:
        name: of the check.
        options: of the command, besides the check's name.
        limit_s: it may take.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        note = Path(folder) / "finding.json"
        command = [sys.executable, "-m", "scripts.gpu_checks", "--only", name, "--note", str(note)]
        reason = ""
        try:
            done = subprocess.run(
                [*command, *options],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
            if note.exists():
                return Finding(**json.loads(note.read_text(encoding="utf-8")))
            reason = f"exit status {done.returncode}: {(done.stderr or done.stdout)[-2000:]}"
        except subprocess.TimeoutExpired:
            reason = f"took longer than {limit_s:g} s"
    seconds = round(time.perf_counter() - start, 1)
    return Finding(name=name, status="failed", seconds=seconds, reason=reason)


def write_report(folder: Path, findings: Sequence[Finding]) -> str:
    """Write ``gpu_check.json`` and ``gpu_check.txt``; return the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"findings": [asdict(finding) for finding in findings]}
    text = "\n".join(line for finding in findings for line in _lines(finding)) + "\n"
    (folder / "gpu_check.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu_check.txt").write_text(text, encoding="utf-8")
    return text


def _lines(finding: Finding) -> list[str]:
    lines = [f"== {finding.name}: {finding.status} ({finding.seconds:g} s)"]
    lines += [f"   {line}" for line in finding.reason.strip().splitlines()]
    return lines + [f"   {line}" for line in _table(finding.rows)] + [""]


def _table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    if len(cells) == 1:
        return []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
