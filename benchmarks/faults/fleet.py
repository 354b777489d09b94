"""Faults of a fleet under load: two replicas of the demo model behind llmpq-route, and one fault.

    python benchmarks/faults fleet --folder DIR [--case kill stop ...] [--requests 1000] \
        [--output FILE.json]

A third of the requests is answered before the fault, a third after its end. Every request is
checked: its answer is complete and that of an undisturbed replica, or it breaks off after its first
byte with an error. Requests that are refused with 503 or find no router are sent again, and
counted. ``malformed`` is a scripted replica whose answers are damaged, beside a good one. Exit
status 1 when a request was answered wrongly, twice or not at all. Cases of an earlier run with the
same ``--output`` are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from servers import Running, free_port, llmpq_serve, running
from workbench import ROOT, machine

sys.path.insert(0, str(ROOT / "tests"))

from helpers.malformed_http import malformed

from llmpq import __version__, plan

DEMO = ROOT / "models" / "demo"
PROMPTS = ("The", "Once", "In a", "When the", "A", "He said", "It was", "They")
NEW_TOKENS = 8
CONCURRENCY = 8
SILENCE_S = 60.0
"""A request without an end for so long is one without an answer."""
RETRY_AFTER_S = 0.5
STALE_S = 1.0
LOAD_BODY = json.dumps(
    {
        "is_ready": True, "running": 0, "waiting": 0, "queued_tokens": 0, "waiting_tokens": 0,
        "free_kv_tokens": 1000, "kv_tokens": 1000, "token_budget": 256,
        "prefill_step_s": 0.5, "decode_step_s": 0.1,
        "prompt_tokens": 0, "new_tokens": 0, "answers": 0,
    }
).encode()  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Play the cases and print what came of the requests."""
    parser = argparse.ArgumentParser(
        prog="faults fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="plan and logs")
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--requests", type=int, default=1000, help="of a case")
    parser.add_argument("--malformed", type=int, default=10_000, help="damaged answers")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows, samples, tallies = {}, {}, []
    if options.output is not None and options.output.exists():
        earlier = json.loads(options.output.read_text(encoding="utf-8"))
        rows = {row["case"]: row for row in earlier["cases"]}
        samples = earlier["outcomes"]
    for name in options.case:
        tally = asyncio.run(CASES[name](options))
        tallies.append(tally)
        rows[name] = tally.record(name, str(CASES[name].__doc__).splitlines()[0])
        samples[name] = dict(tally.outcomes) | tally.notes | {"wrong": tally.wrong}
        print(json.dumps(rows[name]), json.dumps(samples[name]), flush=True)
    if options.output is not None:
        text = json.dumps(_record(list(rows.values())) | {"outcomes": samples}, indent=1)
        options.output.write_text(text + "\n")
    return int(any(one.wrong for one in tallies))


def _record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "topic": "fleet-faults",
        "command": "python benchmarks/faults fleet --folder DIR --output FILE",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {"llmpq": __version__, "python": platform.python_version()},
        "cases": rows,
    }


@dataclass(slots=True)
class Tally:
    """What came of the requests.

    Attributes:
        outcomes: how many were answered, refused (503) or broken off.
        resent: requests that found no router and were sent again.
        wrong: requests with a wrong, repeated or missing answer; at most ten are kept.
        longest_s: from the first attempt of a request to its end.
        notes: figures of the case.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    resent: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    def blame(self, text: str) -> None:
        """Count a wrong outcome."""
        self.outcomes["wrong"] += 1
        self.wrong = [*self.wrong, text][:10]

    def record(self, case: str, what: str) -> dict[str, Any]:
        """Return the row of a case."""
        broken = sum(count for name, count in self.outcomes.items() if name.startswith("broken"))
        return {
            "case": case,
            "what happens": what,
            "answered": self.outcomes["answered"] + self.outcomes["passed on"],
            "refused with 503, sent again": self.outcomes["refused"],
            "broken off after the first byte": broken,
            "found no router": self.resent,
            "wrong, twice or without an end": self.outcomes["wrong"],
            "longest s": round(self.longest_s, 2),
        }


# Servers


def strategy(folder: Path) -> Path:
    """Plan the demo model on one CPU worker, once."""
    path = folder / "demo.json"
    if not path.exists():
        made = plan(
            str(DEMO), device_names=["cpu"], device_numbers=[1], batch=8, prompt=64, new=32,
            dtype="float32", bits=(16,),
        )  # fmt: skip
        made.save(path)
    return path


@contextlib.contextmanager
def replicas(folder: Path) -> Iterator[list[Running]]:
    """Run two replicas."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                llmpq_serve(
                    DEMO, strategy(folder), folder / f"replica-{number}.log",
                    "--step_timeout", "60", name="demo",
                )
            )
            for number in range(2)
        ]  # fmt: skip


@contextlib.contextmanager
def router(folder: Path, ports: list[int], port: int) -> Iterator[Running]:
    """Run llmpq-route in front of servers."""
    urls = [f"http://127.0.0.1:{one}" for one in ports]
    words = [sys.executable, "-m", "llmpq.cli.commands.route", "--port", str(port), "--replica"]
    with running([*words, *urls], port, folder / "router.log", "/version") as found:
        yield found


class Relay:
    """Passes bytes to a replica, unless it is cut off; may hold back the statistics.

    Attributes:
        is_cut: nothing passes, and no connection is closed.
        delay_s: of everything on a connection that asks for statistics.
    """

    def __init__(self, port: int) -> None:
        self.is_cut = False
        self.delay_s = 0.0
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Listen; yield the port."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
            both = (self._copy(reader, there_writer), self._copy(there_reader, writer))
            await asyncio.gather(*both)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            while self.is_cut:
                await asyncio.sleep(0.01)
            if data.startswith(b"GET /load"):
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        writer.close()


# Requests


class RefusedError(Exception):
    """The answer of the router is 503."""


class Client:
    """Sends requests and checks their answers.

    Args:
        session: connections.
        url: of the router.
        expected: text of each prompt's answer.
        tally: of the case.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, expected: dict[str, str], tally: Tally
    ) -> None:
        self._session = session
        self._url = url
        self._expected = expected
        self._tally = tally
        self.done = 0

    async def ask(self, number: int) -> None:
        """Send one request until a router takes it; every other one is a stream."""
        start_s = time.perf_counter()
        prompt = PROMPTS[number % len(PROMPTS)]
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    outcome = await self._once(prompt, is_stream=number % 4 < 2)
                break
            except aiohttp.ClientConnectorError:
                self._tally.resent += 1
                await asyncio.sleep(0.05)
            except RefusedError:
                self._tally.outcomes["refused"] += 1
                await asyncio.sleep(RETRY_AFTER_S)
            except TimeoutError:
                self._tally.blame(f"request {number}: no end within {SILENCE_S:g} s")
                return
            except aiohttp.ClientError as error:
                outcome = f"broken off: {type(error).__name__}"
                break
        self.done += 1
        self._tally.outcomes[outcome] += 1
        self._tally.longest_s = max(self._tally.longest_s, time.perf_counter() - start_s)

    async def _once(self, prompt: str, *, is_stream: bool) -> str:
        body = body_of(prompt) | {"stream": is_stream}
        async with self._session.post(self._url, json=body) as answer:
            if answer.status == 503:
                raise RefusedError
            text = await answer.text()
            if answer.status != 200:
                self._tally.blame(f"status {answer.status}: {text[:200]}")
                return "other status"
        found, error = text_of_events(text) if is_stream else (choice(json.loads(text)), None)
        if error is not None:
            is_right = self._expected[prompt].startswith(found)
        else:
            is_right = found == self._expected[prompt]
        if not is_right:
            self._tally.blame(f"{prompt!r}: found {found!r}, expected {self._expected[prompt]!r}")
        return "answered" if error is None else "broken off: error event"


def body_of(prompt: str) -> dict[str, Any]:
    """Return a request whose answer is always the same."""
    return {
        "model": "demo", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


def choice(answer: dict[str, Any]) -> str:
    """Return the text of an answer or an event."""
    return str(answer["choices"][0]["text"])


def text_of_events(text: str) -> tuple[str, str | None]:
    """Return the text of a stream, and its error; ``[DONE]`` must be there once without one."""
    found, error, ends = "", None, 0
    for event in text.split("\n\n"):
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            ends += 1
        elif data:
            value = json.loads(data)
            if "error" in value:
                error = str(value["error"]["message"])
            else:
                found += choice(value)
    if ends != (error is None):
        error = f"{ends} ends"
    return found, error


async def load(client: Client, requests: int, strike: Callable[[float], Awaitable[None]]) -> None:
    """Send requests; call ``strike`` with 1/3 and 2/3 once so many are done."""
    numbers = iter(range(requests))

    async def worker() -> None:
        for number in numbers:
            await client.ask(number)

    async def watch() -> None:
        for share in (1 / 3, 2 / 3):
            while client.done < share * requests:
                await asyncio.sleep(0.01)
            await strike(share)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    await watching


async def play(
    options: argparse.Namespace, strike_of: Callable[[Fleet], Callable[[float], Awaitable[None]]]
) -> Tally:
    """Load a fleet, with one fault."""
    tally = Tally()
    with replicas(options.folder) as servers, contextlib.ExitStack() as stack:
        relay = Relay(servers[0].port)
        async with relay.serving() as relayed, aiohttp.ClientSession() as session:
            expected = {prompt: await reference(session, servers, prompt) for prompt in PROMPTS}
            port = free_port()

            def start() -> Running:
                ports = [relayed, servers[1].port]
                return stack.enter_context(router(options.folder, ports, port))

            fleet = Fleet(servers, relay, await asyncio.to_thread(start), start, tally)
            url = f"http://127.0.0.1:{port}/v1/completions"
            client = Client(session, url, expected, tally)
            await load(client, options.requests, strike_of(fleet))
            tally.notes["answers_of_replicas"] = [await answers(session, one) for one in servers]
    return tally


@dataclass(slots=True)
class Fleet:
    """What a fault can strike.

    Attributes:
        replicas: the servers.
        relay: before the first one.
        router: in front of both.
        start: starts another router at the same address.
        tally: of the case.
    """

    replicas: list[Running]
    relay: Relay
    router: Running
    start: Callable[[], Running]
    tally: Tally


async def reference(session: aiohttp.ClientSession, servers: list[Running], prompt: str) -> str:
    """Return the text of a prompt's answer, which both replicas give."""
    texts = set()
    for one in servers:
        url = f"http://127.0.0.1:{one.port}/v1/completions"
        async with session.post(url, json=body_of(prompt)) as answer:
            texts.add(choice(await answer.json()))
    (text,) = texts
    return text


async def answers(session: aiohttp.ClientSession, server: Running) -> int | None:
    """Return how many answers a replica has made; ``None`` when it has ended."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(10), session.get(f"http://127.0.0.1:{server.port}/load") as got:
            return int((await got.json())["answers"])
    return None


# Cases


async def kill(options: argparse.Namespace) -> Tally:
    """SIGKILL to a replica, which stays away."""

    def strike_of(fleet: Fleet) -> Callable[[float], Awaitable[None]]:
        async def strike(share: float) -> None:
            if share < 0.5:
                os.kill(fleet.replicas[0].pid, signal.SIGKILL)

        return strike

    return await play(options, strike_of)


async def halt(options: argparse.Namespace) -> Tally:
    """SIGSTOP to a replica, and SIGCONT later."""

    def strike_of(fleet: Fleet) -> Callable[[float], Awaitable[None]]:
        async def strike(share: float) -> None:
            number = signal.SIGSTOP if share < 0.5 else signal.SIGCONT
            os.kill(fleet.replicas[0].pid, number)

        return strike

    return await play(options, strike_of)


async def cut(options: argparse.Namespace) -> Tally:
    """No byte passes between router and replica for a while; no connection is closed."""

    def strike_of(fleet: Fleet) -> Callable[[float], Awaitable[None]]:
        async def strike(share: float) -> None:
            fleet.relay.is_cut = share < 0.5

        return strike

    return await play(options, strike_of)


async def stale(options: argparse.Namespace) -> Tally:
    """Statistics of a replica arrive a second late."""

    def strike_of(fleet: Fleet) -> Callable[[float], Awaitable[None]]:
        async def strike(share: float) -> None:
            fleet.relay.delay_s = STALE_S if share < 0.5 else 0.0

        return strike

    return await play(options, strike_of)


async def restart(options: argparse.Namespace) -> Tally:
    """SIGTERM to the router, which finishes what runs, and another one at the same address."""
    return await _replaced_router(options, signal.SIGTERM)


async def restart_killed(options: argparse.Namespace) -> Tally:
    """SIGKILL to the router, and another one at the same address."""
    return await _replaced_router(options, signal.SIGKILL)


async def _replaced_router(options: argparse.Namespace, number: signal.Signals) -> Tally:
    def strike_of(fleet: Fleet) -> Callable[[float], Awaitable[None]]:
        async def strike(share: float) -> None:
            if share < 0.5:
                start_s = time.perf_counter()
                os.kill(fleet.router.pid, number)
                await asyncio.to_thread(ended, fleet.router.pid)
                await asyncio.to_thread(fleet.start)
                fleet.tally.notes["without_router_s"] = round(time.perf_counter() - start_s, 3)

        return strike

    return await play(options, strike_of)


def ended(pid: int) -> None:
    """Wait for the end of a child process, which is reaped by its own handle."""
    while Path(f"/proc/{pid}/status").exists():
        if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.01)


async def damaged(options: argparse.Namespace) -> Tally:
    """Send requests to a replica with damaged answers and to a good one, one after the other."""
    tally, counts = Tally(), Counter[str]()
    async with (
        scripted(counts, is_good=False) as bad,
        scripted(counts, is_good=True) as good,
        aiohttp.ClientSession() as session,
    ):
        port = free_port()
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, router(options.folder, [bad, good], port))
            url = f"http://127.0.0.1:{port}/v1/completions"
            number = 0
            while counts["bad"] < options.malformed:
                number += 1
                try:
                    async with (
                        asyncio.timeout(SILENCE_S),
                        session.post(url, json=body_of("A")) as a,
                    ):
                        text = await a.read()
                        tally.outcomes["answered" if text == b"{}" else "passed on"] += 1
                except aiohttp.ClientError:
                    tally.outcomes["broken off"] += 1
            async with session.get(f"http://127.0.0.1:{port}/health") as answer:
                tally.notes["health"] = answer.status
    tally.notes["malformed"] = counts["bad"]
    if tally.outcomes.total() != number or counts["good"] != tally.outcomes["answered"]:
        tally.blame(f"{number} requests, {counts['good']} at the good replica")
    return tally


@contextlib.asynccontextmanager
async def scripted(counts: Counter[str], *, is_good: bool) -> AsyncIterator[int]:
    """Run a replica that answers statistics well, and requests well or with damage."""
    name = "good" if is_good else "bad"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, EOFError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(size or 0))
                if head.startswith(b"get /load"):
                    writer.write(whole(LOAD_BODY))
                    continue
                counts[name] += 1
                writer.write(whole(b"{}") if is_good else malformed(counts[name]))
                await writer.drain()
                if not is_good:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def whole(body: bytes) -> bytes:
    """Return a good answer."""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    ) + body


CASES = {
    "kill": kill,
    "stop": halt,
    "cut": cut,
    "stale": stale,
    "restart": restart,
    "restart_killed": restart_killed,
    "malformed": damaged,
}
