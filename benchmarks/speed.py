"""Speed beside llama.cpp and transformers: decode steps, prompts, and a batch over two stages.

    python benchmarks/rivals.py --folder DIR/rivals --cpu_isa avx2    # once: builds llama.cpp
    python benchmarks/speed.py --folder DIR --cpu_isa avx2 --prepare  # models: nothing is timed
    python benchmarks/speed.py --folder DIR --cpu_isa avx2 --rounds 3 --results benchmarks/results

Random Llamas (benchmarks/sizes.py); layers and head have the same bits. The cases:

* ``decode``: 31 steps after prompts of 32 tokens, by sequences and threads, beside llama.cpp with
  as many threads or fewer, and the share of the memory's speed: the weights of a step over the
  time of a plain sum of as many bytes;
* ``prompts``: one prompt, by tokens and threads, beside llama.cpp;
* ``batch16``: 16 prompts of 128 tokens, 32 new ones each: ``llmpq-dist`` with one stage of two
  threads and with two stages of one, beside transformers' ``generate``, and the share of the
  speed of float32 products: the batch's products over the time of as many in one large product.

Every run is a process of its own, the contenders run in turn. The first round searches the best
settings of the others, one choice after another (``choices``); later rounds repeat the best. Ours
counts by the median, others by their best run. Every run is added to DIR/speed.jsonl as it ends,
with processor and instruction set; what is there is not run again, without ``--again``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import long_contexts
import pipeline
import rivals
import sizes
import torch
from workbench import (
    add_isa_option,
    call,
    here,
    keep_run,
    restrict,
    run_of,
    text_of,
    unset_threading,
)

from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.spec.huggingface.families import load_model_dir

OURS, LLAMA_CPP, TRANSFORMERS = "llmpq", "llama.cpp", "transformers"
MEMORY, PRODUCTS = "memory", "products"
MODELS = ("125M", "594M", "1.5B")
DECODE, PROMPTS, BATCH16 = "decode", "prompts", "batch16"
TOKENS = (128, 512, 2048)
UBATCH = 512
"""llama.cpp's default number of tokens computed at once."""
BATCH, PROMPT_TOKENS, NEW_TOKENS = 16, 128, 32
WORKERS = 2
"""Threads of a run of ``batch16``: one stage has both, two stages one each."""
EXPECTED_S = {DECODE: 6.0, PROMPTS: 8.0, BATCH16: 20.0, MEMORY: 4.0, PRODUCTS: 4.0}
"""Of a run with 125 M parameters until there are some; larger models take as much longer."""
FACTORS = {"125M": 1.0, "594M": 4.0, "1.5B": 10.0}
NOTES = {
    DECODE: "Decode steps after prompts of 32. llmpq: median; llama.cpp: best run of its best "
    "settings. The memory's speed is that of a plain sum of as many bytes by as many threads.",
    PROMPTS: "One prompt. llmpq: median; llama.cpp: best run of its best settings.",
    BATCH16: "16 prompts of 128 tokens, 32 new tokens each, two threads in all. llmpq: median; "
    "transformers: best run of its faster format. The float32 speed is that of torch's product of "
    "two large matrices: 16 bits compute so where a processor has no bfloat16 products.",
}
TITLES = {DECODE: "Decode", PROMPTS: "Prompts", BATCH16: "A batch of 16"}
COLUMNS = {
    DECODE: ("model", "bits", "threads", "sequences", "llmpq, ms a step", "least", "most",
             "llama.cpp, ms a step", "llmpq / llama.cpp", "weights read, GB/s",
             "of the memory's speed"),
    PROMPTS: ("model", "bits", "threads", "tokens", "llmpq, tokens/s", "least", "most",
              "llama.cpp, tokens/s", "llmpq / llama.cpp"),
    BATCH16: ("model", "bits", "stages", "llmpq, tokens/s", "least", "most",
              "transformers, tokens/s", "its format", "llmpq / transformers",
              "of the float32 speed"),
}  # fmt: skip
BESIDE = {
    DECODE: ("llmpq, ms a step", "llmpq / llama.cpp", "of the memory's speed"),
    PROMPTS: ("llmpq, tokens/s", "llmpq / llama.cpp"),
    BATCH16: ("llmpq, tokens/s", "llmpq / transformers", "of the float32 speed"),
}
"""Columns that pages show for every processor."""
RANGES = {
    DECODE: {"of": "llmpq / llama.cpp", "by": "sequences"},
    PROMPTS: {"of": "llmpq / llama.cpp", "by": "tokens"},
    BATCH16: {"of": "llmpq / transformers", "by": "stages"},
}
"""Of which column pages state the range, by which other."""
LIMITS = {DECODE: MEMORY, BATCH16: PRODUCTS}
"""What bounds a case, measured beside it."""
KEYS = {DECODE: 4, PROMPTS: 4, BATCH16: 3}
"""First columns of each table that tell its rows apart."""
FIELDS = {
    DECODE: ("model", "bits", "threads", "sequences"),
    PROMPTS: ("model", "bits", "threads", "tokens"),
    BATCH16: ("model", "bits", "stages"),
}
Fields = Mapping[str, Any]


def main() -> int:
    """Prepare, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="models, plans and runs")
    add_isa_option(parser)
    parser.add_argument("--prepare", action="store_true", help="make models and exit")
    parser.add_argument("--cases", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS[:2])
    parser.add_argument("--bits", nargs="+", choices=list(rivals.BITS), default=list(rivals.BITS))
    parser.add_argument("--threads", type=int, nargs="+", default=thread_counts())
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8], help="decode")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="prompts")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], help="batch16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="forget the runs of these cases")
    parser.add_argument("--dry_run", action="store_true", help="print the expected minutes")
    parser.add_argument("--results", type=Path, help="folder of result files")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.one:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        print(json.dumps(ONE[options.one[0]](folder, *options.one[1:])))
        return 0
    restrict(options.cpu_isa)
    if not options.dry_run:
        sizes.make_models(folder, options.models)
        for name in options.models:
            rivals.prepare(folder / "rivals", name, sizes.MODELS[name])
    if not options.prepare:
        measure_and_write(options, folder)
    return 0


def measure_and_write(options: argparse.Namespace, folder: Path) -> None:
    """Run what is missing, and show all runs of the selected cases on this processor."""
    where = here(options.cpu_isa)
    kept = Kept(folder / "speed.jsonl", where)
    wanted = list(cases(options))
    if options.again:
        kept.forget(wanted)
    has_llama_cpp = rivals.bench_of(folder / "rivals", options.cpu_isa).exists()
    if not has_llama_cpp:
        print(f"llama.cpp: not built for {options.cpu_isa}, see rivals.py", file=sys.stderr)
    contenders = [(case, name) for case in wanted for name in names_of(case)
                  if name != LLAMA_CPP or has_llama_cpp]  # fmt: skip
    left = expected(kept, contenders, options.rounds)
    print(f"{len(left)} runs are missing, about {sum(left) / 60:.0f} minutes", file=sys.stderr)
    if options.dry_run:
        return
    measure(kept, contenders, options.rounds, partial(run, folder, options))
    for topic in options.cases:
        runs = [one for one in kept.runs if one["case"] in (topic, LIMITS.get(topic))]
        table = {
            "title": TITLES[topic], "columns": COLUMNS[topic], "keys": KEYS[topic],
            "beside": BESIDE[topic], "ranges": RANGES[topic],
            "rows": ROWS[topic](folder, runs), "note": NOTES[topic],
        }  # fmt: skip
        print(text_of(table), end="\n\n")
        if options.results is not None:
            words = f"python benchmarks/speed.py --folder DIR --cpu_isa {options.cpu_isa}"
            words += f" --cases {topic} --rounds {options.rounds}"
            head = run_of(options.cpu_isa, words, **{"llama.cpp": rivals.PACKAGE})
            samples = [{name: one[name] for name in one if name not in where} for one in runs]
            keep_run(
                options.results / f"{topic}.json", topic,
                {**head, "samples": samples, "tables": [table]},
            )  # fmt: skip


class Kept:
    """The runs of this processor and instruction set in a file, which has others too."""

    def __init__(self, file: Path, where: Fields) -> None:
        self._file, self._where = file, where
        lines = file.read_text().splitlines() if file.exists() else []
        self._all: list[dict[str, Any]] = [json.loads(line) for line in lines]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All runs that were made here."""
        return [one for one in self._all if self._where.items() <= one.items()]

    def of(self, case: Fields, name: str) -> list[dict[str, Any]]:
        """Return the runs of a contender in a case."""
        wanted = {**self._where, **case, "run": name}.items()
        return [one for one in self._all if wanted <= one.items()]

    def add(self, run: Fields) -> None:
        """Keep a run."""
        self._all.append({**self._where, **run})
        with self._file.open("a") as file:
            file.write(json.dumps(self._all[-1]) + "\n")

    def forget(self, cases: Sequence[Fields]) -> None:
        """Drop all runs of some cases."""
        fields = [{**self._where, **case}.items() for case in cases]
        self._all = [one for one in self._all if not any(some <= one.items() for some in fields)]
        self._file.write_text("".join(json.dumps(one) + "\n" for one in self._all))


def thread_counts() -> list[int]:
    """Return one thread and as many as cores."""
    return sorted({1, len(os.sched_getaffinity(0))})


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the cases that the options select; 0 stages are those of transformers."""
    for model, bits in product(options.models, options.bits):
        for threads in options.threads:
            same = {"model": model, "bits": bits, "threads": threads}
            if DECODE in options.cases:
                yield {"case": MEMORY, **same}
                yield from ({"case": DECODE, **same, "sequences": n} for n in options.sequences)
            if PROMPTS in options.cases:
                yield from ({"case": PROMPTS, **same, "tokens": n} for n in options.tokens)
    for model in options.models if BATCH16 in options.cases else ():
        yield {"case": PRODUCTS, "model": model}
        yield {"case": BATCH16, "model": model, "stages": 0}
        for bits, stages in product(options.bits, options.stages):
            yield {"case": BATCH16, "model": model, "bits": bits, "stages": stages}


def names_of(case: Fields) -> tuple[str, ...]:
    """Return who runs a case, in turn."""
    if case["case"] in LIMITS.values():
        return (case["case"],)
    if case["case"] == BATCH16:
        return (OURS,) if case["stages"] else (TRANSFORMERS,)
    return OURS, LLAMA_CPP


def choices(case: Fields, name: str) -> dict[str, tuple[Any, ...]]:
    """Return what another program can be set to in a case, its defaults first."""
    if name == TRANSFORMERS:
        return {"dtype": ("float32", "bfloat16")}
    if name != LLAMA_CPP:
        return {}
    found: dict[str, tuple[Any, ...]] = {
        "format": (case["bits"], rivals.F16) if case["bits"] == "16" else (case["bits"],),
        "flash_attention": ("on", "off"),
        "repack": (True, False),
    }
    if case["case"] == DECODE:
        found["threads"] = tuple(range(case["threads"], 0, -1))
    elif case["tokens"] > UBATCH:
        found["ubatch"] = (UBATCH, case["tokens"])
    return found


def next_setting(
    choices: Mapping[str, Sequence[Any]], tried: Sequence[tuple[Fields, float]]
) -> dict[str, Any] | None:
    """Return the setting to try next, ``None`` once the search has ended.

    One choice after another, each with the best values of those before it.

    Args:
        choices: values of every choice, those of the first setting first.
        tried: settings with their seconds.
    """

    def seconds(setting: Fields) -> float | None:
        return min((taken for one, taken in tried if one == setting), default=None)

    best = {name: values[0] for name, values in choices.items()}
    for name, values in choices.items():
        settings = [{**best, name: value} for value in values]
        missing = [one for one in settings if seconds(one) is None]
        if missing:
            return missing[0]
        best = min(settings, key=lambda one: seconds(one) or 0.0)
    return None if seconds(best) is not None else best


def best_of(runs: Sequence[Fields]) -> Fields:
    """Return the fastest run."""
    return min(runs, key=lambda one: float(one["seconds"]))


def turn(kept: Kept, case: Fields, name: str, number: int) -> dict[str, Any] | None:
    """Return the setting of a contender's next run in a round, ``None`` if it has had its turn."""
    runs = kept.of(case, name)
    tried = [(one["setting"], one["seconds"]) for one in runs]
    setting = next_setting(choices(case, name), tried)
    if setting is not None:
        return setting
    best = dict(best_of(runs)["setting"])
    is_due = sum(one["setting"] == best for one in runs) <= number
    return best if is_due else None


def measure(
    kept: Kept, contenders: Sequence[tuple[Fields, str]], rounds: int, run: Any
) -> None:  # fmt: skip
    """Run all contenders in turn until each has a run of its best setting for every round."""
    for number in range(rounds):
        for case, name in contenders:
            while (setting := turn(kept, case, name, number)) is not None:
                start = time.perf_counter()
                found = run(case, name, setting)
                took_s = round(time.perf_counter() - start, 1)
                what = {**case, "run": name, "setting": setting, **found, "took_s": took_s}
                kept.add({**what, "date": time.strftime("%Y-%m-%d")})
                print(json.dumps(what), file=sys.stderr, flush=True)


def expected(kept: Kept, contenders: Sequence[tuple[Fields, str]], rounds: int) -> list[float]:
    """Return the expected seconds of every missing run."""
    found: list[float] = []
    for case, name in contenders:
        runs = kept.of(case, name)
        settings = 1 + sum(len(values) - 1 for values in choices(case, name).values())
        left = max(0, settings + rounds - 1 - len(runs))
        like = [one["took_s"] for one in kept.runs if one["run"] == name
                and all(one[key] == case[key] for key in ("case", "model"))]  # fmt: skip
        default = EXPECTED_S[case["case"]] * FACTORS[case["model"]]
        found += left * [statistics.median(like) if like else default]
    return found


# Runs


def run(
    folder: Path, options: argparse.Namespace, case: Fields, name: str, setting: Fields
) -> dict[str, float]:
    """Time a contender, on as many cores as the case has threads."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[: case.get("threads", WORKERS)])
    try:
        if name == LLAMA_CPP:
            return {"seconds": llama_cpp(folder, options.cpu_isa, case, setting)}
        if case["case"] == BATCH16 and name == OURS:
            return batch16(folder, options.cpu_isa, case)
        if name == TRANSFORMERS:
            words = ["generate", case["model"], setting["dtype"]]
        elif name == MEMORY:
            spec = load_model_dir(folder / case["model"])
            words = [MEMORY, str(sizes.read_bytes(spec, int(case["bits"])))]
        elif name == PRODUCTS:
            words = [PRODUCTS, case["model"]]
        else:
            count = case.get("sequences") or case["tokens"]
            words = [case["case"], case["model"], case["bits"], str(count)]
        threads = len(os.sched_getaffinity(0))
        variables = unset_threading() if name == TRANSFORMERS else cpu_environment(threads)
        program = [sys.executable, __file__, "--folder", str(folder), "--one", *words]
        return {"seconds": float(call(program, variables).splitlines()[-1])}
    finally:
        os.sched_setaffinity(0, cores)


def llama_cpp(folder: Path, cpu_isa: str, case: Fields, setting: Fields) -> float:
    """Time llama.cpp's decode steps or prompt."""
    words = ["-fa", setting["flash_attention"], *([] if setting["repack"] else ["--no-repack"])]
    words += ["-t", str(setting.get("threads", case["threads"]))]
    words += ["-ub", str(setting.get("ubatch", UBATCH))]
    is_decode = case["case"] == DECODE
    prompt = pipeline.DECODE_PROMPT if is_decode else case["tokens"]
    new = pipeline.DECODE_TOKENS - 1 if is_decode else 1
    found = rivals.llama_cpp(
        folder / "rivals", case["model"], setting["format"], case.get("sequences", 1), prompt, new,
        words, cpu_isa,
    )  # fmt: skip
    return found["decode"] if is_decode else found["seconds"] - found["decode"]


def batch16(folder: Path, cpu_isa: str, case: Fields) -> dict[str, float]:
    """Time ``llmpq-dist``."""
    stages = case["stages"]
    what = {
        "model": case["model"], "bits": int(case["bits"]), "context": PROMPT_TOKENS,
        "batch": BATCH, "stages": stages, "threads": WORKERS // stages, "cpu_isa": cpu_isa,
    }  # fmt: skip
    return {"seconds": sizes.run(folder, what, new_tokens=NEW_TOKENS)["latency_s"]}


def _decode(folder: Path, model: str, bits: str, sequences: str) -> float:
    ids = torch.arange(int(sequences) * pipeline.DECODE_PROMPT).view(int(sequences), -1)
    ids %= pipeline.VOCABULARY
    return pipeline.decode_seconds(folder / model, int(bits), int(bits), ids)


@torch.inference_mode()
def _prompt(folder: Path, model: str, bits: str, tokens: str) -> float:
    return long_contexts.ours(folder / model, int(bits), 16, int(tokens))["prompt_s"]


def _generate(folder: Path, model: str, dtype: str) -> float:
    ids = torch.arange(BATCH * PROMPT_TOKENS).view(BATCH, -1) % pipeline.VOCABULARY
    return min(pipeline.generate(folder / model, ids, NEW_TOKENS, 2, getattr(torch, dtype)))


def _memory(_folder: Path, count: str) -> float:
    return int(count) / sizes.read_bytes_per_s(int(count))


def _products(folder: Path, model: str) -> float:
    spec = load_model_dir(folder / model)
    in_layers = sizes.read_bytes(spec, 16) // 2 - spec.head_weights
    per_sequence = (PROMPT_TOKENS + NEW_TOKENS - 1) * in_layers + NEW_TOKENS * spec.head_weights
    return 2 * BATCH * per_sequence / float32_flops_per_s()


def float32_flops_per_s(width: int = 2048) -> float:
    """Return the operations a second of torch's product of two matrices, the best of ten."""
    values, seconds = torch.ones(width, width), []
    for _ in range(10):
        start = time.perf_counter()
        values @ values
        seconds.append(time.perf_counter() - start)
    return 2 * width**3 / min(seconds)


ONE = {
    DECODE: _decode, PROMPTS: _prompt, "generate": _generate, MEMORY: _memory, PRODUCTS: _products,
}  # fmt: skip


# Tables


def groups(runs: Sequence[Fields], topic: str) -> dict[tuple[Any, ...], dict[str, list[Fields]]]:
    """Return the runs of every case of a topic by contender."""
    found: dict[tuple[Any, ...], dict[str, list[Fields]]] = {}
    for one in runs:
        if one["case"] == topic and one["run"] != TRANSFORMERS:
            key = tuple(one[name] for name in FIELDS[topic])
            found.setdefault(key, {}).setdefault(one["run"], []).append(one)
    return {key: names for key, names in found.items() if OURS in names}


def decode_rows(folder: Path, runs: Sequence[Fields]) -> list[list[Any]]:
    """Return milliseconds a step, ratios and shares of the memory's speed."""
    steps, rows = pipeline.DECODE_TOKENS - 1, []
    for key, found in groups(runs, DECODE).items():
        model, bits, threads, _ = key
        ours = [1e3 * one["seconds"] / steps for one in found[OURS]]
        middle, theirs = statistics.median(ours), None
        if LLAMA_CPP in found:
            theirs = 1e3 * best_of(found[LLAMA_CPP])["seconds"] / steps
        case = {"case": MEMORY, "model": model, "bits": bits, "threads": threads}
        memory = [one["seconds"] for one in runs if case.items() <= one.items()]
        read = sizes.read_bytes(load_model_dir(folder / model), int(bits))
        rows.append([
            *key, *rounded(middle, min(ours), max(ours), theirs, theirs and middle / theirs),
            *rounded(read / middle / 1e6, memory and 1e3 * min(memory) / middle),
        ])  # fmt: skip
    return rows


def prompt_rows(_folder: Path, runs: Sequence[Fields]) -> list[list[Any]]:
    """Return tokens a second and ratios."""
    rows = []
    for key, found in groups(runs, PROMPTS).items():
        ours = [key[-1] / one["seconds"] for one in found[OURS]]
        middle, theirs = statistics.median(ours), None
        if LLAMA_CPP in found:
            theirs = key[-1] / best_of(found[LLAMA_CPP])["seconds"]
        rows.append(
            [*key, *rounded(middle, min(ours), max(ours), theirs, theirs and middle / theirs)]
        )
    return rows


def batch16_rows(_folder: Path, runs: Sequence[Fields]) -> list[list[Any]]:
    """Return tokens a second and ratios."""
    rows = []
    for key, found in groups(runs, BATCH16).items():
        ours = [BATCH * NEW_TOKENS / one["seconds"] for one in found[OURS]]
        others = [one for one in runs if one["run"] == TRANSFORMERS and one["model"] == key[0]]
        limit = [
            one["seconds"] for one in runs if one["run"] == PRODUCTS and one["model"] == key[0]
        ]
        middle, theirs, dtype = statistics.median(ours), None, None
        if others:
            best = best_of(others)
            theirs, dtype = BATCH * NEW_TOKENS / best["seconds"], best["setting"]["dtype"]
        rows.append([
            *key, *rounded(middle, min(ours), max(ours), theirs), dtype,
            *rounded(theirs and middle / theirs),
            *rounded(limit and middle * min(limit) / (BATCH * NEW_TOKENS)),
        ])  # fmt: skip
    return rows


ROWS = {DECODE: decode_rows, PROMPTS: prompt_rows, BATCH16: batch16_rows}


def rounded(*values: Any) -> Iterable[float | None]:
    """Return values with four significant digits; the samples have all."""
    return (float(f"{value:.4g}") if value else None for value in values)


if __name__ == "__main__":
    sys.exit(main())
