"""The ring over torch.distributed: ranks as processes, since a process has one group."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from helpers.processes import At, workers_of
from helpers.ranks import make_plan, run_threads

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
        transport="gloo",
    )


def test_tokens_are_those_of_one_process(job):
    run_job(job)
    requests = [
        Request(id=n, prompt_token_ids=(n + 1,) * 3, max_new_tokens=TOKENS) for n in range(4)
    ]
    expected, _ = run_threads(PLAN, job.model_dir, requests)
    found = {result.id: result.token_ids for result in read_results(job.output)}
    assert found == {name: tokens for name, (tokens, _) in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "message"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "no sign of life")]
)
def test_a_lost_rank_ends_the_run(job, sent, message):
    progress = At(20, lambda: os.kill(workers_of(os.getpid())[1], sent))
    with pytest.raises(StageError, match=rf"stage 1 \(rank 1, .*{message}"):
        run_job(replace(job, step_timeout_s=2.0), progress=progress, max_restarts=0)
