"""The life of a router: connect, route, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp

from llmpq.options.server import ListenOptions
from llmpq.routing import LoadBalancer
from llmpq.server.app import Life, Served, run_app
from llmpq.server.router.backend import Backend
from llmpq.server.router.metrics import RouterMetrics
from llmpq.server.router.proxy import Router
from llmpq.server.transport import RequestGuard, with_origins
from llmpq.spec.runtime_constants import FIRST_BYTE_S

CONNECT_TIMEOUT_S = 2.0
KEEP_ALIVE_S = 3.0
"""Idle connections are closed before a replica does (uvicorn after 5 s): a request that is sent
while the replica closes would have to go to another one."""


def run_router(
    options: ListenOptions,
    urls: Sequence[str],
    balancer: LoadBalancer,
    poll_s: float,
    on_ready: Callable[[str], None],
    first_byte_s: float = FIRST_BYTE_S,
) -> None:
    """Route requests until SIGTERM or Ctrl-C.

    Args:
        options: how to listen.
        urls: addresses of the replicas.
        balancer: chooses among them.
        poll_s: seconds between two readings of the statistics of a replica.
        on_ready: called with the address once requests are routed.
        first_byte_s: see ``Router``.

    Raises:
        LlmpqError: an option cannot be used; ``StoppedError`` when answers were cut short.
    """

    @contextlib.asynccontextmanager
    async def open_router(life: Life) -> AsyncIterator[Served]:
        async with connected(urls, balancer, poll_s, first_byte_s) as router:
            yield served(router, options, life, lambda: None)

    run_app(options, open_router, on_ready)


def served(
    router: Router,
    options: ListenOptions,
    life: Life,
    error: Callable[[], BaseException | None],
) -> Served:
    """Return the application of a router; ``error`` returns why it has ended for good."""
    origins = options.allowed_origins
    guard = RequestGuard(
        router, options.transport, router.check_open, life.keys, allowed_origins=origins
    )
    return Served(
        app=with_origins(guard, origins),
        error=error,
        num_open=lambda: router.num_open,
        begin_drain=router.begin_drain,
        abort=router.abort,
    )


@contextlib.asynccontextmanager
async def connected(
    urls: Sequence[str],
    balancer: LoadBalancer,
    poll_s: float,
    first_byte_s: float = FIRST_BYTE_S,
) -> AsyncIterator[Router]:
    """Return a router whose replicas have been asked for their statistics."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False
    ) as session:
        backends = [Backend(number, url, session) for number, url in enumerate(urls)]
        router = Router(backends, balancer, session, RouterMetrics(backends), first_byte_s)
        await asyncio.gather(*(backend.poll() for backend in backends))
        polling = asyncio.create_task(router.poll(poll_s))
        try:
            yield router
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
