"""A server from its start to its end, in a process of its own, with signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.served import DEMO

from llmpq.errors import SpecError
from llmpq.server import app
from llmpq.server.app import (
    ServerOptions,
    check_tls,
    listen,
    read_api_keys,
    run_server,
)

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from helpers.fake_engine import FakeEngine
from helpers.served import demo_tokenizer
from llmpq.errors import LlmpqError
from llmpq.server.app import ServerOptions, run_server

given = json.loads(sys.argv[1])
engine_options = given.pop("engine")
load_s = given.pop("load_s", 0)
async def start():
    await asyncio.sleep(load_s)
    engine = FakeEngine(**engine_options)
    close = engine.close
    async def closing():
        await close()
        print("closed", flush=True)
    engine.close = closing
    return engine
paths = {name: Path(value) for name, value in given.items() if name.startswith("ssl")}
options = ServerOptions(
    host="127.0.0.1", port=0, model_dir=Path(sys.argv[2]), names=("demo",), **(given | paths))
try:
    run_server(options, start, lambda _: demo_tokenizer(),
               lambda url: print("ready", url, flush=True))
except LlmpqError as error:
    print(error, flush=True)
    sys.exit(error.exit_status)
assert "torch" not in sys.modules
"""


SHUTTING_DOWN = [
    'data: {"error":{"message":"The server is shutting down.","type":"ServiceUnavailableError",'
    '"param":null,"code":503}}',
    "data: [DONE]",
]


class Process:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def end(self) -> tuple[int, str]:
        """Return exit status and the rest of the output."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output


@contextmanager
def started(*, waits: bool = True, **options: object) -> Iterator[Process]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(options), str(DEMO)]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1] if waits else ""
            yield Process(process, url)
        finally:
            process.kill()


def stream(client: httpx.Client, tokens: int):
    body = {"prompt": [5], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return client.stream("POST", "/v1/completions", json=body)


def test_sigterm_finishes_streams_and_refuses_new_requests():
    with (
        started(engine={"step_s": 0.02}) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as other,
        stream(client, 60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        while other.get("/health").status_code == 200:
            time.sleep(0.01)
        refused = other.post("/v1/completions", json={"prompt": [5]})
        assert refused.status_code == 503
        chunks = [json.loads(text[6:]) for text in lines if text.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.end() == (0, "closed\n")


def test_drain_timeout_cuts_streams_short():
    with (
        started(engine={"step_s": 0.02, "max_model_len": 100_000}, drain_timeout_s=0.3) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        stream(client, 90_000) as answer,
    ):
        lines = answer.iter_lines()  # leaving it would close the stream
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert [text for text in lines if text][-2:] == SHUTTING_DOWN
        status, output = server.end()
        assert status == 130
        assert output.startswith("closed\n")


def test_second_signal_ends_at_once():
    with (
        started(engine={"step_s": 0.02, "max_model_len": 100_000}) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        stream(client, 90_000) as answer,
    ):
        lines = answer.iter_lines()  # leaving it would close the stream
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.url}/health").status_code == 200:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert [text for text in lines if text][-2:] == SHUTTING_DOWN
        assert server.end()[0] == 130


def test_signal_while_loading_ends_the_server():
    with started(waits=False, engine={}, load_s=60) as server:
        time.sleep(3)
        server.process.send_signal(signal.SIGTERM)
        status, output = server.end()
        assert status in (130, -signal.SIGTERM)
        assert "ready" not in output


def test_idle_server_ends_with_status_0():
    with started(engine={}) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "demo"
        server.process.send_signal(signal.SIGINT)
        assert server.end() == (0, "closed\n")


def test_used_port_and_foreign_address_are_refused(tmp_path):
    with listen("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with (
            pytest.raises(SpecError, match=f"port {port} cannot be used"),
            listen("127.0.0.1", port),
        ):
            pass
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    with pytest.raises(SpecError, match="--host"), listen("no such host", 0):
        pass


def test_port_that_is_taken_while_the_model_loads_is_an_error():
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    engine = None

    async def start() -> FakeEngine:
        nonlocal engine
        sock.listen()
        engine = FakeEngine()
        return engine

    options = ServerOptions(host="127.0.0.1", port=port, model_dir=DEMO, names=("demo",))
    ready: list[str] = []
    with (
        listen("127.0.0.1", port) as sock,
        pytest.raises(SpecError, match=f":{port} was taken while the model was loaded"),
    ):
        run_server(options, start, lambda _: None, ready.append)
    assert not ready
    assert engine is not None
    assert engine.is_closed


def test_tls_files_are_checked_before_the_model_is_loaded(tmp_path):
    text = tmp_path / "text"
    text.write_text("no certificate")
    for files, message in (
        ({"ssl_keyfile": text}, "--ssl_keyfile: found without a certificate"),
        ({"ssl_certfile": text}, "--ssl_certfile: .*text: cannot be used"),
        ({"ssl_certfile": tmp_path / "none"}, "--ssl_certfile: .*none: cannot be used: No such"),
    ):
        with pytest.raises(SpecError, match=message):
            check_tls(replace(options_for("127.0.0.1"), **files))


def options_for(host: str, key_file: Path | None = None) -> ServerOptions:
    return ServerOptions(host=host, port=0, model_dir=DEMO, names=("demo",), api_key_file=key_file)


def test_other_hosts_need_a_key(tmp_path):
    assert read_api_keys(options_for("127.0.0.1")) == ()
    for host in ("0.0.0.0", "::"):
        with pytest.raises(SpecError, match="expected --api_key_file"):
            read_api_keys(options_for(host))
    keys = tmp_path / "keys"
    keys.write_text("# two keys\nfirst-key-of-16-bytes\n\n second-key-of-16-bytes\n")
    keys.chmod(0o644)
    with pytest.raises(SpecError, match="expected 600"):
        read_api_keys(options_for("0.0.0.0", keys))
    keys.chmod(0o600)
    expected = ("first-key-of-16-bytes", "second-key-of-16-bytes")
    assert read_api_keys(options_for("0.0.0.0", keys)) == expected
    keys.write_text("first-key-of-16-bytes\nx\n")
    with pytest.raises(
        SpecError, match="line 2: found a key of 1 characters, expected at least 16"
    ):
        read_api_keys(options_for("0.0.0.0", keys))
    keys.write_text("# a comment that is long enough\n")
    with pytest.raises(SpecError, match="found comments only"):
        read_api_keys(options_for("0.0.0.0", keys))
    keys.write_bytes(b"\xff" * 20)
    with pytest.raises(SpecError, match=r"--api_key_file: .*not UTF-8"):
        read_api_keys(options_for("127.0.0.1", keys))
    with pytest.raises(SpecError, match=r"--api_key_file: .*none: cannot be read: No such file"):
        read_api_keys(options_for("127.0.0.1", tmp_path / "none"))


def test_too_few_open_files_are_refused(monkeypatch):
    given = []
    monkeypatch.setattr(app.resource, "getrlimit", lambda _: (64, 100))
    monkeypatch.setattr(app.resource, "setrlimit", lambda *values: given.append(values))
    with pytest.raises(SpecError, match=r"found a limit of 100 .*expected at least 256"):
        app.allow_open_files()
    monkeypatch.setattr(app.resource, "getrlimit", lambda _: (64, 4096))
    app.allow_open_files()
    assert given == [(app.resource.RLIMIT_NOFILE, (4096, 4096))]
