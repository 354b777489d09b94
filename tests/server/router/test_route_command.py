"""llmpq-route as a process, in front of two real servers, with the openai package as client."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import openai
import pytest

pytest.importorskip("aiohttp")

from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.processes import wait_for
from helpers.served import Served, make_service, serving

from llmpq.cli.commands.route import main
from llmpq.server.router.backend import report_of_load

NO_PROXY = "http://127.0.0.1:9"  # where nothing listens


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Served]]:
    with serving(make_service(FakeEngine())) as one, serving(make_service(FakeEngine())) as two:
        yield [one, two]


@contextlib.contextmanager
def routing(replicas: list[Served], port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = ["--replica", *(one.url for one in replicas), "--balancer", "round_robin"]
    process = subprocess.Popen(
        [sys.executable, "-m", "llmpq.cli.commands.route", *words, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A proxy of the host is for other sites: replicas are asked directly.
        env=os.environ | dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), NO_PROXY),
    )
    with process:
        assert process.stdout is not None
        yield process, process.stdout.readline().removeprefix("ready ").strip()
        process.kill()


@pytest.fixture(scope="module")
def router(replicas: list[Served]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with routing(replicas) as found:
        yield found


def test_a_server_reports_what_the_router_reads(replicas):
    report = report_of_load(httpx.get(f"{replicas[0].url}/load", timeout=PATIENCE_S).json())
    assert report is not None
    assert report.stats.free_tokens <= report.capacity.kv_tokens


def test_an_openai_client_talks_to_all_replicas(replicas, router):
    with openai.OpenAI(base_url=f"{router[1]}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo", "other-name"]
        for _ in range(2):
            fields = {"model": "demo", "prompt": "The", "max_tokens": 5, "temperature": 0}
            whole = client.completions.create(**fields)
            chunks = client.completions.create(**fields, stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="demo", prompt="The", max_tokens=-1)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="unknown", prompt="The")
    answers = [one.service.metrics.totals.answers for one in replicas]
    assert sum(answers) == 4
    assert min(answers) > 0


def test_state_and_metrics_of_the_router(router):
    url = router[1]
    assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}
    text = httpx.get(f"{url}/metrics").text
    assert text.count("llmpq_router_replica_ready{") == 2
    assert 'outcome="answered"' in text


def test_a_router_goes_on_where_a_killed_one_was(replicas, router):
    process, url = router
    for one in replicas:
        one.call(one.engine.starts.clear)
    body = {"model": "demo", "prompt": "The", "max_tokens": 2}
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(httpx.post, f"{url}/v1/completions", json=body) for _ in range(4)]
        wait_for(lambda: [len(one.engine.active) for one in replicas], [2, 2].__eq__)
        process.kill()
        assert all(isinstance(one.exception(10), httpx.HTTPError) for one in sent)
    for one in replicas:
        one.call(one.engine.starts.set)
    wait_for(lambda: [one.engine.active for one in replicas], lambda left: not any(left))
    with routing(replicas, urlsplit(url).port or 0) as (process, again):
        assert again == url
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replica", "127.0.0.1:1"], "--replica: found 127.0.0.1:1, expected http://HOST:PORT"),
        (["--replica", "http://a", "http://a"], "--replica: found an address twice"),
        (["--replica", "http://a", "--poll_s", "0"], "--poll_s: found 0, expected more than 0"),
        (
            ["--replica", "http://a", "--first_byte_timeout", "0"],
            "--first_byte_timeout: found 0, expected more than 0",
        ),
        (["--replica", "http://a", "--host", "0.0.0.0"], "expected --api_key_file"),
    ],
)
def test_options_that_cannot_be_used_are_errors(words, message, capsys):
    assert main([*words, "--port", "0"]) == 2
    assert message in capsys.readouterr().err
