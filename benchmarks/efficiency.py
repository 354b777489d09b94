"""How much of the slowest stage's speed a pipeline keeps, in decode and in prefill.

    python benchmarks/efficiency.py FOLDER --repeats 5

A stage cannot do more steps a second than one over the time of its own step: layers, and on the
master's rank embedding, head and sampling too. The slowest stage bounds the pipeline. Every run is
traced; of each phase only the steady part counts, from when the first micro-batch has left the last
stage to when the master begins its last one. The efficiency is the steps that the slowest stage did
in that time, times the median of its step, over that time: a wait lowers it, and so does a step
that was slower than usual. Stages are even, of one thread each; three share two cores, where a
step's time includes what the others took of its core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench import command, make_model, write_prompts

from llmpq.cli.profile_memory import even_plan
from llmpq.spec.plan_io import write_plan

BITS = (16, 8)
CASES = {2: (16, 2, 4), 3: (24, 2, 4)}
"""By stages: sequences, and those of a prefill and of a decode micro-batch."""
PROMPT_TOKENS, NEW_TOKENS = 128, 64
WORK = ("embed", "compute", "project", "sample")
Step = tuple[int, int]
"""When a step's first span began and how long its spans took together, in microseconds."""


def main() -> int:
    """Run every case in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model")
    found: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.repeats):
        for stages in CASES:
            for bits in BITS:
                found[stages, bits].append(measure(folder, stages, bits))
    print(
        "| stages | bits | phase | slowest stage's step, ms | efficiency |\n" + "| --- " * 5 + "|"
    )
    for (stages, bits), runs in found.items():
        for phase in ("prefill", "decode"):
            shares = [run[phase] for run in runs]
            step_s = statistics.median(run[f"{phase}_s"] for run in runs)
            spread = f"{statistics.median(shares):.1%} ({min(shares):.1%}-{max(shares):.1%})"
            print(f"| {stages} | {bits} | {phase} | {1e3 * step_s:.2f} | {spread} |")
    return 0


def measure(folder: Path, stages: int, bits: int) -> dict[str, float]:
    """Run one plan; return the efficiency and the slowest stage's step of both phases."""
    batch, *sizes = CASES[stages]
    plan = even_plan(
        folder / "model",
        bits=[bits],
        stages=stages,
        shape=(batch, PROMPT_TOKENS, NEW_TOKENS),
        micro_batch=sizes,
    )
    strategy, prompts = folder / f"plan-{stages}-{bits}.json", folder / f"prompts-{batch}.jsonl"
    answers, trace = folder / "answers.jsonl", folder / "trace.json"
    write_plan(strategy, plan)
    write_prompts(prompts, [(PROMPT_TOKENS, NEW_TOKENS)] * batch)
    answers.unlink(missing_ok=True)
    command([
        "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts),
        "--output", str(answers), "--trace", str(trace), "--json",
    ])  # fmt: skip
    count = batch // sizes[0]
    ranks = steps_of(json.loads(trace.read_text())["traceEvents"])
    phases = {"prefill": slice(count), "decode": slice(count, None)}
    shares = {}
    for phase, part in phases.items():
        steady = [steps[part] for _, steps in sorted(ranks.items())]
        shares[phase], shares[f"{phase}_s"] = efficiency(steady)
    return shares


def steps_of(events: Sequence[Mapping[str, Any]]) -> dict[int, list[Step]]:
    """Return every rank's steps in the order of their micro-batches.

    A step is the run of a rank's working spans of one micro-batch number; the master's embedding
    comes before its layers, its head and sampling when the micro-batch has come round.
    """
    spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        number = event.get("args", {}).get("micro_batch")
        if event["name"] in WORK and number is not None:
            spans[event["pid"], number].append((event["ts"], event["dur"]))
    found: dict[int, list[Step]] = defaultdict(list)
    for (rank, _), parts in sorted(spans.items()):
        found[rank].append((min(start for start, _ in parts), sum(length for _, length in parts)))
    return found


def efficiency(ranks: Sequence[Sequence[Step]]) -> tuple[float, float]:
    """Return the share of the bound that was kept, and the slowest stage's median step in seconds.

    Args:
        ranks: every stage's steps of one phase.
    """
    begin = ranks[-1][0][0] + ranks[-1][0][1]
    end = ranks[0][-1][0]
    medians = [statistics.median(length for _, length in steps) for steps in ranks]
    slowest = max(range(len(ranks)), key=lambda rank: medians[rank])
    done = sum(
        max(0, min(start + length, end) - max(start, begin)) / length
        for start, length in ranks[slowest]
    )
    return done * medians[slowest] / (end - begin), medians[slowest] / 1e6


if __name__ == "__main__":
    sys.exit(main())
