"""Files of requests in OpenAI's Batch format."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from helpers.fake_engine import FakeEngine
from helpers.served import demo_tokenizer, make_service

from llmpq.errors import SpecError, StageError
from llmpq.server.batch import BatchSummary, read_batch, run_batch


def line(custom_id: str, url: str = "/v1/completions", **body: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "demo", **body}}


def write(path: Path, lines: list[object]) -> Path:
    texts = [item if isinstance(item, str) else json.dumps(item) for item in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def run(engine: FakeEngine, source: Path, output: Path, *, resume: bool = False) -> BatchSummary:
    return asyncio.run(run_in_loop(engine, source, output, resume=resume))


async def run_in_loop(engine, source, output, *, resume) -> BatchSummary:
    engine.starts = asyncio.Event()
    engine.starts.set()
    return await run_batch(make_service(engine), source, output, resume=resume)


def answers(path: Path) -> dict[str, dict]:
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    assert len({item["custom_id"] for item in lines}) == len(lines)
    return {item["custom_id"]: item for item in lines}


def test_each_request_has_an_answer_in_the_form_of_its_path(tmp_path):
    chat = line(
        "chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    source = write(
        tmp_path / "in.jsonl",
        [line("one", prompt="Open the", max_tokens=4), chat, line("two", prompt=[5, 6], n=2)],
    )
    summary = run(FakeEngine(), source, tmp_path / "out.jsonl")
    found = answers(tmp_path / "out.jsonl")
    assert {name: item["response"]["status_code"] for name, item in found.items()} == {
        "one": 200,
        "chat": 200,
        "two": 200,
    }
    body = found["one"]["response"]["body"]
    assert body["usage"]["completion_tokens"] == 4
    assert body["choices"][0]["text"]
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len(found["two"]["response"]["body"]["choices"]) == 2
    assert all(item["error"] is None for item in found.values())
    prompt_tokens = sum(
        item["response"]["body"]["usage"]["prompt_tokens"] for item in found.values()
    )
    assert (summary.requests, summary.errors) == (3, 0)
    assert summary.prompt_tokens == prompt_tokens > len(demo_tokenizer().encode("Open the"))


def test_request_that_cannot_be_served_has_a_line_with_its_error(tmp_path):
    source = write(
        tmp_path / "in.jsonl",
        [
            line("good", prompt="x", max_tokens=2),
            line("long", prompt="x", max_tokens=5000),
            line("url", "/v1/audio/speech", input="x"),
            {**line("method", prompt="x"), "method": "GET"},
            {**line("body"), "body": [1]},
            line("field", prompt="x", temperature="hot"),
            {**line("model", prompt="x"), "body": {"model": "none", "prompt": "x"}},
            line("stream", prompt="x", stream=True),
        ],
    )
    summary = run(FakeEngine(), source, tmp_path / "out.jsonl")
    found = answers(tmp_path / "out.jsonl")
    codes = {name: item["response"]["status_code"] for name, item in found.items()}
    assert codes.pop("good") == 200
    assert codes.pop("model") == 404
    assert set(codes.values()) == {400}
    assert len(codes) == 6
    assert "maximum context length" in found["long"]["error"]["message"]
    assert found["field"]["error"]["param"] == "temperature"
    assert (summary.requests, summary.errors) == (8, 7)


def test_lines_without_an_id_are_named_and_the_others_answered(tmp_path):
    source = write(
        tmp_path / "in.jsonl",
        ["{not json", line("a", prompt="x"), line("a", prompt="y"), {"custom_id": 5}, "[]"],
    )
    summary = run(FakeEngine(), source, tmp_path / "out.jsonl")
    assert list(answers(tmp_path / "out.jsonl")) == ["a"]
    assert len(summary.refused) == 4
    for number, text in zip((1, 3, 4, 5), summary.refused, strict=True):
        assert f"in.jsonl: line {number}" in text


def test_run_that_was_cut_off_is_resumed_without_a_second_answer(tmp_path):
    lines = [line(str(number), prompt=[5, number], max_tokens=3) for number in range(20)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    engine = FakeEngine()
    run(engine, source, output)
    whole = output.read_text(encoding="utf-8").splitlines(keepends=True)
    output.write_text("".join(whole[:7]) + whole[7][:20], encoding="utf-8")
    with pytest.raises(SpecError, match="already exists"):
        run(FakeEngine(), source, output)
    again = FakeEngine()
    summary = run(again, source, output, resume=True)
    assert (summary.skipped, summary.requests, len(again.requests)) == (7, 13, 13)
    assert set(answers(output)) == {str(number) for number in range(20)}


def test_failed_engine_ends_the_run_and_keeps_the_answers(tmp_path):
    lines = [line(str(number), prompt=[5, number], max_tokens=2) for number in range(3)]
    lines.append(line("long", prompt=[9], max_tokens=9, ignore_eos=True))
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    engine = FakeEngine()
    engine.fails_after = 5
    with pytest.raises(StageError, match="secret-host"):
        run(engine, source, output)
    assert set(answers(output)) == {"0", "1", "2"}
    assert not engine.active


def test_empty_or_missing_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        read_batch(tmp_path / "none.jsonl")
    with pytest.raises(SpecError, match="found no requests"):
        read_batch(write(tmp_path / "in.jsonl", []))
