"""Time a batch of prompts that begin alike, with and without the prefix cache.

    python benchmarks/batch_prefixes.py --folder DIR --results benchmarks/results

A random Llama of 125 M parameters answers 64 prompts in slots for 16. They have so many tokens in
common, and 32 of their own; answers have 16 tokens. Runs with and without ``--no_prefix_caching``
alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from servers import make_plan
from workbench import (
    SMALL_LLAMA,
    add_isa_option,
    command,
    keep_run,
    make_model,
    restrict,
    run_of,
    text_of,
)

TOPIC = "batch-prefixes"
REQUESTS, BATCH, OWN, NEW = 64, 16, 32, 16
COLUMNS = ["bits", "tokens in common", "s", "with the cache, s", "faster", "tokens found"]


def main() -> int:
    """Prepare, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="model, plans and answers")
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--common", type=int, nargs="+", default=[0, 128, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, help="folder of result files")
    add_isa_option(parser)
    options = parser.parse_args()
    restrict(options.cpu_isa)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "llama-125m")
    rows, samples = [], []
    for bits in options.bits:
        for common in options.common:
            measured = [_round(folder, bits, common, options, at) for at in range(options.rounds)]
            plain, cached = ([one[name] for one in measured] for name in ("plain", "cached"))
            found = measured[-1]["found"]
            gains = [one / other for one, other in zip(plain, cached, strict=True)]
            rows.append([
                bits, common, round(statistics.median(plain), 2),
                round(statistics.median(cached), 2), round(statistics.median(gains), 2),
                f"{100 * found / (REQUESTS * (common + OWN)):.0f} %",
            ])  # fmt: skip
            samples += [{"bits": bits, "common": common, **one} for one in measured]
            print(*rows[-1], flush=True)
    table = {"title": "Batches of prompts that begin alike", "columns": COLUMNS, "keys": 2,
             "rows": rows}  # fmt: skip
    print(text_of(table))
    if options.results is not None:
        words = f"python benchmarks/batch_prefixes.py --folder DIR --rounds {options.rounds}"
        run = run_of(options.cpu_isa, f"{words} --cpu_isa {options.cpu_isa}")
        keep_run(
            options.results / f"{TOPIC}.json", TOPIC, {**run, "samples": samples, "tables": [table]}
        )
    return 0


def _round(
    folder: Path, bits: int, common: int, options: argparse.Namespace, number: int
) -> dict[str, Any]:
    """Return the seconds of a run without and of one with the cache, and the tokens found.

    Every other round begins with the cache.
    """
    plan = make_plan(
        folder / "llama-125m", folder / f"prefixes-{bits}-{common}-{options.cpu_isa}.json",
        bits=bits, batch=BATCH, prompt_tokens=common + OWN, new_tokens=NEW, cpu_isa=options.cpu_isa,
    )  # fmt: skip
    prompts = folder / f"prefixes-{common}.jsonl"
    prompts.write_text("".join(json.dumps(_request(n, common)) + "\n" for n in range(REQUESTS)))
    seconds, found = {}, 0
    runs = [("plain", ["--no_prefix_caching"]), ("cached", [])]
    for name, words in runs[:: 1 - 2 * (number % 2)]:
        answers = folder / "prefixes-answers.jsonl"
        answers.unlink(missing_ok=True)
        text = command([
            "llmpq-dist", "--strat_file_name", str(plan), "--prompts", str(prompts),
            "--output", str(answers), "--json", *words,
        ])  # fmt: skip
        report = json.loads(text)
        seconds[name] = report["latency_s"]["measured"]
        found += report.get("prefix_cache", {}).get("cached", 0)
    return {**seconds, "found": found}


def _request(number: int, common: int) -> dict[str, Any]:
    """Return a prompt: the tokens that all have, and its own."""
    size = SMALL_LLAMA["vocab"]
    tokens = [31 * at % size for at in range(common)]
    tokens += [(997 * number + 37 * at + 5) % size for at in range(OWN)]
    return {
        "id": number, "prompt_token_ids": tokens, "max_new_tokens": NEW, "ignore_eos": True,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
