"""Limits: queues, bodies, headers, keys, slow readers and clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import time
from pathlib import Path

import httpx
import pytest
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.served import Served, demo_tokenizer, make_service, serving
from prometheus_client.parser import text_string_to_metric_families

from llmpq.dist.io.generation import ServingStats
from llmpq.errors import SpecError
from llmpq.options.server import TransportLimits
from llmpq.server import protocol
from llmpq.server.admission import (
    AdmissionLimits,
    RequestAdmission,
    prefill_tokens_per_s,
    queued_tokens_for,
    token_budget_for,
)
from llmpq.server.errors import ApiError
from llmpq.spec.plan import read_plan

ROOT = Path(__file__).resolve().parents[2]
SECRET_TEXT = "a-text-that-no-log-may-hold"
GIB = 1 << 30


def wait_until(condition, timeout_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def completion(port: int, **fields: object) -> bytes:
    """Return the bytes of a completion request."""
    body = json.dumps({"prompt": [5, 6], **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def connect(served: Served) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(1 << 16):
        data += part
    return data


def test_full_queue_is_refused_at_once_and_says_when_to_come_back():
    engine = FakeEngine(step_s=0.02, max_model_len=100_000)
    limits = AdmissionLimits(max_num_queued_reqs=4)
    with (
        serving(make_service(engine, limits=limits)) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
    ):
        readers = [connect(served) for _ in range(4)]
        for sock in readers:
            sock.sendall(completion(served.port, max_tokens=90_000, stream=True))
        wait_until(lambda: len(engine.active) == 4)
        for _ in range(40):
            answer = client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert client.get("/load").json()["server_load"] == 4
        for sock in readers:
            sock.close()
        wait_until(lambda: not engine.active)
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 200
        assert served.service.admission.rejections["max_num_queued_reqs"] == 40


def test_full_server_refuses_before_the_body_arrives():
    engine = FakeEngine(step_s=0.02, max_model_len=100_000)
    service = make_service(engine, limits=AdmissionLimits(max_num_queued_reqs=1))
    with serving(service) as served, connect(served) as holder, connect(served) as sock:
        holder.sendall(completion(served.port, max_tokens=90_000, stream=True))
        wait_until(lambda: len(engine.active) == 1)
        body = json.dumps({"prompt": [5], "max_tokens": 1}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        sock.sendall(head)
        assert read_answer(sock).startswith(b"HTTP/1.1 503 ")
        holder.close()
        wait_until(lambda: not engine.active)
        # The late body is skipped, and the connection goes on.
        sock.sendall(body + head + body)
        assert read_answer(sock).startswith(b"HTTP/1.1 200 ")


def test_refused_body_that_never_arrives_ends_the_connection():
    engine = FakeEngine()
    limits = TransportLimits(read_timeout_s=1.0)
    with serving(make_service(engine), limits) as served, connect(served) as sock:
        served.service.admission.is_draining = True
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert read_answer(sock).startswith(b"HTTP/1.1 503 ")
        assert closes(sock)


def read_answer(sock: socket.socket) -> bytes:
    """Return the bytes of one answer with a JSON body."""
    data = b""
    while not data.endswith(b"}"):
        part = sock.recv(1 << 16)
        assert part, data
        data += part
    return data


@pytest.mark.parametrize("texts", [["one text"], ["a", "", "b c"], ["The server listens. " * 500]])
def test_texts_are_encoded_alike_here_and_in_a_thread(texts):
    tokenizer = demo_tokenizer()
    for special in (True, False):
        found = asyncio.run(
            tokenizer.encode_async(texts, max_tokens=10_000, add_special_tokens=special)
        )
        assert found == [tokenizer.encode(text, add_special_tokens=special) for text in texts]
    tokens = [token for text in texts for token in tokenizer.encode(text)]
    text = asyncio.run(tokenizer.decode_async(tokens))
    assert text == tokenizer.decode(tokens, skip_special_tokens=False)


def test_event_loop_goes_on_while_a_long_text_is_encoded():
    text = "The server listens on the port. " * 5_000

    async def steps() -> int:
        encoding = asyncio.create_task(demo_tokenizer().encode_async([text], max_tokens=1 << 20))
        count = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            count += 1
        return count

    assert asyncio.run(steps()) >= 5  # at most 2 if the encoder held the interpreter's lock


@pytest.mark.parametrize("tokens", [[True], [5, False], [1.0], ["x", 1], [-1], [2**31], [5, None]])
def test_prompts_of_other_values_than_tokens_are_refused(tokens):
    for value in (tokens, [[5], tokens]):
        with pytest.raises(ValueError, match="expected"):
            protocol.parse_prompts(value)


def test_queued_tokens_count_until_the_first_token():
    engine = FakeEngine()
    limits = AdmissionLimits(max_num_queued_tokens=10)
    with (
        serving(make_service(engine, limits=limits)) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
    ):
        served.call(engine.starts.clear)
        held = [connect(served) for _ in range(2)]
        for sock in held:
            sock.sendall(completion(served.port, prompt=[5] * 5, max_tokens=2))
        wait_until(lambda: served.service.admission.queued_tokens == 10)
        assert client.post("/v1/completions", json={"prompt": [5]}).status_code == 503
        for engine.started_tokens, waiting in ((0, 10), (5, 5), (15, 0)):
            found = client.get("/load").json()
            assert (found["queued_tokens"], found["waiting_tokens"]) == (10, waiting)
        served.call(engine.starts.set)
        wait_until(lambda: served.service.admission.num_choices == 0)
        assert served.service.admission.queued_tokens == 0
        # A single request may be longer than the limit.
        answer = client.post("/v1/completions", json={"prompt": [5] * 50, "max_tokens": 1})
        assert answer.status_code == 200
        for sock in held:
            sock.close()


def test_answers_count_with_n():
    admission = RequestAdmission(AdmissionLimits(max_num_queued_reqs=4))
    with admission.admit(3, 10):
        with pytest.raises(ApiError, match="limit of queued requests"):
            admission.admit(2, 10)
        with admission.admit(1, 10):
            assert admission.num_choices == 4
    assert (admission.num_choices, admission.queued_tokens) == (0, 0)


def plan(model: str = "opt-13b"):
    path = sorted((ROOT / "strategies").glob(f"{model}__*__llmpq.json"))[0]
    return read_plan(path)


def test_bound_of_the_first_token_becomes_a_number_of_tokens():
    found = plan()
    times = [max(s.prefill_s, s.send_prefill_s) for s in found.estimate.stages]
    rate = found.micro_batching.prefill * found.workload.prompt_tokens / max(times)
    assert prefill_tokens_per_s(found) == pytest.approx(rate)
    bound_s = 100 * sum(times)
    tokens = queued_tokens_for(found, bound_s)
    # The last of these tokens waits for the slowest stage, then passes the other stages.
    assert tokens / rate + sum(times) - max(times) <= bound_s
    more_s = (tokens + 1) / rate + sum(times) - max(times)
    assert more_s >= bound_s * (1 - 1e-9)


def test_bound_that_one_prompt_breaks_is_refused():
    with pytest.raises(SpecError, match="--ttft_bound: found 1e-06 s, expected at least"):
        queued_tokens_for(plan(), 1e-6)


@pytest.mark.parametrize("times", [1.001, 1.5, 3, 1e6])
@pytest.mark.parametrize("model", ["opt-13b", "bloom"])
def test_bound_between_tokens_becomes_a_token_budget(model, times):
    found = plan(model)
    stages, sizes = found.estimate.stages, found.micro_batching
    prompt = sizes.prefill * found.workload.prompt_tokens

    def token_s(budget: int) -> float:
        """The forecast: the slowest stage once for every stage."""
        more = (budget - sizes.decode) / prompt
        return len(stages) * max(
            max(s.decode_s, s.send_decode_s) + more * max(s.prefill_s, s.send_prefill_s)
            for s in stages
        )

    bound_s = times * token_s(sizes.decode)
    budget = token_budget_for(found, bound_s)
    assert sizes.decode <= budget <= max(prompt, sizes.decode)
    assert token_s(budget) <= bound_s * (1 + 1e-9)
    assert budget == max(prompt, sizes.decode) or token_s(budget + 1) > bound_s * (1 - 1e-9)


@pytest.mark.parametrize("bound_s", [0.0, 1e-6, float("nan"), float("inf")])
def test_bound_between_tokens_that_decoding_breaks_is_refused(bound_s):
    with pytest.raises(SpecError, match=r"--itl_bound: found .* expected at least"):
        token_budget_for(plan(), bound_s)


def test_huge_body_is_refused_before_it_is_read():
    with serving(make_service(FakeEngine())) as served, connect(served) as sock:
        sock.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {GIB}\r\n\r\n".encode()
        )
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"code":413' in answer


def test_streamed_body_is_refused_at_the_limit():
    limits = TransportLimits(max_body_bytes=100_000)
    with serving(make_service(FakeEngine()), limits) as served, connect(served) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        sent = 0
        chunk = b"%x\r\n%s\r\n" % (10_000, b" " * 10_000)
        try:
            while sent < 50_000_000:
                sock.sendall(chunk)
                sent += 10_000
        except OSError:
            pass
        assert sent < 50_000_000
        wait_until(lambda: not served.engine.active)
    with serving(make_service(FakeEngine()), limits) as served:
        body = [b" " * 60_000] * 2
        with httpx.Client(timeout=PATIENCE_S) as client:
            answer = client.post(
                f"{served.url}/v1/completions",
                content=iter(body),
                headers={"content-type": "application/json"},
            )
        assert answer.status_code == 413


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + b"A: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"A: x\r\n" * 1000 + b"\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_large_headers_are_refused(head):
    with serving(make_service(FakeEngine())) as served, connect(served) as sock:
        try:
            sock.sendall(head)
            answer = read_all(sock)
        except OSError:  # closed while it was still sent
            return
        assert answer.startswith(b"HTTP/1.1 400 ")


def test_connection_without_a_request_is_closed():
    limits = TransportLimits(read_timeout_s=1.0)
    with serving(make_service(FakeEngine()), limits) as served:
        for sent in (b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
            with connect(served) as sock:
                sock.sendall(sent)
                assert closes(sock)
        with connect(served) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            assert read_all(sock).startswith(b"HTTP/1.1 408 ")


def closes(sock: socket.socket) -> bool:
    try:
        return sock.recv(100) == b""
    except ConnectionError:
        return True


def test_reader_that_takes_nothing_is_disconnected_and_stalls_no_one():
    engine = FakeEngine(step_s=0.0, max_model_len=1_000_000)
    limits = TransportLimits(write_timeout_s=1.0)
    with (
        serving(make_service(engine), limits) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
        socket.socket() as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", served.port))
        sock.sendall(completion(served.port, max_tokens=900_000, stream=True, logprobs=5))
        wait_until(lambda: engine.made > 2_000)
        for _ in range(5):
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 20})
            assert answer.status_code == 200
        wait_until(lambda: not engine.active)
        assert len(engine.aborted) == 1
        assert served.service.admission.num_choices == 0


def test_slow_reader_gets_the_whole_text_in_fewer_pieces():
    engine = FakeEngine(max_model_len=20_000)
    with serving(make_service(engine)) as served, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE_S)
        sock.connect(("127.0.0.1", served.port))
        sock.sendall(
            completion(
                served.port,
                max_tokens=10_000,
                stream=True,
                temperature=0,
                ignore_eos=True,
                logprobs=5,
            )
        )
        wait_until(lambda: engine.made == 10_000)  # the engine did not wait for the reader
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(1 << 16)
        lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
        chunks = [json.loads(line[6:]) for line in lines]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        with httpx.Client(timeout=PATIENCE_S) as client:
            whole = client.post(
                f"{served.url}/v1/completions",
                json={"prompt": [5, 6], "max_tokens": 10_000, "temperature": 0, "ignore_eos": True},
            ).json()
        assert text == whole["choices"][0]["text"]
        assert len(chunks) < 9_000


def test_half_of_200_connections_hang_up_and_the_others_get_their_answer():
    engine = FakeEngine(step_s=0.001)
    with serving(make_service(engine)) as served:
        done = asyncio.run(many(served, 200))
        wait_until(lambda: not engine.active)
        assert done == 100
        assert served.service.admission.num_choices == 0
        assert served.service.admission.queued_tokens == 0


async def many(served: Served, count: int) -> int:
    """Open connections of which every second one hangs up; return how many saw the end."""

    async def one(number: int) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(completion(served.port, max_tokens=60, stream=True, ignore_eos=True))
        await writer.drain()
        if number % 2:
            await reader.read(random.Random(number).randrange(1, 400))
            writer.transport.abort()
            return False
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            part = await reader.read(1 << 16)
            assert part, "the stream ended early"
            data += part
        writer.close()
        assert data.count(b"data: [DONE]") == 1
        chunks = [json.loads(line[6:]) for line in data.split(b"\n") if line[:7] == b"data: {"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        return True

    return sum(await asyncio.gather(*(one(number) for number in range(count))))


def test_1000_malformed_bodies_are_bad_requests():
    values = random.Random(1)
    valid = json.dumps(
        {"prompt": ["x", "y"], "n": 2, "stop": ["a"], "logit_bias": {"5": 1}, "max_tokens": 3}
    ).encode()
    with serving(make_service(FakeEngine())) as served, httpx.Client(timeout=PATIENCE_S) as client:
        for _ in range(1000):
            body = bytearray(valid)
            for _ in range(values.randrange(1, 6)):
                place = values.randrange(len(body))
                body[place : place + values.randrange(4)] = values.choice(
                    [
                        b"[",
                        b"}",
                        b'"',
                        b"\xff",
                        b"1e999",
                        b"null",
                        b"-1",
                        b"\\ud800",
                        b"{}",
                        b"\x00",
                    ]
                )
            path = values.choice(["/v1/completions", "/v1/chat/completions", "/tokenize"])
            answer = client.post(
                served.url + path,
                content=bytes(body),
                headers={"content-type": "application/json"},
            )
            assert answer.status_code in (200, 400), (bytes(body), answer.text)
        assert client.get(f"{served.url}/health").status_code == 200
        assert served.service.admission.num_choices == 0


def test_keys_are_asked_for_everywhere_but_where_only_numbers_are():
    keys = ("first-key-0123456789", "second-key-0123456789")
    with (
        serving(make_service(FakeEngine()), api_keys=keys) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
    ):
        for path in ("/health", "/ping", "/metrics", "/load", "/version"):
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/openapi.json", "/nothing"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == 401
        for given in ("Bearer wrong", "Basic first-key-0123456789", "Bearer é", "Bearer"):
            answer = client.get("/v1/models", headers={"authorization": given.encode()})
            assert answer.status_code == 401
        for key in keys:
            headers = {"authorization": f"Bearer {key}"}
            assert client.get("/v1/models", headers=headers).status_code == 200
        answer = client.post("/tokenize", json={"prompt": "x"})
        assert answer.status_code == 401


def test_request_id_is_returned_and_made_when_missing():
    with (
        serving(make_service(FakeEngine())) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
    ):
        answer = client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine-1"}
        )
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.json()["id"] == "cmpl-mine-1"
        bad = client.get("/health", headers={"x-request-id": "a b" * 100})
        assert len(bad.headers["x-request-id"]) == 32


def test_no_log_holds_text_of_a_request(caplog, monkeypatch):
    monkeypatch.setattr(protocol, "_logged", set())  # other tests may have filled it
    with (
        caplog.at_level(logging.DEBUG),
        serving(make_service(FakeEngine())) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
    ):
        served.engine.fails_after = 1
        message = {"role": "user", "content": SECRET_TEXT}
        client.post("/v1/completions", json={"prompt": SECRET_TEXT, SECRET_TEXT[:5]: SECRET_TEXT})
        client.post("/v1/chat/completions", json={"messages": [message], "stream": True})
        client.post("/v1/chat/completions", json={"messages": [message, {"x": SECRET_TEXT}]})
        client.post("/tokenize", json={"prompt": [SECRET_TEXT]})
    assert "ignored the unknown field" in caplog.text
    assert SECRET_TEXT not in caplog.text


def test_health_follows_the_engine_and_the_drain():
    service = make_service(FakeEngine())
    with (
        serving(service) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
    ):
        assert client.get("/health").status_code == 200
        service.engine.is_alive = False  # while it restarts
        assert client.get("/health").status_code == 503
        service.engine.is_alive = True
        service.admission.is_draining = True
        assert client.get("/ping").status_code == 503
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]


def test_metrics_have_the_names_and_values_of_vllm():
    service = make_service(FakeEngine())
    with (
        serving(service) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
    ):
        for _ in range(3):
            client.post(
                "/v1/completions",
                json={"prompt": [5, 6], "max_tokens": 4, "n": 2, "ignore_eos": True},
            )
        text = client.get("/metrics").text
    found = {
        (sample.name, sample.labels.get("finished_reason")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }

    def value(name: str, reason: str | None = None) -> float:
        sample = found[name, reason]
        assert sample.labels["model_name"] == "demo"
        return sample.value

    assert value("vllm:generation_tokens_total") == 24
    assert value("vllm:prompt_tokens_total") == 12
    assert value("vllm:request_success_total", "length") == 6
    assert value("vllm:request_success_total", "stop") == 0
    assert value("vllm:time_to_first_token_seconds_count") == 6
    assert value("vllm:inter_token_latency_seconds_count") == 18
    assert value("vllm:e2e_request_latency_seconds_count") == 6
    assert value("vllm:request_params_n_sum") == 6
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert value(f"vllm:spec_decode_num_{name}_total") == 0
    for name, kind in (
        ("kv_offload_bytes", ""), ("kv_offload_saves", "_total"), ("kv_offload_loads", "_total"),
    ):  # fmt: skip
        for tier, expected in (("host", 1000.0), ("disk", 2000.0)):
            line = f'vllm:{name}{kind}{{engine="0",model_name="demo",tier="{tier}"}} {expected}'
            assert line in text.splitlines()
    for tier, expected in (("blocks", 300.0), ("host", 20.0), ("disk", 1.0)):
        labels = f'{{engine="0",model_name="demo",tier="{tier}"}}'
        assert f"vllm:prefix_cache_tier_hits_total{labels} {expected}" in text.splitlines()
    assert value("vllm:kv_offload_unread_total") == 3
    assert value("vllm:num_requests_running") == 0
    assert value("vllm:num_requests_waiting") == 0
    assert value("vllm:kv_cache_usage_perc") == ServingStats().kv_cache_usage
    assert found["vllm:cache_config_info", None].labels["block_size"] == "16"
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001"' in text
    assert 'le="2560.0"' in text
