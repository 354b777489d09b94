"""The router in front of replicas that answer, refuse, break off, hang or talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from helpers.clocks import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp")

import httpx
from helpers.fake_replica import LOAD, fleet, http

from llmpq.errors import SpecError
from llmpq.server.router import backend as backend_module
from llmpq.server.router.backend import Backend, means_of, report_of_load, report_of_metrics
from llmpq.server.router.proxy import routed_request

BODY = {"model": "m", "prompt": "a text", "max_tokens": 4}


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def post(client, **more):
    return client.post("/v1/completions", json=BODY | more)


def test_requests_and_answers_pass_through():
    async def scenario():
        async with fleet(1) as ((replica,), _, client):
            answer = await client.post(
                "/v1/completions?a=b%2F",
                content=b'{"prompt":  "odd   spacing"}',
                headers={"Content-Type": "application/json", "Authorization": "Bearer key"},
            )
            assert answer.json() == {"from": "0"}
            path, fields, body = replica.requests[0]
            assert path == "/v1/completions?a=b%2F"
            assert body == b'{"prompt":  "odd   spacing"}'
            assert fields["authorization"] == "Bearer key"
            assert fields["x-request-id"] == answer.headers["x-request-id"]

    run(scenario)


def test_streams_pass_through():
    async def scenario():
        async with fleet(1) as ((replica,), _, client):
            replica.answer = replica.stream
            answer = await post(client, stream=True)
            assert answer.headers["content-type"] == "text/event-stream"
            assert answer.text == 'data: {"n": 1}\n\ndata: [DONE]\n\n'

    run(scenario)


def test_replicas_take_turns():
    async def scenario():
        async with fleet(3) as (_, _, client):
            found = [(await post(client)).json()["from"] for _ in range(6)]
            assert found == ["0", "1", "2"] * 2

    run(scenario)


@pytest.mark.parametrize("fault", ["be_busy", "close", "hang"])
def test_a_request_without_an_answer_goes_to_another_replica(fault, monkeypatch):
    monkeypatch.setattr(backend_module, "LOST_AFTER_S", 0.0)

    async def scenario():
        async with fleet(2) as ((first, second), router, client):
            first.answer = getattr(first, fault)
            sent = asyncio.create_task(post(client))
            if fault == "hang":
                while not first.requests:
                    await asyncio.sleep(0.01)
                first.load = b"nonsense\r\n\r\n"
                await router.backends[0].poll()
            answer = await sent
            assert answer.json() == {"from": "1"}
            assert (len(first.requests), len(second.requests)) == (1, 1)
            text = (await client.get("/metrics")).text
            assert "llmpq_router_retries_total 1.0" in text
            assert router.backends[0].outstanding == router.num_open == 0

    run(scenario)


def test_a_replica_that_cannot_be_reached_is_out_until_it_answers_again():
    async def scenario():
        async with fleet(2) as ((first, _), router, client):
            first.stop()
            assert [(await post(client)).json()["from"] for _ in range(3)] == ["1"] * 3
            assert not router.backends[0].is_ready
            await first.start(first.port)
            await router.backends[0].poll()
            found = {(await post(client)).json()["from"] for _ in range(2)}
            assert found == {"0", "1"}

    run(scenario)


def test_the_last_refusal_is_the_answer_when_all_replicas_are_busy():
    async def scenario():
        async with fleet(2) as (replicas, _, client):
            for one in replicas:
                one.answer = one.be_busy
            answer = await post(client)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "9")
            assert all(len(one.requests) == 1 for one in replicas)

    run(scenario)


def test_without_a_replica_requests_are_refused():
    async def scenario():
        async with fleet(1) as ((replica,), router, client):
            replica.answer = replica.close
            answer = await post(client)
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "No replica can take the request."
            assert (await client.get("/health")).status_code == 200
            router.backends[0].fail()
            assert (await client.get("/health")).status_code == 503

    run(scenario)


def test_a_stream_that_breaks_off_ends_with_an_error_and_is_not_sent_again():
    async def scenario():
        async with fleet(2) as ((first, second), _, client):
            first.answer = first.break_off_stream
            events = (await post(client, stream=True)).text.split("\n\n")
            events = [event for event in events if event]
            assert events[0] == 'data: {"n": 1}'
            error = json.loads(events[1].removeprefix("data: "))["error"]
            assert error["message"] == "The replica was lost before the answer was complete."
            assert not second.requests

    run(scenario)


def test_a_stream_of_messages_that_breaks_off_ends_with_anthropics_error():
    async def scenario():
        async with fleet(1) as ((replica,), _, client):
            replica.answer = replica.break_off_stream
            answer = await client.post("/v1/messages", json=BODY | {"stream": True})
            name, data = answer.text.strip().split("\n\n")[-1].split("\n")
            assert name == "event: error"  # the client leaves out events without a name
            assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"

    run(scenario)


def test_an_answer_that_breaks_off_closes_the_connection():
    async def scenario():
        async with fleet(1) as ((replica,), router, client):
            replica.answer = replica.break_off_json
            with pytest.raises((httpx.HTTPError, AssertionError)):
                (await post(client)).json()
            assert router.num_open == 0

    run(scenario)


def test_a_draining_router_refuses_new_requests_and_ends_the_others():
    async def scenario():
        async with fleet(1) as ((replica,), router, client):
            replica.answer = replica.hang
            sent = asyncio.create_task(post(client))
            while not replica.requests:
                await asyncio.sleep(0.01)
            router.is_draining = True
            assert (await post(client)).status_code == 503
            assert router.num_open == 1
            replica.released.set()
            assert (await sent).status_code == 503

    run(scenario)


def test_statistics_are_read_and_what_was_sent_since_is_added():
    async def scenario():
        async with fleet(1) as (_, router, client):
            (one,) = router.backends
            await one.poll()
            before = one.view()
            assert (before.queued_tokens, before.free_tokens, before.requests) == (7, 893, 1)
            assert before.capacity.token_budget == 256
            means = means_of(router.backends)
            assert (means.prompt_tokens, means.new_tokens) == (10.0, 4.0)
            await post(client)
            assert one.view().queued_tokens > 7
            await one.poll()
            assert one.view() == before

    run(scenario)


def test_a_replica_that_drains_gets_no_requests():
    async def scenario():
        async with fleet(2) as ((first, _), router, client):
            first.load = http(json.dumps(LOAD | {"is_ready": False}).encode())
            await router.backends[0].poll()
            assert [(await post(client)).json()["from"] for _ in range(3)] == ["1"] * 3

    run(scenario)


@pytest.mark.parametrize(
    "load",
    [
        b"",
        b"nonsense\r\n\r\n",
        http(b"[]"),
        http(b"{"),
        http(json.dumps(LOAD | {"kv_tokens": 0}).encode()),
        http(json.dumps(LOAD | {"queued_tokens": -1}).encode()),
        http(json.dumps(LOAD | {"queued_tokens": "7"}).encode()),
        http(json.dumps(LOAD | {"decode_step_s": None}).encode()),
        http(json.dumps(LOAD).encode().replace(b"0.5", b"NaN")),
    ],
)
def test_malformed_statistics_take_a_replica_out(load, monkeypatch):
    monkeypatch.setattr(backend_module, "POLL_TIMEOUT_S", 0.05)

    async def scenario():
        async with fleet(1) as ((replica,), router, _):
            replica.load = load
            (one,) = router.backends
            await one.poll()
            assert one.is_ready  # one failure may be a pause
            await one.poll()
            assert not one.is_ready

    run(scenario)


@given(
    st.dictionaries(
        st.sampled_from(sorted(LOAD)),
        st.one_of(
            st.none(), st.booleans(), st.floats(), st.integers(), st.text(), st.lists(st.none())
        ),
    )
)
def test_any_statistics_are_a_report_or_an_error(changes):
    with contextlib.suppress(ValueError):
        report = report_of_load(LOAD | changes)
        assert report is None or report.capacity.kv_tokens > 0


def test_vllm_metrics_are_read():
    text = """\
# HELP vllm:num_requests_running Number
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="0",model_name="m"} 60.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 4.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 6.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
"""
    report = report_of_metrics(text)
    assert (report.stats.running, report.stats.waiting, report.stats.free_tokens) == (3, 2, 1200)
    assert report.capacity.kv_tokens == 1600
    assert report.totals == (100, 60, 10)
    with pytest.raises(ValueError, match="expected vllm:num_requests_running"):
        report_of_metrics("up 1\n")


def test_prompt_lengths_are_estimated_without_parsing():
    ids = json.dumps({"model": "m", "prompt": list(range(500))}).encode()
    assert abs(routed_request(ids).prompt_tokens - 500) <= 2
    text = json.dumps({"model": "m", "prompt": "word " * 800}).encode()
    assert routed_request(text).prompt_tokens == pytest.approx(1000, rel=0.02)
    assert routed_request(b"").prompt_tokens == 1


def test_equal_beginnings_have_equal_prefixes():
    first, second = (routed_request(b"x" * 600 + end).prefix for end in (b"a" * 300, b"b" * 300))
    assert len(first) == len(second) == 3
    assert first[:2] == second[:2]
    assert first[2] != second[2]


@pytest.mark.parametrize("url", ["ftp://a", "127.0.0.1:80", "http://", "http://a/?b"])
def test_an_address_that_is_not_one_is_an_error(url):
    with pytest.raises(SpecError, match="--replica: found"):
        Backend(0, url, None)


class Clock:
    """A clock that a test moves on."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_a_pause_of_the_router_is_no_silence_of_a_replica():
    clock = Clock()

    async def scenario():
        async with fleet(1, clock=clock) as ((replica,), router, client):
            (one,) = router.backends
            replica.answer = replica.hang
            sent = asyncio.create_task(post(client))
            while not replica.requests:
                await asyncio.sleep(0.01)
            answer, replica.load = replica.load, b"nonsense\r\n\r\n"
            clock.now_s += 3600.0  # a laptop sleeps, and the first poll then fails
            await one.poll()
            assert not sent.done()
            assert one.is_ready
            replica.load = answer
            await one.poll()
            assert one.is_ready
            replica.load = b"nonsense\r\n\r\n"
            for _ in range(3):  # the replica is silent for as long as its polls take
                assert one.outstanding == 1
                clock.now_s += backend_module.POLL_TIMEOUT_S
                await one.poll()
            assert (await sent).status_code == 503

    run(scenario)


def test_a_replica_that_fails_gets_a_request_now_and_then():
    clock = Clock()

    async def scenario():
        async with fleet(2, clock=clock) as ((bad, good), router, client):
            bad.answer = bad.fail
            statuses = [(await post(client)).status_code for _ in range(20)]
            assert statuses.count(500) == len(bad.requests) == backend_module.BREAKER_FAILURES
            for wait_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
                before = len(bad.requests)
                clock.now_s += wait_s
                for _ in range(6):
                    await post(client)
                assert len(bad.requests) == before + 1
            bad.answer = bad.complete
            clock.now_s += 30.0
            found = [(await post(client)).json()["from"] for _ in range(6)]
            assert found.count("0") == 3
            assert len(good.requests) > 40
            assert router.backends[0].is_preferred

    run(scenario)


def test_replicas_that_all_fail_still_get_requests():
    async def scenario():
        async with fleet(2) as (replicas, _, client):
            for one in replicas:
                one.answer = one.fail
            assert [(await post(client)).status_code for _ in range(12)] == [500] * 12
            assert sum(len(one.requests) for one in replicas) == 12

    run(scenario)


@pytest.mark.parametrize(("stream", "limit_s"), [(True, 7.0), (False, 70.0)])
def test_a_replica_without_a_first_byte_loses_the_request(stream, limit_s, monkeypatch):
    limits, timeout = [], asyncio.timeout

    def watched(seconds):
        limits.append((seconds, timeout(None)))  # it ends when the test says so
        return limits[-1][1]

    async def scenario():
        async with fleet(2, first_byte_s=7.0) as ((first, second), router, client):
            first.answer = first.hang
            monkeypatch.setattr(asyncio, "timeout", watched)
            sent = asyncio.create_task(post(client, stream=stream))
            while not first.requests:
                await asyncio.sleep(0.01)
            of_first_byte = [limit for seconds, limit in limits if seconds == limit_s]
            of_first_byte[0].reschedule(0.0)
            assert (await sent).json() == {"from": "1"}
            assert (len(first.requests), len(second.requests)) == (1, 1)
            assert router.backends[0].outstanding == 0
            monkeypatch.undo()

    run(scenario)


def test_a_header_that_no_client_can_read_goes_to_another_replica(caplog):
    async def scenario():
        async with fleet(2) as ((first, _), router, client):
            first.answer = first.odd_header
            assert (await post(client)).json() == {"from": "1"}
            router.backends[1].fail()
            assert (await post(client)).status_code == 503

    run(scenario)
    assert "Traceback" not in caplog.text


def test_the_origin_of_a_page_is_checked_by_the_router_alone():
    async def scenario():
        async with fleet(1) as ((replica,), _, client):
            headers = {"origin": "http://localhost:3000"}
            assert (await client.post("/v1/x", json={}, headers=headers)).status_code == 200
            assert "origin" not in replica.requests[0][1]
            headers = {"origin": "http://evil.example"}
            assert (await client.post("/v1/x", json={}, headers=headers)).status_code == 403

    run(scenario)
