#!/usr/bin/env python3
"""A model twice as large as the memory limit of its control group, with weights on disk.

    benchmarks/streaming.py --folder DIR [--json benchmarks/results/streaming.json]

CPU and disk are measured (``llmpq-profile device``), a random model is planned at 16 bits for the
limit, and the plan runs in a group with that limit (needs root). Its tokens are compared with those
of the same model in memory, its steps with the forecast, and the bytes that it reads a second with
what the disk gives, which is measured before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from limited_hosts import control_group, killed, peak_bytes, run_in
from workbench import ROOT, keep_document, origin, unset_threading

sys.path.insert(0, str(ROOT / "tests"))

from helpers.byte_tokenizer import TOKENS, write_byte_tokenizer
from helpers.tiny_models import save_tiny_model

from llmpq.quant.loading.streaming import read_bytes_per_s
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import Plan, read_plan
from llmpq.units import MIB

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 26,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
PROMPT, NEW = 16, 16
LAUNCHER_BYTES = 120 * MIB
"""Of the command that starts the rank, which is in the group too."""


def make_model(folder: Path) -> Path:
    """Write the model, once."""
    path = folder / "model"
    if not (path / "tokenizer.json").exists():
        save_tiny_model(
            "llama", path, seed=1, dtype=torch.bfloat16, vocab_size=len(TOKENS), **SHAPE
        )
        write_byte_tokenizer(path)
    return path


def model_bytes(path: Path) -> int:
    """Return the bytes of a model's weights."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def plan(folder: Path, name: str, memory_bytes: int, run: Any, *more: str) -> Path:
    """Plan the model for one CPU worker with so much memory."""
    device = {"type": "here", "count": 1, "threads": 1, "memory_bytes": memory_bytes}
    cluster = {"schema": 1, "name": name, "nodes": [{"name": "here", "devices": [device]}]}
    (folder / f"{name}.cluster.json").write_text(json.dumps(cluster))
    words = ["plan", "--model", str(folder / "model"), "--bits", "16"]
    words += ["--cluster", str(folder / f"{name}.cluster.json"), "--global_bz", "1"]
    words += ["--devices", str(folder / "device.json"), "--s", str(PROMPT), "--n", str(NEW)]
    run([*words, "--no_explain", "--output", str(folder / f"{name}.json"), *more])
    return folder / f"{name}.json"


def answer(folder: Path, strategy: Path, run: Any) -> tuple[dict[str, Any], list[int]]:
    """Run a plan; return its report and the tokens."""
    output = folder / "answers.jsonl"
    output.unlink(missing_ok=True)
    words = ["dist", "--strat_file_name", str(strategy), "--json"]
    words += ["--model", str(folder / "model"), "--prompts", str(folder / "prompts.jsonl")]
    words += ["--output", str(output), "--store", str(folder / "store")]
    report = json.loads(run(words))
    return report, json.loads(output.read_text())["token_ids"]


def streamed_bytes(found: Plan, path: Path) -> int:
    """Return the bytes of the layers that a plan reads from disk in a step."""
    layers = load_model_dir(path).layers
    return sum(
        2 * layers[stage.first_layer + index].parameters
        for stage in found.stages
        for index in stage.on_disk
    )


def measure(folder: Path) -> dict[str, Any]:
    """Measure, plan, run; return what was found."""
    path = make_model(folder)
    (folder / "store").mkdir(mode=0o700, exist_ok=True)
    prompt = {"id": "a", "prompt_token_ids": list(range(1, 1 + PROMPT)), "ignore_eos": True}
    (folder / "prompts.jsonl").write_text(json.dumps({**prompt, "max_new_tokens": NEW}) + "\n")
    variables = {
        **unset_threading(), "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    limit = model_bytes(path) // 2

    def run_limited(words: Sequence[str], limit_bytes: int = limit) -> str:
        with control_group(limit_bytes) as group:
            done = run_in(
                group, [sys.executable, "-m", "llmpq.cli.front.program", *words], variables
            )
            state.update(killed=killed(group), peak_bytes=peak_bytes(group))
        if done.returncode:
            raise RuntimeError(done.stderr[-1000:])
        return done.stdout

    def run(words: Sequence[str]) -> str:
        return run_limited(words, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    state: dict[str, Any] = {}
    words = ["profile", "device", "--name", "here", "--budget", "15"]
    words += ["--features", "1024", "--store", str(folder / "store")]
    run([*words, "--output", str(folder / "device.json")])
    streamed = plan(folder, "streamed", limit - LAUNCHER_BYTES, run)
    resident = plan(folder, "resident", 4 * limit, run, "--no_streaming")
    answer(folder, streamed, run)  # fills the store
    before = read_bytes_per_s(folder / "store")
    report, tokens = answer(folder, streamed, run_limited)
    after = read_bytes_per_s(folder / "store")
    found = {"limit_bytes": limit, "model_bytes": model_bytes(path), **state}
    in_memory, expected = answer(folder, resident, run)
    decode_s = report["stages"][0]["decode_s"]
    nbytes = streamed_bytes(read_plan(streamed), path)
    assert before is not None
    assert after is not None
    return {
        **found,
        "layers_on_disk": len(read_plan(streamed).stages[0].on_disk),
        "tokens": tokens,
        "tokens_in_memory": expected,
        "decode_s": decode_s,
        "decode_in_memory_s": in_memory["stages"][0]["decode_s"],
        "latency_s": report["latency_s"],
        "read_bytes": nbytes,
        "read_bytes_per_s": nbytes / decode_s["measured"],
        "disk_bytes_per_s": [before, after],
    }


def table(found: dict[str, Any]) -> dict[str, Any]:
    """Return what was found as a table."""
    seconds, disk = found["decode_s"], mean(found["disk_bytes_per_s"])
    return {
        "title": "A model twice as large as its memory",
        "columns": ["What", "Found"],
        "rows": [
            ["model, MB", found["model_bytes"] / 1e6],
            ["memory limit, MB", found["limit_bytes"] / 1e6],
            ["memory used at most, MB", found["peak_bytes"] / 1e6],
            ["processes killed for memory", found["killed"]],
            ["layers on disk", found["layers_on_disk"]],
            ["tokens", len(found["tokens"])],
            ["tokens as with all weights in memory", sum(map(_same, *_pair(found)))],
            ["seconds a token, forecast", seconds["predicted"]],
            ["seconds a token, measured", seconds["measured"]],
            ["forecast over measured", seconds["predicted"] / seconds["measured"]],
            ["disk, MB a second", disk / 1e6],
            ["read while running, MB a second", found["read_bytes_per_s"] / 1e6],
            ["read over disk", found["read_bytes_per_s"] / disk],
        ],
    }


def _pair(found: dict[str, Any]) -> tuple[list[int], list[int]]:
    return found["tokens"], found["tokens_in_memory"]


def _same(one: int, other: int) -> int:
    return int(one == other)


def main() -> int:
    """Measure; return 1 if a token differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found = measure(options.folder.resolve())
    print(json.dumps(found))
    if options.json is not None:
        document = origin("streaming", "benchmarks/streaming.py --folder DIR")
        keep_document(options.json, {**document, "tables": [table(found)], "measured": found})
    return int(found["tokens"] != found["tokens_in_memory"])


if __name__ == "__main__":
    sys.exit(main())
