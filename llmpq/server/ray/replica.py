"""One replica in Ray Serve: the ranks of a strategy as processes of the actor's node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from starlette.types import Message

from llmpq.dist import model_dir_of
from llmpq.dist.async_engine import AsyncEngine
from llmpq.errors import StageError
from llmpq.server.admission import AdmissionLimits, prefill_tokens_per_s
from llmpq.server.app import build_app, make_service
from llmpq.server.ray.options import FleetOptions, strategy_for
from llmpq.server.ray.replica_table import RECORDED_S, RoutingHint
from llmpq.server.service import Service
from llmpq.server.text.tokenizer import load_server_tokenizer
from llmpq.spec.plan import read_plan

NAME = "llmpq.replica"
"""Type of the first message of every answer, which names the replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """What a replica reads of a request beside its body.

    Attributes:
        method: of HTTP.
        path: without the query, decoded.
        raw_path: likewise, as it came.
        query: likewise.
        headers: names in lower case, and values.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    def scope(self) -> dict[str, Any]:
        """Return the scope of ASGI."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.raw_path,
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


class EngineReplica:
    """Serves the strategy that is meant for the node it is placed on.

    Args:
        options: of the fleet.
    """

    async def __init__(self, options: FleetOptions) -> None:  # type: ignore[misc]  # Ray awaits it
        labels: Mapping[str, str] = ray.get_runtime_context().get_node_labels()
        plan = read_plan(strategy_for(options, labels))
        model_dir = model_dir_of(plan, options.model)
        tokenizer = await asyncio.to_thread(load_server_tokenizer, model_dir)
        self._engine = await AsyncEngine.start(plan, model_dir, **options.engine_settings())
        limits = AdmissionLimits(
            max_num_queued_reqs=options.max_num_queued_reqs,
            max_num_queued_tokens=options.max_num_queued_tokens,
            prefill_tokens_per_s=prefill_tokens_per_s(plan),
            decode_step_s=plan.decode_round_s,
        )
        names = (options.served_model_name or plan.model.name,)
        self._start(make_service(self._engine, tokenizer, model_dir, names, limits))

    def _start(self, service: Service) -> None:
        self._service = service
        self._app = build_app(service, checks_site=False)  # the names are those of Ray's proxy
        self._name = serve.get_replica_context().replica_id.unique_id

    async def answer(
        self, hint: RoutingHint, head: RequestHead, body: bytes
    ) -> AsyncGenerator[Message, None]:
        """Yield the name of this replica, then the messages of ASGI that answer a request.

        Nothing follows the name when this replica has refused the request before.
        """
        yield {"type": NAME, "name": self._name}
        if self._name in hint.tried:
            return
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            return await asyncio.Future()  # Ray cancels this call when the client goes away

        async def run() -> None:
            try:
                await self._app(head.scope(), receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the load, for the router; called by Ray again and again."""
        return {RECORDED_S: time.time(), **self._service.load()}

    async def check_health(self) -> None:
        """Called by Ray again and again.

        Raises:
            StageError: the engine has ended for good; Ray starts another replica.
        """
        if self._service.engine.error is not None:
            raise StageError("the engine has ended")

    async def __del__(self) -> None:
        """End the ranks; called by Ray after the last answer."""
        if hasattr(self, "_engine"):
            await self._engine.close()
        if hasattr(self, "_service"):
            self._service.close()
