"""Ranks as processes over torch.distributed: the same tokens, and an end to a lost rank."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from helpers.processes import At, workers_of
from helpers.ranks import make_plan, make_split_plan, run_threads

from llmpq.dist import run_job
from llmpq.dist.io.job import Job
from llmpq.dist.io.prompts import Prompt, Request, write_prompts
from llmpq.dist.io.results import read_results
from llmpq.errors import StageError
from llmpq.spec.plan import write_plan

pytestmark = pytest.mark.dist

TOKENS = 60
PLAN = make_plan((0, 1, 3), prefill=3, decode=2, batch=4, new_tokens=TOKENS)


@pytest.fixture
def job(tiny_model, tmp_path) -> Job:
    prompts = [
        Prompt(id=n, where="", token_ids=(n + 1,) * 3, max_new_tokens=TOKENS, ignore_eos=True)
        for n in range(4)
    ]
    write_plan(tmp_path / "strategy.json", PLAN)
    write_prompts(tmp_path / "prompts.jsonl", prompts)
    return Job(
        strategy=tmp_path / "strategy.json",
        model_dir=tiny_model("llama", seed=1),
        prompts=tmp_path / "prompts.jsonl",
        output=tmp_path / "results.jsonl",
        transport="gloo",  # the old name
    )


def expected_tokens(job: Job) -> dict[str | int, tuple[int, ...]]:
    requests = [
        Request(id=n, prompt_token_ids=(n + 1,) * 3, max_new_tokens=TOKENS) for n in range(4)
    ]
    expected, _ = run_threads(PLAN, job.model_dir, requests)
    return {name: tokens for name, (tokens, _) in expected.items()}


def found_tokens(job: Job) -> dict[str | int, tuple[int, ...]]:
    return {result.id: result.token_ids for result in read_results(job.output)}


def test_tokens_are_those_of_one_process(job):
    run_job(job)
    assert found_tokens(job) == expected_tokens(job)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (signal.SIGKILL, "SIGKILL"),
        pytest.param(signal.SIGSTOP, "no sign of life", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_the_run(job, sent, message):
    progress = At(20, lambda: os.kill(workers_of(os.getpid())[1], sent))
    torch_job = replace(job, step_timeout_s=2.0, transport="torch")
    with pytest.raises(StageError, match=rf"stage 1 \(rank 1, .*{message}") as caught:
        run_job(torch_job, progress=progress, max_restarts=0)
    assert caught.value.exit_status == 4


def test_keys_and_values_reach_the_ranks_that_decode(job):
    """WAA with two stages of either phase."""
    plan = make_split_plan((0, 2, 3), (0, 1, 3), prefill=3, decode=2, batch=4, new_tokens=TOKENS)
    write_plan(job.strategy, plan)
    run_job(replace(job, transport="torch"))
    assert found_tokens(job) == expected_tokens(job)
