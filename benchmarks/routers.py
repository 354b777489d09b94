"""What a router adds to a request, and how routers share the load of the same replicas.

    python benchmarks/routers.py --folder DIR --case overhead    # scripted replicas, no work
    python benchmarks/routers.py --folder DIR --case throughput  # two equal replicas
    python benchmarks/routers.py --folder DIR --case ttft        # two different replicas
    python benchmarks/routers.py --folder DIR --case balancers   # ours, real and simulated
    python benchmarks/routers.py --folder DIR --output FILE      # JSON of all runs

Routers are llmpq-route, and vllm-router and sglang-router where ``--vllm_router`` and
``--sglang_router`` name their programs. They run in turn (A B C A B C ...) in front of the same
replicas, each in a process of its own on 127.0.0.1; each run is added to DIR/CASE.jsonl, with the
``load`` of the machine. Replicas of the demo model have one thread each, and share the cores with
router and client.

``ttft`` first runs the policies of the other routers in turn, and keeps for each router the one
with the least mean. The second replica is held to the oldest vector extensions; both are profiled
first, so that their plans state their speed. Requests arrive at ``--load`` times the rate that both
replicas answer when they are full. ``balancers`` sends such requests through our router with each
of its load balancers, and simulates the same ones by the plans of the replicas: of a random Llama
of 125 M parameters, whose steps are long beside the cost of HTTP, which is not simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from load import Query, Sample, Send, drive, sender, summary
from servers import Running, free_port, llmpq_serve, make_text_model, running
from workbench import PASSIVE, ROOT, SMALL_LLAMA, machine, write_results

from llmpq import plan
from llmpq.batching.queue_order import queue_order
from llmpq.costmodel import build_costs
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits
from llmpq.profiler.device import cpu_isas
from llmpq.routing import BALANCERS, load_balancer
from llmpq.sim.costs import PlanCosts, PlanEngineCosts
from llmpq.sim.fleet import FleetReplica, simulate_fleet
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import read_plan
from llmpq.spec.workload import TraceRequest

DEMO = ROOT / "models" / "demo"
WORDS = ("the", "of", "and", "to", "in", "is", "it", "was", "for", "on", "with", "he", "as", "at")
TOKENS_PER_WORD = 2
"""At most; the lengths of prompts are in tokens."""
PROMPT_TOKENS, NEW_TOKENS = 384, 96
"""Of the longest request."""
OURS = "sal_seconds"
POLICIES = {
    "vllm": ("round_robin", "power_of_two", "cache_aware", "sticky_least_loaded"),
    "sglang": ("round_robin", "power_of_two", "cache_aware"),
}
"""Of the other routers, without those that need sessions or do not look at the load by design."""
ROUND_NUMBERS = 100_000
"""Numbers of requests between those of two seeds."""
FULL_REQUESTS, FULL_CONCURRENCY = 40, 8
CHOICE_ROUNDS = 2
SCRIPTED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[2]) / "benchmarks"))
from routers import scripted
asyncio.run(scripted(int(sys.argv[1])))
"""
LOAD = {
    "is_ready": True, "running": 0, "waiting": 0, "queued_tokens": 0, "waiting_tokens": 0,
    "free_kv_tokens": 9000, "kv_tokens": 9000, "token_budget": 256,
    "prefill_step_s": 0.01, "decode_step_s": 0.001,
    "prompt_tokens": 0, "new_tokens": 0, "answers": 0,
}  # fmt: skip
BODY = json.dumps({"model": "demo", "prompt": "word " * 200, "max_tokens": 16}).encode()


def main() -> int:
    """Measure a case, or write what was measured."""
    options = _parser().parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.case:
        CASES[options.case](options)
    if options.output:
        write_results(options.output, record(options))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="plans, logs and runs")
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=300, help="of a router in a round")
    parser.add_argument("--load", type=float, default=0.8, help="ttft: share of the full rate")
    parser.add_argument(
        "--seconds", type=float, default=18.0, help="ttft: of arrivals in a run; half to choose"
    )
    parser.add_argument("--vllm_router", type=Path, help="program of vllm-router")
    parser.add_argument("--sglang_router", type=Path, help="program of sglang-router (smg)")
    parser.add_argument("--output", type=Path, help="JSON of all runs in the folder")
    return parser


# Replicas and routers


async def scripted(port: int) -> None:
    """Serve answers that take no time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(size or 0))
                body = ANSWERS.get(head.split(b" ", 2)[1], b"{}")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


ANSWERS = {
    b"/load": json.dumps(LOAD).encode(),
    b"/v1/models": b'{"object": "list", "data": [{"id": "demo", "object": "model"}]}',
    b"/v1/completions": json.dumps(
        {"id": "a", "object": "text_completion", "choices": [{"index": 0, "text": "word " * 16}]}
    ).encode(),
}


@contextlib.contextmanager
def scripted_replicas(folder: Path) -> Iterator[list[int]]:
    """Run two scripted replicas; yield their ports."""
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        for port in ports:
            words = [sys.executable, "-c", SCRIPTED, str(port), str(ROOT)]
            stack.enter_context(running(words, port, folder / "scripted.log"))
        yield ports


@contextlib.contextmanager
def real_replicas(folder: Path) -> Iterator[list[int]]:
    """Run two replicas of the demo model, of one thread each; yield their ports."""
    path = one_worker(folder)
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(
                llmpq_serve(
                    DEMO, path, folder / f"replica-{number}.log", "--step_timeout", "60",
                    "--no_prefix_caching", name="demo",
                )
            )
            for number in range(2)
        ]  # fmt: skip
        yield [one.port for one in found]


@contextlib.contextmanager
def different_replicas(folder: Path, model: Path = DEMO) -> Iterator[list[int]]:
    """Run two replicas of different speed, each on a core; yield their ports."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(
                llmpq_serve(
                    model, path, folder / f"replica-{number}.log", "--step_timeout", "60",
                    "--no_prefix_caching", name="demo", core=cores[number % len(cores)],
                )
            )
            for number, path in enumerate(measured_plans(folder, cores, model))
        ]  # fmt: skip
        yield [one.port for one in found]


def measured_plans(folder: Path, cores: Sequence[int], model: Path) -> list[Path]:
    """Profile both replicas at once and plan them, once; return their strategy files."""
    isas = {"all-extensions": None, "oldest-extensions": cpu_isas()[0]}
    jobs = [
        profile(folder, model, name, isa, cores[place % len(cores)])
        for place, (name, isa) in enumerate(isas.items())
        if not (folder / f"{name}.csv").exists()
    ]
    for job in jobs:
        if job.wait():
            raise SystemExit(f"llmpq-profile: status {job.returncode}")
    return [one_worker(folder, model, name, isa) for name, isa in isas.items()]


def profile(
    folder: Path, model: Path, name: str, isa: str | None, core: int
) -> subprocess.Popen[bytes]:
    """Start to measure a layer of the model on a core."""
    words = [str(Path(sys.executable).parent / "llmpq-profile"), "layer", "--model", str(model)]
    words += ["--device", "cpu", "--threads", "1", "--core", str(core), "--bits", "16"]
    words += ["--dtype", "float32", "--batches", "1", "4", "16", "--prompt_tokens", "32", "128"]
    words += [str(PROMPT_TOKENS), "--context_tokens", "32", "128", str(PROMPT_TOKENS + NEW_TOKENS)]
    words += ["--budget", "8", "--output", str(folder / f"{name}.csv")]
    words += ["--cpu_isa", isa] if isa else []
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, env=os.environ | PASSIVE)


def one_worker(folder: Path, model: Path = DEMO, name: str = "", isa: str | None = None) -> Path:
    """Plan a model on one CPU worker of one thread, once; return the strategy file.

    Args:
        folder: of the file.
        model: folder of the weights.
        name: of its latency table there; by default the figures of the catalogue.
        isa: newest vector extension of the worker.
    """
    path = folder / f"{name or 'demo'}.json"
    if not path.exists():
        table = str(folder / f"{name}.csv") if name else None
        group = DeviceGroup(type="cpu", count=1, threads=1, profile=table, cpu_isa=isa)
        cluster = Cluster(name="one", nodes=(Node(name="here", devices=(group,)),))
        made = plan(
            str(model), cluster=cluster, batch=16, prompt=PROMPT_TOKENS, new=NEW_TOKENS,
            dtype="float32", bits=(16,),
        )  # fmt: skip
        made.save(path)
    return path


def programs(options: argparse.Namespace) -> list[str]:
    """Return the routers that can run here."""
    found = ["llmpq"]
    found += ["vllm"] if options.vllm_router else []
    found += ["sglang"] if options.sglang_router else []
    return found


@contextlib.contextmanager
def routing(
    options: argparse.Namespace, name: str, policy: str, ports: Sequence[int]
) -> Iterator[Running]:
    """Run a router in front of replicas."""
    port, urls = free_port(), [f"http://127.0.0.1:{one}" for one in ports]
    if name == "llmpq":
        words = [sys.executable, "-m", "llmpq.cli.commands.route", "--balancer", policy]
        words += ["--port", str(port), "--replica", *urls]
    else:
        program = [str(options.vllm_router)] if name == "vllm" else [
            str(options.sglang_router), "launch", "--worker-startup-check-interval", "1",
        ]  # fmt: skip
        words = [*program, "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
        words += ["--log-level", "error"]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        words += ["--worker-urls", *urls]
    with running(words, port, options.folder / f"{name}.log", "/v1/models") as found:
        yield found


# Cases


def overhead(options: argparse.Namespace) -> None:
    """Time requests one after the other, directly and through each router."""
    with scripted_replicas(options.folder) as ports, contextlib.ExitStack() as stack:
        found = {"none": ports[0]}
        for name in programs(options):
            found[name] = stack.enter_context(routing(options, name, "round_robin", ports)).port
        for number in range(options.rounds):
            seconds: dict[str, list[float]] = {name: [] for name in found}
            for _ in range(3):  # blocks in turn, so that a change of the load meets all
                for name, port in found.items():
                    seconds[name] += asyncio.run(one_by_one(port, options.requests // 3))
            for name in found:
                add(options, "overhead", {
                    "router": name, "round": number, "requests": len(seconds[name]),
                    "p50_ms": round(1e3 * statistics.median(seconds[name]), 4),
                    "p95_ms": round(1e3 * statistics.quantiles(seconds[name], n=20)[-1], 4),
                })  # fmt: skip


async def one_by_one(port: int, requests: int) -> list[float]:
    """Return the seconds of requests on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    text = head + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    seconds = []
    for number in range(requests + 10):
        start_s = time.perf_counter()
        writer.write(text)
        await read_answer(reader)
        if number >= 10:
            seconds.append(time.perf_counter() - start_s)
    writer.close()
    return seconds


async def read_answer(reader: asyncio.StreamReader) -> None:
    """Read one whole answer.

    Raises:
        ValueError: its status is not 200.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if head.split(b" ", 2)[1] != b"200":
        raise ValueError(head.decode(errors="replace"))
    if b"transfer-encoding: chunked" not in head:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
        return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readline()


def throughput(options: argparse.Namespace) -> None:
    """Count the tokens a second of streams from two replicas, directly and through each router."""
    with real_replicas(options.folder) as ports, contextlib.ExitStack() as stack:
        found: dict[str, Send] = {"none": alternating(ports)}
        for name in programs(options):
            router = stack.enter_context(routing(options, name, "round_robin", ports))
            found[name] = sender(router.port, body_of)
        for send in found.values():
            asyncio.run(drive(equal(8), send, 4))
        names = list(found)
        for number in range(options.rounds):
            order = names[number % len(names) :] + names[: number % len(names)]
            for name in order:
                samples = asyncio.run(drive(equal(options.requests), found[name], 16))
                add(options, "throughput", {"router": name, "round": number, **summary(samples)})


def ttft(options: argparse.Namespace) -> None:
    """Compare TTFT of the same arrivals through our router and the best policies of others."""
    with different_replicas(options.folder) as ports, contextlib.ExitStack() as stack:
        rate = options.load * full_rate(ports, body_of)
        found = {
            (name, policy): stack.enter_context(routing(options, name, policy, ports)).port
            for name, policy in variants(options)
        }
        rivals = [variant for variant in found if variant[0] != "llmpq"]
        for number in range(CHOICE_ROUNDS):
            queries = arrivals(round(rate * options.seconds / 2), rate, seed=1000 + number)
            for variant in rivals[number:] + rivals[:number]:
                run_ttft(options, "choice", variant, sender(found[variant], body_of), queries)
        best = best_policies(runs_of(options.folder, "choice"))
        kept = [variant for variant in found if variant not in rivals or variant in best]
        for number in range(options.rounds):
            queries = arrivals(round(rate * options.seconds), rate, seed=number)
            for place in range(len(kept)):
                variant = kept[(place + number) % len(kept)]
                run_ttft(options, "ttft", variant, sender(found[variant], body_of), queries)


def balancers(options: argparse.Namespace) -> None:
    """Compare our load balancers in front of two different replicas, and simulate them."""
    folder = options.folder / "balancers"
    folder.mkdir(exist_ok=True)
    make_text_model(folder / "model")
    with different_replicas(folder, folder / "model") as ports, contextlib.ExitStack() as stack:
        rate = options.load * full_rate(ports, ids_of)
        found = {
            name: stack.enter_context(routing(options, "llmpq", name, ports)).port
            for name in BALANCERS
        }
        for number in range(options.rounds):
            queries = arrivals(round(rate * options.seconds), rate, seed=number)
            for place in range(len(BALANCERS)):
                name = BALANCERS[(place + number) % len(BALANCERS)]
                run_ttft(options, "balancers", ("llmpq", name), sender(found[name], ids_of),
                         queries, simulated(folder, name, queries))  # fmt: skip


def simulated(folder: Path, name: str, queries: Sequence[Query]) -> list[float]:
    """Return the TTFT of each request, in milliseconds, as the plans forecast it."""
    model = folder / "model"
    trace = [
        TraceRequest(
            arrival_s=query.arrival_s,
            prompt_tokens=query.prompt_tokens,
            new_tokens=query.new_tokens,
        )
        for query in queries
    ]
    replicas = [
        FleetReplica(
            costs=PlanEngineCosts(PlanCosts(one, build_costs(
                catalog.resolve_model(str(model))[0], one.cluster, dtype=one.dtype,
                kv_bits=one.kv_bits, head_bits=one.head_width,
            ))),
            limits=engine_limits(one, EngineOptions(prefix_caching=False)),
            order=queue_order("fcfs"),
        )
        for one in map(read_plan, measured_plans(folder, sorted(os.sched_getaffinity(0)), model))
    ]  # fmt: skip
    report = simulate_fleet(replicas, load_balancer(name), trace).total
    return [round(1e3 * one.time_to_first_token_s, 2) for one in report.requests]


def full_rate(ports: Sequence[int], body: Callable[[Query], dict[str, Any]]) -> float:
    """Return the requests a second of all replicas together while each has enough to do."""
    queries = arrivals(FULL_REQUESTS, 1.0, seed=99)

    async def both() -> list[list[Sample]]:
        sends = [sender(port, body) for port in ports]
        return list(
            await asyncio.gather(*(drive(queries, send, FULL_CONCURRENCY) for send in sends))
        )

    asyncio.run(drive(equal(8), alternating(ports), 4))
    return sum(float(summary(samples)["requests_per_s"]) for samples in asyncio.run(both()))


def run_ttft(
    options: argparse.Namespace,
    case: str,
    variant: tuple[str, str],
    send: Send,
    queries: Sequence[Query],
    simulated: Sequence[float] = (),
) -> None:
    """Send the arrivals to a router and keep the run, with the TTFT of each request."""
    samples = asyncio.run(drive(queries, send))
    add(options, case, {
        "router": variant[0], "policy": variant[1], "round": queries[0].number // ROUND_NUMBERS,
        "rate": round(len(queries) / queries[-1].arrival_s, 3), **summary(samples),
        "ttft_ms": [round(1e3 * (one.first_s - one.due_s), 2) for one in samples if one.first_s],
        **({"simulated_ttft_ms": list(simulated)} if simulated else {}),
    })  # fmt: skip


def best_policies(runs: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the policy with the least mean TTFT of each other router."""
    means: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        means.setdefault((run["router"], run["policy"]), []).extend(run["ttft_ms"])
    best: dict[str, tuple[str, str]] = {}
    for variant in sorted(means, key=lambda one: statistics.fmean(means[one])):
        best.setdefault(variant[0], variant)
    return list(best.values())


def variants(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the routers that can run here, each with its policies."""
    rivals = [name for name in programs(options) if name != "llmpq"]
    return [("llmpq", OURS), *((name, policy) for name in rivals for policy in POLICIES[name])]


def alternating(ports: Sequence[int]) -> Send:
    """Return what sends requests to servers in turn."""
    turns = itertools.cycle([sender(port, body_of) for port in ports])

    async def send(query: Query, sample: Sample, clock: Any) -> None:
        await next(turns)(query, sample, clock)

    return send


def equal(count: int) -> list[Query]:
    """Return requests of the same length."""
    return [Query(number=n, prompt_tokens=64, new_tokens=32) for n in range(count)]


def arrivals(count: int, rate: float, seed: int) -> list[Query]:
    """Return requests with Poisson arrivals: a quarter of them long, the others short.

    Those of different seeds have different numbers, and so different prompts.
    """
    source, now_s, found = random.Random(seed), 0.0, []
    for number in range(seed * ROUND_NUMBERS, seed * ROUND_NUMBERS + count):
        now_s += source.expovariate(rate)
        prompt, new = (PROMPT_TOKENS, NEW_TOKENS) if source.random() < 0.25 else (32, 16)
        found.append(Query(number=number, prompt_tokens=prompt, new_tokens=new, arrival_s=now_s))
    return found


def body_of(query: Query) -> dict[str, Any]:
    """Return a request as text, for sglang-router takes no token ids."""
    source = random.Random(query.number)
    words = [source.choice(WORDS) for _ in range(query.prompt_tokens // TOKENS_PER_WORD)]
    return {
        "model": "demo", "prompt": " ".join(words), "temperature": 0,
        "max_tokens": query.new_tokens, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


# Results


def ids_of(query: Query) -> dict[str, Any]:
    """Return a request as token ids, whose number every router knows."""
    return body_of(query) | {"prompt": list(query.token_ids(SMALL_LLAMA["vocab"]))}


def add(options: argparse.Namespace, case: str, row: dict[str, Any]) -> None:
    """Keep a run."""
    row["load"] = round(os.getloadavg()[0], 1)
    with (options.folder / f"{case}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(case, json.dumps(row), flush=True)


def runs_of(folder: Path, case: str) -> list[dict[str, Any]]:
    """Return the runs of a case."""
    path = folder / f"{case}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Return figures over rounds, and all runs."""
    found = {case: runs_of(options.folder, case) for case in (*CASES, "choice")}
    return {
        "topic": "routers",
        "command": "python benchmarks/routers.py --folder DIR --output FILE",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {name: version(name) for name in ("aiohttp", "uvicorn", "torch")}
        | {"python": platform.python_version()}
        | versions_of_routers(options),
        "a_request_without_work": overhead_rows(found["overhead"]),
        "two_replicas_under_load": throughput_rows(found["throughput"]),
        "time_to_first_token_of_two_different_replicas": ttft_rows(found["ttft"]),
        "policies_of_other_routers": choice_rows(found["choice"]),
        "our_load_balancers_real_and_simulated": balancer_rows(found["balancers"]),
        "samples": found,
    }


def versions_of_routers(options: argparse.Namespace) -> dict[str, str]:
    """Return the versions of the other routers, from where they are installed."""
    found = {}
    for name, program in (("vllm", options.vllm_router), ("sglang", options.sglang_router)):
        if program is not None:
            packages = program.absolute().parent.parent.glob("lib/python*/site-packages")
            paths = [str(path) for path in packages]
            for item in distributions(name=f"{name}-router", path=paths):
                found[f"{name}-router"] = item.version
    return found


def overhead_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median over rounds for each router, and what it adds in the same round."""
    direct = {run["round"]: run for run in runs if run["router"] == "none"}
    rows = []
    for name in dict.fromkeys(run["router"] for run in runs):
        own = [run for run in runs if run["router"] == name]
        added = [run["p50_ms"] - direct[run["round"]]["p50_ms"] for run in own]
        rows.append({
            "router": name,
            "p50 ms": round(statistics.median(run["p50_ms"] for run in own), 3),
            "p95 ms": round(statistics.median(run["p95_ms"] for run in own), 3),
            "added at p50 ms": round(statistics.median(added), 3),
            "rounds": len(own),
            "load": f"{min(run['load'] for run in own)} to {max(run['load'] for run in own)}",
        })  # fmt: skip
    return rows


def throughput_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median over rounds for each router, and its share of the same round's direct."""
    direct = {run["round"]: run["output_tokens_per_s"] for run in runs if run["router"] == "none"}
    rows = []
    for name in dict.fromkeys(run["router"] for run in runs):
        own = [run for run in runs if run["router"] == name]
        shares = [run["output_tokens_per_s"] / direct[run["round"]] for run in own]
        rows.append({
            "router": name,
            "tokens/s": round(statistics.median(run["output_tokens_per_s"] for run in own)),
            "of direct": round(statistics.median(shares), 3),
            "in the rounds": f"{min(shares):.2f} to {max(shares):.2f}",
            "rounds": len(own),
            "load": f"{min(run['load'] for run in own)} to {max(run['load'] for run in own)}",
        })  # fmt: skip
    return rows


def ttft_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and 95th percentile over all requests, and their ratios to ours by round."""
    ours = {run["round"]: run["ttft_ms"] for run in runs if run["router"] == "llmpq"}
    rows = []
    for key in dict.fromkeys((run["router"], run["policy"]) for run in runs):
        own = [run for run in runs if (run["router"], run["policy"]) == key]
        rows.append({
            **pooled(key, own),
            "mean, of ours": ratios(statistics.fmean, own, ours),
            "p95, of ours": ratios(p95, own, ours),
            "rounds": len(own),
            "requests/s": round(statistics.fmean(run["rate"] for run in own), 2),
            "load": f"{min(run['load'] for run in own)} to {max(run['load'] for run in own)}",
        })  # fmt: skip
    return rows


def balancer_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean of each load balancer over all requests, measured and simulated."""
    rows = []
    for policy in dict.fromkeys(run["policy"] for run in runs):
        own = [run for run in runs if run["policy"] == policy]
        measured = statistics.fmean(value for run in own for value in run["ttft_ms"])
        forecast = statistics.fmean(value for run in own for value in run["simulated_ttft_ms"])
        rows.append({
            "balancer": policy, "requests": sum(run["requests"] for run in own),
            "mean TTFT ms": round(measured, 1), "simulated ms": round(forecast, 1),
            "simulated / measured": round(forecast / measured, 2),
        })  # fmt: skip
    return sorted(rows, key=lambda row: row["mean TTFT ms"])


def choice_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and 95th percentile of each policy over all requests."""
    keys = dict.fromkeys((run["router"], run["policy"]) for run in runs)
    return [
        pooled(key, [run for run in runs if (run["router"], run["policy"]) == key]) for key in keys
    ]


def pooled(key: tuple[str, str], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a policy over the requests of all runs."""
    values = [value for run in runs for value in run["ttft_ms"]]
    return {
        "router": key[0], "policy": key[1], "requests": len(values),
        "failed": sum(run["failed"] for run in runs),
        "mean TTFT ms": round(statistics.fmean(values), 1), "p95 TTFT ms": round(p95(values), 1),
    }  # fmt: skip


def ratios(
    figure: Callable[[Sequence[float]], float],
    runs: Sequence[dict[str, Any]],
    ours: dict[int, list[float]],
) -> str:
    """Return the median over rounds of a figure's ratio to ours, and its range."""
    found = [figure(run["ttft_ms"]) / figure(ours[run["round"]]) for run in runs]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


CASES = {"overhead": overhead, "throughput": throughput, "ttft": ttft, "balancers": balancers}

if __name__ == "__main__":
    sys.exit(main())
