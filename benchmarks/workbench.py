"""What benchmarks of whole runs share: the small random Llama, its prompts, our commands."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
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
