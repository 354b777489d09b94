"""Result files: written at once, never twice, and continued after a cut or a full disk."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.ranks import make_plan

from llmpq.cli.commands.dist import main
from llmpq.dist.io.prompts import Prompt, write_prompts
from llmpq.dist.io.results import Result, ResultWriter, read_results
from llmpq.dist.io.sampling_params import TokenLogprobs
from llmpq.errors import SpecError, StageError


def _result(name: str) -> Result:
    return Result(id=name, token_ids=(1, 2), text="é", finish_reason="length")


def test_results_are_on_disk_at_once(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    with ResultWriter(path) as writer:
        writer.write(_result("a"))
        assert read_results(path) == [_result("a")]


def test_log_probabilities_are_read_back_and_are_json(tmp_path):
    path = tmp_path / "results.jsonl"
    logprobs = (
        TokenLogprobs(1, -0.25, ((1, -0.25), (7, -1.5))),
        TokenLogprobs(2, -0.5, ((2, -0.5), (3, -math.inf))),  # a token that may not come
    )
    with ResultWriter(path) as writer:
        writer.write(replace(_result("a"), logprobs=logprobs, prompt_logprobs=(None, *logprobs)))
        writer.write(_result("b"))
    with_them, without = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert "Infinity" not in path.read_text(encoding="utf-8")
    assert not {"logprobs", "prompt_logprobs"} & without.keys()
    assert with_them["prompt_logprobs"] == [None, *with_them["logprobs"]]
    assert with_them["logprobs"][0] == {
        "token_id": 1, "logprob": -0.25, "top": [[1, -0.25], [7, -1.5]]
    }  # fmt: skip
    result = read_results(path)[0]
    found = result.logprobs
    assert result.prompt_logprobs == (None, *(found or ()))
    assert found is not None
    assert found[0] == logprobs[0]
    assert found[1].top[1] == (3, -9999.0)


@pytest.mark.parametrize("value", [3, [None], [{"token_id": 1}], [{"token_id": "x", "logprob": 0}]])
def test_log_probabilities_of_another_form_are_refused(tmp_path, value):
    path = tmp_path / "results.jsonl"
    line = {"id": "a", "token_ids": [1], "text": "", "finish_reason": "stop", "logprobs": value}
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(SpecError, match="'logprobs': found"):
        read_results(path)


def test_a_result_is_never_written_twice(tmp_path):
    with ResultWriter(tmp_path / "results.jsonl") as writer:
        writer.write(_result("a"))
        with pytest.raises(AssertionError, match="twice"):
            writer.write(_result("a"))


def test_existing_results_are_not_overwritten(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultWriter(path) as writer:
        writer.write(_result("a"))
    with pytest.raises(SpecError, match=r"already exists.*--resume"):
        ResultWriter(path)


def test_resume_drops_the_line_that_was_cut_short(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultWriter(path) as writer:
        writer.write(_result("a"))
        writer.write(_result("b"))
    path.write_bytes(path.read_bytes()[:-5])
    with ResultWriter(path, resume=True) as writer:
        assert writer.done == {"a"}
        writer.write(_result("b"))
    assert read_results(path) == [_result("a"), _result("b")]


def test_resume_refuses_a_file_of_something_else(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n')
    with pytest.raises(SpecError, match=r"results.jsonl: line 1"):
        ResultWriter(path, resume=True)


@contextlib.contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """Writes beyond ``count`` bytes of a file fail in this process, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named_and_keeps_what_was_answered(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultWriter(path) as writer:
        writer.write(_result("a"))
        limit = files_of_at_most(path.stat().st_size + 10)
        with limit, pytest.raises(StageError, match=r"jsonl: cannot be .* 1 answers, --resume"):
            writer.write(_result("b"))
        with pytest.raises(StageError, match="cannot be written") as caught:
            writer.write(_result("c"))
    assert caught.value.is_permanent
    assert path.read_bytes().endswith(b"\n")
    with ResultWriter(path, resume=True) as writer:
        assert writer.done == {"a"}
        writer.write(_result("b"))
    assert read_results(path) == [_result("a"), _result("b")]


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_at_once_and_goes_on_later(tiny_model, tmp_path):
    output, limit = tmp_path / "results.jsonl", 8192
    make_plan((0, 1, 3), new_tokens=60).save(tmp_path / "plan.json")
    prompts = [
        Prompt(id=number, where="", token_ids=(number + 1,), ignore_eos=True)
        for number in range(60)
    ]
    write_prompts(tmp_path / "prompts.jsonl", prompts)
    words = ["--strat_file_name", tmp_path / "plan.json", "--prompts", tmp_path / "prompts.jsonl"]
    words += ["--model", tiny_model("llama", seed=1), "--output", output, "--max_restarts", "2"]
    command = [str(word) for word in words]
    code = (
        "import resource, sys\n"
        "from llmpq.cli.commands.dist import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stderr
    assert f"{output}: cannot be written" in done.stderr
    assert "anew" not in done.stderr
    answered = read_results(output)
    assert 0 < len(answered) < len(prompts)
    assert main([*command, "--resume"]) == 0
    assert [item.id for item in read_results(output)][: len(answered)] == [
        item.id for item in answered
    ]
    assert sorted(int(item.id) for item in read_results(output)) == list(range(len(prompts)))
