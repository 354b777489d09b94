"""The application of the router: choose a replica, pass bytes through, try another one.

A request is sent again only while no byte of an answer has come: to the replica that the balancer
ranks next, once to each. A replica that fails requests in a row gets one now and then while another
one is ready. An answer that breaks off later ends with an error event (streams) or with
a closed connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import aiohttp
from starlette.types import Receive, Scope, Send
from yarl import URL

from llmpq import __version__
from llmpq.routing import LoadBalancer, RoutedRequest
from llmpq.server.errors import ApiError, error_body
from llmpq.server.json_output import event_of, json_response
from llmpq.server.router.backend import Backend, ranked
from llmpq.server.router.metrics import RouterMetrics
from llmpq.server.transport import until_disconnected
from llmpq.spec.runtime_constants import FIRST_BYTE_S

BYTES_PER_TOKEN = 4
"""Bytes of a request for each prompt token, where the prompt is text."""
PREFIX_BYTES = 256
"""Bytes of a block of the prefix."""
PREFIX_BLOCKS = 64
MAX_REFUSAL_BYTES = 1 << 16
BUSY = (429, 503)
FAILED = 500
"""Statuses from here on are failures of a replica."""
WHOLE_TIMES = 10
"""The first byte of a whole answer comes after its last token: it may take so many times longer."""
_IS_STREAM = re.compile(rb'"stream"\s*:\s*true')
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_TOKEN_IDS = re.compile(rb'"(?:prompt|input)"\s*:\s*\[\s*\d')
HOP_BY_HOP = frozenset(
    {
        b"connection", b"content-length", b"host", b"keep-alive", b"proxy-authenticate",
        b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect",
    }
)  # fmt: skip
_FROM_REPLICA = HOP_BY_HOP | {b"date", b"server", b"x-request-id"}
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ReplicaResponse:
    """Status and headers of an answer to a request."""

    status: int
    headers: Headers

    @property
    def is_stream(self) -> bool:
        """Whether it has server-sent events."""
        return any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self.headers
        )


class Router:
    """Routes requests to replicas.

    Args:
        backends: the replicas.
        balancer: chooses among those that are ready.
        session: connections to them.
        metrics: counts what happens.
        first_byte_s: longest time to the first byte of a streamed answer, and a tenth of that of
            a whole one; then another replica is tried.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        balancer: LoadBalancer,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        first_byte_s: float = FIRST_BYTE_S,
    ) -> None:
        self.backends = backends
        self.is_draining = False
        self.num_open = 0
        self._balancer = balancer
        self._session = session
        self._metrics = metrics
        self._first_byte_s = first_byte_s

    def check_open(self) -> None:
        """Check what needs no look at the request.

        Raises:
            ApiError: the router drains, or no replica is ready.
        """
        if self.is_draining:
            raise ApiError(503, "The router is shutting down.", retry_after_s=1)
        if not any(backend.is_ready for backend in self.backends):
            raise no_replica()

    def begin_drain(self) -> None:
        """Admit no new requests."""
        self.is_draining = True

    def abort(self) -> None:
        """End all answers; streams with a reason."""
        for backend in self.backends:
            backend.give_up()

    async def poll(self, poll_s: float) -> None:
        """Read the statistics of all replicas again and again, each at its own pace."""

        async def one(backend: Backend) -> None:
            while True:
                start_s = time.monotonic()
                await backend.poll()
                await asyncio.sleep(max(0.0, start_s + poll_s - time.monotonic()))

        async with asyncio.TaskGroup() as group:
            for backend in self.backends:
                group.create_task(one(backend))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            ApiError: no replica can take it.
        """
        path = scope["path"]
        if path in ("/health", "/ping"):
            is_ready = not self.is_draining and any(one.is_ready for one in self.backends)
            await json_response({}, 200 if is_ready else 503)(scope, receive, send)
        elif path == "/metrics":
            await self._metrics.response()(scope, receive, send)
        elif path == "/version":
            await json_response({"version": __version__})(scope, receive, send)
        elif path == "/load":
            await json_response({"server_load": self.num_open})(scope, receive, send)
        else:
            self.check_open()
            body = await read_body(receive)
            self.num_open += 1
            try:
                await until_disconnected(self._route(scope, body, send), receive)
            finally:
                self.num_open -= 1

    async def _route(self, scope: Scope, body: bytes, send: Send) -> None:
        request = routed_request(body)
        first_byte_s = self._first_byte_s * (1 if _IS_STREAM.search(body) else WHOLE_TIMES)
        tried: set[int] = set()
        refusal: tuple[ReplicaResponse, bytes] | None = None
        while (backend := self._choose(request, tried)) is not None:
            if tried:
                self._metrics.retries.inc()
            tried.add(backend.number)
            self._balancer.routed(request, backend.number)
            attempt = _Attempt(self._session, backend, scope, body, send)
            try:
                refusal = await attempt.run(request, first_byte_s)
            except ConnectionError:  # the answer broke off
                backend.count(has_failed=True)
                raise
            self._metrics.count(backend, attempt.outcome)
            backend.count(has_failed=attempt.has_failed)
            if attempt.has_begun:
                return
        if refusal is None:
            raise no_replica()
        answer, text = refusal
        await _start(send, answer)
        await send({"type": "http.response.body", "body": text})

    def _choose(self, request: RoutedRequest, tried: set[int]) -> Backend | None:
        """Return the best of the replicas that are ready and have not been tried."""
        ready = [one for one in self.backends if one.is_ready and one.number not in tried]
        preferred = [one for one in ready if one.is_preferred]
        order = ranked(self._balancer, request, preferred or ready, self.backends)
        return self.backends[order[0]] if order else None


class _Attempt:
    """One request to one replica."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        backend: Backend,
        scope: Scope,
        body: bytes,
        send: Send,
    ) -> None:
        self._session = session
        self._backend = backend
        self._scope = scope
        self._body = body
        self._send = send
        self._answer: ReplicaResponse | None = None
        self.has_begun = False
        self.outcome = "lost"

    @property
    def has_failed(self) -> bool:
        """Whether the replica gave no answer, or that of a failure."""
        is_error = self._answer is not None and self._answer.status >= FAILED
        return self.outcome == "lost" or is_error

    async def run(
        self, request: RoutedRequest, first_byte_s: float
    ) -> tuple[ReplicaResponse, bytes] | None:
        """Pass the answer on; return that of a replica which is busy.

        Raises:
            ConnectionError: the answer broke off, and has no end that a client can read.
        """
        try:
            async with asyncio.timeout(None) as limit:
                with self._backend.attempt(request, limit):
                    return await self._pass_on(first_byte_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.outcome = "lost"
            if isinstance(error, aiohttp.ClientConnectorError):
                self._backend.fail()
            if self.has_begun:
                assert self._answer is not None
                await break_off(self._answer, self._send, self._scope["path"])
            return None

    async def _pass_on(self, first_byte_s: float) -> tuple[ReplicaResponse, bytes] | None:
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(first_byte_s):
                found = await stack.enter_async_context(self._request())
            if not 200 <= found.status < 600:  # nothing that HTTP lets an answer have
                raise aiohttp.ClientPayloadError(f"status {found.status}")
            headers = [(name.lower(), value) for name, value in found.raw_headers]
            if any(_CONTROL.search(text) for pair in headers for text in pair):
                raise aiohttp.ClientPayloadError("a control character in a header")
            answer = ReplicaResponse(
                found.status, [one for one in headers if one[0] not in _FROM_REPLICA]
            )
            if answer.status in BUSY:
                self.outcome = "busy"
                return answer, await found.content.read(MAX_REFUSAL_BYTES)
            self._answer = answer
            await self._copy(found.content.iter_any())
            self.outcome = "answered"
            return None

    def _request(self) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return the context of the request to the replica."""
        scope = self._scope
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        address = self._backend.url + (scope["raw_path"] + query).decode("latin-1")
        return self._session.request(
            scope["method"],
            URL(address, encoded=True),
            data=self._body or None,
            headers=_to_replica(scope["headers"], scope["state"]["request_id"]),
            allow_redirects=False,
        )

    async def _copy(self, chunks: AsyncIterator[bytes]) -> None:
        assert self._answer is not None
        async for chunk in chunks:
            if not self.has_begun:
                self.has_begun = True
                await _start(self._send, self._answer)
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        if not self.has_begun:
            self.has_begun = True
            await _start(self._send, self._answer)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def break_off(answer: ReplicaResponse, send: Send, path: str) -> None:
    """End an answer whose replica was lost after its first byte.

    Raises:
        ConnectionError: the answer is no stream, and has no end that a client can read.
    """
    if not answer.is_stream:
        raise ConnectionError("the answer of a replica broke off")
    error = ApiError(500, "The replica was lost before the answer was complete.")
    event = b"\n\n" + event_of(error_body(error, path))
    await send({"type": "http.response.body", "body": event, "more_body": False})


def no_replica() -> ApiError:
    """Return the refusal of a request that no replica can take."""
    return ApiError(503, "No replica can take the request.", retry_after_s=1)


def routed_request(body: bytes) -> RoutedRequest:
    """Return what a balancer reads of a request, without parsing it."""
    tokens = body.count(b",") if _TOKEN_IDS.search(body) else len(body) // BYTES_PER_TOKEN
    return RoutedRequest(prompt_tokens=max(1, tokens), prefix=tuple(_prefix(body)))


def _prefix(body: bytes) -> Iterable[int]:
    digest = hashlib.blake2b(digest_size=8)
    for block in range(min(PREFIX_BLOCKS, len(body) // PREFIX_BYTES)):
        digest.update(body[block * PREFIX_BYTES : (block + 1) * PREFIX_BYTES])
        yield int.from_bytes(digest.digest(), "little")


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of a request.

    Raises:
        ConnectionError: the client has gone away.
    """
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _to_replica(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> list[tuple[str, str]]:
    kept = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name not in HOP_BY_HOP and name not in (b"x-request-id", b"accept-encoding", b"origin")
    ]
    return [*kept, ("x-request-id", request_id), ("accept-encoding", "identity")]


async def _start(send: Send, answer: ReplicaResponse) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
