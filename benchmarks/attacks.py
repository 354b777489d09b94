"""Requests made to stop a server, and what its neighbours notice.

    python benchmarks/attacks.py                                  # all, about eight minutes
    python benchmarks/attacks.py --only stop_ids tokenize --output benchmarks/results/attacks.json

The others keep their rows in the file.

The shipped model in float32 on two ranks. Before each attack and during it, neighbours send short
requests one after the other, one of them with a form, and ``/health`` is asked ten times a second.
Reported are the 99th percentiles of their times, the memory of all processes before, at most and
20 s after, restarts, and how the attack was answered. ``router`` pauses the router for 5 s under
40 streams; ``full_log`` starts a server whose standard error is a full disk.

Exit status 1 when an attack hangs, restarts a rank, fails a neighbour, or leaves more than a tenth
of the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from load import events, request
from servers import OFFLINE, Running, answers, free_port, llmpq_serve, make_plan, running, stop
from workbench import NATIVE, PASSIVE, ROOT, keep_run, run_of, text_of, unset_threading

MODEL = ROOT / "models" / "demo"
BEFORE_S, DURING_S, AFTER_S, ATTACK_LIMIT_S, NEIGHBOUR_LIMIT_S = 10.0, 20.0, 20.0, 180.0, 60.0
FEWEST = 5
"""Answers of each neighbour during an attack, which lasts as long as they take."""
COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
SHORT = {"prompt": "a b", "max_tokens": 4}
FORM = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
STREAMS, PAUSE_S = 40, 5.0
COLUMNS = [
    "attack", "status", "s", "neighbours: p99 before, ms", "neighbours: during, ms",
    "forms: p99 before, ms", "forms: during, ms", "/health: worst, ms", "failed", "restarts",
    "memory before, MiB", "memory at most, MiB", "memory after, MiB",
]  # fmt: skip


def form(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a request whose answer has a form."""
    return {"prompt": "a", "max_tokens": 4, "structured_outputs": {"json": schema}, **more}


def attacks() -> dict[str, tuple[str, list[Any], float]]:
    """Return for each attack the path, the bodies sent at once, and when the client hangs up."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    enums = [{"enum": [{"a": [i, {"b": i}]} for i in range(20000 + k)]} for k in range(6)]
    prompt = [0, *range(2, 301)]
    many = {"prompt": [prompt] * 32, "n": 16, "max_tokens": 1, "echo": True, "logprobs": 20}
    ids = {"prompt": "a", "n": 64, "max_tokens": 1, "stop_token_ids": [5] * 10**6}
    limit = ATTACK_LIMIT_S
    return {
        "multiple_of": (COMPLETIONS, [form({"type": "integer", "multipleOf": 121330189})], limit),
        "stop_ids": (COMPLETIONS, [ids], limit),
        "wide_form": (COMPLETIONS, [form(wide, n=128)], 6.0),
        "large_enums": (COMPLETIONS, [form(schema) for schema in enums], limit),
        "many_answers": (COMPLETIONS, [many], limit),
        "tokenize": (TOKENIZE, [{"prompt": "a b " * 1_750_000}] * 6, limit),
        "template": (CHAT, [{"messages": [{"role": "user", "content": "a"}]}] * 4, limit),
    }


class Neighbour:
    """A client that sends one request after the other, and notes how long each took.

    Args:
        port, path, body: of its requests; ``None`` asks for the path.
        pause_s: between them.
    """

    def __init__(self, port: int, path: str, body: Any, pause_s: float) -> None:
        self.port, self.path, self.body, self.pause_s = port, path, body, pause_s
        self.times_s: list[float] = []
        self.failed = 0

    async def run(self, seconds: float, fewest: int = 0) -> None:
        """Send requests for some seconds, and at least so many."""
        end_s, self.times_s = time.monotonic() + seconds, []
        while time.monotonic() < end_s or len(self.times_s) < fewest:
            start_s = time.monotonic()
            status = await request(self.port, self.path, self.body, NEIGHBOUR_LIMIT_S)
            self.times_s.append(time.monotonic() - start_s)
            self.failed += status != 200
            await asyncio.sleep(self.pause_s)

    def p99_ms(self) -> float:
        """Return the 99th percentile of the last run."""
        times = sorted(self.times_s)
        return 1000 * times[min(len(times) - 1, len(times) * 99 // 100)]


def strike(
    port: int, path: str, bodies: Sequence[Any], limit_s: float
) -> tuple[list[int], float, float]:
    """Send all at once; return the statuses, and when the first was sent and the last read."""

    async def send() -> list[int]:
        return await asyncio.gather(*(request(port, path, body, limit_s) for body in bodies))

    start_s = time.monotonic()
    return asyncio.run(send()), start_s, time.monotonic()


async def attack(server: Running, path: str, bodies: Sequence[Any], limit_s: float) -> list[Any]:
    """Attack a server beside neighbours; return the cells of ``COLUMNS`` after the name."""
    plain = Neighbour(server.port, COMPLETIONS, SHORT, 0.05)
    forms = Neighbour(server.port, COMPLETIONS, FORM, 0.05)
    health = Neighbour(server.port, "/health", None, 0.1)
    everyone = (plain, forms, health)
    await asyncio.gather(*(one.run(BEFORE_S) for one in everyone))
    before = [one.p99_ms() for one in everyone]
    memory = [resident_mib(server.pid)]

    async def watch() -> None:
        while True:
            memory.append(resident_mib(server.pid))
            await asyncio.sleep(0.25)

    # Its megabytes are read in a process of its own, because neighbours would wait for that too.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as attacker:
        await asyncio.wrap_future(attacker.submit(time.monotonic))  # it has started
        watching = asyncio.create_task(watch())
        striking = asyncio.wrap_future(attacker.submit(strike, server.port, path, bodies, limit_s))
        beside = asyncio.gather(*(one.run(DURING_S, fewest=FEWEST) for one in everyone))
        found, start_s, end_s = await striking
        await beside
    await asyncio.sleep(AFTER_S)
    watching.cancel()
    restarts = server.log.read_text(errors="replace").count("starting all ranks anew")
    return [
        ", ".join(map(str, sorted(set(found)))), round(end_s - start_s, 2),
        round(before[0]), round(plain.p99_ms()), round(before[1]), round(forms.p99_ms()),
        round(1000 * max(health.times_s)), sum(one.failed for one in everyone), restarts,
        round(memory[0]), round(max(memory)), round(memory[-1]),
    ]  # fmt: skip


def resident_mib(pid: int) -> float:
    """Return the memory of a process and of those that it started, pages that they share once."""
    total, waiting = 0.0, [pid]
    while waiting:
        one = Path("/proc") / str(waiting.pop())
        with contextlib.suppress(OSError):  # it has ended
            rows = (one / "smaps_rollup").read_text().splitlines()
            total += sum(int(row.split()[1]) for row in rows if row.startswith("Pss:")) / 1024
            for task in (one / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return total


def problems(row: Sequence[Any]) -> list[str]:
    """Return what a row of the table says is wrong."""
    name, _, took_s, *_, failed, restarts, before, _, after = row
    checks = {
        "hangs": took_s >= ATTACK_LIMIT_S,
        "fails neighbours": failed,
        "restarts ranks": restarts,
        "keeps memory": after > 1.1 * before,
    }
    return [f"{name} {text}" for text, is_so in checks.items() if is_so]


def recorded(path: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a result file has of this processor."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    names = "processor", "cpu_isa"
    own = [one for one in runs if all(one[name] == run[name] for name in names)]
    return own[0] if own else {"tables": [{"rows": []}], "others": {}}


@contextlib.contextmanager
def hostile_model(folder: Path) -> Iterator[Path]:
    """Yield the shipped model with a chat template that does not end."""
    copy = folder / "hostile"
    shutil.copytree(MODEL, copy)
    (copy / "chat_template.jinja").write_text(LOOP)
    yield copy


def pause_router(folder: Path, plan: Path) -> dict[str, int]:
    """Pause a router under streams; return how many ended whole and otherwise."""
    with contextlib.ExitStack() as stack:
        replicas = [
            stack.enter_context(llmpq_serve(MODEL, plan, folder / f"replica-{i}.log"))
            for i in range(2)
        ]
        port = free_port()
        words = [sys.executable, "-m", "llmpq.cli.commands.route", "--port", str(port)]
        for replica in replicas:
            words += ["--replica", f"http://127.0.0.1:{replica.port}"]
        router = stack.enter_context(running(words, port, folder / "router.log", variables=PASSIVE))

        async def read(number: int) -> str:
            body = {"prompt": [2 + number], "max_tokens": 120, "stream": True, "ignore_eos": True}
            reason = "none"
            async for event in events(router.port, COMPLETIONS, body):
                if "error" in event:
                    return "error"
                reason = event["choices"][0]["finish_reason"] or reason
            return reason

        async def play() -> list[Any]:
            streams = [asyncio.create_task(read(number)) for number in range(STREAMS)]
            await asyncio.sleep(0.3)
            os.kill(router.pid, signal.SIGSTOP)
            await asyncio.sleep(PAUSE_S)
            os.kill(router.pid, signal.SIGCONT)
            return await asyncio.gather(*streams, return_exceptions=True)

        ended = asyncio.run(play())
    whole = sum(reason == "length" for reason in ended)
    return {"streams": STREAMS, "whole": whole, "lost": STREAMS - whole}


def serves_with_full_log(plan: Path) -> bool:
    """Return whether a server answers whose standard error cannot be written."""
    port = free_port()
    words = [sys.executable, "-m", "llmpq.cli.commands.serve", "--strat_file_name", str(plan)]
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(
            [*words, "--model", str(MODEL), "--port", str(port)], stdout=full, stderr=full,
            stdin=subprocess.DEVNULL, cwd=ROOT, env={**unset_threading(), **OFFLINE, **PASSIVE},
        )  # fmt: skip
    try:
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s and process.poll() is None:
            if answers(port):
                return asyncio.run(request(port, COMPLETIONS, SHORT, NEIGHBOUR_LIMIT_S)) == 200
            time.sleep(0.1)
        return False
    finally:
        stop(process)


def main() -> int:
    """Run and report."""
    known = attacks()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*known, "router", "full_log"])
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    chosen = options.only or [*known, "router", "full_log"]
    rows, wrong, others = [], [], {}
    with tempfile.TemporaryDirectory(prefix="attacks-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        plan = make_plan(MODEL, folder / "plan.json", bits=16, batch=32, stages=2, dtype="float32",
                         prompt_tokens=384, new_tokens=128)  # fmt: skip
        hostile = stack.enter_context(hostile_model(folder))
        for title in (title for title in known if title in chosen):
            model = hostile if title == "template" else MODEL
            path, bodies, limit_s = known[title]
            with llmpq_serve(model, plan, folder / f"{title}.log") as server:
                rows.append([title, *asyncio.run(attack(server, path, bodies, limit_s))])
            print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
            wrong += problems(rows[-1])
        extra: dict[str, Callable[[], Any]] = {
            "router": lambda: pause_router(folder, plan),
            "full_log": lambda: {"serves": serves_with_full_log(plan)},
        }
        for title in (title for title in extra if title in chosen):
            others[title] = extra[title]()
            print({title: others[title]}, flush=True)
        wrong += ["router loses streams"] if others.get("router", {}).get("lost") else []
        wrong += ["full_log ends"] if not others.get("full_log", {"serves": True})["serves"] else []
    table = {"title": "Attacks", "columns": COLUMNS, "rows": rows}
    print(text_of(table))
    if options.output:
        run = run_of(NATIVE, "python benchmarks/attacks.py")
        before = recorded(options.output, run)
        found = [*before["tables"][0]["rows"], *rows]
        kept = {title: [title, str(status), *rest] for title, status, *rest in found}
        table["rows"] = [kept[title] for title in known if title in kept]
        others = {**before["others"], **others}
        keep_run(options.output, "attacks", {**run, "others": others, "tables": [table]})
    for text in wrong:
        print(f"PROBLEM {text}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
