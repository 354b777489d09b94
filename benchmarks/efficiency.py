"""How much of the slowest stage's speed a pipeline keeps, in decode and in prefill.

    python benchmarks/efficiency.py FOLDER --repeats 5 [--models "125 M"] [--layouts even planned]

A stage cannot do more steps a second than one over the time of its own step: layers, and on the
master's rank embedding, head and sampling too. The slowest stage bounds the pipeline, so what is
kept of the bound is the share of time in which that stage computes. Every run is traced; of each
phase only the steady part counts, from when the first micro-batch has left the last stage to when
the master begins its last one. The rest is reported as time for each step next to the busiest
stage's own.

Stages have one thread each. Two are even, or as the planner cuts them, which knows of the master's
head. Three share two cores here: three even ones wait for a core as well as for each other, which
no third core would have them do; so the largest has a core of its own and the two small ones share
the other, once with the largest in the middle and once with the master as the largest.
Two models of 125 and 594 M parameters: what is not computing is a time a step, and matters less the
longer the step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from workbench import ROOT, SMALL_LLAMA, command, make_model, write_prompts

from llmpq.assigner.planner import even_plan
from llmpq.spec.plan import read_plan, write_plan

BITS = (16, 8)
BATCH = {2: 16, 3: 24}
"""Sequences, by stages."""
MICRO_BATCH = (2, 4)
"""Sequences of a prefill and of a decode micro-batch."""
LARGE = {**SMALL_LLAMA, "layers": 20, "hidden": 1536, "intermediate": 4096, "heads": 16}
MODELS = {"125 M": SMALL_LLAMA, "594 M": LARGE}
PROMPT_TOKENS, NEW_TOKENS = 128, {"125 M": 64, "594 M": 24}
WORK = ("embed", "compute", "project", "sample")
Span = tuple[int, int, int]
"""Number of the micro-batch, begin and end in microseconds."""
START_S = 60.0
"""How long ranks may take to appear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How layers lie on stages, and stages on cores.

    Attributes:
        stages: how many.
        cuts: by model, the stages' first layers and the end of the last; even where empty.
        is_planned: whether the planner cuts.
        cores: of each stage; where empty the launcher chooses.
    """

    stages: int
    cuts: Mapping[str, Sequence[int]] | None = None
    is_planned: bool = False
    cores: Sequence[int] = ()


LAYOUTS = {
    "2 even": Layout(stages=2),
    "2 planned": Layout(stages=2, is_planned=True),
    "3 even": Layout(stages=3),
    "3, the second alone": Layout(
        stages=3, cuts={"125 M": (0, 1, 10, 12), "594 M": (0, 3, 15, 20)}, cores=(0, 1, 0)
    ),
    "3, the master alone": Layout(
        stages=3, cuts={"125 M": (0, 6, 9, 12), "594 M": (0, 11, 16, 20)}, cores=(0, 1, 1)
    ),
}


def main() -> int:
    """Run every case in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--bits", nargs="+", type=int, default=BITS, choices=BITS)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        make_model(folder / name.replace(" ", ""), MODELS[name])
    cases = list(product(options.models, options.layouts, options.bits))
    found: dict[tuple[str, str, int], list[dict[str, tuple[float, float]]]] = defaultdict(list)
    for _ in range(options.repeats):
        for case in cases:
            found[case].append(measure(folder, *case))
            print(*case, found[case][-1], file=sys.stderr)
    heads = ("model", "stages", "bits", "phase", "step, ms", "beside it, ms", "efficiency")
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|")
    for case, runs in found.items():
        for phase in ("prefill", "decode"):
            shares, steps = zip(*(run[phase] for run in runs), strict=True)
            spread = f"{median(shares):.1%} ({min(shares):.1%}-{max(shares):.1%})"
            words = " | ".join(map(str, case))
            beside = median(step / share - step for share, step in zip(shares, steps, strict=True))
            print(
                f"| {words} | {phase} | {1e3 * median(steps):.1f} | {1e3 * beside:.2f} | {spread} |"
            )
    return 0


def measure(folder: Path, model: str, name: str, bits: int) -> dict[str, tuple[float, float]]:
    """Run one plan; return the efficiency of both phases, and the slowest stage's step."""
    layout, new_tokens = LAYOUTS[name], NEW_TOKENS[model]
    batch = BATCH[layout.stages]
    strategy, prompts = folder / "plan.json", folder / "prompts.jsonl"
    answers, trace = folder / "answers.jsonl", folder / "trace.json"
    write_strategy(strategy, folder, model, layout, bits)
    write_prompts(prompts, [(PROMPT_TOKENS, new_tokens)] * batch)
    answers.unlink(missing_ok=True)
    serve([
        "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts),
        "--output", str(answers), "--trace", str(trace), "--json",
    ], layout.cores)  # fmt: skip
    ranks = spans_of(json.loads(trace.read_text())["traceEvents"])
    last = batch // MICRO_BATCH[0] - 1
    return {
        "prefill": efficiency(ranks, 0, last),
        "decode": efficiency(ranks, last + 1, max(number for number, _, _ in ranks[0])),
    }


def write_strategy(path: Path, folder: Path, model: str, layout: Layout, bits: int) -> None:
    """Write the plan of a case, and say where it cuts."""
    shape = (BATCH[layout.stages], PROMPT_TOKENS, NEW_TOKENS[model])
    source = folder / model.replace(" ", "")
    plan = even_plan(
        source,
        bits=[bits],
        stages=layout.stages,
        shape=shape,
        micro_batch=MICRO_BATCH,
        cuts=None if layout.cuts is None else layout.cuts[model],
    )
    write_plan(path, plan)
    if layout.is_planned:
        cluster = folder / "cluster.json"
        devices = [{"type": "cpu", "count": layout.stages, "threads": 1}]
        nodes = [{"name": "here", "devices": devices}]
        cluster.write_text(json.dumps({"schema": 1, "name": "here", "nodes": nodes}))
        words = ["--global_bz", shape[0], "--s", shape[1], "--n", shape[2], "--bits", bits]
        words += ["--micro_batch", *MICRO_BATCH, "--output", path]
        command([
            "llmpq-algo", "--model", str(source), "--cluster", str(cluster), "--no_explain",
            *map(str, words),
        ])  # fmt: skip
    layers = [stage.num_layers for stage in read_plan(path).stages]
    print(f"{model}, {layout.stages} stages, {bits} bits: layers {layers}", file=sys.stderr)


def serve(words: Sequence[str], cores: Sequence[int]) -> None:
    """Run the command, with every rank on its core; unless told, the launcher chooses.

    Raises:
        SystemExit: it failed, or its ranks did not appear.
    """
    if not cores:
        command(words)
        return
    program = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(program, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as run:
        missing, deadline_s = set(range(len(cores))), time.monotonic() + START_S
        while missing and run.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
            missing -= {rank for rank in missing if pin(run.pid, rank, cores[rank])}
    if run.returncode or missing:
        raise SystemExit(f"{words[:4]}: status {run.returncode}, ranks not seen: {missing}")


def pin(launcher: int, rank: int, core: int) -> bool:
    """Keep a rank, and the threads it will start, to a core; tell whether it was there yet."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        with contextlib.suppress(OSError):  # it may end meanwhile
            if Path(f"/proc/{child}/comm").read_text().strip() == f"llmpq-rank-{rank}":
                for task in Path(f"/proc/{child}/task").iterdir():
                    os.sched_setaffinity(int(task.name), {core})
                return True
    return False


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
