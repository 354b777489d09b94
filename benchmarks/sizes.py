"""Cost against size: time a token and memory by parameters, context, batch and stages.

    python benchmarks/sizes.py --folder DIR --prepare       # models: nothing is timed
    python benchmarks/sizes.py --folder DIR --results benchmarks/results --picture FILE.png

Random Llamas of 125 M to 3 B parameters, layers and head at the same bits. Every point is a run of
``llmpq-dist`` with a plan of ``llmpq-algo``: one stage with a thread a core, or stages of one
thread. Runs are kept one by one in DIR, so that an interrupted round goes on where it was; medians
count. A slope is that of the line with the least squares of relative errors, and is compared with
the bytes that a step has to read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from workbench import (
    SMALL_LLAMA,
    add_isa_option,
    cluster_text,
    command,
    here,
    keep_run,
    make_model,
    restrict,
    run_of,
    run_rounds,
    text_of,
    write_prompts,
)

from llmpq.cli.plots import new_figure
from llmpq.costmodel.memory import head_bytes, layer_weight_bytes
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model import ModelSpec

MODELS = {
    name: {**SMALL_LLAMA, **shape, "max_positions": 32768}
    for name, shape in {
        "125M": {},
        "594M": {"layers": 20, "hidden": 1536, "intermediate": 4096, "heads": 16, "kv_heads": 4},
        "1.5B": {"layers": 30, "hidden": 2048, "intermediate": 5632, "heads": 32, "kv_heads": 8},
        "3B": {"layers": 28, "hidden": 3072, "intermediate": 8192, "heads": 24, "kv_heads": 8},
    }.items()
}
SIZES = {
    "model": "million parameters",
    "batch": "sequences",
    "stages": "stages of one thread",
    "context": "tokens of context",
}
"""The field of a case that grows along a curve, and what it counts."""
UNITS = {
    "model": (1e8, "100 M parameters"),
    "batch": (1.0, "sequence"),
    "stages": (1.0, "stage"),
    "context": (1e3, "1,000 tokens"),
}
"""In which a slope is given."""
BITS = (16, 4)
VALUES: dict[str, Sequence[Any]] = {
    "model": tuple(MODELS),
    "batch": (1, 4, 16, 64),
    "stages": (1, 2, 3, 4),
    "context": (128, 512, 2048, 8192, 32000),
}
CURVES = (("model", 16), ("model", 4), ("batch", 16), ("batch", 4), ("stages", 16), ("context", 16))
STAGES_BATCH = 16
FIELDS = ("model", "bits", "context", "batch", "stages", "threads", "cpu_isa")
"""What tells a case from the others."""
STEPS = 32
"""Decode steps of a run."""
TIMEOUT_S = "300"
"""Of a step: the longest prompt is one."""
READ_BYTES = 1 << 30
MB, GB = 1e6, 1e9
Case = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A size and what it costs.

    Attributes:
        x: parameters, sequences, stages or tokens of context.
        rows: sequences of a step.
        step_s: seconds of a decode step of all sequences.
        memory_bytes, forecast_bytes: peak of all workers.
        read_bytes: weights that a step reads.
        stored_bytes: all weights.
        kv_bytes: room for keys and values.
    """

    x: float
    rows: int
    step_s: float
    memory_bytes: float
    forecast_bytes: float
    read_bytes: float
    stored_bytes: float
    kv_bytes: float


def main() -> int:
    """Measure, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prepare", action="store_true", help="make models and exit")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--longest", type=int, default=VALUES["context"][-1], help="context")
    add_isa_option(parser)
    parser.add_argument("--results", type=Path, help="folder of result files")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    folder = options.folder.absolute()
    restrict(options.cpu_isa)
    make_models(folder, options.models)
    if options.prepare:
        return 0
    cores = len(os.sched_getaffinity(0))
    curves = {(size, bits): cases(size, bits, cores) for size, bits in CURVES}
    wanted: list[Case] = []
    for case in (case for found in curves.values() for case in found):
        fits = case["model"] in options.models and case["context"] <= options.longest
        if fits and case not in wanted:
            wanted.append(case)
    timed = partial(timed_case, folder, options.cpu_isa)
    kept, where = folder / "sizes.jsonl", here(options.cpu_isa)
    runs = run_rounds(kept, wanted, options.rounds, timed, where)
    speed = read_bytes_per_s()
    points = {
        (size, bits): [point(folder, size, case, runs) for case in found if case in wanted]
        for (size, bits), found in curves.items()
    }
    rows = [row for (size, bits), found in points.items() if len(found) > 1
            for row in slopes(size, bits, found, speed, cores)]  # fmt: skip
    table = {"title": "Slopes", "columns": ("cost", "bits", "slope", "why"), "rows": rows}
    print(text_of(table))
    if options.picture is not None:
        draw(options.picture, points, speed, cores)
    if options.results is not None:
        words = f"python benchmarks/sizes.py --folder DIR --cpu_isa {options.cpu_isa}"
        found = {"read_bytes_per_s": speed, "samples": runs, "tables": [table]}
        head = run_of(options.cpu_isa, words)
        keep_run(options.results / "sizes.json", "sizes", {**head, **found})
    return 0


def timed_case(folder: Path, cpu_isa: str, case: Case) -> dict[str, float]:
    """Run a case of a curve."""
    return run(folder, {**case, "cpu_isa": cpu_isa})


def make_models(folder: Path, names: Sequence[str]) -> None:
    """Write random models, each once."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        make_model(folder / name, MODELS[name])


def cases(size: str, bits: int, cores: int) -> list[Case]:
    """Return the cases of a curve."""
    case = {"model": "125M", "bits": bits, "context": 128, "batch": 1, "stages": 1}
    case["threads"] = cores
    if size == "stages":
        case |= {"batch": STAGES_BATCH, "threads": 1}
    return [{**case, size: value} for value in VALUES[size]]


def run(folder: Path, case: Case, new_tokens: int = STEPS + 1) -> dict[str, float]:
    """Run a case: seconds of a decode step and in all, bytes of all workers, of keys and values."""
    name = "-".join(str(value) for value in (*(case[key] for key in FIELDS), new_tokens))
    strategy, prompts, answers = (
        folder / f"{name}{ending}" for ending in (".json", "-prompts.jsonl", "-answers.jsonl")
    )
    plan(folder, case, strategy, new_tokens)
    write_prompts(prompts, [(case["context"], new_tokens)] * case["batch"])
    answers.unlink(missing_ok=True)
    text = command([
        "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts), "--output",
        str(answers), "--store", str(folder / "store"), "--step_timeout", TIMEOUT_S, "--json",
    ])  # fmt: skip
    report = json.loads(text)
    memory = [stage["memory_bytes"] for stage in report["stages"]]
    kv = [stage["memory_parts"]["kv"]["measured"] for stage in report["stages"]]
    return {
        "step_s": report["phases"]["decode"]["measured"] / (new_tokens - 1),
        "latency_s": report["latency_s"]["measured"],
        "memory_bytes": sum(one["measured"] for one in memory),
        "forecast_bytes": sum(one["predicted"] for one in memory),
        "kv_bytes": sum(kv),
    }


def plan(folder: Path, case: Case, strategy: Path, new_tokens: int) -> None:
    """Plan for latency, with every worker."""
    cluster = strategy.with_suffix(".cluster")
    cluster.write_text(cluster_text(case["stages"], case["threads"], case["cpu_isa"]))
    bits, devices = str(case["bits"]), (f"here/cpu#{rank}" for rank in range(case["stages"]))
    head = [] if bits == "16" else ["--fix_bits", f"head={bits}"]
    command([
        "llmpq-algo", "--model", str(folder / case["model"]), "--cluster", str(cluster), "--bits",
        bits, *head, "--global_bz", str(case["batch"]), "--s", str(case["context"]), "--n",
        str(new_tokens), "--theta", "0", "--use", *devices, "--no_explain", "--output",
        str(strategy),
    ])  # fmt: skip


def point(folder: Path, size: str, case: Case, runs: Sequence[Case]) -> Point:
    """Return the medians of a case's runs as a point of a curve."""
    spec = load_model_dir(folder / case["model"])
    same = [one for one in runs if case.items() <= one.items()]
    fields = ("step_s", "memory_bytes", "forecast_bytes", "kv_bytes")
    read = read_bytes(spec, case["bits"])
    return Point(
        x=float(spec.parameters if size == "model" else case[size]),
        rows=case["batch"],
        read_bytes=read,
        stored_bytes=read + 2 * spec.embedding_parameters,
        **{name: statistics.median(one[name] for one in same) for name in fields},
    )


def read_bytes(spec: ModelSpec, bits: int) -> int:
    """Return the bytes of weights that a decode step reads: layers, and a head of as many bits."""
    layers = sum(layer_weight_bytes(spec, kind, bits, "bfloat16") for kind in spec.layer_kinds)
    head = 2 * spec.head_weights if bits == 16 else head_bytes(spec, "bfloat16", bits)
    return layers + head


def read_bytes_per_s(count: int = READ_BYTES) -> float:
    """Return the bytes of a buffer that torch's threads read in a second.

    The best of three operators that do little else, ten times each.
    """
    import torch  # noqa: PLC0415  not needed to draw

    width = 1 << 12
    values, row = torch.ones(count // 4 // width * width), torch.ones(width)
    reads = (values.sum, lambda: values.dot(values), lambda: values.view(-1, width).mv(row))
    seconds = []
    for read in 10 * reads:
        start = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - start)
    return 4 * len(values) / min(seconds)


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return constant and slope of the line with the least squares of relative errors."""
    slope, constant = np.polyfit(xs, ys, 1, w=1.0 / np.asarray(ys))
    return float(constant), float(slope)


def slopes(
    size: str, bits: int, points: Sequence[Point], speed: float, cores: int
) -> list[list[str]]:
    """Return a row for the time and one for the memory, each with why it grows so.

    Args:
        size: that grows.
        bits: of layers and head.
        points: of the curve, in order.
        speed: bytes that all cores read in a second.
        cores: of the machine.
    """
    name = SIZES[size].removeprefix("million ")
    time_slope, time_why = _stages_time(points, cores) if size == "stages" else (
        _time(size, points, speed)
    )  # fmt: skip
    memory_slope, memory_why = _memory(size, points)
    return [
        [f"time, by {name}", str(bits), time_slope, time_why],
        [f"memory, by {name}", str(bits), memory_slope, memory_why],
    ]


def _time(size: str, points: Sequence[Point], speed: float) -> tuple[str, str]:
    xs, unit, name = [one.x for one in points], *UNITS[size]
    rest_s, slope = line(xs, [one.step_s for one in points])
    text = f"{1e3 * unit * slope:.3g} ms a step for {name}"
    if size == "batch":
        first, last = points[0], points[-1]
        share = last.step_s / last.rows / (first.step_s / first.rows)
        return text, (
            f"the weights are read once for all, {1e3 * rest_s:.1f} ms; a token takes {share:.2f} "
            f"of the time with {last.rows} sequences"
        )
    what = "weights" if size == "model" else "keys and values"
    parts = [one.read_bytes if size == "model" else one.kv_bytes for one in points]
    grown = line(xs, parts)[1]
    return text, (
        f"{unit * grown / MB:.3g} MB of {what}, read at {grown / slope / GB:.1f} GB/s, "
        f"{grown / slope / speed:.0%} of the memory's speed"
    )


def _stages_time(points: Sequence[Point], cores: int) -> tuple[str, str]:
    first, last = points[0], points[-1]
    full = max((one for one in points if one.x <= cores), key=lambda one: one.x)
    return (
        f"times {full.step_s / first.step_s:.2f} with {full.x:.0f} stages, "
        f"{last.step_s / first.step_s:.2f} with {last.x:.0f}",
        f"{cores} cores: at best {first.x / full.x:.2f}, with more stages as well",
    )


def _memory(size: str, points: Sequence[Point]) -> tuple[str, str]:
    xs, unit, name = [one.x for one in points], *UNITS[size]
    rest, slope = line(xs, [one.memory_bytes for one in points])
    forecast = line(xs, [one.forecast_bytes for one in points])[1]
    text = f"{unit * slope / MB:.3g} MB for {name} (forecast {unit * forecast / MB:.3g})"
    if size == "stages":
        return text, f"a process without weights; {points[0].stored_bytes / MB:.0f} MB are shared"
    if size == "model":
        grown = line(xs, [one.stored_bytes for one in points])[1]
        return text, f"{unit * grown / MB:.3g} MB are weights; a process takes {rest / MB:.0f} MB"
    grown = line(xs, [one.kv_bytes for one in points])[1]
    return text, f"{unit * grown / MB:.3g} MB are keys and values, the rest the prompt's tensors"


def draw(
    picture: Path, curves: Mapping[tuple[str, int], Sequence[Point]], speed: float, cores: int
) -> None:
    """Draw a column a size: time a token above, peak memory below."""
    from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415  only for the picture

    with new_figure(picture, 14, 7) as figure:
        axes = figure.subplots(2, len(SIZES), sharex="col")
        for (above, below), (size, label) in zip(axes.T, SIZES.items(), strict=True):
            unit = MB if size == "model" else 1.0
            shown = {
                bits: points for (name, bits), points in curves.items() if name == size and points
            }
            for bits, points in shown.items():
                xs, colour = [one.x / unit for one in points], f"C{BITS.index(bits)}"
                token_ms = [1e3 * one.step_s / one.rows for one in points]
                above.plot(xs, token_ms, "o-", color=colour, label=f"{bits} bits")
                above.plot(xs, _least_ms(size, points, speed, cores), ":", color=colour)
                below.plot(xs, [one.memory_bytes / MB for one in points], "o-", color=colour)
                below.plot(xs, [one.forecast_bytes / MB for one in points], ":", color=colour)
            below.set_xlabel(label if size == "stages" else f"{label}, one stage")
            for one in (above, below):
                one.set_xscale("linear" if size == "stages" else "log")
                one.grid(alpha=0.3)
            below.set_ylim(bottom=0)
            if size == "stages":
                above.set_ylim(bottom=0)
            else:
                above.set_yscale("log")
                above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                above.yaxis.set_major_formatter("{x:,g}")
                above.yaxis.set_minor_locator(NullLocator())
            if shown:
                ticks = [one.x / unit for one in next(iter(shown.values()))]
                below.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
                below.set_xticks([], minor=True)
            above.legend()
        axes[0, 0].set_ylabel("ms a token; dotted: least")
        axes[1, 0].set_ylabel("peak memory, MB; dotted: forecast")


def _least_ms(size: str, points: Sequence[Point], speed: float, cores: int) -> list[float]:
    """Return milliseconds of a token at the memory's speed; of stages, divided evenly on cores."""
    if size == "stages":
        first = points[0]
        return [1e3 * first.step_s / first.rows / min(one.x, cores) for one in points]
    return [1e3 * (one.read_bytes + one.kv_bytes) / speed / one.rows for one in points]


if __name__ == "__main__":
    sys.exit(main())
