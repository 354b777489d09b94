#!/usr/bin/env python3
"""From a model's name to the first answer: seconds, and how well the plan's forecast holds.

    benchmarks/first_answer.py models/demo DIR ... [--starts 3] [--repeats 5] [--json FILE]

Each start begins with an empty cache: devices are measured and the plan is made. The runs after it
find both. Seconds are those from the command to the first byte of the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from workbench import ROOT, keep_document, origin, text_of, unset_threading

PROMPT, TOKENS = "Once upon a time", 256


def command(model: str, *words: str) -> list[str]:
    """Return the command that answers."""
    program = [sys.executable, "-m", "llmpq.cli.front.program", "run", model]
    return [*program, "--prompt", PROMPT, "--max_tokens", str(TOKENS), *words]


def variables(cache: Path) -> dict[str, str]:
    """Return the environment of a command with a cache of its own."""
    own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    return {**unset_threading(), **own}


def first_byte_s(model: str, cache: Path) -> float:
    """Return the seconds to the first byte of an answer."""
    start_s = time.monotonic()
    with subprocess.Popen(
        command(model), env=variables(cache), cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        found = os.read(process.stdout.fileno(), 1)
        seconds = time.monotonic() - start_s
        process.stdout.read()
    if not found or process.returncode:
        raise SystemExit(f"llmpq run: status {process.returncode}")
    return seconds


def report_of(model: str, cache: Path) -> dict[str, Any]:
    """Return what a run says with ``--json``."""
    done = subprocess.run(
        command(model, "--json"), env=variables(cache), cwd=ROOT, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def play(model: str, repeats: int) -> dict[str, Any]:
    """Return the figures of a start and of the runs after it."""
    with tempfile.TemporaryDirectory(prefix="first-answer-") as name:
        cache = Path(name)
        first_s = first_byte_s(model, cache)
        later_s = [first_byte_s(model, cache) for _ in range(repeats)]
        reports = [report_of(model, cache) for _ in range(repeats)]
    return {
        "model": Path(model).resolve().name,
        "first_s": first_s,
        "later_s": later_s,
        "figures": reports[0]["devices"][0]["figures"],
        "forecast_tokens_per_s": reports[0]["forecast_tokens_per_s"],
        "tokens_per_s": [one["tokens_per_s"] for one in reports],
    }


def table(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each start."""
    rows = [
        [
            one["model"],
            one["first_s"],
            median(one["later_s"]),
            one["forecast_tokens_per_s"],
            median(one["tokens_per_s"]),
            one["forecast_tokens_per_s"] / median(one["tokens_per_s"]),
        ]
        for one in starts
    ]
    columns = ["Model", "First answer, s", "Later, s", "Forecast, tokens/s", "Found", "Ratio"]
    return {
        "title": "From a model's name to its answer",
        "columns": columns,
        "rows": rows,
        "formats": ["", "{:.1f}", "{:.1f}", "{:,.0f}", "{:,.0f}", "{:.2f}"],
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    starts = [play(one, options.repeats) for one in options.models for _ in range(options.starts)]
    found = table(starts)
    print(text_of(found))
    if options.json is not None:
        names = " ".join(Path(one).resolve().name for one in options.models)
        words = f"benchmarks/first_answer.py {names} --starts {options.starts}"
        document = origin("first-answer", f"{words} --repeats {options.repeats}")
        keep_document(options.json, {**document, "tables": [found], "starts": starts})
    return 0


if __name__ == "__main__":
    sys.exit(main())
