"""The entrance to the replicas in Ray Serve: OpenAI's API, keys, and another try elsewhere.

As in ``llmpq-route``, a request is sent again only while no byte of an answer has come: after a
refusal to the replica that the balancer ranks next, once to each; after the loss of a replica to
another one. An answer that breaks off later ends with an error event (streams) or with a closed
connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmpq.logging import get_logger
from llmpq.options.server import ListenOptions, TransportLimits
from llmpq.routing import RoutedRequest
from llmpq.server.app import read_api_keys
from llmpq.server.errors import ApiError
from llmpq.server.json_output import json_response
from llmpq.server.ray.options import FleetOptions
from llmpq.server.ray.replica import NAME, RequestHead
from llmpq.server.ray.replica_table import RoutingHint
from llmpq.server.router.proxy import (
    BUSY,
    HOP_BY_HOP,
    ReplicaResponse,
    break_off,
    no_replica,
    read_body,
    routed_request,
)
from llmpq.server.transport import RequestGuard, until_disconnected

logger = get_logger(__name__)
LOST_ATTEMPTS = 3
"""Replicas that a request may lose; Ray leaves those that have died out."""


class Ingress:
    """Passes requests on to the replicas.

    Args:
        replicas: handle of the deployment of :class:`~llmpq.server.ray.replica.EngineReplica`.
        options: of the fleet.
    """

    def __init__(self, replicas: DeploymentHandle, options: FleetOptions) -> None:
        self._replicas = replicas.options(stream=True, method_name="answer")
        file = None if options.api_key_file is None else Path(options.api_key_file)
        # Where Ray's proxy listens is not known here; without a file no key is asked for.
        listen = ListenOptions(host="127.0.0.1", port=0, api_key_file=file)
        self._gate = RequestGuard(
            self.route, TransportLimits(), lambda: None, read_api_keys(listen), checks_site=False
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application; called by Ray."""

        # A function: uvicorn takes a bound method for an application of ASGI 2.
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                for name in ("startup", "shutdown"):
                    await receive()
                    await send({"type": f"lifespan.{name}.complete"})
            else:
                await self._gate(scope, receive, send)

        return app

    async def route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            ApiError: no replica can take it, or its path is not one of the API.
        """
        path = path_of(scope)
        if path == "/metrics":
            raise ApiError(404, "The metrics of the replicas are among Ray's.")
        if path == "/ping":
            await json_response({})(scope, receive, send)
            return
        body = await read_body(receive)
        await until_disconnected(self._route(scope, body, send), receive)

    async def _route(self, scope: Scope, body: bytes, send: Send) -> None:
        request, head = routed_request(body), head_of(scope)
        tried: tuple[str, ...] = ()
        refusal: list[Message] = []
        num_lost = 0
        while num_lost < LOST_ATTEMPTS:
            attempt = _RayAttempt(send)
            try:
                await attempt.run(self._call(request, tried, head, body))
            except (RayError, RayServeException) as error:
                logger.warning("a replica was lost: %s", type(error).__name__)
                if attempt.answer is not None:
                    await break_off(attempt.answer, send, head.path)
                    return
                num_lost += 1
                continue
            if attempt.answer is not None:
                return
            if not attempt.refusal:  # the replica has refused it before: so have all
                break
            tried += (attempt.name,)
            refusal = attempt.refusal
        if not refusal:
            raise no_replica()
        for message in refusal:
            await send(message)

    def _call(
        self, request: RoutedRequest, tried: tuple[str, ...], head: RequestHead, body: bytes
    ) -> AsyncIterator[Message]:
        hint = RoutingHint(request=request, tried=tried)
        messages: AsyncIterator[Message] = self._replicas.remote(hint, head, body)
        return messages


class _RayAttempt:
    """One request at one replica.

    Attributes:
        name: of the replica.
        answer: head of an answer whose first byte was sent; ``None`` before.
        refusal: messages of a replica that is busy.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.name = ""
        self.answer: ReplicaResponse | None = None
        self.refusal: list[Message] = []

    async def run(self, messages: AsyncIterator[Message]) -> None:
        """Pass the answer on, or keep a refusal."""
        start: Message | None = None
        async for message in messages:
            if message["type"] == NAME:
                self.name = message["name"]
            elif message["type"] == "http.response.start":
                # The gate of the ingress adds the request's id.
                kept = [item for item in message["headers"] if item[0] != b"x-request-id"]
                start = {**message, "headers": kept}
            elif start is not None and start["status"] in BUSY:
                self.refusal += [*(() if self.refusal else (start,)), message]
            else:
                assert start is not None
                if self.answer is None:
                    self.answer = ReplicaResponse(start["status"], list(start["headers"]))
                    await self._send(start)
                await self._send(message)


def path_of(scope: Scope) -> str:
    """Return the path of a request without the prefix that Ray has for the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


def head_of(scope: Scope) -> RequestHead:
    """Return what a replica reads of a request."""
    request_id = scope["state"]["request_id"].encode()
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name not in HOP_BY_HOP and name not in (b"x-request-id", b"authorization")
    ]
    return RequestHead(
        method=scope["method"],
        path=path_of(scope),
        raw_path=quote(path_of(scope)).encode(),
        query=scope["query_string"],
        headers=(*kept, (b"x-request-id", request_id)),
    )
