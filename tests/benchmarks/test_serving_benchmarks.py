"""The parts of the serving benchmarks that need no server: load, summaries, requests, reports."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from llmpq.cli.commands import algo, sim
from llmpq.spec.workload import load_trace

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "faults")]

import load  # noqa: E402
import online  # noqa: E402
import server  # noqa: E402
import servers  # noqa: E402
from load import Query, Sample  # noqa: E402

pytestmark = pytest.mark.nightly


def options_of(folder: Path, *words: str) -> Namespace:
    return online._parser().parse_args(["--folder", str(folder), *words])


# load


def sample(number: int, **values: Any) -> Sample:
    times = {"due_s": 1.0, "sent_s": 1.5, "first_s": 2.0 + number, "end_s": 4.0 + number}
    whole = {"prompt_tokens": 10, "new_tokens": 5, "reason": "length", **times, **values}
    return Sample(number=number, **whole)


def test_summary_counts_from_the_time_a_request_was_due():
    samples = [sample(number) for number in range(20)]
    found = load.summary([*samples, sample(99, reason="error: x"), sample(98, reason="")])
    assert (found["requests"], found["failed"], found["errors"]) == (22, 2, ["error: x", ""])
    assert found["seconds"] == 23.0 - 1.5
    assert found["output_tokens_per_s"] == pytest.approx(100 / 21.5, abs=1e-3)
    assert found["requests_per_s"] == pytest.approx(20 / 21.5, abs=1e-4)
    waits = [1.0 + number for number in range(20)]
    for at in (50, 95, 99):
        assert found["ttft_s"][f"p{at}"] == pytest.approx(np.percentile(waits, at))
        assert found["normalized_ttft_s"][f"p{at}"] == pytest.approx(np.percentile(waits, at) / 10)
    assert found["total_generation_time_s"]["mean"] == pytest.approx(12.5)
    assert set(found["time_per_output_token_s"].values()) == {0.5}
    assert set(found["late_s"].values()) == {0.5}


def test_summary_of_failures_alone_has_no_figures():
    found = load.summary([sample(0, reason="error: refused")])
    assert found == {"requests": 1, "failed": 1, "errors": ["error: refused"]}


def test_single_tokens_have_no_time_per_token():
    assert load.summary([sample(0, new_tokens=1)])["time_per_output_token_s"] == {}


def test_rows_have_the_columns_of_a_sample():
    (row,) = load.rows([sample(3, first_s=2.123456)])
    found = dict(zip(load.SAMPLE_COLUMNS, row, strict=True))
    assert (found["number"], found["first_s"], found["reason"]) == (3, 2.1235, "length")


def test_prompts_are_tokens_without_a_common_beginning():
    prompts = [Query(number=n, prompt_tokens=40, new_tokens=1).token_ids(1000) for n in range(50)]
    assert all(len(ids) == 40 and min(ids) >= 3 and max(ids) < 1000 for ids in prompts)
    assert len({ids[0] for ids in prompts}) == 50


def served(head: bytes, parts: list[bytes]) -> list[dict[str, Any]]:
    """Return the events that a server's bytes are read as."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in (head, *parts):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def run() -> list[dict[str, Any]]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return [event async for event in load.events(port, "/x", {})]

    return asyncio.run(run())


@pytest.mark.parametrize("is_chunked", [True, False])
def test_events_are_the_same_however_the_bytes_are_cut(is_chunked):
    events = [{"text": "a\u00e9" * number, "number": number} for number in range(12)]
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    body = b": comment\n\n" + b"".join(lines) + b"data: [DONE]\n\n"
    chance = random.Random(int(is_chunked))
    parts, left = [], body
    while left:
        size = chance.randrange(1, 60)
        part, left = left[:size], left[size:]
        parts.append(b"%x\r\n%s\r\n" % (len(part), part) if is_chunked else part)
    kind = b"Transfer-Encoding: chunked\r\n" if is_chunked else b"Connection: close\r\n"
    head = b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n"
    assert served(head, [*parts, b"0\r\n\r\n"] if is_chunked else parts) == events


def test_status_and_early_end_are_errors():
    with pytest.raises(load.HttpError, match="503 Busy wait"):
        served(b"HTTP/1.1 503 Busy\r\n\r\n", [b"wait"])
    with pytest.raises(EOFError, match="without"):
        served(b"HTTP/1.1 200 OK\r\n\r\n", [b'data: {"a": 1}\n\n'])


def test_closed_loop_keeps_so_many_requests_under_way():
    under_way, most, order = 0, 0, []

    async def send(query: Query, one: Sample, clock: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        order.append(query.number)
        await asyncio.sleep(0.001)
        under_way -= 1
        if query.number == 4:
            raise ConnectionError("gone")
        one.reason, one.end_s = "length", clock()

    queries = [Query(number=n, prompt_tokens=4, new_tokens=7) for n in range(10)]
    samples = asyncio.run(load.drive(queries, send, 3))
    assert most == 3
    assert order == sorted(order)
    reasons = {one.number: one.reason for one in samples}
    assert reasons.pop(4) == "error: ConnectionError: gone"
    assert set(reasons.values()) == {"length"}
    assert {one.new_tokens for one in samples} == {7}


def test_open_loop_sends_each_request_at_its_time():
    sent = []

    async def send(query: Query, one: Sample, clock: Any) -> None:
        sent.append((query.number, clock() >= query.arrival_s))
        one.reason = "stop"

    queries = [
        Query(number=n, prompt_tokens=4, new_tokens=7, arrival_s=at)
        for n, at in enumerate((0.03, 0.0, 0.015))
    ]
    samples = asyncio.run(load.drive(queries, send))
    assert sent == [(1, True), (2, True), (0, True)]
    assert [one.due_s for one in samples] == [0.03, 0.0, 0.015]


# servers


def test_words_of_the_tokenizer_are_its_tokens(tmp_path):
    servers.write_word_tokenizer(tmp_path, 50)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [3, 49, 3, 0, 17]
    assert tokenizer.encode(servers.text_of(ids)).ids == ids


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run, instead of running them."""
    found: list[list[str]] = []

    def command(words: list[str]) -> str:
        found.append(list(words))
        return json.dumps({"rates": [{"throughput_tokens_per_s": 5.0}]})

    for module in (servers, online):
        monkeypatch.setattr(module, "command", command)
    return found


@pytest.mark.parametrize("profile", [None, "tables"])
def test_profile_prices_the_plan_and_the_simulation(commands, tmp_path, profile, monkeypatch):
    words = ["--case", "orders", "--bits", "8", "--orders", "fcfs", "--rates", "2"]
    options = options_of(tmp_path, *words, *(["--profile", profile] if profile else []))

    async def drive(*_: Any) -> list[Sample]:
        return [sample(0)]

    class Alone:
        async def __aenter__(self) -> tuple[Any, Any]:
            return Namespace(stats=Namespace(num_preemptions=3)), None

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(online, "drive", drive)
    monkeypatch.setattr(online, "engine_alone", lambda *_, **__: Alone())
    monkeypatch.setattr(online, "arriving", lambda *_: [])
    online.orders(options, 0)
    plan, simulation = commands
    parsed = algo._parser().parse_args(plan[1:])
    assert (parsed.profile, parsed.bits, parsed.global_bz) == (profile, [8], 64)
    simulated = sim._parser().parse_args(simulation[1:])
    assert simulated.profile == profile
    assert (simulated.strategy, simulated.scheduler) == (parsed.output, "fcfs")
    real, other = online.runs_of(online.path_of(options, options.case))
    assert real["preemptions"] == 0
    assert other["simulated"] == {"throughput_tokens_per_s": 5.0}


def test_plans_with_and_without_a_profile_are_different_files(commands, tmp_path):
    names = {online.plan_of(options_of(tmp_path, *words), 8).name
             for words in ((), ("--profile", "tables"))}  # fmt: skip
    assert len(names) == 2


# online


def test_bad_arguments_are_refused(tmp_path, capsys):
    for words in (("--case", "best"), ("--bits", "5"), ("--servers", "other"), ("--arrivals", "x")):
        with pytest.raises(SystemExit):
            options_of(tmp_path, *words)
        assert words[0] in capsys.readouterr().err


def test_requests_of_rounds_differ(tmp_path):
    options = options_of(tmp_path, "--prompt_tokens", "9", "--new_tokens", "4")
    rounds = [online.equal(options, 4, number) for number in (-1, 0, 1)]
    assert [len(one) for one in rounds] == [16, 16, 16]
    assert len({query.number for one in rounds for query in one}) == 48
    assert {(query.prompt_tokens, query.new_tokens) for query in rounds[0]} == {(9, 4)}


@pytest.mark.parametrize("kind", ["poisson", "azure"])
def test_arrivals_have_the_rate_and_a_quarter_of_the_lengths(tmp_path, kind):
    trace = tmp_path / "own.csv"
    lines = (f"{number * 0.7},{400 + 4 * number},{80 + 4 * number}\n" for number in range(200))
    trace.write_text("arrival_s,prompt_tokens,new_tokens\n" + "".join(lines))
    options = options_of(tmp_path, "--trace", str(trace), "--requests", "150")
    queries = online.arriving(options, kind, 2.0, 0)
    assert [query.prompt_tokens for query in queries] == [100 + number for number in range(150)]
    assert [query.new_tokens for query in queries] == [20 + number for number in range(150)]
    times = [query.arrival_s for query in queries]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(2.0, rel=1e-9 if kind == "azure" else 0.3)
    (tmp_path / "again.csv").write_text(online.trace_text(queries))
    again = load_trace(tmp_path / "again.csv")
    assert [(item.arrival_s, item.prompt_tokens, item.new_tokens) for item in again] == [
        (query.arrival_s, query.prompt_tokens, query.new_tokens) for query in queries
    ]


def test_table_has_the_medians_of_rounds(tmp_path, capsys):
    options = options_of(tmp_path, "--case", "closed")
    for number, end_s in enumerate((3.0, 9.0, 5.0)):
        ones = [sample(0, sent_s=1.0, first_s=1.5 + number, end_s=end_s)]
        online.keep(options, number, ones, server="llmpq", bits=8, concurrency=4)
    online.show(options)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    name, rounds, failed, speed, median, _, total = lines[2].strip("| ").split(" | ")
    assert (name, rounds, failed) == ("server llmpq, bits 8, concurrency 4", "3", "0")
    assert (float(speed), float(median), float(total)) == (1.25, 1500.0, 4.0)
    record = online.record(options)
    assert [run["round"] for run in record["cases"]["closed"]] == [0, 1, 2]
    assert len(record["cases"]["closed"][0]["samples"][0]) == len(record["sample_columns"])


def test_figures_of_a_simulation_have_other_names():
    run = {
        "simulated": {
            "throughput_tokens_per_s": 7.0,
            "time_to_first_token_s": {"p50": 0.25, "p95": 0.5},
            "total_generation_time_s": {"p50": 3.0},
        }
    }
    assert online.figures_of(run) == (7.0, 250.0, 500.0, 3.0)
    assert online.label({"order": "fcfs", "rate": 2.0, **run}) == "order fcfs, rate 2.0, simulated"


# stress


def test_stress_finds_wrong_tokens_and_streams_without_a_reason(monkeypatch, capsys):
    answer: list[dict[str, Any]] = []

    async def events(port: int, path: str, body: dict[str, Any]) -> Any:
        for event in answer:
            yield event

    monkeypatch.setattr(server, "events", events)
    expected = [(5, 6)] * server.PROMPTS
    for tokens, reason, wrong in (([5, 6], "length", 0), ([5, 5], "length", 1), ([5, 6], None, 1)):
        watched = server.Stress(0, expected, 0)
        answer[:] = [{"choices": [{"token_ids": tokens, "finish_reason": reason}]}]
        asyncio.run(watched.read(0.0))
        assert len(watched.problems) == wrong
    answer[:] = [{"error": {"code": 500}}]
    asyncio.run(watched.read(0.0))
    assert "ended with {'code': 500}" in watched.problems[-1]
    capsys.readouterr()


def test_stress_prompts_come_in_pairs_that_begin_alike():
    for number in range(0, server.PROMPTS, 2):
        one, other = server.prompt_of(number), server.prompt_of(number + 1)
        shared = server.PROMPT_TOKENS // 2
        assert one[:shared] == other[:shared]
        assert one != other
        assert all(3 <= token < server.VOCABULARY for token in one + other)
