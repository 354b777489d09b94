"""Multi-bin batches of a real model, by what is known of the lengths of answers.

    python benchmarks/multibin.py --folder DIR --results benchmarks/results

As Figures 7 and 11 of multi-bin batching: static batches of 8 in 1 to 8 bins, whose lengths are
known, or predicted by what ``llmpq-profile lengths`` learned from other prompts. The shipped model
continues paragraphs of its texts to their end, at a temperature of 0.7 with fixed seeds; half of
the prompts teach. One bin is what the mean of all answers as a prediction gives.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from servers import make_plan
from workbench import (
    add_isa_option,
    command,
    here,
    keep_run,
    restrict,
    run_of,
    run_rounds,
    text_of,
)

from llmpq.dist.io.model_files import load_tokenizer

TOPIC = "multibin-measured"
ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "demo"
TAUGHT, SERVED, BATCH = 1600, 800, 8
PROMPT, NEW, WORDS = 96, 128, 3
BINS = (1, 2, 4, 8)
COLUMNS = ["lengths", *(f"{bins} bins" for bins in BINS[1:])]


def main() -> int:
    """Prepare, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="plans, prompts and answers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, help="folder of result files")
    add_isa_option(parser)
    options = parser.parse_args()
    restrict(options.cpu_isa)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    learned = _prepare(folder, options.cpu_isa)
    cases = [{"known": "oracle", "bins": bins} for bins in BINS]
    cases += [{"known": "learned", "bins": bins} for bins in BINS[1:]]
    runs = run_rounds(
        folder / "runs.jsonl", cases, options.rounds,
        lambda case: _run(folder, options.cpu_isa, case), here(options.cpu_isa),
    )  # fmt: skip
    rows = [
        [known, *(_gain(runs, known, bins) for bins in BINS[1:])] for known in ("oracle", "learned")
    ]
    table = {"title": "Throughput over one bin", "columns": COLUMNS, "keys": 1, "rows": rows}
    print(text_of(table))
    if options.results is not None:
        words = f"python benchmarks/multibin.py --folder DIR --rounds {options.rounds}"
        run = run_of(options.cpu_isa, f"{words} --cpu_isa {options.cpu_isa}")
        document = {**run, "predictor": learned, "samples": runs, "tables": [table]}
        keep_run(options.results / f"{TOPIC}.json", TOPIC, document)
    return 0


def _gain(runs: list[dict[str, Any]], known: str, bins: int) -> str:
    """Return the throughput over that of one bin in the same round: median and range."""
    rates, one = (
        [run["requests_per_s"] for run in runs if (run["known"], run["bins"]) == case]
        for case in ((known, bins), ("oracle", 1))
    )
    gains = [rate / base for rate, base in zip(rates, one, strict=True)]
    return f"{statistics.median(gains):.2f} ({min(gains):.2f}-{max(gains):.2f})"


def _prepare(folder: Path, cpu_isa: str) -> dict[str, Any]:
    """Answer all prompts once, learn from some, and write the others with and without lengths."""
    prompts = _prompts()
    taught, served = prompts[:TAUGHT], prompts[TAUGHT:]
    plan = make_plan(
        MODEL, folder / f"answers-{cpu_isa}.json", bits=16, batch=32, prompt_tokens=PROMPT,
        new_tokens=NEW, cpu_isa=cpu_isa,
    )  # fmt: skip
    lengths = {}
    for name, some in (("taught", taught), ("served", served)):
        _write(folder / f"{name}.jsonl", some)
        results = folder / f"{name}-answers.jsonl"
        if not results.exists():
            command([
                "llmpq-dist", "--strat_file_name", str(plan), "--model", str(MODEL), "--prompts",
                str(folder / f"{name}.jsonl"), "--output", str(results),
            ])  # fmt: skip
        for line in results.read_text().splitlines():
            answer = json.loads(line)
            lengths[answer["id"]] = len(answer["token_ids"])
    _write(folder / "known.jsonl", [one | {"max_new_tokens": lengths[one["id"]]} for one in served])
    text = command([
        "llmpq-profile", "lengths", "--model", str(MODEL), "--prompts",
        str(folder / "taught.jsonl"), "--results", str(folder / "taught-answers.jsonl"),
        "--output", str(folder / "lengths.json"), "--json",
    ])  # fmt: skip
    found: dict[str, Any] = json.loads(text)
    del found["output"]
    return found


def _prompts() -> list[dict[str, Any]]:
    """Return prompts: a paragraph of the model's texts and the first words of the next one."""
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer is not None
    end = tokenizer.encode("a\n")[-1]
    texts = (MODEL / name for name in ("calibration.txt", "heldout.txt"))
    found = []
    for text in texts:
        paragraphs = text.read_text(encoding="utf-8").split("\n\n")
        for first, second in pairwise(paragraphs):
            words = second.split()
            if len(words) < WORDS:
                continue
            bos, *tokens = tokenizer.encode(f"{first}\n\n{' '.join(words[:WORDS])}")
            found.append([bos, *tokens[1 - PROMPT :]])
    random.Random(0).shuffle(found)
    return [
        {"id": number, "prompt_token_ids": tokens, "max_new_tokens": NEW, "stop_token_ids": [end],
         "sampling_params": {"temperature": 0.7, "seed": number}}
        for number, tokens in enumerate(found[: TAUGHT + SERVED])
    ]  # fmt: skip


def _write(path: Path, prompts: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in prompts))


def _run(folder: Path, cpu_isa: str, case: dict[str, Any]) -> dict[str, float]:
    """Return requests a second."""
    plan = make_plan(
        MODEL, folder / f"batches-{cpu_isa}.json", bits=16, batch=BATCH, prompt_tokens=PROMPT,
        new_tokens=NEW, cpu_isa=cpu_isa,
    )  # fmt: skip
    is_known = case["known"] == "oracle"
    answers = folder / "answers.jsonl"
    answers.unlink(missing_ok=True)
    report = json.loads(command([
        "llmpq-dist", "--strat_file_name", str(plan), "--model", str(MODEL), "--prompts",
        str(folder / ("known.jsonl" if is_known else "served.jsonl")), "--output", str(answers),
        "--policy", "multibin", "--bins", str(case["bins"]), "--predictor",
        "oracle" if is_known else str(folder / "lengths.json"), "--json",
    ]))  # fmt: skip
    seconds = report["latency_s"]["measured"]
    return {"requests_per_s": SERVED / seconds, "tokens": report["generated_tokens"]}


if __name__ == "__main__":
    sys.exit(main())
