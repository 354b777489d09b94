"""Requests that would stop the server or starve its neighbours: each limit, and what it says."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.served import CHAT_TEMPLATE, make_service, serving
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from llmpq.cli import server_options
from llmpq.dist.io.model_files import export_tokenizer
from llmpq.dist.io.sampling_params import SamplingParams, TokenLogprobs
from llmpq.dist.limited.limited_process import JobLimits
from llmpq.dist.transport.endpoint import Acceptor, Endpoint
from llmpq.errors import SpecError
from llmpq.options.server import TransportLimits
from llmpq.server import protocol, service
from llmpq.server.admission import (
    CORRECTION,
    LARGEST_CORRECTION,
    AdmissionLimits,
    RequestAdmission,
)
from llmpq.server.apis.openai import MAX_LOGPROB_VALUES, MAX_SHARED_IDS, CompletionFormat
from llmpq.server.app import build_app
from llmpq.server.errors import ApiError
from llmpq.server.json_output import PART_ITEMS, SharedItems, SharedList, dump_json, json_parts
from llmpq.server.service import ChoiceDelta, PreparedRequest, ServedModel
from llmpq.server.text import text_process
from llmpq.server.text.tokenizer import THREAD_CHARACTERS, ServerTokenizer
from llmpq.server.transport import LARGE_BODY_BYTES, RequestGuard

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
MESSAGE = {"role": "user", "content": "x"}


@pytest.fixture(autouse=True)
def children_import_this_checkout(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def client():
    with (
        serving(make_service(FakeEngine())) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as found,
    ):
        yield found


def tokenizer_with(template: str) -> ServerTokenizer:
    return ServerTokenizer(
        {
            "tokenizer": json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8")),
            "special_tokens": {},
            "chat_template": template,
        }
    )


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            "/v1/completions",
            {"prompt": "a", "n": 64, "stop_token_ids": [5] * 10**6},
            "stop_token_ids",
            f"at most {protocol.MAX_STOP_TOKENS} items",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "logit_bias": {str(n): 1 for n in range(2000)}},
            "logit_bias",
            f"at most {protocol.MAX_LOGIT_BIAS} items",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "allowed_token_ids": [5] * (1 + protocol.MAX_ALLOWED_TOKENS)},
            "allowed_token_ids",
            f"at most {protocol.MAX_ALLOWED_TOKENS} items",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "bad_words": ["x" * 2000]},
            "bad_words.0",
            f"at most {protocol.MAX_STOP_LENGTH} items after validation, not 2000",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "n": 128, "allowed_token_ids": list(range(3000))},
            "n",
            f"found 3000 entries for each of 128 answers, expected at most {MAX_SHARED_IDS}",
        ),
        (
            "/v1/completions",
            {"prompt": [[5] * 500] * 64, "n": 64, "max_tokens": 1},
            "n",
            "found 4096 answers (64 prompts with n = 64), expected at most 2048",
        ),
        (
            "/v1/completions",
            {"prompt": [[5] * 500] * 32, "n": 16, "max_tokens": 1, "echo": True, "logprobs": 20},
            "logprobs",
            f"found up to 5386752 values in 512 answers, expected at most {MAX_LOGPROB_VALUES}",
        ),
        ("/v1/completions", {"prompt": "a", "best_of": 4}, "best_of", "found 4, expected none"),
        (
            "/v1/chat/completions",
            {"messages": [MESSAGE] * 5000},
            "messages",
            f"at most {protocol.MAX_MESSAGES} items",
        ),
        (
            "/tokenize",
            {"messages": [MESSAGE], "tools": [{}] * 2000},
            "tools",
            f"at most {protocol.MAX_TOOLS} items",
        ),
        (
            "/v1/chat/completions",
            {"messages": [MESSAGE], "chat_template_kwargs": {f"v{n}": 1 for n in range(100)}},
            "chat_template_kwargs",
            f"at most {protocol.MAX_TEMPLATE_VARIABLES} items",
        ),
        (
            "/detokenize",
            {"tokens": [5] * (1 + protocol.MAX_DETOKENIZED)},
            "tokens",
            f"at most {protocol.MAX_DETOKENIZED} items",
        ),
    ],
)
def test_lists_of_a_request_are_bounded(client, path, body, param, message):
    answer = client.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_best_of_that_changes_nothing_is_accepted(client):
    for more in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": None}):
        assert client.post("/v1/completions", json={"prompt": "a"} | more).status_code == 200


def test_answers_of_one_request_form_a_group():
    with (
        serving(make_service(FakeEngine())) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
    ):
        client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
        client.post("/v1/completions", json={"prompt": "a"})
        groups = [one.group for one in served.engine.requests.values()]
    assert len(groups) == 5
    assert len(set(groups[:4])) == 1
    assert groups[0] is not None
    assert groups[4] is None


def test_seeds_of_answers_change_nothing_else():
    given = SamplingParams(temperature=1.0, stop_token_ids=(5, 6), logit_bias={7: 1.0})
    found = given.with_seed(9)
    assert found == SamplingParams(
        temperature=1.0, stop_token_ids=(5, 6), logit_bias={7: 1.0}, seed=9
    )
    assert given.seed is None


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a'.center(20000000000) }}",
    ],
)
def test_a_template_that_does_not_end_stops_no_one(template, monkeypatch):
    monkeypatch.setattr(text_process, "TEMPLATE_LIMITS", JobLimits(cpu_s=1.0))
    tokenizer = tokenizer_with(template)
    body = {"messages": [MESSAGE]}
    with (
        serving(make_service(FakeEngine(), tokenizer=tokenizer)) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as neighbour,
    ):
        answers = []
        attack = threading.Thread(
            target=lambda: answers.append(client.post("/v1/chat/completions", json=body))
        )
        attack.start()
        assert neighbour.get("/health").status_code == 200
        assert neighbour.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        attack.join()
    error = answers[0].json()["error"]
    assert (answers[0].status_code, error["param"]) == (400, "messages")
    assert "chat template" in error["message"]
    tokenizer.close()


def test_templates_render_as_in_this_process():
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    text = asyncio.run(tokenizer.render([MESSAGE], tools=[{"a": "é"}], add_generation_prompt=True))
    assert text == '<user>x\n[{"a": "é"}]\n<assistant>'
    with pytest.raises(ApiError, match="no text to continue") as found:
        asyncio.run(tokenizer.render([{"role": "user"}], continue_final_message=True))
    assert found.value.param == "continue_final_message"
    tokenizer.close()


def test_long_texts_have_the_tokens_of_this_process():
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    long = "The server listens on é. " * (THREAD_CHARACTERS // 20)
    texts = ["short", long, "another"]
    for special in (True, False):
        found = asyncio.run(
            tokenizer.encode_async(texts, max_tokens=1 << 20, add_special_tokens=special)
        )
        assert found == [tokenizer.encode(text, add_special_tokens=special) for text in texts]
    tokenizer.close()


def test_a_text_that_takes_too_long_is_a_bad_request(monkeypatch):
    monkeypatch.setattr(text_process, "ENCODE_LIMITS", JobLimits(cpu_s=0.5))
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    with pytest.raises(ApiError, match=r"found 24000000 characters, whose tokens take more than"):
        asyncio.run(tokenizer.encode_async(["a b " * 6_000_000], max_tokens=1 << 24))
    tokenizer.close()


def test_tokenize_says_its_limit(client):
    answer = client.post("/tokenize", json={"prompt": "a" * 7_000_000})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert "found 7000000" in error["message"] or "7000000 characters" in error["message"]


def test_pages_of_other_sites_are_refused_without_keys(client):
    body = b'{"prompt": "a"}'
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "https://evil.example:8000"},
        {"origin": "null"},
        {"origin": "http://["},
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1.evil.example"},
    ):
        answer = client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 403, headers
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (403, "PermissionDeniedError")
        assert "--api_key_file" in error["message"]
    for headers in (
        {},
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1"},
        {"origin": "app://a-program"},
        {"host": "localhost"},
        {"host": "[::1]:8000"},
        {"host": "192.168.1.5:8000"},
    ):
        answer = client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"} | headers
        )
        assert answer.status_code == 200, headers


def test_keys_replace_the_check_of_the_site():
    key = "a-key-of-16-bytes"
    with (
        serving(make_service(FakeEngine()), api_keys=(key,)) as served,
        httpx.Client(base_url=served.url) as client,
    ):
        headers = {"authorization": f"Bearer {key}", "origin": "https://ours.example"}
        answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.status_code == 200


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("keys", [(), ("a-key-of-16-bytes",)])
@pytest.mark.parametrize(
    ("allowed", "origin", "is_allowed"),
    [
        (("https://ours.example",), "https://ours.example", True),
        (("https://ours.example",), "https://evil.example", False),
        (("*",), "https://any.example", True),
        ((), "https://ours.example", False),
    ],
)
def test_pages_of_allowed_origins_alone_may_read_answers(keys, allowed, origin, is_allowed):
    app = build_app(make_service(FakeEngine()), None, keys, allowed_origins=allowed)

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            client.headers["origin"] = origin
            before = await client.options("/v1/completions", headers=PREFLIGHT)
            body, headers = {"prompt": "a"}, {"authorization": f"Bearer {''.join(keys)}"}
            return before, await client.post("/v1/completions", json=body, headers=headers)

    for answer in asyncio.run(ask()):
        shown = answer.headers.get("access-control-allow-origin")
        assert shown == (("*" if "*" in allowed else origin) if is_allowed else None)
        assert not is_allowed or answer.status_code == 200
    if not is_allowed and not keys:
        assert answer.status_code == 403


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00"]
)
def test_what_is_no_http_is_answered_in_json_without_a_line_of_the_log(client, data, caplog):
    caplog.set_level(logging.INFO)
    address = client.base_url.host, client.base_url.port
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        sock.sendall(data)
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    assert json.loads(body)["error"]["code"] == 400
    assert not [one for one in caplog.records if "Invalid HTTP" in one.getMessage()]


def bounded(limit: int = 1000, bound_s: float = 2.0) -> RequestAdmission:
    return RequestAdmission(AdmissionLimits(max_num_queued_tokens=limit, ttft_bound_s=bound_s))


def test_the_bound_of_the_first_token_follows_what_is_measured(caplog):
    """A server of a quarter of the forecast rate: the limit becomes that of its own rate."""
    admission = bounded()
    for _ in range(200):
        queued = int(admission.max_queued_tokens)
        admission.measure(queued, queued / 125)  # the forecast is 500 tokens a second
    assert admission.max_queued_tokens == pytest.approx(250, rel=0.02)
    assert caplog.text.count("--ttft_bound: prompts take longer") == 1
    with admission.admit(1, 249), pytest.raises(ApiError, match="limit of queued tokens"):
        admission.admit(1, 10)
    for _ in range(2000):  # it is faster than forecast
        queued = int(admission.max_queued_tokens)
        admission.measure(queued, queued / 50_000)
    assert admission.max_queued_tokens == LARGEST_CORRECTION * 1000


def test_short_waits_of_an_empty_queue_change_no_bound():
    admission = bounded()
    admission.measure(10, 0.5)  # 20 tokens a second: most of it is no prefill
    assert admission.max_queued_tokens == 1000
    admission.measure(10, 4.0)  # that is too long
    assert admission.max_queued_tokens == 1000 + CORRECTION * (5 - 1000)


def test_a_fixed_limit_is_not_corrected():
    admission = RequestAdmission(AdmissionLimits(max_num_queued_tokens=1000))
    admission.measure(1000, 60.0)
    assert admission.max_queued_tokens == 1000


def test_times_to_the_first_token_reach_the_limit():
    limits = AdmissionLimits(max_num_queued_tokens=10, ttft_bound_s=1e-9)
    with (
        serving(make_service(FakeEngine(), limits=limits)) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client,
    ):
        client.post("/v1/completions", json={"prompt": [5] * 9, "max_tokens": 1})
        assert served.service.admission.max_queued_tokens < 10


class FullDisk:
    """A stream on a full disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_full_disk_behind_an_output_ends_no_server(name, monkeypatch, capsys, tmp_path):
    full = FullDisk(tmp_path / "log")
    monkeypatch.setattr(server_options.sys, name, full)
    options = server_options.argparse.Namespace(json=False)
    server_options.say_ready(options, {"url": "http://127.0.0.1:1"})
    full.close()
    found = capsys.readouterr()
    assert "ready http://127.0.0.1:1" in found.out + found.err


def test_an_acceptor_goes_on_after_an_error_of_accept():
    token, purpose = b"a token of 16 byt", b"test"
    listener = socket.create_server(("127.0.0.1", 0))

    class Failing:
        """A listener that fails at first, as when there are too many open files."""

        def __init__(self):
            self.errors = [errno.ECONNABORTED, errno.EMFILE]

        def accept(self):
            if self.errors:
                raise OSError(self.errors.pop(0), "no connection")
            return listener.accept()

    acceptor = Acceptor([Failing()], token, [purpose])
    endpoint = Endpoint(address=listener.getsockname())
    deadline_s = time.monotonic() + PATIENCE_S
    with endpoint.connect_authenticated(token, purpose, deadline_s) as sock:
        found, accepted = acceptor.take(deadline_s)
        assert found == purpose
        accepted.close()
        assert sock.recv(1) == b""
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_tokenizer_that_is_code_is_refused_in_own_words(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("Please pass the argument `trust_remote_code=True` to allow custom code.")

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(SpecError, match="llmpq never runs") as found:
        export_tokenizer(tmp_path)
    assert "trust_remote_code" not in str(found.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=30,
)


@settings(max_examples=50)
@given(value=JSON, long=st.integers(0, 3 * PART_ITEMS))
def test_json_in_parts_is_the_same_json(value, long):
    for whole in (value, {"a": [value] * long, "b": value}):
        assert b"".join(json_parts(whole)) == dump_json(whole)


@settings(max_examples=50)
@given(items=st.lists(JSON, max_size=3 * PART_ITEMS), rests=st.lists(st.lists(JSON), max_size=3))
@example(items=[None], rests=[[None] * (PART_ITEMS + 1)])
def test_lists_that_begin_alike_are_the_same_json(items, rests):
    shared = SharedItems(items)
    for rest in rests:
        value = {"a": SharedList(shared, rest)}
        assert b"".join(json_parts(value)) == dump_json(value) == dump_json({"a": items + rest})


def test_others_run_between_the_parts_of_a_long_answer():
    values = {"top_logprobs": [{"a" * 100: 1.0}] * 20 * PART_ITEMS, "text": "x"}
    turns = []

    async def scenario():
        async def other():
            while True:
                turns.append(None)
                await asyncio.sleep(0)

        spent_s = []

        async def pause(seconds):
            spent_s.append(seconds)
            await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        whole = await service.dump_in_parts(values, pause)
        beside.cancel()
        assert b"".join(whole) == dump_json(values)
        assert len(spent_s) >= 20
        assert min(spent_s) >= 0

    asyncio.run(scenario())
    assert len(turns) >= 20


@pytest.mark.parametrize(
    ("streams", "pause_s"), [((), 0), (("own",), 0), (("other",), 0.25), (("own", "other"), 0.25)]
)
def test_a_long_answer_pauses_as_long_as_its_parts_take_beside_others(
    monkeypatch, streams, pause_s
):
    """An answer that is written whole has no stream any more."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    answer = object.__new__(service.RequestHandler)
    answer._service, answer._stream = SimpleNamespace(streams=set(streams)), "own"
    monkeypatch.setattr(service.asyncio, "sleep", sleep)
    asyncio.run(answer._pause(0.25))
    assert slept == [pause_s]


def test_large_bodies_leave_all_other_work_as_much_time_as_each_takes():
    pieces, small = [], []

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        start_s = time.monotonic()
        if scope["path"] == "large":
            time.sleep(0.02)
            pieces.append((start_s, time.monotonic()))
        else:
            small.append(start_s)

    async def scenario():
        gate = RequestGuard(app, TransportLimits(), lambda: None)

        async def call(path, size):
            async def receive():
                return {"type": "http.request", "body": bytes(size), "more_body": False}

            scope = {"type": "http", "method": "POST", "path": path, "headers": []}
            await gate(scope, receive, None)

        large = [asyncio.create_task(call("large", 1 + LARGE_BODY_BYTES)) for _ in range(4)]
        await asyncio.sleep(0)
        await call("small", 10)
        await asyncio.gather(*large)

    asyncio.run(scenario())
    assert len(pieces) == 4
    for (start_s, end_s), (next_s, _) in pairwise(pieces):
        assert next_s - end_s > 0.9 * (end_s - start_s)
    assert small[0] < pieces[1][0]


def test_logprobs_of_a_prompt_are_made_once_for_all_its_answers_but_are_those_of_each():
    body = protocol.CompletionRequest(
        prompt=[[2, 3], [4]], n=3, max_tokens=1, echo=True, logprobs=2
    )
    prompts = ((2, 3), (4,))
    request = PreparedRequest(prompts=prompts, sampling=SamplingParams(), n=3, echoes=("ab", "c"))
    model = ServedModel(
        names=("m",), root=".", tokenizer=None, max_model_len=100, vocab_size=10
    )  # fmt: skip
    form = CompletionFormat(body, model, request, "id")
    for index in (0, 3, 1, 4, 5, 2):
        ids = prompts[index // 3]
        found = [TokenLogprobs(token, -float(token), ((token, -1.0),)) for token in ids[1:]]
        delta = ChoiceDelta(
            index=index, is_first=True, text="d", token_ids=[5], offsets=[0],
            logprobs=[TokenLogprobs(5, -float(index))], prompt_logprobs=(None, *found),
        )  # fmt: skip
        made = form.items(delta)[0]["logprobs"]
        assert made["tokens"] == [f"token_id:{token}" for token in (*ids, 5)]
        assert made["token_logprobs"] == [None, *(-float(one) for one in ids[1:]), -float(index)]
        assert all(len(values) == len(ids) + 1 for values in made.values())
