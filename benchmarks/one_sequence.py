"""One sequence: milliseconds a step, beside llama.cpp's, and the share of the memory's speed.

    python benchmarks/one_sequence.py --folder DIR --prepare       # models: nothing is timed
    python benchmarks/one_sequence.py --folder DIR --rounds 2 --json FILE.json
    python benchmarks/one_sequence.py --folder DIR --sequences 2 8 32 --json FILE.json  # batches

Random Llamas of three sizes (benchmarks/sizes.py) answer a prompt of 32 tokens on one core and on
all: 31 decode steps, layers and head at the same bits. llama.cpp has the closest of its formats,
where benchmarks/rivals.py built it into DIR/rivals, and as many threads. Every run is a process of
its own, the two run in turn. Runs are kept one by one in DIR, so that an interrupted round goes on
where it was. Ours is the median of the rounds, llama.cpp's the best.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pipeline
import rivals
from sizes import GB, MODELS, make_models, read_bytes, read_bytes_per_s
from workbench import origin, run_rounds, text_of, write_results

from llmpq.spec.huggingface.families import load_model_dir

OURS, LLAMA_CPP = "llmpq", "llama.cpp"
SIZES = ("1.5B", "594M", "125M")
COLUMNS = (
    "model",
    "bits",
    "threads",
    "sequences",
    "llmpq, ms a step (range)",
    "llama.cpp, ms a step",
    "llmpq / llama.cpp",
    "weights read, GB/s",
    "of the memory's speed",
)
NOTE = (
    "Decode steps after a prompt of 32; llmpq: median of the rounds; llama.cpp: its best run, at "
    f"16, 8, 4 and 3 bits in {', '.join(rivals.BITS.values())}. The head has the bits of the "
    "layers. The memory's speed is that of one thread or of all, reading 1 GiB."
)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prepare", action="store_true", help="make models and exit")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, nargs="+", default=thread_counts())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.folder.absolute()
    make_models(folder, options.models)
    for name in options.models:
        rivals.prepare(folder / "rivals", name, MODELS[name])
    if options.prepare:
        return 0
    topic, title = "one-sequence", "One sequence"
    words = "python benchmarks/one_sequence.py --folder DIR"
    if options.sequences != [1]:
        topic, title = "batches", "Several sequences"
        words += f" --models {' '.join(options.models)}"
        words += f" --sequences {' '.join(map(str, options.sequences))}"
        words += f" --threads {' '.join(map(str, options.threads))}"
    wanted = cases(options.models, options.sequences, options.threads)
    runs = run_rounds(folder / f"{topic}.jsonl", wanted, options.rounds, partial(run, folder))
    speeds = {threads: read_bytes_per_s(folder, threads) for threads in options.threads}
    table = {"title": title, "columns": COLUMNS, "rows": rows(folder, runs, speeds)}
    print(text_of(table))
    if options.json is not None:
        head = origin(topic, words, **{"llama.cpp": rivals.PACKAGE})
        speed = {"read_bytes_per_s": speeds, "samples": runs, "tables": [{**table, "note": NOTE}]}
        write_results(options.json, {**head, **speed})
    return 0


def thread_counts() -> list[int]:
    """Return one thread and as many as cores."""
    return sorted({1, len(os.sched_getaffinity(0))})


def cases(
    models: Sequence[str], sequences: Sequence[int], threads: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the runs of a round, in turn."""
    return [
        {"model": model, "bits": bits, "threads": count, "sequences": batch, "run": name}
        for model in models
        for count in sorted(threads, reverse=True)
        for batch in sequences
        for bits in rivals.BITS
        for name in (OURS, LLAMA_CPP)
    ]


def run(folder: Path, case: Mapping[str, Any]) -> dict[str, float]:
    """Time the decode steps of a case, on as many cores as it has threads."""
    bits, cores = case["bits"], os.sched_getaffinity(0)
    name = f"{bits}, head {bits}" if case["run"] == OURS else f"{LLAMA_CPP}-{bits}"
    os.sched_setaffinity(0, sorted(cores)[: case["threads"]])
    try:
        return pipeline.run(folder, case["model"], f"{name} x{case['sequences']}")
    finally:
        os.sched_setaffinity(0, cores)


def rows(
    folder: Path, runs: Sequence[Mapping[str, Any]], speeds: Mapping[int, float]
) -> list[list[str]]:
    """Return a row for each model, bitwidth, numbers of threads and sequences that both ran."""
    found = []
    names = ("model", "threads", "sequences", "bits")
    for key in dict.fromkeys(tuple(one[name] for name in names) for one in runs):
        same = dict(zip(names, key, strict=True)).items()
        model, threads, sequences, bits = key
        ours, theirs = (
            [1e3 * one["seconds"] / (pipeline.DECODE_TOKENS - 1) for one in runs
             if same <= one.items() and one["run"] == name]
            for name in (OURS, LLAMA_CPP)
        )  # fmt: skip
        if not ours or not theirs:
            continue
        middle, best = statistics.median(ours), min(theirs)
        rate = read_bytes(load_model_dir(folder / model), int(bits)) / middle * 1e3
        found.append([
            model, bits, str(threads), str(sequences),
            f"{middle:.2f} ({min(ours):.2f}-{max(ours):.2f})", f"{best:.2f}",
            f"{middle / best:.2f}", f"{rate / GB:.1f}", f"{rate / speeds[threads]:.0%}",
        ])  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main())
