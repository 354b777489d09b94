"""How much of the slowest stage's speed a pipeline keeps, in decode and in prefill.

    python benchmarks/efficiency.py FOLDER --repeats 5

A stage cannot do more steps a second than one over the time of its own step: layers, and on the
master's rank embedding, head and sampling too. The slowest stage bounds the pipeline, so what is
kept of the bound is the share of time in which that stage computes. Every run is traced; of each
phase only the steady part counts, from when the first micro-batch has left the last stage to when
the master begins its last one. Stages are even, of one thread each; three share two cores, where a
step's time includes what the others took of its core. Two models of 125 and 594 M parameters: what
is not computing is a time a step, and matters less the longer the step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from workbench import SMALL_LLAMA, command, make_model, write_prompts

from llmpq.cli.profile_memory import even_plan
from llmpq.spec.plan_io import write_plan

BITS = (16, 8)
CASES = {2: (16, 2, 4), 3: (24, 2, 4)}
"""By stages: sequences, and those of a prefill and of a decode micro-batch."""
LARGE = {**SMALL_LLAMA, "layers": 20, "hidden": 1536, "intermediate": 4096, "heads": 16}
MODELS = {"125 M": SMALL_LLAMA, "594 M": LARGE}
PROMPT_TOKENS, NEW_TOKENS = 128, {"125 M": 64, "594 M": 24}
WORK = ("embed", "compute", "project", "sample")
Span = tuple[int, int, int]
"""Number of the micro-batch, begin and end in microseconds."""


def main() -> int:
    """Run every case in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name, shape in MODELS.items():
        make_model(folder / name.replace(" ", ""), shape)
    cases = [(name, stages, bits) for name in MODELS for stages in CASES for bits in BITS]
    found: dict[tuple[str, int, int], list[dict[str, tuple[float, float]]]] = defaultdict(list)
    for _ in range(options.repeats):
        for case in cases:
            found[case].append(measure(folder, *case))
    print("| model | stages | bits | phase | step, ms | efficiency |\n" + "| --- " * 6 + "|")
    for case, runs in found.items():
        for phase in ("prefill", "decode"):
            shares, steps = zip(*(run[phase] for run in runs), strict=True)
            spread = f"{median(shares):.1%} ({min(shares):.1%}-{max(shares):.1%})"
            words = " | ".join(map(str, case))
            print(f"| {words} | {phase} | {1e3 * median(steps):.1f} | {spread} |")
    return 0


def measure(folder: Path, model: str, stages: int, bits: int) -> dict[str, tuple[float, float]]:
    """Run one plan; return the efficiency of both phases, and the slowest stage's step."""
    batch, *sizes = CASES[stages]
    new_tokens = NEW_TOKENS[model]
    plan = even_plan(
        folder / model.replace(" ", ""),
        bits=[bits],
        stages=stages,
        shape=(batch, PROMPT_TOKENS, new_tokens),
        micro_batch=sizes,
    )
    strategy, prompts = folder / "plan.json", folder / "prompts.jsonl"
    answers, trace = folder / "answers.jsonl", folder / "trace.json"
    write_plan(strategy, plan)
    write_prompts(prompts, [(PROMPT_TOKENS, new_tokens)] * batch)
    answers.unlink(missing_ok=True)
    command([
        "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts),
        "--output", str(answers), "--trace", str(trace), "--json",
    ])  # fmt: skip
    ranks = spans_of(json.loads(trace.read_text())["traceEvents"])
    last = batch // sizes[0] - 1
    return {
        "prefill": efficiency(ranks, 0, last),
        "decode": efficiency(ranks, last + 1, max(number for number, _, _ in ranks[0])),
    }


def spans_of(events: Sequence[Mapping[str, Any]]) -> list[list[Span]]:
    """Return what every rank computed, and when."""
    found: dict[int, list[Span]] = defaultdict(list)
    for event in events:
        number = event.get("args", {}).get("micro_batch")
        if event["name"] in WORK and number is not None:
            found[event["pid"]].append((number, event["ts"], event["ts"] + event["dur"]))
    return [spans for _, spans in sorted(found.items())]


def efficiency(ranks: Sequence[Sequence[Span]], first: int, last: int) -> tuple[float, float]:
    """Return the share of time that the busiest stage computed, and the seconds of its step.

    Args:
        ranks: what every rank computed.
        first: number of the phase's first micro-batch.
        last: number of its last.
    """
    begin = next(end for number, _, end in ranks[-1] if number == first)
    end = next(start for number, start, _ in ranks[0] if number == last)
    busy = [
        sum(max(0, min(stop, end) - max(start, begin)) for _, start, stop in spans)
        for spans in ranks
    ]
    slowest = max(range(len(ranks)), key=busy.__getitem__)
    steps = {number for number, start, stop in ranks[slowest] if start < end and stop > begin}
    return busy[slowest] / (end - begin), busy[slowest] / len(steps) / 1e6


if __name__ == "__main__":
    sys.exit(main())
