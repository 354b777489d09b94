"""The application in Ray Serve on a cluster of two nodes of this host: a lane of its own.

``scripts/check -m ray`` in an environment with ``llmpq[ray]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.clocks import PATIENCE_S

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs llmpq[ray]", allow_module_level=True)

import httpx
import openai
from helpers.fake_replica import FakeSession
from helpers.processes import is_running, listening_addresses, wait_for
from helpers.ray_fleet import (
    HOST,
    LABEL,
    NODES,
    TRACES,
    FakeEngineReplica,
    RecordingRouter,
    VaryingReplica,
    children_of,
    cluster,
)
from ray import serve

from llmpq.routing import BALANCERS, RoutedRequest, load_balancer
from llmpq.server.ray.app import application
from llmpq.server.ray.options import FleetOptions
from llmpq.server.ray.replica_table import RECORDED_S
from llmpq.server.router.backend import Backend
from llmpq.server.router.metrics import RouterMetrics
from llmpq.server.router.proxy import Router

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
PORT = 18123
URL = f"http://{HOST}:{PORT}"
LIMIT = 4
"""Answers at once of a replica; above them it refuses."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    os.environ[TRACES] = str(tmp_path_factory.mktemp("traces"))
    with cluster():
        serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": PORT})
        yield
    del os.environ[TRACES]


def options_of(**changes):
    return FleetOptions(
        **{
            "strategies": {name: f"{name}.json" for name in NODES},
            "label": LABEL,
            "num_replicas": 2,
            "max_replicas_per_node": 1,
            "balancer": "least_loaded",
            "max_num_queued_reqs": LIMIT,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def fleet(nodes):
    serve.run(application(options_of(), FakeEngineReplica), name="fleet")
    yield URL
    serve.delete("fleet")


def body_of(number, **changes):
    return {"model": "demo", "prompt": f"The {number}", "max_tokens": 4} | changes


def post(number, **changes):
    return httpx.post(f"{URL}/v1/completions", json=body_of(number, **changes), timeout=PATIENCE_S)


def test_an_openai_client_talks_to_the_replicas_of_both_nodes(fleet):
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        fields = {"model": "demo", "prompt": "The", "max_tokens": 5, "temperature": 0}
        whole = client.completions.create(**fields)
        chunks = client.completions.create(**fields, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="demo", prompt="The", max_tokens=-1)
        with ThreadPoolExecutor(8) as pool:
            lists = pool.map(lambda _: client.models.list().data[0].id, range(16))
            assert set(lists) == {
                f"{name}.json" for name in NODES
            }  # each node has the strategy of its label


def test_the_answer_has_the_id_of_the_request(fleet):
    answer = httpx.get(f"{URL}/v1/models", headers={"X-Request-Id": "mine"})
    assert set(answer.headers.get_list("x-request-id")) == {"mine"}  # Ray's proxy adds it too


def test_a_refused_request_goes_to_the_other_replica_once(fleet):
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda n: post(n, max_tokens=40), range(32)))
    found = Counter(answer.status_code for answer in answers)
    assert found.total() == found[200] + found[503] == 32
    assert found[200] >= 2 * LIMIT
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == 503
    assert post(0).status_code == 200


def test_a_client_that_goes_away_ends_its_answer(fleet):
    for _ in range(2 * LIMIT):
        with (
            httpx.stream(
                "POST", f"{URL}/v1/completions", json=body_of(0, stream=True, max_tokens=900)
            ) as answer,
        ):
            next(answer.iter_lines())
    wait_for(lambda: [post(n).status_code for n in range(4)], [200, 200, 200, 200].__eq__)


def test_only_what_ray_serve_starts_itself_listens_beyond_this_host(fleet):
    """Every actor of Serve has a gRPC server on all addresses, which no setting of Ray changes."""
    addresses = set()
    for pid in children_of(os.getpid()) - actors("ServeReplica"):
        with contextlib.suppress(FileNotFoundError):  # it has ended, or closed a file
            addresses |= listening_addresses([pid])
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert addresses <= loopback


def test_a_killed_replica_costs_no_answer_and_comes_back(fleet):
    replicas = "ServeReplica:fleet:replicas"
    victim = min(actors(replicas))
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(post, number, max_tokens=20) for number in range(40)]
        time.sleep(0.3)
        os.kill(victim, signal.SIGKILL)
        answers = [one.result() for one in sent]
    assert Counter(answer.status_code for answer in answers) == {200: 40}
    assert not is_running(victim)
    wait_for(lambda: len(actors(replicas)), (2).__eq__)


def actors(name):
    """Return the process ids of actors by the beginning of their name."""
    found = set()
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):
            if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


@pytest.mark.parametrize("balancer", BALANCERS)
def test_decisions_equal_those_of_llmpq_route_on_the_same_trace(nodes, balancer):
    """The trace is what Ray's router had: requests, their ends, and statistics that change."""
    options = options_of(balancer=balancer, seed=3, max_num_queued_reqs=None)
    serve.run(
        application(options, VaryingReplica, RecordingRouter),
        name=balancer,
        route_prefix=f"/{balancer}",
    )
    source = random.Random(1)
    bodies = [body_of(n, prompt="word " * source.randrange(1, 400)) for n in range(150)]
    try:
        time.sleep(1.0)  # the first statistics
        with ThreadPoolExecutor(8) as pool:
            sent = [
                pool.submit(
                    httpx.post, f"{URL}/{balancer}/v1/completions", json=body, timeout=PATIENCE_S
                )
                for body in bodies
            ]
        assert {one.result().status_code for one in sent} == {200}
    finally:
        serve.delete(balancer)
    trace = Path(os.environ[TRACES]) / f"{balancer}.jsonl"
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    decisions = [event["order"][0] for event in events if "order" in event]
    assert len(decisions) == len(bodies)
    assert len(set(decisions)) == 2
    assert len({json.dumps(event["stats"]) for event in events if "order" in event}) > 5
    assert replayed(events, balancer, options.seed) == decisions


def replayed(events, balancer, seed):
    """Decisions of llmpq-route's router on a trace of Ray's."""
    clock = Clock()
    names = sorted(next(event["stats"] for event in events if "order" in event))

    async def scenario():
        replay = Replay(names, load_balancer(balancer, seed=seed), clock)
        for event in events:
            if "order" in event:
                await replay.choose(event)
            elif "end" in event:
                replay.end(event["key"], event["end"])
            else:
                replay.route(event["key"], event)
        return replay.found

    return asyncio.run(scenario())


class Replay:
    """Takes the events of a trace of Ray's router with llmpq-route's."""

    def __init__(self, names, balancer, clock):
        self.session, self.names, self.balancer, self.clock = FakeSession(), names, balancer, clock
        self.backends = [
            Backend(n, f"http://{name}", self.session, clock=clock.monotonic)
            for n, name in enumerate(names)
        ]
        metrics = RouterMetrics(self.backends)
        self.router = Router(self.backends, balancer, self.session, metrics)
        self.sent, self.early, self.found = {}, set(), []

    async def choose(self, event):
        for name, backend in zip(self.names, self.backends, strict=True):
            stats = event["stats"][name]
            if self.session.loads.get(backend.url) != stats:
                self.session.loads[backend.url] = stats
                self.clock.now_s = stats[RECORDED_S]
                await backend.poll()
        self.clock.now_s = event["now_s"]
        prefix = tuple(event["prefix"])
        request = RoutedRequest(prompt_tokens=event["prompt_tokens"], prefix=prefix)
        chosen = self.router._choose(request, set())
        self.send(event["key"], request, chosen)
        self.found.append(self.names[chosen.number])

    def send(self, key, request, backend):
        self.balancer.routed(request, backend.number)
        stack = contextlib.ExitStack()
        stack.enter_context(backend.attempt(request, asyncio.Timeout(None)))
        self.sent[key] = self.names[backend.number], request, stack

    def end(self, key, name):
        if self.sent[key][0] == name:
            self.sent.pop(key)[2].close()
        else:
            self.early.add(key)  # Ray says only then where it was sent

    def route(self, key, event):
        if key in self.early:
            self.sent.pop(key)[2].close()
        elif key in self.sent and self.sent[key][0] != event["routed"]:  # the first was too slow
            _, request, stack = self.sent.pop(key)
            stack.close()
            self.clock.now_s = event["now_s"]
            self.send(key, request, self.backends[self.names.index(event["routed"])])


class Clock:
    """Stands for the clock of a router."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s
