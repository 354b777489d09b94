"""Ranks as processes over torch.distributed: the same tokens, and an end to a lost rank."""

from __future__ import annotations

import os
import signal

import pytest
from helpers.processes import At, workers_of
from helpers.ranks import make_plan, make_split_plan, run_threads

from llmpq.dist import run_job
from llmpq.dist.async_engine import Session
from llmpq.dist.io.job import Job
from llmpq.dist.io.prompts import Prompt, Request, write_prompts
from llmpq.dist.io.results import read_results
from llmpq.errors import StageError
from llmpq.spec.plan import write_plan

pytestmark = pytest.mark.dist

TOKENS = 60
PLAN = make_plan((0, 1, 3), prefill=3, decode=2, batch=4, new_tokens=TOKENS)
PROMPTS = [
    Prompt(id=n, where="", token_ids=(n + 1,) * 3, max_new_tokens=TOKENS, ignore_eos=True)
    for n in range(4)
]


@pytest.fixture
def job(tiny_model, tmp_path) -> Job:
    write_plan(tmp_path / "strategy.json", PLAN)
    write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
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


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (signal.SIGKILL, "SIGKILL"),
        pytest.param(signal.SIGSTOP, "no sign of life", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_process_until_a_rank_is_lost(job, sent, message):
    pids: dict[int, int] = {}
    progress = At(20, lambda: pids.update(workers_of(os.getpid())))
    # Long enough for the steps of a busy machine, whose answers must be right first.
    options = {"step_timeout_s": 30.0, "transport": "torch"}
    with Session(PLAN, job.model_dir, progress=progress, **options) as session:
        results = session.generate(PROMPTS)
        progress.next(lambda: os.kill(pids[1], sent))
        with pytest.raises(StageError, match=rf"stage 1 \(rank 1, .*{message}") as caught:
            session.generate(PROMPTS)
    assert {result.id: result.token_ids for result in results} == expected_tokens(job)
    assert caught.value.exit_status == 4


@pytest.mark.parametrize(
    "prefill_cuts", [(0, 3), pytest.param((0, 1, 3), marks=pytest.mark.slow)], ids=["2+1", "2+2"]
)
def test_keys_and_values_reach_the_ranks_that_decode(job, prefill_cuts):
    """WAA with two stages that decode: one that prefills has layers of both."""
    plan = make_split_plan((0, 2, 3), prefill_cuts, prefill=3, decode=2, batch=4, new_tokens=TOKENS)
    write_plan(job.strategy, plan)
    run_job(job)
    assert found_tokens(job) == expected_tokens(job)
