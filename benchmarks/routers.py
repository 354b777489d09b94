"""What a router adds to a request, and how routers share the load of the same replicas.

    python benchmarks/routers.py --folder DIR --case overhead    # scripted replicas, no work
    python benchmarks/routers.py --folder DIR --case throughput  # two real replicas
    python benchmarks/routers.py --folder DIR --case policies    # TTFT at a rate, by policy
    python benchmarks/routers.py --folder DIR --output FILE      # JSON of all runs

Routers are llmpq-route, and vllm-router and sglang-router where ``--vllm_router`` and
``--sglang_router`` name their programs. They run in turn (A B C A B C ...) in front of the same
replicas, each in a process of its own on 127.0.0.1; each run is added to DIR/CASE.jsonl. Replicas
of the demo model have one thread each, and share the cores with router and client. On a busy
machine, run this under ``chrt -r 5``: children inherit it, and ``load`` says how busy it was.
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
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from load import Query, Sample, Send, drive, sender, summary
from servers import Running, free_port, llmpq_serve, running
from workbench import ROOT, cpu_name

from llmpq import plan
from llmpq.spec.cluster import Cluster, DeviceGroup, Node

DEMO = ROOT / "models" / "demo"
WORDS = ("the", "of", "and", "to", "in", "is", "it", "was", "for", "on", "with", "he", "as", "at")
TOKENS_PER_WORD = 2
"""At most; the lengths of prompts are in tokens."""
PROMPT_TOKENS, NEW_TOKENS = 384, 96
"""Of the longest request."""
POLICIES = {
    "llmpq": ("round_robin", "least_loaded", "sal", "sal_seconds"),
    "vllm": ("round_robin", "power_of_two", "cache_aware", "sticky_least_loaded"),
    "sglang": ("round_robin", "power_of_two", "cache_aware"),
}
SCRIPTED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[2]) / "benchmarks"))
from routers import scripted
asyncio.run(scripted(int(sys.argv[1])))
"""
LOAD = {
    "is_ready": True, "running": 0, "waiting": 0, "queued_tokens": 0, "free_kv_tokens": 9000,
    "kv_tokens": 9000, "token_budget": 256, "prefill_step_s": 0.01, "decode_step_s": 0.001,
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
        options.output.write_text(json.dumps(record(options.folder), indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="plans, logs and runs")
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=300, help="of a router in a round")
    parser.add_argument("--rate", type=float, default=8.0, help="policies: requests a second")
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
    path = demo_plan(folder)
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


def demo_plan(folder: Path) -> Path:
    """Plan the demo model on one CPU worker of one thread, once; return the strategy file."""
    path = folder / "demo.json"
    if not path.exists():
        group = DeviceGroup(type="cpu", count=1, threads=1)
        cluster = Cluster(name="one", nodes=(Node(name="here", devices=(group,)),))
        made = plan(
            str(DEMO), cluster=cluster, batch=16, prompt=PROMPT_TOKENS, new=NEW_TOKENS,
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


def policies(options: argparse.Namespace) -> None:
    """Measure TTFT of the same arrivals through each router with each of its policies."""
    with real_replicas(options.folder) as ports:
        asyncio.run(drive(equal(8), alternating(ports), 4))
        for number in range(options.rounds):
            queries = arrivals(options.requests, options.rate, seed=number)
            for name, policy in variants(options):
                with routing(options, name, policy, ports) as router:
                    samples = asyncio.run(drive(queries, sender(router.port, body_of)))
                add(options, "policies", {
                    "router": name, "policy": policy, "round": number, "rate": options.rate,
                    **summary(samples),
                })  # fmt: skip


def variants(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the routers that can run here, each with each of its policies."""
    return [(name, policy) for name in programs(options) for policy in POLICIES[name]]


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
    """Return requests with Poisson arrivals: a quarter of them long, the others short."""
    source, now_s, found = random.Random(seed), 0.0, []
    for number in range(count):
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


def record(folder: Path) -> dict[str, Any]:
    """Return medians over rounds, and all runs."""
    found = {case: runs_of(folder, case) for case in CASES}
    return {
        "topic": "routers",
        "command": "chrt -r 5 python benchmarks/routers.py --folder DIR --output FILE",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {cpu_name()}",
        "versions": {name: version(name) for name in ("aiohttp", "uvicorn", "torch")}
        | {"python": platform.python_version()},
        "a_request_without_work": overhead_rows(found["overhead"]),
        "two_replicas_under_load": throughput_rows(found["throughput"]),
        "time_to_first_token": policy_rows(found["policies"]),
        "samples": found,
    }


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


def policy_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median over rounds for each router and policy."""
    rows = []
    for key in dict.fromkeys((run["router"], run["policy"]) for run in runs):
        own = [run for run in runs if (run["router"], run["policy"]) == key]
        rows.append({
            "router": key[0], "policy": key[1],
            "mean TTFT ms": round(1e3 * statistics.median(run["ttft_s"]["mean"] for run in own), 1),
            "p95 TTFT ms": round(1e3 * statistics.median(run["ttft_s"]["p95"] for run in own), 1),
            "failed": sum(run["failed"] for run in own),
            "rounds": len(own),
        })  # fmt: skip
    return rows


CASES = {"overhead": overhead, "throughput": throughput, "policies": policies}

if __name__ == "__main__":
    sys.exit(main())
