"""Replicas in this process that answer, refuse, break off, hang or talk nonsense, and a router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import aiohttp
import httpx

from llmpq.options.server import TransportLimits
from llmpq.routing import load_balancer
from llmpq.server.router.backend import Backend
from llmpq.server.router.metrics import RouterMetrics
from llmpq.server.router.proxy import Router
from llmpq.server.transport import RequestGuard

LOAD = {
    "server_load": 1, "is_ready": True, "running": 1, "waiting": 0, "queued_tokens": 7,
    "waiting_tokens": 7,
    "free_kv_tokens": 900, "kv_tokens": 1000, "token_budget": 256, "prefill_step_s": 0.5,
    "decode_step_s": 0.1, "prompt_tokens": 50, "new_tokens": 20, "answers": 5,
}  # fmt: skip


def random_load(source, *, can_refuse=False):
    """Statistics of a replica at a random time; one that can refuse takes no requests at times."""
    kv_tokens = source.choice((4000, 9000))
    return LOAD | {
        "queued_tokens": source.randrange(1000, 2000),
        "waiting_tokens": source.randrange(1000),
        "free_kv_tokens": source.randrange(kv_tokens),
        "kv_tokens": kv_tokens,
        "running": source.randrange(20),
        "waiting": source.randrange(5),
        "prefill_step_s": source.uniform(0.1, 1.0),
        "new_tokens": source.randrange(1, 400),
        "is_ready": not can_refuse or source.random() < 0.8,
    }


class FakeSession:
    """Answers the polls of backends with statistics by address."""

    def __init__(self):
        self.loads = {}

    @contextlib.asynccontextmanager
    async def get(self, url):
        yield FakeAnswer(json.dumps(self.loads[url.removesuffix("/load")]).encode())


class FakeAnswer:
    status = 200

    def __init__(self, body):
        self.body = body
        self.content = self

    async def read(self, _):
        return self.body


def http(body, status="200 OK", kind="application/json", length=True):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n"
    head += f"Content-Length: {len(body)}\r\n" if length else "Transfer-Encoding: chunked\r\n"
    return head.encode() + b"\r\n" + body


def chunk(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class FakeReplica:
    """Answers polls with its load, and requests with what a test says."""

    def __init__(self, name):
        self.name = name
        self.load = http(json.dumps(LOAD).encode())
        self.requests = []
        self.writers = set()
        self.answer = self.complete
        self.released = asyncio.Event()
        self.load_asked = asyncio.Event()
        self.load_released = asyncio.Event()
        self.load_released.set()
        self.closes_after_load = False

    async def start(self, port=0):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", port)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    def stop(self):
        self.released.set()
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader, writer):
        self.writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = [line.split(": ", 1) for line in head.split("\r\n")[1:] if line]
                fields = {name.lower(): value for name, value in lines}
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                path = head.split()[1]
                if path == "/load":
                    self.load_asked.set()
                    await self.load_released.wait()
                    writer.write(self.load)
                    if self.closes_after_load:
                        await self.close(writer)
                    continue
                self.requests.append((path, fields, body))
                await self.answer(writer)
                await writer.drain()
        self.writers.discard(writer)
        writer.close()

    async def complete(self, writer):
        writer.write(http(json.dumps({"from": self.name}).encode()))

    async def stream(self, writer):
        parts = [b'data: {"n": 1}\n\n', b"data: [DONE]\n\n"]
        text = b"".join(map(chunk, parts)) + chunk(b"")
        writer.write(http(text, kind="text/event-stream", length=False))

    async def be_busy(self, writer):
        body = b'{"error": {"code": 503}}'
        writer.write(http(body, status="503 Service Unavailable\r\nRetry-After: 9"))

    async def close(self, writer):
        writer.close()
        raise ConnectionError

    async def fail(self, writer):
        writer.write(http(b'{"error": {"code": 500}}', status="500 Internal Server Error"))

    async def odd_header(self, writer):
        writer.write(http(b"{}", status="200 OK\r\nX-A: b\x0bc"))

    async def break_off_stream(self, writer):
        text = chunk(b'data: {"n": 1}\n\n')
        writer.write(http(text, kind="text/event-stream", length=False))
        await writer.drain()
        await self.close(writer)

    async def break_off_json(self, writer):
        writer.write(http(b'{"from": "a replica that ends"}')[:-5])
        await writer.drain()
        await self.close(writer)

    async def hang(self, writer):
        await self.released.wait()
        await self.close(writer)


@contextlib.asynccontextmanager
async def fleet(count, balancer="round_robin", clock=time.monotonic, **options):
    replicas = [await FakeReplica(str(number)).start() for number in range(count)]
    async with aiohttp.ClientSession() as session:
        backends = [Backend(number, one.url, session, clock) for number, one in enumerate(replicas)]
        metrics = RouterMetrics(backends)
        router = Router(backends, load_balancer(balancer), session, metrics, **options)
        for one in backends:
            await one.poll()
        app = RequestGuard(router, TransportLimits(), router.check_open)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield replicas, router, client
    for one in replicas:
        one.stop()
    await asyncio.sleep(0)  # the connections close
