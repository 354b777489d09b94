"""Time whole runs of a two-stage pipeline on one host, over sockets and over gloo in turns.

    python benchmarks/transport_pipeline.py [--rounds 3]

A random Llama in float32, 16 requests of 32 + 32 tokens, micro-batches of 4, one thread a rank.
Prints one JSON object a transport: medians over the rounds, and all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.ranks import make_plan  # noqa: E402  the path comes first
from helpers.tiny_models import save_tiny_model  # noqa: E402

from llmpq.spec.plan import write_plan  # noqa: E402

LAYERS, REQUESTS, TOKENS = 4, 16, 32
SIZES = {"layers": LAYERS, "hidden": 512, "intermediate": 1024, "heads": 8, "kv_heads": 8}


def main() -> None:
    """Measure both transports in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: dict[str, list[dict[str, float]]] = {"auto": [], "gloo": []}
    with tempfile.TemporaryDirectory() as name:
        words = prepare(Path(name))
        for _ in range(rounds):
            for transport, rows in found.items():
                rows.append(run([*words, "--transport", transport]))
    for transport, rows in found.items():
        medians = {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
        rates = [round(row["tokens_per_s"], 1) for row in rows]
        print(json.dumps({"transport": transport, **medians, "all_tokens_per_s": rates}))


def prepare(folder: Path) -> list[str]:
    """Write a model, a plan and prompts; return the command's options for them."""
    model = save_tiny_model("llama", folder / "model", seed=1, shape=SIZES)
    plan = make_plan(
        (0, LAYERS // 2, LAYERS),
        prefill=4,
        decode=4,
        batch=REQUESTS,
        prompt_tokens=TOKENS,
        new_tokens=TOKENS,
    )
    write_plan(folder / "strategy.json", plan)
    request = {"prompt_token_ids": [1] * TOKENS, "max_new_tokens": TOKENS, "ignore_eos": True}
    lines = [json.dumps({"id": number} | request) for number in range(REQUESTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [
        "--strat_file_name", str(folder / "strategy.json"), "--model", str(model),
        "--prompts", str(folder / "prompts.jsonl"), "--output", str(folder / "out.jsonl"),
    ]  # fmt: skip


def run(words: list[str]) -> dict[str, float]:
    """Run the command once."""
    command = [sys.executable, "-m", "llmpq.cli.commands.dist", *words, "--json"]
    Path(words[words.index("--output") + 1]).unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LLMPQ_STORE": "off"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    stages = report["stages"]
    return {
        "tokens_per_s": report["throughput_tokens_per_s"],
        "send_fraction": max(stage["send_fraction"] for stage in stages),
        "slowest_busy": max(stage["busy_fraction"] for stage in stages),
    }


if __name__ == "__main__":
    main()
