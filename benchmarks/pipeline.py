"""Time whole runs of a random model: our pipeline against transformers' own generate.

    python benchmarks/pipeline.py --folder DIR --prepare        # models, plans: nothing is timed
    python benchmarks/pipeline.py --folder DIR --case batch16   # one round; again for more
    python benchmarks/pipeline.py --folder DIR --case decode    # 594 M parameters, batches 1 and 8
    python benchmarks/pipeline.py --folder DIR --case single    # the small model, one sequence
    python benchmarks/pipeline.py --folder DIR --table

Everything runs on the same cores in turn (A B C A B C ...), each run in a process of its own, and
loading is not counted. llama.cpp takes part where benchmarks/rivals.py built it into DIR/rivals. A
round is kept run by run, so an interrupted one goes on where it was. The tables give our medians
over rounds and the best runs of all others, and ratios to transformers in bf16 on all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import rivals
import torch
from transformers import AutoModelForCausalLM
from workbench import call, cluster_text, command, keep_document, make_model, origin, write_prompts

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.engine.engine import Choice, SamplingState, ScoredRows
from llmpq.dist.engine.executor import StageRunner
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.dist.transport.frames import Row
from llmpq.models import kv_shapes, load_config
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.quant.loading.weight_cache import WeightCache

SHAPES = {
    "batch16": (12, 768, 2048, 12, 4),
    "decode": (20, 1536, 4096, 16, 4),
    "single": (12, 768, 2048, 12, 4),
}
"""Layers, hidden size, feed-forward, heads and KV heads of each case's model."""
VOCABULARY, MAX_POSITIONS = 32000, 1024
BATCH, PROMPT_TOKENS, NEW_TOKENS = 16, 128, 64
DECODE_PROMPT, DECODE_TOKENS = 32, 32
STORE_BYTES = 16 << 30
RIVAL, PIPELINE, LLAMA_CPP = "transformers", "transformers-pipeline", "llama.cpp"
RUNS = {
    "batch16": (
        RIVAL,
        "1-16",
        "1-8",
        "1-4",
        "1-mixed",
        "2-16",
        "2-8",
        "2-mixed",
        PIPELINE,
        f"{LLAMA_CPP}-16",
        f"{LLAMA_CPP}-8",
        f"{LLAMA_CPP}-4",
    ),
    "single": (
        f"{RIVAL} x1",
        "16 x1",
        "8 x1",
        "8, head 8 x1",
        "4 x1",
        "4, head 4 x1",
        "3, head 3 x1",
        f"{LLAMA_CPP}-16 x1",
        f"{LLAMA_CPP}-8 x1",
        f"{LLAMA_CPP}-4 x1",
    ),
    "decode": tuple(
        f"{name} x{batch}"
        for batch in (1, 8)
        for name in (
            RIVAL,
            "16",
            "8",
            "8, head 8",
            "4",
            "4, head 4",
            "3, head 3",
            f"{LLAMA_CPP}-16",
            f"{LLAMA_CPP}-8",
            f"{LLAMA_CPP}-4",
        )
    ),
}
"""Contenders: stages and bits of a run, or bits and rows of a decode.

The head of ours is at 16 bits unless its bits are given; llama.cpp's has the bits of its layers.
"""
QUALITY_BUDGET = "0.25"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--case", choices=sorted(RUNS))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", type=Path, help="file of all tables")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.one:
        print(json.dumps(run_here(folder, *options.one)))
    if options.prepare:
        prepare(folder)
    if options.case:
        measure(folder, options.case)
    if options.table:
        print("\n\n".join(table(folder, case) for case in RUNS))
    if options.json:
        keep_document(options.json, document(folder))
    return 0


def prepare(folder: Path) -> None:
    """Make models, prompts and plans."""
    folder.mkdir(exist_ok=True, parents=True)
    names = ("layers", "hidden", "intermediate", "heads", "kv_heads")
    for case, shape in SHAPES.items():
        sizes = dict(zip(names, shape, strict=True))
        whole = {**sizes, "vocab": VOCABULARY, "max_positions": MAX_POSITIONS}
        make_model(folder / case, whole)
        rivals.prepare(folder / "rivals", case, whole)
    write_prompts(folder / "prompts.jsonl", [(PROMPT_TOKENS, NEW_TOKENS)] * BATCH)
    cores = len(os.sched_getaffinity(0))
    for stages in (1, 2):
        cluster = folder / f"cluster{stages}.json"
        cluster.write_text(cluster_text(stages, max(1, cores // stages)))
        for bits in ("16", "8", "4", "mixed"):
            plan(folder, cluster, bits, folder / f"plan-{stages}-{bits}.json")


def contenders(folder: Path, case: str) -> list[str]:
    """Return who takes part: llama.cpp where it was built."""
    is_built = rivals.bench_of(folder / "rivals").exists()
    return [name for name in RUNS[case] if is_built or not name.startswith(LLAMA_CPP)]


def measure(folder: Path, case: str) -> None:
    """Time what the current round lacks, one run at a time."""
    names = contenders(folder, case)
    kept = folder / f"{case}.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for name in names[len(lines) % len(names) :]:
        found = run(folder, case, name)
        with kept.open("a") as file:
            file.write(json.dumps({"name": name, **found}) + "\n")


def run(folder: Path, case: str, name: str) -> dict[str, float]:
    """Time one contender in a fresh process."""
    if name == PIPELINE:
        work = (BATCH, PROMPT_TOKENS, NEW_TOKENS)
        return rivals.transformers_pipeline(folder / case, work)
    if name.startswith(LLAMA_CPP):
        return _llama_cpp(folder, case, name.removeprefix(f"{LLAMA_CPP}-"))
    if case == "batch16" and name != RIVAL:
        output = folder / "answers.jsonl"
        output.unlink(missing_ok=True)
        text = command([
            "llmpq-dist", "--strat_file_name", str(folder / f"plan-{name}.json"), "--prompts",
            str(folder / "prompts.jsonl"), "--output", str(output), "--json",
        ])  # fmt: skip
        return {"seconds": json.loads(text)["latency_s"]["measured"]}
    # Rivals wait as they would for their user; ours as its workers do.
    threads = len(os.sched_getaffinity(0))
    variables = {} if name.startswith(RIVAL) else cpu_environment(threads)
    words = [sys.executable, str(Path(__file__)), "--folder", str(folder), "--one", case, name]
    text = call(words, variables)
    return dict(json.loads(text.splitlines()[-1]))


def _llama_cpp(folder: Path, case: str, name: str) -> dict[str, float]:
    bits, _, rows = name.partition(" x")
    place = folder / "rivals"
    if rows:
        steps = DECODE_TOKENS - 1
        found = rivals.llama_cpp(place, case, bits, int(rows), DECODE_PROMPT, steps)
        return {"seconds": found["decode"]}
    found = rivals.llama_cpp(place, case, bits, BATCH, PROMPT_TOKENS, NEW_TOKENS)
    return {"seconds": found["seconds"]}


def run_here(folder: Path, case: str, name: str) -> dict[str, float]:
    """Time transformers, or the decode steps of our layers, in this process."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if case == "batch16":
        text = (folder / "prompts.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        ids = torch.tensor([line["prompt_token_ids"] for line in lines])
        return {"seconds": min(generate(folder / case, ids, NEW_TOKENS, rounds=2))}
    bits, _, rows = name.partition(" x")
    ids = torch.arange(int(rows) * DECODE_PROMPT).view(int(rows), -1) % VOCABULARY
    if bits == RIVAL:
        # The time of a step is that of the steps after the first, whose time a run of one tells.
        first = min(generate(folder / case, ids, 1, rounds=3))
        return {"seconds": min(generate(folder / case, ids, DECODE_TOKENS, rounds=2)) - first}
    bits, _, head = bits.partition(", head ")
    return {"seconds": decode_seconds(folder / case, int(bits), int(head or 16), ids)}


def generate(
    model_dir: Path, ids: torch.Tensor, new_tokens: int, rounds: int,
    dtype: torch.dtype = torch.bfloat16,
) -> list[float]:  # fmt: skip
    """Generate greedily with transformers; the first call only warms up."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def decode_seconds(model_dir: Path, bits: int, head_bits: int, ids: torch.Tensor) -> float:
    """Decode greedily with one stage of ours: embedding, layers, head and choice of every step."""
    config = load_config(model_dir)
    layers, rows = config.num_hidden_layers, len(ids)
    weight_cache = WeightCache.opened(model_dir.parent / "store", STORE_BYTES)
    stage = load_stage(
        model_dir,
        0,
        layers,
        [bits] * layers,
        dtype=torch.bfloat16,
        device="cpu",
        weight_cache=weight_cache,
    )
    master = load_master(
        model_dir,
        dtype=torch.bfloat16,
        device="cpu",
        head_bits=head_bits,
        weight_cache=weight_cache,
    )
    cache = KVCache(kv_shapes(config, 0, layers), 0, dtype=torch.bfloat16,
                    num_blocks=rows * blocks_of(MAX_POSITIONS),
                    states=stage.new_states(rows))  # fmt: skip
    runner = StageRunner(
        layers=stage,
        cache=cache,
        device=torch.device("cpu"),
        steps=step_runner_of(stage, cache),
        is_last=True,
    )
    states = [SamplingState() for _ in range(rows)]

    def step(tokens: torch.Tensor, first: int) -> torch.Tensor:
        width = tokens.shape[1]
        end = first + width
        tables = [slot_blocks(slot, MAX_POSITIONS, end) for slot in range(rows)]
        where = [
            Row(blocks=table, first=first, length=end, slot=slot)
            for slot, table in enumerate(tables)
        ]
        positions = torch.arange(first, end).repeat(rows)[None]
        hidden = runner.run(master.embed(tokens.view(1, -1), positions), where)
        choices = [Choice(row, state) for row, state in enumerate(states)]
        scored = ScoredRows(master.logits(hidden[0]), choices)
        sampled = [scored.sample(row, state) for row, state in enumerate(states)]
        return torch.tensor([token.token_id for token in sampled])[:, None]

    seconds = []
    for _ in range(2):
        newest = step(ids, 0)
        start = time.perf_counter()
        for first in range(DECODE_PROMPT, DECODE_PROMPT + DECODE_TOKENS - 1):
            newest = step(newest, first)
        seconds.append(time.perf_counter() - start)
    return seconds[-1]


def plan(folder: Path, cluster: Path, bits: str, strategy: Path) -> None:
    """Plan for latency alone: one bitwidth, or any under the quality budget."""
    words = ["--quality_budget", QUALITY_BUDGET] if bits == "mixed" else ["--bits", bits]
    command([
        "llmpq-algo", "--model", str(folder / "batch16"), "--cluster", str(cluster), *words,
        "--global_bz", str(BATCH), "--s", str(PROMPT_TOKENS), "--n", str(NEW_TOKENS),
        "--theta", "0", "--output", str(strategy), "--no_explain",
    ])  # fmt: skip


COLUMNS = ("run", "seconds (range)", "tokens/s", "times transformers")
TITLES = {
    "batch16": ("Batch of 16", "125 M parameters, prompt 128, 64 new tokens, two threads in all."),
    "single": ("One sequence", "125 M parameters, 31 decode steps after a prompt of 32."),
    "decode": ("594 M parameters", "31 decode steps after prompts of 32."),
}
NOTE = (
    "Ours: median of the rounds; others: their best. Our head has 16 bits unless its bits are "
    "given, llama.cpp's those of its layers."
)


def table(folder: Path, case: str) -> str:
    """Return a Markdown table of the whole rounds."""
    found = rows(folder, case)
    lines = [COLUMNS, ("---",) * len(COLUMNS), *found]
    return "\n".join([f"{case}:", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def rows(folder: Path, case: str) -> list[tuple[str, ...]]:
    """Return the table of the whole rounds: ours by the median, all others by their best run."""
    times = samples(folder, case)
    base = {name: min(seconds) for name, seconds in times.items()}
    made = []
    for name, seconds in times.items():
        is_other = name.startswith((RIVAL, LLAMA_CPP))
        counted = min(seconds) if is_other else statistics.median(seconds)
        _, _, count = name.partition(" x")
        ratio = base[f"{RIVAL} x{count}" if count else RIVAL] / counted
        tokens = int(count) * (DECODE_TOKENS - 1) if count else BATCH * NEW_TOKENS
        made.append(
            (
                label(name),
                f"{counted:.3f} ({min(seconds):.3f}-{max(seconds):.3f})",
                f"{tokens / counted:.0f}",
                f"{ratio:.2f}",
            )
        )
    return made


def label(name: str) -> str:
    """Return the name of a contender as tables have it."""
    name, _, count = name.partition(" x")
    if name == RIVAL:
        made = "transformers `generate`, bf16"
    elif name == PIPELINE:
        made = "transformers' own pipeline, two ranks"
    elif name.startswith(LLAMA_CPP):
        made = f"llama.cpp, {name.rpartition('-')[2]} bits"
    elif count:
        bits, _, head = name.partition(", head ")
        made = f"{bits} bits, head {head} bits" if head else f"{bits} bits"
    else:
        stages, _, bits = name.partition("-")
        kind = f"quality budget {QUALITY_BUDGET}" if bits == "mixed" else f"{bits} bits"
        made = f"{stages} stage{'s' * (stages > '1')}, {kind}"
    return f"{made}, {count} sequences" if count not in ("", "1") else made


def samples(folder: Path, case: str) -> dict[str, list[float]]:
    """Return the seconds of the whole rounds, by contender."""
    kept = folder / f"{case}.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    found: dict[str, list[float]] = defaultdict(list)
    names = contenders(folder, case)
    for line in lines[: len(lines) // len(names) * len(names)]:
        found[line["name"]].append(line["seconds"])
    return found


def document(folder: Path) -> dict[str, object]:
    """Return all tables with their samples and where they come from."""
    return {
        **origin(
            "throughput",
            "python benchmarks/pipeline.py --folder DIR --case batch16 (and single, decode)",
            **{"llama.cpp": rivals.PACKAGE},
        ),
        "samples": {case: samples(folder, case) for case in RUNS},
        "tables": [
            {
                "title": title,
                "columns": COLUMNS,
                "rows": rows(folder, case),
                "note": f"Random Llama, {text} {NOTE}",
            }
            for case, (title, text) in TITLES.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
