"""A server under stress: clients that hang up, slow readers, bad bodies, ranks that are killed.

    python benchmarks/faults server --seconds 120 --connections 200 --kill_every_s 20

The model is tiny and in float32, on two ranks, with so few KV blocks that requests are preempted.
Every answer is compared with ``generate`` of transformers. Exit status 1 when a check fails: a
wrong or repeated token, a stream that ends without a reason, a status 5xx other than 503, or
requests, blocks, descriptors or memory that are left in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from load import HttpError, events, request
from processes import open_files, resident_bytes
from servers import Running, llmpq_serve, make_plan
from transformers import AutoModelForCausalLM
from workbench import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from helpers.processes import workers_of
from helpers.tiny_models import save_tiny_model

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 24, 40, 48
VOCABULARY = 100
SLOW_READ_S = 0.1
RETRY_S = 0.2
QUIET_S = 60.0
MEMORY_SLACK_BYTES = 48 << 20
DESCRIPTOR_SLACK = 4
KINDS = ("quitter", "quitter", "quitter", "quitter", "reader", "reader", "slow", "vandal")
"""What the connections do; half of them hang up."""
BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe\x00",
    b'{"prompt": null}',
    b'{"prompt": []}',
    b'{"prompt": [[]]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [1e99]}',
    b'{"prompt": [99999999999999999999]}',
    b'{"prompt": [1], "max_tokens": -1}',
    b'{"prompt": [1], "max_tokens": 100000000}',
    b'{"prompt": [1], "temperature": NaN}',
    b'{"prompt": [1], "n": 1000000}',
    b'{"prompt": [1], "model": "another"}',
    b'{"prompt": [1], "stop": [[]]}',
    b'{"prompt": [1], "logit_bias": {"x": 1}}',
    b'{"prompt": [1], "stream_options": {}}',
    b'{"prompt": [1], "stream": "maybe"}',
    b'{"prompt": ' + b"[" * 5000,
)


class Stress:
    """Counts what happens, and keeps what is wrong.

    Args:
        port: of the server.
        expected: tokens of each prompt's answer.
        seed: of what clients do.
    """

    def __init__(self, port: int, expected: Sequence[tuple[int, ...]], seed: int) -> None:
        self.port = port
        self.expected = expected
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.busy_s: list[float] = []

    def problem(self, text: str) -> None:
        """Keep something that is wrong."""
        self.problems.append(text)
        print(f"PROBLEM {text}", file=sys.stderr, flush=True)

    async def client(self, kind: str, end_s: float) -> None:
        """Send requests one after the other until it is time to end."""
        act = self.acts()[kind]
        while time.monotonic() < end_s:
            start_s = time.monotonic()
            try:
                await act()
            except HttpError as error:
                self.busy_s.append(time.monotonic() - start_s)
                self.counts["refused"] += 1
                if not str(error).startswith("503"):
                    self.problem(f"{kind}: {error}")
                await asyncio.sleep(RETRY_S)
            except (OSError, EOFError, ValueError) as error:
                self.problem(f"{kind}: {type(error).__name__}: {error}")
            self.counts[kind] += 1

    def acts(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return what each kind of client does, again and again."""
        return {
            "quitter": self.quit_early,
            "reader": lambda: self.read(0.0),
            "slow": lambda: self.read(SLOW_READ_S),
            "vandal": self.send_nonsense,
        }

    def body(self, number: int) -> dict[str, Any]:
        """Return the request of a prompt."""
        return {
            "prompt": prompt_of(number), "max_tokens": NEW_TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip

    async def read(self, pause_s: float) -> None:
        """Read an answer to its end and compare it."""
        number = self.chance.randrange(PROMPTS)
        found: list[int] = []
        reason = None
        async for event in events(self.port, "/v1/completions", self.body(number)):
            if "error" in event:
                return self.problem(f"a stream ended with {event['error']}")
            for choice in event["choices"]:
                found += choice.get("token_ids") or ()
                reason = choice["finish_reason"] or reason
            if pause_s:
                await asyncio.sleep(pause_s)
        if reason != "length":
            self.problem(f"a stream ended with the reason {reason} after {len(found)} tokens")
        if tuple(found) != self.expected[number]:
            self.problem(f"prompt {number}: found {found}, expected {self.expected[number]}")
        self.counts["compared"] += 1
        return None

    async def quit_early(self) -> None:
        """Hang up after a few events, each of which is compared."""
        number, left = self.chance.randrange(PROMPTS), self.chance.randrange(1, NEW_TOKENS)
        found: list[int] = []
        stream = events(self.port, "/v1/completions", self.body(number))
        async with contextlib.aclosing(stream):  # type: ignore[type-var]
            async for event in stream:
                for choice in event.get("choices") or ():
                    found += choice.get("token_ids") or ()
                left -= 1
                if not left:
                    break
        if tuple(found) != self.expected[number][: len(found)]:
            self.problem(f"prompt {number}: found {found} before hanging up")

    async def send_nonsense(self) -> None:
        """Send a body that cannot be used."""
        body = self.chance.choice(BAD_BODIES)
        if self.chance.random() < 0.5:
            text = bytearray(json.dumps(self.body(0)).encode())
            for _ in range(self.chance.randrange(1, 4)):
                text[self.chance.randrange(len(text))] = self.chance.randrange(256)
            body = bytes(text)
        status = await request(self.port, "/v1/completions", body, 120)
        self.counts[f"bad body {status}"] += 1
        if status <= 0 or (status >= 500 and status != 503):
            self.problem(f"status {status} for {body[:200]!r}")

    async def kill_ranks(self, pid: int, every_s: float, end_s: float) -> None:
        """Kill a rank now and then."""
        while every_s and time.monotonic() + every_s < end_s:
            await asyncio.sleep(every_s)
            ranks = workers_of(pid)
            if ranks:
                rank = self.chance.choice(sorted(ranks))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ranks[rank], signal.SIGKILL)
                self.counts["kills"] += 1


def prompt_of(number: int) -> list[int]:
    """Return a prompt; pairs of them begin alike."""
    group = number // 2
    return [3 + (group * 131 + at * (7 + number % 2 * (at > PROMPT_TOKENS // 2))) % 90
            for at in range(PROMPT_TOKENS)]  # fmt: skip


def expected_answers(model_dir: Path) -> list[tuple[int, ...]]:
    """Return the greedy answers of transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    found = []
    for number in range(PROMPTS):
        ids = torch.tensor([prompt_of(number)])
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS,
        )  # fmt: skip
        found.append(tuple(answer[0, PROMPT_TOKENS:].tolist()))
    return found


async def play(
    options: argparse.Namespace, server: Running, stress: Stress, kinds: Sequence[str]
) -> None:
    """Run clients of some kinds, the killer, and what watches memory."""
    end_s = time.monotonic() + options.seconds
    memory: list[int] = []

    async def watch() -> None:
        while time.monotonic() < end_s:
            memory.append(resident_bytes(server.pid))
            await asyncio.sleep(1)

    await asyncio.gather(
        *(stress.client(kind, end_s) for kind in kinds),
        stress.kill_ranks(server.pid, options.kill_every_s, end_s),
        watch(),
    )
    third = len(memory) // 3
    if third and max(memory[-third:]) > max(memory[third : 2 * third]) + MEMORY_SLACK_BYTES:
        stress.problem(f"memory grows: {memory[third] >> 20} to {memory[-1] >> 20} MiB")
    stress.counts["memory MiB"] = memory[-1] >> 20


async def settle(server: Running, stress: Stress, descriptors: int) -> None:
    """Wait until nothing runs, and check that nothing is left."""
    end_s = time.monotonic() + QUIET_S
    left: dict[str, float] = {}
    while time.monotonic() < end_s:
        left = left_over(server.port)
        left["descriptors"] = max(0, len(open_files(server.pid)) - descriptors - DESCRIPTOR_SLACK)
        if not any(left.values()):
            return
        await asyncio.sleep(0.2)
    stress.problem(f"left in the end: { {name: value for name, value in left.items() if value} }")


def left_over(port: int) -> dict[str, float]:
    """Return what the server's metrics say is still there."""
    return metrics(port, "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def metrics(port: int, *names: str) -> dict[str, float]:
    """Return some of a server's metrics; of one with labels the last."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(line.rpartition(" ")[2])
        for name in names
        for line in lines
        if line.startswith(f"vllm:{name}{{")
    }


def main(argv: Sequence[str]) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(
        prog="faults server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--kill_every_s", type=float, default=20.0, help="0 kills nothing")
    parser.add_argument("--max_num_queued_reqs", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="stress-") as name:
        folder = Path(name)
        model = folder / "model"
        save_tiny_model("llama", model, seed=1, num_hidden_layers=2, vocab_size=VOCABULARY,
                        max_position_embeddings=256)  # fmt: skip
        plan = make_plan(model, folder / "plan.json", bits=16, batch=8, stages=2, dtype="float32",
                         prompt_tokens=64, new_tokens=64)  # fmt: skip
        words = (
            "--max_restarts",
            "1000",
            "--max_num_queued_reqs",
            str(options.max_num_queued_reqs),
        )
        with llmpq_serve(model, plan, folder / "log", *words) as server:
            stress = Stress(server.port, expected_answers(model), options.seed)
            asyncio.run(stress.read(0.0))
            descriptors = len(open_files(server.pid))
            kinds = [KINDS[at % len(KINDS)] for at in range(options.connections)]
            asyncio.run(play(options, server, stress, kinds))
            asyncio.run(settle(server, stress, descriptors))
            asyncio.run(stress.read(0.0))
        return report(stress, folder / "log")


def report(stress: Stress, log: Path) -> int:
    """Print what happened; return 1 when something was wrong."""
    text = log.read_text(errors="replace")
    if "Traceback" in text:
        stress.problem(f"a traceback in the log:\n{text[text.index('Traceback') :][:3000]}")
    refusals = sorted(stress.busy_s)
    counts = dict(sorted(stress.counts.items()))
    if refusals:
        counts["refusal p50 ms"] = round(1000 * refusals[len(refusals) // 2])
        counts["refusal p99 ms"] = round(1000 * refusals[len(refusals) * 99 // 100])
    print(json.dumps({"counts": counts, "problems": len(stress.problems),
                      "first": stress.problems[:5]}, indent=1))  # fmt: skip
    return int(bool(stress.problems))
