"""Streams say that they go on while nothing is new, as while a long prompt is computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.served import Served, make_service, serving

TURN = {"role": "user", "content": "hi"}
ASKS = {
    "completions": {"prompt": "hi", "max_tokens": 9},
    "chat/completions": {"messages": [TURN], "max_tokens": 9},
    "responses": {"input": "hi", "max_output_tokens": 9},
    "messages": {"messages": [TURN], "max_tokens": 9},
}
PINGS = 3


@contextlib.contextmanager
def silent(ping_s: float) -> Iterator[Served]:
    """Run a server whose requests wait for ``starts``."""
    engine = FakeEngine(script=[300, 400, 500, 301])
    service = make_service(engine)
    service.ping_s = ping_s
    with serving(service) as server:
        server.loop.call_soon_threadsafe(engine.starts.clear)
        yield server


def go(server: Served) -> None:
    server.loop.call_soon_threadsafe(server.engine.starts.set)


@pytest.mark.parametrize("path", ASKS)
def test_a_stream_that_waits_has_pings(path):
    is_ping = "event: ping" if path == "messages" else ":"
    body = {"model": "demo", "stream": True, **ASKS[path]}
    with silent(0.01) as server, httpx.Client(timeout=PATIENCE_S) as client:
        with client.stream("POST", f"{server.url}/v1/{path}", json=body) as answer:
            lines, count = [], 0
            for line in answer.iter_lines():
                lines.append(line)
                count += line == is_ping
                if count == PINGS + (path == "messages"):
                    go(server)
        assert answer.status_code == 200
    assert count >= PINGS + (path == "messages")  # one begins each message
    texts = [line for line in lines if line and line != ":"]
    assert all(line.startswith(("data: ", "event: ")) for line in texts)
    assert not set(texts[-1]) <= {":"}


@pytest.mark.parametrize("path", ASKS)
def test_without_silence_there_are_no_pings(path):
    body = {"model": "demo", "stream": True, **ASKS[path]}
    with silent(PATIENCE_S) as server:
        go(server)
        answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=PATIENCE_S)
    assert not answer.text.startswith(":")
    assert "\n:" not in answer.text
    assert answer.text.count("event: ping") == (path == "messages")


def test_official_clients_pass_pings_over():
    with silent(0.01) as server:
        timer = threading.Timer(0.3, go, [server])
        timer.start()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            chat = client.chat.completions.create(
                model="demo", stream=True, **ASKS["chat/completions"]
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
            whole = client.chat.completions.create(model="demo", **ASKS["chat/completions"])
            assert text == whole.choices[0].message.content
            with client.responses.stream(model="demo", **ASKS["responses"]) as stream:
                assert stream.get_final_response().output_text == text
        with (
            anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
            client.messages.stream(model="demo", **ASKS["messages"]) as stream,
        ):
            assert stream.get_final_text() == text
        timer.join()
