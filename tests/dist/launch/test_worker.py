"""One rank as the launcher starts it, here in this process: a plan of one stage has no peers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.ranks import make_plan
from tokenizers import Tokenizer, models, pre_tokenizers

from llmpq.dist.io.job import Job, write_job
from llmpq.dist.io.results import read_results
from llmpq.dist.launch.ranks import measurement_file, read_error_record
from llmpq.dist.launch.worker import NAME, die_with, main, name_process
from llmpq.dist.metrics.progress import Event
from llmpq.spec.plan import write_plan

torch.set_num_threads(1)

WORDS = [f"word{number}" for number in range(100)]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def job(tiny_model, tmp_path) -> Job:
    """A job on a model of a hundred words, in files of its own."""
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for file in tiny_model("llama", seed=1).iterdir():
        (model_dir / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="word0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    write_plan(tmp_path / "strategy.json", make_plan((0, 3), prefill=2, decode=3))
    return Job(
        strategy=tmp_path / "strategy.json",
        model_dir=model_dir,
        prompts=tmp_path / "prompts.jsonl",
        output=tmp_path / "results.jsonl",
        resume=True,
    )


def _run(job: Job, pipe: tuple[int, int], *prompts: dict[str, object]) -> int:
    job.prompts.write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    write_job(job.strategy.parent / "job.json", job)
    return main([str(job.strategy.parent / "job.json"), "0", str(pipe[1])])


def test_text_in_text_out(job, pipe):
    prompts = [
        {"id": "text", "prompt": "word5 word6 word7", "ignore_eos": True},
        {"id": "tokens", "prompt_token_ids": [5, 6, 7], "ignore_eos": True},
    ]
    assert _run(job, pipe, *prompts) == 0
    first, second = read_results(job.output)
    assert first.token_ids == second.token_ids
    assert len(first.token_ids) == 8
    assert first.text == second.text == " ".join(WORDS[token] for token in first.token_ids)
    measured = json.loads(measurement_file(job.strategy.parent).read_text())
    assert (measured["requests"], measured["generated_tokens"]) == (2, 16)
    events = [Event.decode(line) for line in os.read(pipe[0], 65536).splitlines()]
    assert [(e.done, e.total) for e in events if e.kind == "load"] == [(1, 3), (2, 3), (3, 3)]
    assert [(e.done, e.total) for e in events if e.kind == "tokens"][-1] == (16, 16)
    assert any(event.kind == "alive" for event in events)


def test_a_second_run_answers_only_what_is_left(job, pipe):
    prompts = [{"id": name, "prompt": "word1"} for name in "abc"]
    assert _run(job, pipe, *prompts[:2]) == 0
    before = read_results(job.output)
    assert _run(job, pipe, *prompts) == 0
    assert read_results(job.output)[:2] == before
    assert sorted(result.id for result in read_results(job.output)) == ["a", "b", "c"]


def test_a_text_that_is_too_long_leaves_a_note(job, pipe):
    prompt = {"id": "a", "prompt": " ".join(WORDS * 2)}
    assert _run(job, pipe, prompt) == 2
    record = read_error_record(job.strategy.parent, 0)
    assert record is not None
    assert (record.exit_status, record.lost_rank) == (2, None)
    assert "prompts.jsonl: line 1: found 200 prompt tokens" in record.message
    assert "word" not in record.message.partition("found")[2]


def test_a_damaged_weight_file_leaves_a_note(job, pipe):
    weights = next(job.model_dir.glob("*.safetensors"))
    Path(weights).write_bytes(b"\xff" * 64)
    assert _run(job, pipe, {"id": "a", "prompt": "word1"}) == 2
    record = read_error_record(job.strategy.parent, 0)
    assert record is not None
    assert weights.name in record.message


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")
def test_a_process_is_called_what_it_says():
    own = Path("/proc/self/comm")
    before = own.read_text().strip()
    name_process(f"{NAME}12")
    try:
        assert own.read_text().strip() == "llmpq-rank-12"
    finally:
        name_process(before)


def test_a_process_without_a_launcher_keeps_running():
    die_with(0)
