"""The application in Ray Serve on a cluster of two nodes of this host: a lane of its own.

``scripts/check -m ray`` in an environment with ``llmpq[ray]``.
"""

from __future__ import annotations

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

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs llmpq[ray]", allow_module_level=True)

import httpx
import openai
from helpers.processes import is_running, listening_addresses, wait_for
from helpers.ray_fleet import HOST, LABEL, NODES, FakeEngineReplica, children_of, cluster
from ray import serve

from llmpq.routing import load_balancer
from llmpq.server.ray.app import application
from llmpq.server.ray.options import FleetOptions
from llmpq.server.ray.replica_table import RECORDED_S, ReplicaTable, RoutingHint
from llmpq.server.router.proxy import routed_request

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
def nodes():
    with cluster():
        serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": PORT})
        yield


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
    return httpx.post(f"{URL}/v1/completions", json=body_of(number, **changes), timeout=60)


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
            assert set(lists) == {"a.json", "b.json"}  # each node has the strategy of its label


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
    wait_for(lambda: [post(n).status_code for n in range(4)], [200, 200, 200, 200].__eq__, 20)


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
    wait_for(lambda: len(actors(replicas)), (2).__eq__, 30)


def actors(name):
    """Return the process ids of actors by the beginning of their name."""
    found = set()
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):
            if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


@pytest.mark.parametrize("balancer", ["sal", "lmetric", "prefix", "round_robin"])
def test_decisions_equal_those_without_ray_on_the_same_trace(nodes, balancer):
    """No statistics come after the first: decisions follow from the requests alone."""
    options = options_of(balancer=balancer, poll_s=60.0, max_num_queued_reqs=None)
    serve.run(application(options, FakeEngineReplica), name=balancer, route_prefix=f"/{balancer}")
    source = random.Random(1)
    bodies = [
        json.dumps(body_of(n, prompt="word " * source.randrange(1, 90))).encode() for n in range(24)
    ]
    try:
        time.sleep(2)  # the first statistics
        url, kind = f"{URL}/{balancer}", {"content-type": "application/json"}
        stats = httpx.get(f"{url}/load").json() | {RECORDED_S: 0.0}
        found = []
        for body in bodies:
            time.sleep(0.02)  # the end of the last one is counted
            answer = httpx.post(f"{url}/v1/completions", content=body, headers=kind, timeout=60)
            found.append(answer.json()["model"])
    finally:
        serve.delete(balancer)
    table = ReplicaTable(load_balancer(balancer))
    expected = []
    for number, body in enumerate([b"", *bodies]):  # the first one asked for the load
        hint = RoutingHint(request=routed_request(body))
        name = table.rank(str(number), hint, {"x": stats, "y": stats})[0]
        table.finished(str(number), name)
        expected.append(name)
    names = dict(zip(expected[1:], found, strict=True))
    assert [names[name] for name in expected[1:]] == found
    assert len(set(names.values())) == 2
