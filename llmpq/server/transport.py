"""What happens between socket and routes: limits of bodies and headers, keys, slow readers.

The limits apply before a body is read or parsed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmpq.dist.transport.endpoint import is_loopback_name
from llmpq.logging import get_logger
from llmpq.options.server import TransportLimits
from llmpq.server.errors import ApiError, as_api_error, bad_request, error_response
from llmpq.server.json_output import dump_json

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/metrics", "/load", "/version"})
"""Paths that need no key: they hold numbers only, and the page, which asks for a key."""
GENERATION_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/embeddings",
    }
)
"""Paths that a full server refuses."""
LARGE_BODY_BYTES = 64 << 10
"""A body above it takes milliseconds to read: such bodies take turns with all other work."""
MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 200
BODY_TIMES = 2
"""A connection is aborted after so many times the time for a body, whose end is answered first."""
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}")

T = TypeVar("T")
logger = get_logger(__name__)
_ADDRESS = re.compile(r"[\d.]+|.*:.*")
_PARSER = get_logger(f"{__name__}.parser")


class RequestGuard:
    """The outermost application: checks key, body and media type, and names the request.

    A full server refuses a request here, before its body is read: a refusal takes a fraction of
    the time that reading the request would.

    Args:
        app: answers requests that pass.
        limits: of connections.
        check_open: raises ``ApiError`` while no answer can be made.
        api_keys: accepted keys; without any, no key is asked for.
        checks_site: whether pages of other sites are refused where no key is asked for.
        allowed_origins: sites whose pages are not refused; ``*`` for all.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: TransportLimits,
        check_open: Callable[[], None],
        api_keys: tuple[str, ...] = (),
        *,
        checks_site: bool = True,
        allowed_origins: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._allowed_origins = frozenset(allowed_origins)
        self._checks_site = checks_site and not api_keys
        self._limits = limits
        self._check_open = check_open
        self._turns = _Turns()
        self._api_keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        writer = _Writer(send, request_id)
        try:
            self._check(scope, headers)
            await self._app(scope, _limited(receive, self._limits, self._turns), writer)
        except ApiError as error:
            await _answer_error(error, scope, receive, writer)
        except ConnectionError:
            logger.info("request %s: the client went away", request_id)
        except Exception as error:
            # Its message may hold text of the prompt.
            logger.error("request %s failed", request_id, exc_info=_without_message(error))
            await _answer_error(as_api_error(error), scope, receive, writer)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if self._checks_site:
            self._check_site(headers)
        if self._api_keys and scope["path"] not in OPEN_PATHS:
            self._check_key(headers)
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            raise ApiError(400, "Content-Length: expected a number.")
        if int(length) > self._limits.max_body_bytes:
            raise _too_large(self._limits)
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, "Content-Type: expected application/json.")
        if scope["path"] in GENERATION_PATHS:
            self._check_open()

    def _check_site(self, headers: Headers) -> None:
        """Refuse what a browser sends for a page of another site, as no key is asked for.

        Browsers name the site of a page in ``Origin``. A name of another site that leads to this
        host is in ``Host``.
        """
        origin = headers.get("origin", "")
        is_web = origin.startswith(("http:", "https:", "null"))
        is_allowed = not self._allowed_origins.isdisjoint((origin, "*"))
        if is_web and not is_allowed and not is_loopback_name(_host_of(origin)):
            raise ApiError(
                403,
                f"Origin: found {origin:.200}, expected a page of this host; pages of other hosts "
                "need --allowed_origins, or a server with --api_key_file.",
            )
        host = _host_of(f"//{headers.get('host', '')}")
        is_foreign_name = "." in host.rstrip(".") and not _ADDRESS.fullmatch(host)
        if is_foreign_name and not is_loopback_name(host):
            raise ApiError(
                403,
                f"Host: found {host:.200}, expected localhost or an address of it; other names "
                "need a server with --api_key_file.",
            )

    def _check_key(self, headers: Headers) -> None:
        """Check the key: that of OpenAI's clients, or of Anthropic's in ``x-api-key``."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), key if scheme.lower() == "bearer" else ""]
        # Every key is compared, in constant time.
        matches = [
            hmac.compare_digest(found.strip().encode("utf-8", "replace"), expected)
            for found in given
            for expected in self._api_keys
        ]
        if not any(matches):
            raise ApiError(
                401, "The API key is missing or wrong: expected 'Authorization: Bearer'."
            )


def with_origins(app: ASGIApp, allowed_origins: Sequence[str]) -> ASGIApp:
    """Return an application whose answers pages of these sites may read; ``*`` for all."""
    if not allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=("*",),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return "not.a.host"


class _Writer:
    """Sends messages with the request's id."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
            message = {**message, "headers": headers}
        await self._send(message)


async def _answer_error(error: ApiError, scope: Scope, receive: Receive, writer: _Writer) -> None:
    """Answer with an error, unless an answer has begun."""
    if writer.has_begun:
        return
    await error_response(error, scope["path"])(scope, receive, writer)


def _without_message(error: Exception) -> tuple[type[BaseException], BaseException, Any]:
    return RuntimeError, RuntimeError(type(error).__name__), error.__traceback__


def _too_large(limits: TransportLimits) -> ApiError:
    return ApiError(413, f"The body is larger than {limits.max_body_bytes} bytes.")


class _Turns:
    """Leaves everything else as much time after a piece of long work as the piece took.

    A piece is what runs until the event loop goes on.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self) -> None:
        """Return when the next piece may begin."""
        await self._lock.acquire()
        loop = asyncio.get_running_loop()
        loop.call_soon(self._end_piece, loop, loop.time())

    def _end_piece(self, loop: asyncio.AbstractEventLoop, start_s: float) -> None:
        loop.call_later(loop.time() - start_s, self._lock.release)


def _limited(receive: Receive, limits: TransportLimits, turns: _Turns) -> Receive:
    """Return ``receive`` with limits on the size of the body and the time it takes.

    Large bodies arrive in turns: what receives the end of one reads all of it at once.
    """
    total = 0
    is_whole = False
    end_s = asyncio.get_running_loop().time() + limits.read_timeout_s

    async def limited() -> MutableMapping[str, Any]:
        nonlocal total, is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout_at(end_s):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, "The body did not arrive in time.") from None
        total += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if total > limits.max_body_bytes:
            raise _too_large(limits)
        if is_whole and total > LARGE_BODY_BYTES:
            await turns.take()
        return message

    return limited


class EventStream(Response):
    """Server-sent events; a client that goes away ends their source at once.

    Args:
        source: the events; its first item has been taken.
    """

    def __init__(self, source: AsyncGenerator[bytes, None]) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        del scope  # the head of the answer is the same for every request
        await until_disconnected(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._source:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._source.aclose()


async def until_disconnected(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of ``work``, cancelled when the client goes away.

    Raises:
        ConnectionError: the client has gone away.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionError("the client went away")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on headers, and on the time that peers take."""

    limits = TransportLimits()
    _header_bytes = 0
    _read_clock: asyncio.TimerHandle | None = None
    _write_clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        self.logger = _PARSER
        super().connection_made(transport)
        self._expect(self.limits.read_timeout_s)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no request of HTTP, as other errors are answered."""
        body = dump_json(bad_request(msg).to_json())
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop both clocks."""
        self._stop_clocks()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Expect the headers of a request."""
        self._header_bytes = 0
        self._expect(self.limits.read_timeout_s)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request, and expect its body, which nothing may read after a refusal."""
        self._expect(BODY_TIMES * self.limits.read_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop waiting: the whole request is there."""
        if self._read_clock is not None:
            self._read_clock.cancel()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Abort the connection unless the reader goes on in time."""
        self._write_clock = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Go on after the reader has taken data."""
        if self._write_clock is not None:
            self._write_clock.cancel()
        super().resume_writing()

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            raise ValueError("the headers are too large")

    def _expect(self, seconds: float) -> None:
        """Abort the connection unless the next part of a request is there in time."""
        if self._read_clock is not None:
            self._read_clock.cancel()
        self._read_clock = self.loop.call_later(seconds, self.transport.abort)

    def _stop_clocks(self) -> None:
        for clock in (self._read_clock, self._write_clock):
            if clock is not None:
                clock.cancel()


def bounded_protocol(limits: TransportLimits) -> type[BoundedHttpProtocol]:
    """Return the protocol with other limits."""
    _PARSER.setLevel(logging.ERROR)  # anyone can send nonsense: it is no line of the log each time
    return type("LimitedHttpProtocol", (BoundedHttpProtocol,), {"limits": limits})
