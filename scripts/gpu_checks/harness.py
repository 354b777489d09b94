"""Checks that cannot harm each other: what one is, how it is run, and what is kept of it.

A check has a file of its own, with a JSON object a line: its rows, each written as it comes, and at
last the outcome. A run that is ended from outside loses nothing but the outcome.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
STDERR_BYTES = 4096
"""What is kept of a check's standard error: its end."""
AGAIN = "again"
"""Part of the name of a second run of a failed check."""
SYNCHRONOUS = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1"}
"""Variables of the second run: an error then comes from the call that caused it."""
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


Check = Callable[[Setting], Iterator[Row]]


class SkippedError(Exception):
    """This machine lacks what the check needs; the message says what."""


class FailedError(Exception):
    """Something is wrong; the message says what."""


@dataclass(slots=True, kw_only=True)
class Finding:
    """What came of a check.

    Attributes:
        name: of the check.
        status: ``passed``, ``failed``, ``skipped``, or ``unfinished`` without an outcome.
        seconds: it took.
        reason: why it failed or was skipped.
        stderr: the end of its standard error.
        rows: its figures.
    """

    name: str
    status: str = "unfinished"
    seconds: float = 0.0
    reason: str = ""
    stderr: str = ""
    rows: list[Row] = field(default_factory=list)


def run_here(name: str, check: Check, setting: Setting, file: Path) -> Finding:
    """Run a check in this process, and write its rows and its outcome to ``file``."""
    start = time.perf_counter()
    finding = Finding(name=name, status="passed")
    file.write_text("", encoding="utf-8")
    try:
        for row in check(setting):
            _append(file, {"row": row})
            finding.rows.append(row)
    except SkippedError as skipped:
        finding.status, finding.reason = "skipped", str(skipped)
    except FailedError as failed:
        finding.status, finding.reason = "failed", str(failed)
    except Exception:
        finding.status, finding.reason = "failed", traceback.format_exc(limit=-6)
    finding.seconds = round(time.perf_counter() - start, 1)
    _append_outcome(file, finding)
    return finding


def run_apart(
    name: str,
    options: Sequence[str],
    folder: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> Finding:
    """Run a check in a process of its own, which a broken GPU context or a hang ends with.

    Args:
        name: of the check.
        options: of the command, besides the check's name.
        folder: for the check's file and its standard error.
        limit_s: it may take.
        environment: further variables; those of a second run, which gets a file of its own.
    """
    start = time.perf_counter()
    stem = name if environment is None else f"{name}.{AGAIN}"
    file, errors = folder / f"{stem}.jsonl", folder / f"{stem}.stderr"
    command = [sys.executable, "-m", "scripts.gpu_checks", "--only", name, "--file", str(file)]
    reason = ""
    with errors.open("wb") as log:
        try:
            done = subprocess.run(
                [*command, *options],
                cwd=ROOT,
                env=os.environ | (environment or {}),
                stdout=log,
                stderr=log,
                timeout=limit_s,
                check=False,
            )
            reason = f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"took longer than {limit_s:g} s"
    finding = read_finding(file)
    finding.stderr = errors.read_bytes()[-STDERR_BYTES:].decode(errors="replace").strip()
    if finding.status == "unfinished":
        finding.status, finding.reason = "failed", reason
        finding.seconds = round(time.perf_counter() - start, 1)
    _append_outcome(file, finding)  # with the standard error
    return finding


def read_finding(file: Path) -> Finding:
    """Return what a check has written so far."""
    finding = Finding(name=file.stem)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a process that was killed
        if "row" in entry:
            finding.rows.append(entry["row"])
        else:
            for name, value in entry.items():
                setattr(finding, name, value)
    return finding


def _append_outcome(file: Path, finding: Finding) -> None:
    outcome = asdict(finding)
    del outcome["rows"], outcome["name"]
    _append(file, outcome)


def _append(file: Path, entry: Mapping[str, object]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(entry) + "\n")
