"""What benchmarks of whole runs share: the small random Llama, its prompts, our commands."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For our processes. Rivals wait as they do for their users: llama.cpp's threads take four times as
long with it."""
THREADING = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_PROC_BIND")
SMALL_LLAMA = {
    "layers": 12,
    "hidden": 768,
    "intermediate": 2048,
    "heads": 12,
    "kv_heads": 4,
    "vocab": 32000,
    "max_positions": 1024,
}
"""125 M parameters: the smallest whose layers take longer than the work around them."""


def make_model(path: Path, shape: Mapping[str, int] = SMALL_LLAMA, dtype: str = "bfloat16") -> None:
    """Write a random Llama, once."""
    if path.exists():
        return
    sizes = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    script = str(ROOT / "scripts" / "make_tiny_model.py")
    call([sys.executable, script, "--family", "llama", *sizes, "--dtype", dtype,
          "--output", str(path)])  # fmt: skip


def write_prompts(path: Path, lengths: Iterable[tuple[int, int]]) -> None:
    """Write one request a line.

    Args:
        path: of the prompt file.
        lengths: prompt tokens and new tokens of every request.
    """
    vocabulary = SMALL_LLAMA["vocab"]
    lines = (
        {
            "id": number,
            "prompt_token_ids": [(number * 997 + at * 31) % vocabulary for at in range(prompt)],
            "max_new_tokens": new,
            "ignore_eos": True,
        }
        for number, (prompt, new) in enumerate(lengths)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def cluster_text(devices: int, threads: int) -> str:
    """Return a cluster of equal CPU workers, priced from the catalogue."""
    group = {"type": "cpu", "count": devices, "threads": threads}
    nodes = [{"name": "here", "devices": [group]}]
    return json.dumps({"schema": 1, "name": f"cpu{devices}", "nodes": nodes, "links": []})


def command(words: Sequence[str]) -> str:
    """Run one of the project's commands, of this environment; return what it prints."""
    return call([str(Path(sys.executable).parent / words[0]), *words[1:]])


def unset_threading() -> dict[str, str]:
    """Return the environment without variables that say how threads compute and wait."""
    return {name: value for name, value in os.environ.items() if name not in THREADING}


def call(words: Sequence[str], variables: Mapping[str, str] = PASSIVE) -> str:
    """Run a program from the root of the project; return what it prints.

    Args:
        words: program and arguments.
        variables: of its environment, beside those of this process that say nothing of threads.

    Raises:
        SystemExit: it failed; with the end of what it said.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in PASSIVE}
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{words[:4]}: status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def run_rounds(
    kept: Path,
    cases: Sequence[Mapping[str, Any]],
    rounds: int,
    run: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Run every case once a round, and return all runs: the fields of a case with what it gave.

    Args:
        kept: file of the runs, each added at once; what it has already is not run again.
        cases: fields that tell each from the others.
        rounds: runs of a case.
        run: of a case.
    """
    lines = kept.read_text().splitlines() if kept.exists() else []
    runs: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for number in range(rounds):
        for case in cases:
            if sum(case.items() <= one.items() for one in runs) <= number:
                runs.append({**case, **run(case)})
                with kept.open("a") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
    return runs


def origin(topic: str, words: str, **versions: str) -> dict[str, Any]:
    """Return what a result file begins with: where its figures come from.

    ``words`` are the command, ``versions`` those of others than Python, torch and transformers.
    """
    return {
        "topic": topic,
        "command": words,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
            **versions,
        },
    }


def text_of(table: Mapping[str, Any]) -> str:
    """Return a table as Markdown."""
    columns = table["columns"]
    lines = [columns, ("---",) * len(columns), *table["rows"]]
    rows = (f"| {' | '.join(map(str, cells))} |" for cells in lines)
    return "\n".join([f"**{table['title']}**", "", *rows])


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Write results as JSON, each list of numbers or words on one line."""
    text = json.dumps(document, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)
    path.write_text(text + "\n")


def cpu_name() -> str:
    """Return the processor's name."""
    found = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    lines = [line for line in found.splitlines() if line.startswith("Model name:")]
    return lines[0].partition(":")[2].strip() if lines else platform.machine()


def machine() -> str:
    """Return the processor and the number of cores."""
    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"
