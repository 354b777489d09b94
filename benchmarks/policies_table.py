"""The table of the policies' benchmark, corrected by calibrating runs as a user would do it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cores import disturbed_share
from leveled import at_share, busy_level, rows_of, share_of, slowdown_of
from policies_bench import BITS, PREFILL, SLOTS, run_plan
from workbench import command, write_prompts

from llmpq.costmodel.tables.latency import MASTER_BITS
from llmpq.spec.plan import MicroBatching, read_plan, write_plan
from llmpq.spec.precision import Phase
from llmpq.spec.schedule import Schedule
from llmpq.spec.tables import LatencyTable, read_latency_table, write_latency_table

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
        found = run_plan(strategy, prompts, options.watch)
        (folder / f"{number}-{size}.json").write_text(json.dumps(found))
        print(f"calibration {number} by {size}: {found['throughput_tokens_per_s']:.1f} tokens/s")
    recalibrate(options.folder)


def recalibrate(folder: Path) -> None:
    """Correct the measured table by every calibrating run, as they were and as on calm cores."""
    reports = sorted((folder / "calibration").glob("*-*.json"))
    plans = [report.with_name(f"plan{report.stem.partition('-')[2]}.json") for report in reports]
    print(_corrected(folder, reports, plans, "measured.csv", "table.csv"))
    measured = read_latency_table(folder / "measured.csv")
    write_latency_table(folder / "leveled.csv", at_share(measured, -share_of(measured)))
    leveled = [_leveled(report, measured) for report in reports]
    _corrected(folder, leveled, plans, "leveled.csv", "calm.csv")


def _corrected(
    folder: Path, reports: Sequence[Path], plans: Sequence[Path], table: str, output: str
) -> str:
    return command([
        "llmpq-profile", "recalibrate", "--report", *map(str, reports),
        "--strat_file_name", *map(str, plans), "--table", str(folder / table),
        "--output", str(folder / output),
    ])  # fmt: skip


def _leveled(report: Path, measured: LatencyTable) -> Path:
    """Write a report as if its cores had been calm; return the file."""
    found = json.loads(report.read_text())
    shares = stage_shares(found["loops_s"], measured)
    for stage, share in zip(found["stages"], shares, strict=True):
        for work in stage["work"]:
            phase = Phase(work["phase"])
            rows = rows_of(phase, work["rows"], work["tokens"])
            for key, bits in (("seconds", BITS), ("master_s", MASTER_BITS)):
                work[key] /= busy_level(slowdown_of(measured, phase, bits).at(rows), share)
    file = report.parent / "leveled" / report.name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found))
    return file


def stage_shares(loops_s: Sequence[Sequence[float]], measured: LatencyTable) -> list[float]:
    """Return the share of a run in which each stage's core was disturbed."""
    return [disturbed_share([own], calm_s_of(measured)) for own in loops_s]


def calm_s_of(measured: LatencyTable) -> float:
    """Return the loop's time on the calm level."""
    return float(dict(measured.provenance)["reference_s"])
