#!/usr/bin/env python3
"""Whether a front door's plan runs in the memory that its host has: random models and limits.

    benchmarks/limited_hosts.py --folder DIR [--cases 200] [--json benchmarks/results/limits.json]

Each case is ``llmpq run`` on a random model in a control group with a random limit of memory (needs
root). It must answer a prompt that fills the planned context, or say that the model does not fit;
no process may be killed for memory. Cases in the folder are not played again, so a run may be
stopped at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from workbench import ROOT, keep_document, origin, unset_threading

sys.path.insert(0, str(ROOT / "tests"))

from helpers.byte_tokenizer import TOKENS, write_byte_tokenizer
from helpers.tiny_models import save_tiny_model

from llmpq.units import MIB

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "opt", "mistral", "phi3", "mixtral")
MODELS = 16
LEAST_MIB, MOST_MIB = 330, 800
LONGEST_PROMPT = 6000
"""Tokens; a longer context is filled so far."""
LIMIT_S = 600.0
DOES_NOT_FIT = 3
GROUPS = Path("/sys/fs/cgroup")


def make_model(number: int, folder: Path) -> Path:
    """Write a random model with a tokenizer of bytes, once."""
    path = folder / f"model-{number}"
    if not (path / "tokenizer.json").exists():
        chance = random.Random(number)
        heads = chance.choice((6, 8, 12))
        shape = {
            "hidden_size": 64 * heads,
            "intermediate_size": 64 * heads * chance.choice((2, 3, 4)),
            "num_hidden_layers": chance.randint(4, 16),
            "num_attention_heads": heads,
            "num_key_value_heads": chance.choice((1, 2, heads)),
            "vocab_size": len(TOKENS) + chance.choice((0, 20_000)),
            "max_position_embeddings": chance.choice((2048, 8192, 32_768)),
        }
        save_tiny_model(
            FAMILIES[number % len(FAMILIES)], path, seed=number, dtype=torch.bfloat16, **shape
        )
        write_byte_tokenizer(path)
    return path


@contextlib.contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """Make a control group of this host, version 1 or 2, with so much memory."""
    is_old = (GROUPS / "memory").is_dir()
    group = (GROUPS / "memory" if is_old else GROUPS) / f"llmpq-limit-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if is_old else "memory.max"
        (group / name).write_text(str(limit_bytes))
        yield group
    finally:
        end_s = time.monotonic() + 10.0  # until the kernel has forgotten the processes
        while (group / "cgroup.procs").read_text() and time.monotonic() < end_s:
            time.sleep(0.1)
        group.rmdir()


def killed(group: Path) -> int:
    """Return how many processes of a group were killed for memory."""
    name = "memory.events" if (group / "memory.events").exists() else "memory.oom_control"
    fields = dict(line.split() for line in (group / name).read_text().splitlines())
    return int(fields["oom_kill"])


def peak_bytes(group: Path) -> int | None:
    """Return the most bytes that a group had, page cache included; ``None`` if unknown."""
    for name in ("memory.peak", "memory.max_usage_in_bytes"):
        if (group / name).exists():
            return int((group / name).read_text())
    return None


def play(number: int, folder: Path) -> dict[str, Any]:
    """Run one case; return what came of it."""
    chance = random.Random(1000 + number)
    model = make_model(chance.randrange(MODELS), folder)
    limit_mib = chance.randint(LEAST_MIB, MOST_MIB)
    variables = {
        **unset_threading(), "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache"),
    }  # fmt: skip
    words = [sys.executable, "-m", "llmpq.cli.front.program", "run", str(model), "--json"]
    words += ["--no_measure", "--replan", "--max_tokens", "8"]
    words += ["--max_num_seqs", str(chance.choice((1, 1, 2, 4)))]
    with control_group(limit_mib * MIB) as group:
        context = planned_context(words, group, variables)
        prompt = "x" * max(1, min(context - 16, LONGEST_PROMPT))
        done = run_in(group, [*words, "--prompt", prompt], variables)
        found = {
            "case": number,
            "model": model.name,
            "limit_mib": limit_mib,
            "context": context,
            "prompt": len(prompt) if context else None,
            "status": done.returncode,
            "killed": killed(group),
            "peak_mib": (peak_bytes(group) or 0) / MIB,
        }
    answered = done.returncode == 0 and json.loads(done.stdout)["tokens"] == 8
    found["is_right"] = not found["killed"] and (answered or done.returncode == DOES_NOT_FIT)
    if not found["is_right"]:
        found["error"] = done.stderr[-600:]
    return found


def planned_context(words: Sequence[str], group: Path, variables: dict[str, str]) -> int:
    """Return the tokens of the plan that the group's memory allows; 0 without a plan."""
    done = run_in(group, [*words, "--prompt", "x"], variables)
    return int(json.loads(done.stdout)["context"]) if done.returncode == 0 else 0


def run_in(
    group: Path, words: Sequence[str], variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command in a control group."""
    shell = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group), *words]
    return subprocess.run(
        shell, env=variables, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


def table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of what came of the cases."""
    ran = [row for row in rows if row["status"] == 0]
    shares = [row["peak_mib"] / row["limit_mib"] for row in ran]
    return {
        "title": "Random models and limits of memory",
        "columns": ["What", "Found"],
        "rows": [
            ["cases", len(rows)],
            ["answered", len(ran)],
            ["does not fit, said so", sum(row["status"] == DOES_NOT_FIT for row in rows)],
            ["processes killed for memory", sum(row["killed"] for row in rows)],
            ["anything else", sum(not row["is_right"] for row in rows)],
            ["largest share of the limit that was used", max(shares, default=0.0)],
        ],
    }


def main() -> int:
    """Play the cases; return 1 when one went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "cases.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    for number in range(len(rows), options.cases):
        rows.append(play(number, options.folder))
        with file.open("a") as out:
            out.write(json.dumps(rows[-1]) + "\n")
        print(rows[-1], flush=True)
    if options.json is not None:
        document = origin("limits", f"benchmarks/limited_hosts.py --cases {options.cases}")
        keep_document(options.json, {**document, "tables": [table(rows)], "cases": rows})
    return int(not all(row["is_right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
