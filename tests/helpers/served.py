"""A real server on a loopback port, with an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine

from llmpq.options.server import TransportLimits
from llmpq.server.admission import AdmissionLimits, RequestAdmission
from llmpq.server.app import build_app, listen
from llmpq.server.metrics import ServerMetrics
from llmpq.server.page.plan_view import PlanView
from llmpq.server.service import EmbeddingSettings, ServedModel, Service
from llmpq.server.text.tokenizer import ServerTokenizer
from llmpq.server.transport import bounded_protocol

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def demo_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> ServerTokenizer:
    """Return the demo's tokenizer, read without transformers."""
    return ServerTokenizer(
        {
            "tokenizer": json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8")),
            "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
            "chat_template": chat_template,
        }
    )


def make_service(
    engine: FakeEngine,
    *,
    limits: AdmissionLimits | None = None,
    tokenizer: ServerTokenizer | None = None,
    names: tuple[str, ...] = ("demo", "other-name"),
    has_tokenizer: bool = True,
    embeddings: EmbeddingSettings | None = None,
) -> Service:
    admission = RequestAdmission(limits or AdmissionLimits())
    model = ServedModel(
        names=names,
        root=str(DEMO),
        tokenizer=(tokenizer or demo_tokenizer()) if has_tokenizer else None,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        created_s=1,
        embeddings=embeddings or EmbeddingSettings(),
    )
    return Service(engine, model, admission, ServerMetrics(names[0], engine, admission))


class Served:
    """A running server.

    Attributes:
        url: where it answers.
        port: its port.
        service: what it serves.
        engine: of the service.
        loop: of the server's thread.
    """

    def __init__(self, service: Service, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.service = service
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.loop = loop

    @property
    def engine(self) -> Any:
        return self.service.engine

    def call(self, function: Any, *args: Any) -> None:
        """Call a function in the server's thread."""
        self.loop.call_soon_threadsafe(function, *args)


@contextlib.contextmanager
def serving(
    service: Service,
    limits: TransportLimits | None = None,
    api_keys: tuple[str, ...] = (),
    view: PlanView | None = None,
) -> Iterator[Served]:
    """Run a server in a thread."""
    limits = limits or TransportLimits()
    config = uvicorn.Config(
        build_app(service, limits, api_keys, view=view),
        http=bounded_protocol(limits),
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
    )
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []
    is_up = threading.Event()

    with listen("127.0.0.1", 0) as sock:

        async def run() -> None:
            loops.append(asyncio.get_running_loop())
            is_up.set()
            await server.serve([sock])

        sock.listen(512)
        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        thread.start()
        is_up.wait(10)
        try:
            yield Served(service, sock.getsockname()[1], loops[0])
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)
            assert not thread.is_alive()


def last_request(served: Served) -> Any:
    """Return the latest request that the engine of a server got."""
    return list(served.engine.requests.values())[-1]


def prompt_text(served: Served) -> str:
    """Return the last prompt; the template of the server writes ``<role>content`` a line."""
    return demo_tokenizer().decode(last_request(served).prompt_token_ids)


def chat_text(served: Served, messages: list[Any], **fields: object) -> str:
    """Return the server's answer to a conversation, greedy unless the fields say otherwise."""
    body = {"messages": messages, "temperature": 0, **fields}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
    text: str = answer["choices"][0]["message"]["content"]
    return text
