"""The table of the policies' benchmark, corrected by calibrating runs as a user would do it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from policies_bench import PREFILL, SLOTS, run_plan
from workbench import command, write_prompts

from llmpq.spec.plan import MicroBatching, Schedule, read_plan, write_plan

CALIBRATIONS = {4: (16, 96), 16: (64, 96)}
"""Of each size of micro-batch: requests and new tokens; all have ``CALIBRATION_PROMPT`` tokens."""
CALIBRATION_PROMPT = 16


def calibrate(options: argparse.Namespace) -> None:
    """Run requests of one length in micro-batches of two sizes; correct the table by all so far."""
    folder = options.folder / "calibration"
    folder.mkdir(exist_ok=True)
    done = [int(file.stem.partition("-")[0]) for file in folder.glob("*-*.json")]
    number = max(done, default=-1) + 1  # some may have been left out
    plan = read_plan(options.folder / "plan.json")
    for size, (count, new) in CALIBRATIONS.items():
        strategy, prompts = folder / f"plan{size}.json", folder / f"prompts{size}.jsonl"
        write_plan(
            strategy,
            replace(
                plan,
                schedule=Schedule(policy="static", decode_batch=min(count, SLOTS)),
                micro_batching=MicroBatching(prefill=min(size, PREFILL), decode=size),
            ),
        )
        write_prompts(prompts, [(CALIBRATION_PROMPT, new)] * count)
        found = run_plan(strategy, prompts)
        (folder / f"{number}-{size}.json").write_text(json.dumps(found))
        print(f"calibration {number} by {size}: {found['throughput_tokens_per_s']:.1f} tokens/s")
    recalibrate(options.folder)


def recalibrate(folder: Path) -> None:
    """Correct the measured table by every calibrating run."""
    reports = sorted((folder / "calibration").glob("*-*.json"))
    plans = [report.with_name(f"plan{report.stem.partition('-')[2]}.json") for report in reports]
    print(command([
        "llmpq-profile", "recalibrate", "--report", *map(str, reports),
        "--strat_file_name", *map(str, plans), "--table", str(folder / "measured.csv"),
        "--output", str(folder / "table.csv"),
    ]))  # fmt: skip
