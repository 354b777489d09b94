"""Speed of models with a recurrent state, beside llama.cpp and transformers.

    python benchmarks/rivals.py --folder DIR/rivals --cpu_isa avx512       # once: builds llama.cpp
    python benchmarks/recurrent_layers.py --folder DIR --cpu_isa avx512 --results benchmarks/results

A random model of 500 M parameters with the shapes of Qwen3.5: three of four layers are Gated
DeltaNet. llama.cpp gets the same weights in its own formats, written as its converter does; layers
and head have the same bits. Decode steps follow prompts of 32 tokens; a prompt is one sequence.
Runs, rounds and counting are those of ``speed.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pipeline
import rivals
import speed
import torch
from speed import DECODE, LLAMA_CPP, OURS, PROMPTS, TRANSFORMERS
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3_5TextConfig
from workbench import add_isa_option, call, here, keep_run, restrict, run_of, text_of

from llmpq.dist.launch.process_environment import cpu_environment

MODEL = "qwen3.5-500M"
BITS = ("16", "8", "4")
TOPIC = "recurrent-layers"
SEED = 0
COLUMNS = {
    DECODE: ("bits", "threads", "sequences", "llmpq, ms a step", "least", "most",
             "llama.cpp, ms a step", "llmpq / llama.cpp", "transformers, ms a step",
             "llmpq / transformers"),
    PROMPTS: ("bits", "threads", "tokens", "llmpq, tokens/s", "least", "most",
              "llama.cpp, tokens/s", "llmpq / llama.cpp", "transformers, tokens/s",
              "llmpq / transformers"),
}  # fmt: skip
NOTE = (
    "llmpq: median; the others: best run of their best settings, transformers in its faster format."
)
Fields = Mapping[str, Any]


def main() -> int:
    """Prepare, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="models and runs")
    add_isa_option(parser)
    parser.add_argument("--bits", nargs="+", choices=BITS, default=list(BITS))
    parser.add_argument("--threads", type=int, nargs="+", default=[max(speed.thread_counts())])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8], help="decode")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="prompts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="forget the runs of these cases")
    parser.add_argument("--results", type=Path, help="folder of result files")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.one:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        print(generate(folder / MODEL, *options.one))
        return 0
    restrict(options.cpu_isa)
    prepare(folder)
    kept = speed.Kept(folder / f"{TOPIC}.jsonl", here(options.cpu_isa))
    wanted = list(cases(options))
    if options.again:
        kept.forget(wanted)
    names = (OURS, LLAMA_CPP, TRANSFORMERS)
    contenders = [
        (case, name) for case in wanted for name in names
        if name != TRANSFORMERS or case["bits"] == BITS[0]
    ]  # fmt: skip
    speed.measure(kept, contenders, options.rounds, partial(run, folder, options))
    tables = [table_of(topic, kept.runs) for topic in COLUMNS]
    for table in tables:
        print(text_of(table), end="\n\n")
    if options.results is not None:
        words = f"python benchmarks/recurrent_layers.py --folder DIR --cpu_isa {options.cpu_isa}"
        head = run_of(
            options.cpu_isa, f"{words} --rounds {options.rounds}", **{"llama.cpp": rivals.PACKAGE}
        )
        where = here(options.cpu_isa)
        samples = [{name: one[name] for name in one if name not in where} for one in kept.runs]
        keep_run(options.results / f"{TOPIC}.json", TOPIC,
                 {**head, "samples": samples, "tables": tables})  # fmt: skip
    return 0


def prepare(folder: Path) -> None:
    """Write the model, and llama.cpp's files of it, each once."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from helpers.gguf_writer import write_gguf  # noqa: PLC0415  only where files are missing

    if not (folder / MODEL).exists():
        config = Qwen3_5TextConfig(
            vocab_size=32000, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
            num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
            linear_num_value_heads=16, max_position_embeddings=32768, dtype="bfloat16",
            rope_parameters={"rope_type": "default", "rope_theta": 1e6,
                             "partial_rotary_factor": 0.25},
        )  # fmt: skip
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / MODEL)
    for bits in (*BITS, rivals.F16):
        file = rivals.gguf_of(folder / "rivals", MODEL, bits)
        if not file.exists():
            words = [lambda writer: writer.add_tokenizer_model("no_vocab")]
            write_gguf(folder / MODEL, file, rivals.FORMATS[bits], words)


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the cases that the options select."""
    for bits, threads in product(options.bits, options.threads):
        same = {"bits": bits, "threads": threads}
        yield from ({"case": DECODE, **same, "sequences": n} for n in options.sequences)
        yield from ({"case": PROMPTS, **same, "tokens": n} for n in options.tokens)


def run(
    folder: Path, options: argparse.Namespace, case: Fields, name: str, setting: Fields
) -> dict[str, float]:
    """Time a contender, on as many cores as the case has threads."""
    if name != TRANSFORMERS:
        return speed.run(folder, options, {**case, "model": MODEL}, name, setting)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[: case["threads"]])
    try:
        what = f"{case['case']}-{case.get('sequences') or case['tokens']}"
        words = [sys.executable, __file__, "--folder", str(folder), "--one", what]
        found = call([*words, setting["dtype"]], cpu_environment(case["threads"]))
        return {"seconds": float(found.splitlines()[-1])}
    finally:
        os.sched_setaffinity(0, cores)


@torch.inference_mode()
def generate(model_dir: Path, what: str, dtype: str) -> str:
    """Time transformers' decode steps, or a prompt; the better of two."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    topic, count = what.split("-")
    rows, tokens = (1, int(count)) if topic == PROMPTS else (int(count), pipeline.DECODE_PROMPT)
    ids = torch.arange(rows * tokens).view(rows, tokens) % pipeline.VOCABULARY
    seconds = []
    for _ in range(2):
        cache = DynamicCache(config=model.config)
        start = time.perf_counter()
        newest = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        if topic == DECODE:
            start = time.perf_counter()
            for _ in range(pipeline.DECODE_TOKENS - 1):
                newest = model(newest, past_key_values=cache).logits[:, -1:].argmax(-1)
        seconds.append(time.perf_counter() - start)
    return json.dumps(min(seconds))


def table_of(topic: str, runs: Sequence[Fields]) -> dict[str, Any]:
    """Return the table of a case, with the ranges that pages state."""
    count = "sequences" if topic == DECODE else "tokens"
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for one in runs:
        if one["case"] == topic:
            key = (one["bits"], one["threads"], one[count])
            found.setdefault(key, {}).setdefault(one["run"], []).append(_figure(one, topic))
    rows = []
    best = min if topic == DECODE else max
    for key, figures in found.items():
        ours, row = figures[OURS], list(key)
        row += [*speed.rounded(statistics.median(ours), min(ours), max(ours))]
        for name, bits in ((LLAMA_CPP, key[0]), (TRANSFORMERS, BITS[0])):
            theirs = best(found[(bits, *key[1:])][name])
            row += [*speed.rounded(theirs, statistics.median(ours) / theirs)]
        rows.append(row)
    return {
        "title": speed.TITLES[topic], "columns": COLUMNS[topic], "keys": 3, "rows": rows,
        "note": NOTE,
    }  # fmt: skip


def _figure(one: Fields, topic: str) -> float:
    """Return milliseconds a step, or tokens a second."""
    seconds = float(one["seconds"])
    if topic == DECODE:
        return 1e3 * seconds / (pipeline.DECODE_TOKENS - 1)
    return int(one["tokens"]) / seconds


if __name__ == "__main__":
    sys.exit(main())
