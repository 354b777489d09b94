"""llmpq-dist MODEL: a plan for the prompts, made here, and their answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmpq.cli.commands import dist
from llmpq.cli.commands.dist import main
from llmpq.cli.engine_options import engine_words
from llmpq.spec.plan import read_plan

OWN = ["--no_measure", "--bits", "16"]
PROMPTS = {"a": [1, 2], "b": [5, 6, 7, 8, 9, 10], "c": [3]}
NEW = {"a": 4, "b": 10, "c": 7}


@pytest.fixture
def files(tmp_path, monkeypatch) -> list[str]:
    """The options of a run that would succeed; plans are kept in this folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"id": name, "prompt_token_ids": ids, "max_new_tokens": NEW[name], "ignore_eos": True}
        for name, ids in PROMPTS.items()
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--prompts", str(prompts), "--output", str(tmp_path / "answers.jsonl")]


def kept_plans(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "llmpq" / "plans").glob("*.json"))


@pytest.mark.dist
def test_the_answers_are_those_of_generate_and_the_plan_is_for_these_prompts(
    tiny_model, files, tmp_path, capsys
):
    folder = tiny_model("llama", seed=1)
    assert main([str(folder), *files, *OWN]) == 0
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder)
    for answer in found:
        ids = torch.tensor([PROMPTS[answer["id"]]])
        new = NEW[answer["id"]]
        tokens = model.generate(ids, do_sample=False, min_new_tokens=new, max_new_tokens=new)
        assert answer["token_ids"] == tokens[0, ids.shape[1] :].tolist()
    assert {answer["id"] for answer in found} == set(PROMPTS)

    (file,) = kept_plans(tmp_path)
    work = read_plan(file).workload
    assert (work.batch, work.prompt_tokens, work.new_tokens) == (3, 3, 7)
    assert work.max_context_tokens == 16
    assert f"{file} (new)" in capsys.readouterr().err

    assert main([str(folder), *files, *OWN, "--resume"]) == 0
    assert f"{file} (kept from before)" in capsys.readouterr().err
    more = ["--resume", "--max_num_seqs", "2", "--max_model_len", "32"]
    assert main([str(folder), *files, *OWN, *more]) == 0
    (other,) = set(kept_plans(tmp_path)) - {file}
    work = read_plan(other).workload
    assert (work.batch, work.max_context_tokens) == (2, 32)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "found no plan, expected MODEL"),
        (["MODEL", "--strat_file_name", "x"], "found 'MODEL' and a plan, expected one of them"),
        (["MODEL", "--model", "x"], "--model: found with 'MODEL', expected one of them"),
        (["--strat_file_name", "x", "--bits", "4"], "--bits.* found with a plan"),
        (["--strat_file_name", "x", "--max_model_len", "9"], "--max_model_len.* found with a plan"),
        (["--strat_file_name", "x", "--max_num_seqs", "9"], "--max_num_seqs.* found with a plan"),
        (["MODEL", "--nnodes", "2"], "--nnodes: found with 'MODEL', expected a strategy"),
        (["MODEL", "--no_auto"], "--no_auto: found with 'MODEL', expected a strategy"),
        (["MODEL", "--launcher", "ray", "--workers", "x"], "--workers: found with --launcher ray"),
        (["MODEL", "--key_file", "x"], "--key_file: found without --workers, expected both"),
        (["MODEL", "--prompts", "none.jsonl"], "none.jsonl: no such file"),
    ],
)
def test_what_does_not_go_together_is_one_line(tiny_model, files, capsys, words, error):
    folder = str(tiny_model("llama", seed=1))
    assert main([*files, *(folder if word == "MODEL" else word for word in words)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.search(error.replace("MODEL'", f"{folder}'"), lines[0])


def test_only_options_of_the_engine_go_to_workers():
    argv = ["model", "--prompts", "4", "--kernel", "reference", "--max_restarts", "4"]
    argv += ["--store", "off", "--output", "4", "--step_timeout=9", "--max_model_len", "64"]
    words = ["--kernel", "reference", "--max_restarts", "4", "--step_timeout", "9"]
    assert engine_words(dist._parser().parse_args(argv)) == words
