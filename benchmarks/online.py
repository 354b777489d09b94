"""Speed of online serving: our server, llama.cpp's and transformers', and the parts of ours.

    python benchmarks/online.py --folder DIR --prepare               # models and plans
    python benchmarks/online.py --folder DIR --case closed           # concurrency 1 to 64
    python benchmarks/online.py --folder DIR --case arrivals         # Poisson and Azure arrivals
    python benchmarks/online.py --folder DIR --case overhead         # the engine alone, and HTTP
    python benchmarks/online.py --folder DIR --case orders           # queue orders: real, simulated
    python benchmarks/online.py --folder DIR --case agents           # long prefixes, few blocks
    python benchmarks/online.py --folder DIR --case batched          # llama.cpp without its server
    python benchmarks/online.py --folder DIR --case vllm_bench       # by ``vllm bench serve``
    python benchmarks/online.py --folder DIR --case capacity         # a mixed cluster, predicted

The model is a random Llama of 125 M parameters. Servers run in turn on all cores, in rounds
(A B C A B C ...); every round starts its servers anew, and the first requests only warm up. The
table has the median of our runs, and the best run of every other server; llama.cpp's settings
differ from round to round (LLAMA_SETTINGS), and at 16 bits bf16 and f16 alternate. Each run is
added to a file in DIR for its case, processor and ``--cpu_isa``, so that more rounds can follow.
With ``--output`` everything that was run here is written into that result file.

llama.cpp takes part where ``benchmarks/rivals.py --folder DIR/rivals`` built its server, or with
``--llama_server``; its prompts are token ids, as ours. transformers' server takes text, and runs
with and without continuous batching. ``vllm_bench`` is measured by a client that is not of this
project, run by ``--vllm_python`` (an environment with vLLM's requirements; ``scripts/accept.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import statistics
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rivals
from load import SAMPLE_COLUMNS, Query, Sample, Send, drive, rows, sender, summary
from servers import (
    MAX_CONTEXT,
    VLLM_BENCH,
    Running,
    llama_server,
    llmpq_serve,
    make_plan,
    make_text_model,
    text_of,
    transformers_serve,
)
from workbench import (
    NATIVE,
    ROOT,
    SMALL_LLAMA,
    add_isa_option,
    call,
    command,
    keep_document,
    processor,
    restrict,
)

from llmpq.dist.async_engine import AsyncEngine
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.spec.plan import read_plan
from llmpq.spec.workload import (
    TraceRequest,
    Workload,
    draw_arrivals,
    fit_trace,
    load_trace,
    slice_trace,
    with_arrivals,
)
from llmpq.units import GIB

VOCABULARY = SMALL_LLAMA["vocab"]
CONCURRENCY = (1, 4, 16, 64)
RATES = (1.0, 2.0, 4.0)
AZURE = ROOT.parent / "shared" / "data" / "azure" / "AzureLLMInferenceTrace_conv.csv"
AZURE_SCALE = 4
"""Azure's lengths are divided by this: the model's context is 1,024 tokens."""
BATCHED = "transformers-batched"
OURS = ("llmpq", "engine")
SERVERS = ("llmpq", "llama.cpp", "transformers", BATCHED)
BATCHED_OPTIONS = (
    "--continuous-batching", "--cb-block-size", "32", "--cb-num-blocks", "512",
    "--cb-max-batch-tokens", "1024",
)  # fmt: skip
"""Room for 64 requests of 256 tokens; the default takes most of the memory."""
LLAMA_SETTINGS = (("-kvu",), (), ("-kvu", "--poll", "0"), ("-kvu", "--cache-ram", "0"))
"""Options of llama.cpp's server by round: one cache for all slots, threads that do not spin, no
store of prompts. Flash attention, other samplers and one thread were tried and are not faster."""
ORDERS = ("fcfs", "larry", "no_preempt")
WARM_UP = 2
KEPT_BYTES = 2 * GIB
"""Most bytes that leave the blocks of an engine and are kept."""
STATS_S = 0.3
"""Until an engine's counters are here."""
ROUND_NUMBERS = 1_000_000
"""Numbers of requests between those of two rounds. No server sees a number twice, as it would
find the prompt in its cache."""
Reply = dict[str, Any]


def main() -> int:
    """Prepare, measure or write."""
    options = _parser().parse_args()
    options.folder = options.folder.absolute()
    options.profile = options.profile and options.profile.absolute()  # commands run elsewhere
    options.folder.mkdir(parents=True, exist_ok=True)
    restrict(options.cpu_isa)
    if options.prepare:
        prepare(options)
    if options.case:
        for number in range(options.rounds):
            CASES[options.case](options, number)
        show(options)
    if options.output:
        keep_document(options.output, record(options), options.cpu_isa)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="models, plans and runs")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument("--bits", nargs="+", type=int, choices=(16, 8, 4), default=(16, 8, 4))
    add_isa_option(parser)
    parser.add_argument("--concurrency", nargs="+", type=int, default=CONCURRENCY)
    parser.add_argument("--arrivals", nargs="+", choices=("poisson", "azure"),
                        default=("poisson", "azure"))  # fmt: skip
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="requests a second")
    parser.add_argument("--requests", type=int, help="of a run (default: 4 times the concurrency, "
                        "at least 8; 60 for arrivals and orders)")  # fmt: skip
    parser.add_argument("--prompt_tokens", type=int, default=128, help="closed, overhead")
    parser.add_argument("--new_tokens", type=int, default=64, help="closed, overhead")
    parser.add_argument("--orders", nargs="+", default=ORDERS, help="queue orders")
    parser.add_argument("--alpha", type=float, default=1.0, help="of larry")
    parser.add_argument("--num_blocks", type=int, default=160, help="orders, agents: KV blocks")
    parser.add_argument("--agents", type=int, default=8, help="agents: conversations")
    parser.add_argument("--turns", type=int, default=4, help="agents: requests of each")
    parser.add_argument("--token_budget", type=int, default=256, help="orders: tokens of a step")
    parser.add_argument("--trace", type=Path, default=AZURE, help="Azure's layout or ours")
    parser.add_argument("--trace_first", type=int, default=0, help="first request of the trace")
    parser.add_argument("--profile", type=Path, help="folder of this machine's latency tables")
    parser.add_argument("--threads", type=int, help="of our worker (default: one a core)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm_python", type=Path, help="Python that has vLLM")
    parser.add_argument("--llama_server", type=Path, help="llama.cpp's binary")
    parser.add_argument("--output", type=Path, help="JSON of all runs in the folder")
    return parser


def prepare(options: argparse.Namespace) -> None:
    """Make models and plans."""
    make_text_model(options.folder / "model")
    for bits in options.bits:
        plan_of(options, bits)
    shape = {**SMALL_LLAMA, "vocab": VOCABULARY}
    rivals.prepare(options.folder / "rivals", rivals.SERVER_CASE, shape)


def plan_of(options: argparse.Namespace, bits: int) -> Path:
    """Return the strategy of a bitwidth: one stage, priced by the profile."""
    folder = options.folder
    count = "" if options.threads is None else f"-{options.threads}"
    isa = "" if options.cpu_isa == NATIVE else f"-{options.cpu_isa}"
    output = folder / f"plan-{bits}{'-profiled' if options.profile else ''}{count}{isa}.json"
    return make_plan(
        folder / "model", output, bits=bits, batch=64, prompt_tokens=512, new_tokens=256,
        threads=options.threads, profile=options.profile, cpu_isa=options.cpu_isa,
    )  # fmt: skip


# Servers


def contenders(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return names and bits of the servers that can run here."""
    found = []
    for bits in options.bits:
        for name in options.servers:
            if name == "llama.cpp" and not binary_of(options).exists():
                print("llama.cpp: no server here; see --llama_server", file=sys.stderr)
            elif not name.startswith("transformers") or bits == 16:
                found.append((name, bits))
    return found


def binary_of(options: argparse.Namespace) -> Path:
    """Return llama.cpp's server, whether it exists or not."""
    return options.llama_server or rivals.server_of(options.folder / "rivals", options.cpu_isa)


@contextlib.contextmanager
def serving(
    options: argparse.Namespace, name: str, bits: int, slots: int, number: int = 0
) -> Iterator[Send]:
    """Run a server in a round; yield what sends requests to it."""
    with server(options, name, bits, slots, number) as found:
        if name.startswith("transformers"):
            model = str(options.folder / "model")
            yield sender(found.port, lambda query: text_body(query, model))
        else:
            yield sender(found.port, ids_body)


@contextlib.contextmanager
def server(
    options: argparse.Namespace, name: str, bits: int, slots: int, number: int
) -> Iterator[Running]:
    """Run a server in a round."""
    folder, log = options.folder, options.folder / f"{name}-{bits}.log"
    model = folder / "model"
    if name == "llmpq":
        run = llmpq_serve(model, plan_of(options, bits), log)
    elif name == "llama.cpp":
        binary, words = binary_of(options), llama_settings(number)
        model_bits = format_of(bits, number)
        run = llama_server(binary, folder / "rivals", model_bits, log, slots, *words)
    else:
        run = transformers_serve(model, log, *(BATCHED_OPTIONS if name == BATCHED else ()))
    with run as found:
        yield found


def llama_settings(number: int) -> tuple[str, ...]:
    """Return the options of llama.cpp's server in a round."""
    return LLAMA_SETTINGS[number % len(LLAMA_SETTINGS)]


def format_of(bits: int, number: int) -> str:
    """Return the format of llama.cpp's model in a round: 16 bits are bf16 or f16 in turn."""
    return rivals.F16 if bits == 16 and number % 2 else str(bits)


def ids_body(query: Query) -> dict[str, Any]:
    """Return a request of token ids, for ours and llama.cpp."""
    return {
        "model": "model", "prompt": list(query.token_ids(VOCABULARY)),
        "max_tokens": query.new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "cache_prompt": False,
    }  # fmt: skip


def text_body(query: Query, model: str) -> dict[str, Any]:
    """Return the same request as text, for transformers."""
    return {
        "model": model, "prompt": text_of(query.token_ids(VOCABULARY)), "stream": True,
        "max_tokens": query.new_tokens, "temperature": 0,
    }  # fmt: skip


@contextlib.asynccontextmanager
async def engine_alone(
    options: argparse.Namespace, bits: int, **settings: Any
) -> AsyncIterator[tuple[AsyncEngine, Send]]:
    """Run the engine without a server; yield it, and what sends requests to it."""
    plan = read_plan(plan_of(options, bits))
    engine = await AsyncEngine.start(plan, options.folder / "model", **settings)

    async def send(query: Query, sample: Sample, clock: Callable[[], float]) -> None:
        request = GenerationRequest(
            id=str(query.number),
            prompt_token_ids=query.token_ids(VOCABULARY),
            sampling=SamplingParams(max_tokens=query.new_tokens, ignore_eos=True),
        )
        async for output in engine.generate(request):
            sample.first_s = sample.first_s or clock()
            sample.end_s = clock()
            sample.new_tokens += len(output.token_ids)
            sample.reason = output.finish_reason or ""

    try:
        yield engine, send
    finally:
        await engine.close()


# Cases


def closed(options: argparse.Namespace, number: int) -> None:
    """Time every server at every concurrency."""
    for name, bits in contenders(options):
        with serving(options, name, bits, max(options.concurrency), number) as send:
            warm_up(send)
            for level in options.concurrency:
                samples = asyncio.run(drive(equal(options, level, number), send, level))
                keep(options, number, samples, server=name, bits=bits, concurrency=level)


def arrivals(options: argparse.Namespace, number: int) -> None:
    """Time every server under requests that arrive at random times."""
    for name, bits in contenders(options):
        with serving(options, name, bits, max(CONCURRENCY), number) as send:
            warm_up(send)
            for kind in options.arrivals:
                for rate in options.rates:
                    queries = arriving(options, kind, rate, number)
                    samples = asyncio.run(drive(queries, send))
                    keep(options, number, samples, server=name, bits=bits, arrivals=kind, rate=rate)


def overhead(options: argparse.Namespace, number: int) -> None:
    """Time the engine without and with HTTP in turn, under the same requests."""

    async def alone(bits: int, queries: Sequence[Query], level: int | None) -> list[Sample]:
        async with engine_alone(options, bits) as (_, send):
            await drive(equal(options, WARM_UP, -1), send, WARM_UP)
            return await drive(queries, send, level)

    loads: list[tuple[str, Sequence[Query], int | None]] = [
        (f"{level} at a time", equal(options, level, number), level)
        for level in options.concurrency
    ]
    loads += [
        (f"{rate:g} a second", arriving(options, "poisson", rate, number), None)
        for rate in options.rates
    ]
    for bits in options.bits:
        for load, queries, level in loads:
            samples = asyncio.run(alone(bits, queries, level))
            keep(options, number, samples, server="engine", bits=bits, load=load)
            with serving(options, "llmpq", bits, max(CONCURRENCY)) as send:
                warm_up(send)
                samples = asyncio.run(drive(queries, send, level))
            keep(options, number, samples, server="llmpq", bits=bits, load=load)


def orders(options: argparse.Namespace, number: int) -> None:
    """Time queue orders on an engine with few blocks, and simulate the same requests."""

    async def real(order: str, queries: Sequence[Query]) -> tuple[list[Sample], int]:
        settings: dict[str, Any] = {
            "scheduler": order, "num_blocks": options.num_blocks,
            "token_budget": options.token_budget,
            "alpha": options.alpha if order == "larry" else None,
        }  # fmt: skip
        async with engine_alone(options, bits, **settings) as (engine, send):
            await drive(equal(options, WARM_UP, -1), send, WARM_UP)
            before = engine.stats.num_preemptions
            samples = await drive(queries, send)
            await asyncio.sleep(STATS_S)
            return samples, engine.stats.num_preemptions - before

    bits = options.bits[0]
    for rate in options.rates:
        queries = arriving(options, "poisson", rate, number)
        trace = options.folder / "trace.csv"
        trace.write_text(trace_text(queries))
        for order in options.orders:
            what = {"order": order, "rate": rate, "bits": bits, "num_blocks": options.num_blocks}
            samples, preemptions = asyncio.run(real(order, queries))
            keep(options, number, samples, **what, preemptions=preemptions)
            text = command([
                "llmpq-sim", "--strategy", str(plan_of(options, bits)), "--engine", "--scheduler",
                order, "--alpha", str(options.alpha), "--num_blocks", str(options.num_blocks),
                "--token_budget", str(options.token_budget), "--trace", str(trace), "--json",
                *(["--profile", str(options.profile)] if options.profile else []),
            ])  # fmt: skip
            add(options, {"round": number, **what, "simulated": json.loads(text)["rates"][0]})


def agents(options: argparse.Namespace, number: int) -> None:
    """Let agents take turns, each with a longer prompt, in blocks that do not hold all of them.

    What leaves the blocks is lost, or kept in host memory or in files.
    """
    tiers: dict[str, dict[str, Any]] = {
        "blocks": {},
        "host": {"kv_offloading_bytes": KEPT_BYTES},
        "disk": {
            "kv_offloading_folder": options.folder / "blocks",
            "kv_offloading_disk_bytes": KEPT_BYTES,
        },
    }

    async def play(bits: int, settings: dict[str, Any]) -> tuple[list[Sample], float]:
        settings = {**settings, "num_blocks": options.num_blocks}
        async with engine_alone(options, bits, **settings) as (engine, send):
            await drive(equal(options, WARM_UP, -1), send, WARM_UP)
            await asyncio.sleep(STATS_S)
            before, samples = engine.stats, []
            for turn in range(1, options.turns + 1):
                samples += await drive(turns_of(options, number, turn), send, 1)
            await asyncio.sleep(STATS_S)
            hits = engine.stats.prefix_cache_hits - before.prefix_cache_hits
            queries = engine.stats.prefix_cache_queries - before.prefix_cache_queries
            return samples, hits / queries

    for bits in options.bits:
        for tier, settings in tiers.items():
            samples, rate = asyncio.run(play(bits, settings))
            print(f"{bits} bits, {tier}: {rate:.1%} of prompt tokens found", file=sys.stderr)
            what = {"tier": tier, "bits": bits, "num_blocks": options.num_blocks}
            keep(options, number, samples, **what, hit_rate=rate)


def turns_of(options: argparse.Namespace, number: int, turn: int) -> list[Query]:
    """Return the requests of a turn: each begins with that of the turn before."""
    first = number * ROUND_NUMBERS
    return [
        Query(
            number=first + agent,
            prompt_tokens=options.prompt_tokens * turn,
            new_tokens=options.new_tokens,
        )
        for agent in range(options.agents)
    ]


def batched(options: argparse.Namespace, number: int) -> None:
    """Time llama.cpp's batched benchmark, an upper bound of what its server can make."""
    for bits in options.bits:
        for level in options.concurrency:
            work = options.prompt_tokens, options.new_tokens
            found = rivals.llama_cpp(
                options.folder / "rivals", rivals.SERVER_CASE, format_of(bits, number), level,
                *work, cpu_isa=options.cpu_isa,
            )  # fmt: skip
            speed = level * options.new_tokens / found["seconds"]
            what = {"server": "llama.cpp batched", "bits": bits, "concurrency": level}
            add(options, {"round": number, **what, "output_tokens_per_s": speed})


def vllm_bench(options: argparse.Namespace, number: int) -> None:
    """Let ``vllm bench serve`` time every server: Poisson arrivals, and requests at a time."""
    rates = [(f"{rate:g} a second", 32, "--request-rate", rate) for rate in options.rates]
    levels = [
        (f"{level} at a time", max(8, 4 * level), "--max-concurrency", level)
        for level in options.concurrency
    ]
    for name, bits in contenders(options):
        with server(options, name, bits, max(CONCURRENCY), number) as found:
            for load, default, option, value in [*rates, *levels]:
                count = options.requests or default
                seed = zlib.crc32(f"{load}, {number}".encode())  # other prompts for every run
                words = [option, str(value), "--num-prompts", str(count), "--seed", str(seed)]
                one = by_vllm_bench(options, name, found.port, words)
                add(options, {
                    "round": number, "server": name, "bits": bits, "load": load,
                    "failed": count - one["completed"],
                    "output_tokens_per_s": one["output_throughput"],
                    "ttft_s": {f"p{n}": one[f"p{n}_ttft_ms"] / 1000 for n in (50, 95)},
                    "total_generation_time_s": {"p50": one["p50_e2el_ms"] / 1000},
                })  # fmt: skip


def by_vllm_bench(options: argparse.Namespace, name: str, port: int, words: list[str]) -> Reply:
    """Return the report of a client run on a server."""
    report, model = options.folder / "vllm.json", str(options.folder / "model")
    named = model if name.startswith("transformers") else "model"
    call([
        str(options.vllm_python), "-c", VLLM_BENCH, "--backend", "openai", "--endpoint",
        "/v1/completions", "--model", named, "--base-url", f"http://127.0.0.1:{port}",
        *words, "--tokenizer", model, "--dataset-name", "random", "--random-input-len",
        str(options.prompt_tokens), "--random-output-len", str(options.new_tokens), "--ignore-eos",
        "--num-warmups", str(WARM_UP), "--percentile-metrics", "ttft,e2el", "--metric-percentiles",
        "50,95", "--save-result", "--result-filename", str(report),
    ], {"VLLM_TARGET_DEVICE": "cpu"})  # fmt: skip
    return dict(json.loads(report.read_text()))


def capacity(options: argparse.Namespace, number: int) -> None:
    """Serve two different devices as fast as they can, and compare with what is predicted."""
    plan = mixed_plan(options)
    queries = [replace(one, arrival_s=0.0) for one in arriving(options, "azure", 1.0, number)]
    with llmpq_serve(options.folder / "model", plan, options.folder / "mixed.log") as found:
        send = sender(found.port, ids_body)
        warm_up(send)
        samples = asyncio.run(drive(queries, send, len(queries)))
    keep(options, number, samples, server="llmpq")
    trace = options.folder / "trace.csv"
    trace.write_text(trace_text(queries))
    text = command([
        "llmpq-sim", "--strategy", str(plan), "--engine", "--trace", str(trace), "--json",
    ])  # fmt: skip
    add(options, {"round": number, "server": "llmpq", "simulated": json.loads(text)["rates"][0]})


def mixed_plan(options: argparse.Namespace) -> Path:
    """Return the plan of two devices, one with an older vector extension; profile both once."""
    folder = options.folder / "mixed"
    folder.mkdir(exist_ok=True)
    for name, words in (("native", ()), ("avx2", ("--cpu_isa", "avx2"))):
        if not (folder / f"{name}.csv").exists():
            command([
                "llmpq-profile", "layer", "--model", str(options.folder / "model"), "--core", "0",
                "--max_batch", "64", "--max_prompt", "512", "--max_context", "768", "--points",
                "10", "--max_prefill", "512", "--layers", "3", "--budget", "60",
                "--output", str(folder / f"{name}.csv"), *words,
            ])  # fmt: skip
    devices = [
        {"type": "cpu", "count": 1, "threads": 1, "profile": "native.csv"},
        {"type": "cpu", "count": 1, "threads": 1, "cpu_isa": "avx2", "profile": "avx2.csv"},
    ]
    nodes = [{"name": "here", "devices": devices, "cores": len(os.sched_getaffinity(0))}]
    cluster = {"schema": 1, "name": "mixed", "nodes": nodes, "links": []}
    (folder / "cluster.json").write_text(json.dumps(cluster))
    plan = folder / "plan.json"
    if not plan.exists():
        command([
            "llmpq-algo", "--model", str(options.folder / "model"), "--cluster",
            str(folder / "cluster.json"), "--global_bz", "64", "--s", "512", "--n", "256",
            "--no_explain", "--output", str(plan),
        ])  # fmt: skip
    return plan


CASES = {
    "capacity": capacity,
    "closed": closed,
    "arrivals": arrivals,
    "overhead": overhead,
    "orders": orders,
    "agents": agents,
    "batched": batched,
    "vllm_bench": vllm_bench,
}


# Requests


def equal(options: argparse.Namespace, level: int, number: int) -> list[Query]:
    """Return requests of equal lengths; those of every round and level differ."""
    count = options.requests or max(8, 4 * level)
    first = (number + 1) * ROUND_NUMBERS + level * 1_000
    return [
        Query(number=first + at, prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens)
        for at in range(count)
    ]


def arriving(options: argparse.Namespace, kind: str, rate: float, number: int) -> list[Query]:
    """Return requests with Azure's lengths, arriving at a mean rate; those of every run differ."""
    count = options.requests or 60
    trace = slice_trace(load_trace(options.trace), options.trace_first, None)[:count]
    short = [
        replace(
            item,
            prompt_tokens=max(1, item.prompt_tokens // AZURE_SCALE),
            new_tokens=max(2, item.new_tokens // AZURE_SCALE),
        )
        for item in trace
    ]
    work = Workload(batch=1, prompt_tokens=MAX_CONTEXT // 2, new_tokens=MAX_CONTEXT // 4)
    fitting: Sequence[TraceRequest] = fit_trace(short, work, "cut")[0]
    if kind == "poisson":
        times = draw_arrivals("poisson", len(fitting), rate, seed=options.seed + number)
        fitting = with_arrivals(fitting, times)
    else:
        own_rate = len(fitting) / fitting[-1].arrival_s
        fitting = [replace(item, arrival_s=item.arrival_s * own_rate / rate) for item in fitting]
    first = (number + 1) * ROUND_NUMBERS + (400_000 if kind == "poisson" else 700_000)
    first += round(10 * rate) * 1_000
    return [
        Query(
            number=first + at, prompt_tokens=item.prompt_tokens, new_tokens=item.new_tokens,
            arrival_s=item.arrival_s,
        )
        for at, item in enumerate(fitting)
    ]  # fmt: skip


def trace_text(queries: Sequence[Query]) -> str:
    """Return the requests as a trace of llmpq-sim."""
    lines = (f"{one.arrival_s!r},{one.prompt_tokens},{one.new_tokens}\n" for one in queries)
    return "arrival_s,prompt_tokens,new_tokens\n" + "".join(lines)


def warm_up(send: Send) -> None:
    """Send a few requests.

    Raises:
        SystemExit: the server cannot answer them.
    """
    queries = [Query(number=-1 - at, prompt_tokens=64, new_tokens=8) for at in range(WARM_UP)]
    found = summary(asyncio.run(drive(queries, send, WARM_UP)))
    if found["failed"]:
        raise SystemExit(f"the server does not answer: {found['errors']}")


# Results


def keep(options: argparse.Namespace, number: int, samples: list[Sample], **what: Any) -> None:
    """Keep a run."""
    add(options, {"round": number, **what, **summary(samples), "samples": rows(samples)})


def add(options: argparse.Namespace, run: Reply) -> None:
    """Add a run to those of the case, with the load of the machine."""
    run = {**run, "load_average": os.getloadavg()[0], "time_s": time.time()}
    run["cores"] = len(os.sched_getaffinity(0))
    if run.get("server") == "llama.cpp":
        run["settings"] = " ".join(llama_settings(run["round"]))
        run["format"] = rivals.FORMATS[format_of(run["bits"], run["round"])]
    with path_of(options, options.case).open("a", encoding="utf-8") as file:
        file.write(json.dumps(run) + "\n")


def path_of(options: argparse.Namespace, case: str) -> Path:
    """Return where the runs of a case on this processor are kept."""
    place = re.sub(r"\W+", "-", f"{processor()}-{options.cpu_isa}")
    return Path(options.folder / f"{case}-{place}.jsonl")


def runs_of(path: Path) -> list[Reply]:
    """Return the runs of a case."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(options: argparse.Namespace) -> None:
    """Print a table: medians over rounds of our runs, the best round of every other server."""
    groups: dict[str, list[Reply]] = {}
    for run in runs_of(path_of(options, options.case)):
        groups.setdefault(label(run), []).append(run)
    print("| run | rounds | failed | tokens/s | TTFT p50 ms | TTFT p95 ms | TGT p50 s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, runs in groups.items():
        figures = [figures_of(run) for run in runs]
        if runs[0].get("server", "llmpq") in OURS:
            figures = [tuple(map(statistics.median, zip(*figures, strict=True)))]
        cells = [f"{figure:.4g}" for figure in max(figures)]
        failed = sum(run.get("failed", 0) for run in runs)
        print(f"| {name} | {len(runs)} | {failed} | {' | '.join(cells)} |")


def label(run: Reply) -> str:
    """Return what a run was, without its round."""
    names = (
        "server",
        "tier",
        "order",
        "bits",
        "concurrency",
        "arrivals",
        "rate",
        "load",
        "num_blocks",
    )
    parts = [f"{name} {run[name]}" for name in names if name in run]
    return ", ".join([*parts, *(["simulated"] if "simulated" in run else [])])


def figures_of(run: Reply) -> tuple[float, float, float, float]:
    """Return throughput, TTFT and total time of a run."""
    found = run.get("simulated", run)
    speed = found.get("output_tokens_per_s", found.get("throughput_tokens_per_s", 0.0))
    ttft = found.get("ttft_s") or found.get("time_to_first_token_s") or {}
    total = found.get("total_generation_time_s") or {}
    return (
        speed, 1000 * ttft.get("p50", 0.0), 1000 * ttft.get("p95", 0.0), total.get("p50", 0.0),
    )  # fmt: skip


def record(options: argparse.Namespace) -> Reply:
    """Return all runs of the folder and where they come from."""
    packages = ("torch", "transformers", "uvicorn", "fastapi")
    return {
        "topic": "online",
        "command": f"python benchmarks/online.py --folder DIR --cpu_isa {options.cpu_isa}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
            "llama-cpp-python": rivals.PACKAGE.partition("==")[2],
        },
        "tables": tables(options),
        "sample_columns": SAMPLE_COLUMNS,
        "cases": {name: runs_of(path_of(options, name)) for name in CASES},
    }


def tables(options: argparse.Namespace) -> list[Reply]:
    """Return tables of speed and first tokens beside other servers, and of what HTTP costs."""
    found = [
        beside(options, "closed", "Requests at a time", ("bits", "concurrency")),
        beside(options, "arrivals", "Arrivals", ("bits", "arrivals", "rate")),
        beside(options, "vllm_bench", "Timed by vllm bench serve", ("bits", "load")),
    ]
    rows = []
    for key, (alone, ours) in best_runs(options, "overhead", ("bits", "load")).items():
        if alone and ours:
            rows.append([*key, alone[0], ours[0], ours[0] / alone[0], ours[1] - alone[1]])
    bound = best_runs(options, "batched", ("bits", "concurrency"), ("llama.cpp batched",))
    found.append(
        {
            "title": "llama.cpp's batched benchmark",
            "columns": ["bits", "sequences", "tokens/s with prompts"],
            "rows": [[*key, runs[0][0]] for key, runs in bound.items() if runs[0]],
        }
    )
    head = ["bits", "load", "engine tokens/s", "HTTP tokens/s", "ratio", "TTFT p50 more, ms"]
    found.append({"title": "What HTTP costs", "columns": head, "rows": rows})
    return [*found, capacity_table(options), orders_table(options)]


def capacity_table(options: argparse.Namespace) -> Reply:
    """Return the table of a mixed cluster's speed, measured and simulated."""
    rows = [
        [number, real["output_tokens_per_s"], simulated["throughput_tokens_per_s"],
         simulated["throughput_tokens_per_s"] / real["output_tokens_per_s"]]
        for number, real, simulated in pairs(options, "capacity", ("round",))
    ]  # fmt: skip
    head = ["round", "tokens/s", "simulated", "simulated / measured"]
    return {"title": "Capacity of a mixed cluster", "columns": head, "rows": rows}


def orders_table(options: argparse.Namespace) -> Reply:
    """Return the table of queue orders, measured and simulated."""
    rows = []
    for rate, order, real, simulated in pairs(options, "orders", ("rate", "order")):
        row = [rate, order]
        for mine, theirs in (
            ("ttft_s", "time_to_first_token_s"),
            ("total_generation_time_s", "total_generation_time_s"),
        ):
            measured, predicted = real[mine]["mean"], simulated[theirs]["mean"]
            row += [measured, predicted, predicted / measured]
        rows.append([*row, real["preemptions"]])
    head = ["rate", "order", "TTFT, s", "simulated", "ratio", "TGT, s", "simulated", "ratio"]
    return {"title": "Queue orders", "columns": [*head, "preemptions"], "rows": rows}


def pairs(options: argparse.Namespace, case: str, keys: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the keys, a run, and what was simulated of the same requests."""
    runs = runs_of(path_of(options, case))
    return [
        (*(real[key] for key in keys), real, twin["simulated"])
        for real, twin in zip(runs[::2], runs[1::2], strict=True)
    ]


def beside(options: argparse.Namespace, case: str, title: str, keys: Sequence[str]) -> Reply:
    """Return the table of a case: each server's tokens a second, ratios, 95th percentiles."""
    rivals_of_us = ("llama.cpp", BATCHED)
    head = [*keys, *(f"{name} tokens/s" for name in ("llmpq", *rivals_of_us))]
    head += [f"over {name}" for name in rivals_of_us]
    head += [f"{name} TTFT p95, ms" for name in ("llmpq", *rivals_of_us)]
    rows = []
    for key, (ours, *others) in best_runs(options, case, keys, ("llmpq", *rivals_of_us)).items():
        if ours:
            speeds = [found and found[0] for found in (ours, *others)]
            ratios = [found and ours[0] / found[0] for found in others]
            rows.append(
                [*key, *speeds, *ratios, *(found and found[2] for found in (ours, *others))]
            )
    return {
        "title": title, "columns": head, "keys": len(keys), "rows": rows,
        "beside": ["llmpq tokens/s", "over llama.cpp", "llmpq TTFT p95, ms",
                   "llama.cpp TTFT p95, ms"],
        "ranges": {"of": "over llama.cpp", "by": "bits"},
    }  # fmt: skip


def best_runs(
    options: argparse.Namespace,
    case: str,
    keys: Sequence[str],
    servers: Sequence[str] = ("engine", "llmpq"),
) -> dict[tuple[Any, ...], list[tuple[float, ...] | None]]:
    """Return the figures of every server: our medians, the best runs of others, or ``None``."""
    runs = runs_of(path_of(options, case))
    found: dict[tuple[Any, ...], list[tuple[float, ...] | None]] = {}
    for key in dict.fromkeys(tuple(run[name] for name in keys) for run in runs):
        for server in servers:
            own = [
                figures_of(run)
                for run in runs
                if tuple(run[name] for name in keys) == key and run["server"] == server
            ]
            middle = tuple(map(statistics.median, zip(*own, strict=True))) if own else None
            best = max(own) if own else None
            found.setdefault(key, []).append(middle if server in OURS else best)
    return found


if __name__ == "__main__":
    sys.exit(main())
