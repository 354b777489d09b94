"""WAA with real processes: same tokens, and a lost rank of either kind ends the run by its name."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from helpers.processes import At, is_running, workers_of
from helpers.ranks import make_plan, make_split_plan, run_threads

from llmpq.dist import check_job, generate_offline
from llmpq.dist.async_engine import Session
from llmpq.dist.io.job import Job
from llmpq.dist.io.prompts import Prompt, Request, write_prompts
from llmpq.errors import StageError
from llmpq.spec.plan import read_plan, write_plan

PROMPTS = [
    Prompt(
        id=n, where="", token_ids=tuple(range(n, n + 1 + n % 7)), max_new_tokens=60, ignore_eos=True
    )
    for n in range(12)
]
PLAN = make_split_plan((0, 2, 3), (0, 1, 3), prefill=3, decode=2, batch=4, new_tokens=60)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("cuts", "victim"),
    [
        pytest.param(((0, 3), (0, 3)), 1, id="1+1", marks=pytest.mark.slow),
        pytest.param(((0, 2, 3), (0, 1, 3)), 1, id="2+2-1", marks=pytest.mark.slow),
        pytest.param(((0, 2, 3), (0, 1, 3)), 2, id="2+2-2", marks=pytest.mark.slow),
        pytest.param(((0, 2, 3), (0, 1, 3)), 3, id="2+2-3"),
    ],
)
def test_processes_say_what_one_does_until_one_is_killed(tiny_model, cuts, victim):
    """Where two decode and two prefill, they are ranks 0 and 1, and 2 and 3."""
    model_dir = tiny_model("llama", seed=1)
    one = make_plan((0, 3), prefill=3, decode=2, batch=4, new_tokens=60)
    requests = [
        Request(id=p.id, prompt_token_ids=p.token_ids or (), max_new_tokens=60) for p in PROMPTS
    ]
    expected = {
        name: tokens for name, (tokens, _) in run_threads(one, model_dir, requests)[0].items()
    }
    plan = make_split_plan(*cuts, prefill=3, decode=2, batch=4, new_tokens=60)
    pids: dict[int, int] = {}
    progress = At(20, lambda: pids.update(workers_of(os.getpid())))
    with Session(plan, model_dir, progress=progress) as session:
        results = session.generate(PROMPTS)
        progress.next(lambda: os.kill(pids[victim], signal.SIGKILL))
        with pytest.raises(StageError, match=rf"stage {victim} \(rank {victim}, .*SIGKILL"):
            session.generate(PROMPTS)
    assert {result.id: result.token_ids for result in results} == expected
    assert sorted(pids) == list(range(len(plan.stages)))
    assert not any(is_running(pid) for pid in pids.values())


@pytest.mark.dist
@pytest.mark.slow  # the gate stops a rank in test_processes, and kills one of a split plan above
@pytest.mark.parametrize("victim", [1, 3])
def test_a_stopped_rank_is_a_timeout(tiny_model, victim):
    pids: dict[int, int] = {}

    def stop() -> None:
        pids.update(workers_of(os.getpid()))
        os.kill(pids[victim], signal.SIGSTOP)

    with pytest.raises(StageError, match=rf"\(rank {victim}, .*no sign of life for 2 s"):
        generate_offline(
            PLAN,
            PROMPTS,
            model_dir=tiny_model("llama", seed=1),
            step_timeout_s=2.0,
            progress=At(20, stop),
        )
    assert not any(is_running(pid) for pid in pids.values())


def test_a_split_plan_passes_the_checks_before_any_rank_starts(tiny_model, tmp_path):
    write_plan(tmp_path / "plan.json", PLAN)
    assert read_plan(tmp_path / "plan.json") == PLAN
    write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    job = Job(
        strategy=tmp_path / "plan.json",
        model_dir=tiny_model("llama", seed=1),
        prompts=tmp_path / "prompts.jsonl",
        output=tmp_path / "results.jsonl",
    )
    assert check_job(job) == PLAN
    assert check_job(replace(job, transport="torch")) == PLAN
