"""Faults of replicas under load: every request is answered or refused, and none twice."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter

import pytest
from helpers.clocks import PATIENCE_S

pytest.importorskip("aiohttp")

import httpx
from helpers.fake_replica import fleet
from helpers.malformed_http import malformed

from llmpq.server.router import backend as backend_module

REQUESTS = 60
MALFORMED = 300


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def post(client, number):
    return client.post("/v1/completions", json={"prompt": "a text", "number": number})


def numbers_of(replica):
    return Counter(json.loads(body)["number"] for _, _, body in replica.requests)


async def kill(replica, router):
    """Close all connections and the listener."""
    replica.stop()


async def halt(replica, router):
    """Answer nothing more, neither requests nor polls; connections stay open."""
    replica.answer = replica.hang
    replica.load = b""
    while router.backends[0].is_ready:
        await router.backends[0].poll()


@pytest.mark.parametrize("fault", [kill, halt])
def test_every_request_is_answered_once_while_a_replica_is_lost(fault, monkeypatch):
    monkeypatch.setattr(backend_module, "POLL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(backend_module, "LOST_AFTER_S", 0.08)

    async def scenario():
        async with fleet(2, "least_loaded") as ((first, second), router, client):
            released = asyncio.Event()

            async def slow(writer):
                await released.wait()
                await first.complete(writer)

            first.answer = slow
            sent = [asyncio.create_task(post(client, number)) for number in range(REQUESTS)]
            while not len(first.requests) == len(second.requests) == REQUESTS / 2:
                await asyncio.sleep(0.005)
            await fault(first, router)
            late = [asyncio.create_task(post(client, REQUESTS + n)) for n in range(REQUESTS)]
            answers = await asyncio.gather(*sent, *late)
            assert {answer.json()["from"] for answer in answers} == {"1"}
            assert numbers_of(second) == Counter(range(2 * REQUESTS))
            assert max(numbers_of(first).values()) == 1
            assert not router.backends[0].is_ready
            assert [one.outstanding for one in router.backends] == [0, 0]
            released.set()

    run(scenario)


def test_without_another_replica_every_request_is_refused():
    async def scenario():
        async with fleet(1) as ((replica,), router, client):
            replica.answer = replica.hang
            sent = [asyncio.create_task(post(client, number)) for number in range(REQUESTS)]
            while len(replica.requests) < REQUESTS:
                await asyncio.sleep(0.005)
            replica.stop()
            assert {answer.status_code for answer in await asyncio.gather(*sent)} == {503}
            assert router.num_open == 0

    run(scenario)


def test_statistics_on_their_way_leave_out_what_was_routed_since():
    async def scenario():
        async with fleet(1) as ((replica,), router, client):
            replica.load_released.clear()
            (one,) = router.backends
            poll = asyncio.create_task(one.poll())
            await replica.load_asked.wait()
            await post(client, 0)
            before = one.view()
            replica.load_released.set()
            await poll
            assert one.view().queued_tokens == before.queued_tokens
            await one.poll()
            assert one.view().queued_tokens < before.queued_tokens

    run(scenario)


def test_malformed_answers_pass_through_or_go_to_another_replica(caplog, monkeypatch):
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(backend_module, "BREAKER_FAILURES", math.inf)

    async def scenario():
        async with fleet(2) as ((first, second), router, client):
            outcomes: Counter[str] = Counter()

            async def damaged(writer):
                writer.write(malformed(len(first.requests)))
                await first.close(writer)

            first.answer = damaged
            number = 0
            while len(first.requests) < MALFORMED:
                number += 1
                try:
                    answer = await post(client, number)
                except (httpx.HTTPError, AssertionError):
                    outcomes["broken off"] += 1
                    continue
                is_of_second = answer.content == b'{"from": "1"}'
                outcomes["another" if is_of_second else "passed on"] += 1
            assert min(outcomes[name] for name in ("broken off", "another", "passed on")) > 0
            assert outcomes.total() == number
            assert max(numbers_of(second).values()) == max(numbers_of(first).values()) == 1
            assert numbers_of(second).total() == outcomes["another"]
            assert [one.outstanding for one in router.backends] == [0, 0]

    run(scenario)
    assert not caplog.records  # nothing that the router did not expect


def test_malformed_statistics_never_stop_the_polls():
    async def scenario():
        async with fleet(1) as ((replica,), router, _):
            (one,) = router.backends
            for seed in range(MALFORMED):
                replica.load = malformed(seed)
                replica.closes_after_load = True
                await one.poll()
                assert one.view().capacity.kv_tokens > 0
            assert not one.is_ready

    run(scenario)
