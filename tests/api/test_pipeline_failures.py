"""Pipelines that end: closed, idle, killed, interrupted; no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.clocks import PATIENCE_S
from helpers.processes import At, is_running, wait_for, workers_of
from helpers.ranks import make_plan

from llmpq import Pipeline, SamplingParams
from llmpq.errors import SpecError, StageError

pytestmark = pytest.mark.dist

PLAN = make_plan((0, 1, 3), prefill=2, decode=3, batch=4, prompt_tokens=16, new_tokens=8)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9, 10, 11, 50, 51], [61], [33, 34, 35, 36]]


def test_an_idle_pipeline_outlives_its_step_timeout_and_closes(tiny_model):
    with Pipeline(PLAN, model=tiny_model("llama", seed=1), step_timeout_s=3.0) as llm:
        first = llm.generate(PROMPTS)
        time.sleep(7.0)
        assert llm.generate(PROMPTS) == first
        pids = workers_of(os.getpid())
        assert sorted(pids) == [0, 1]
    assert not any(is_running(pid) for pid in pids.values())
    with pytest.raises(StageError, match="closed"):
        llm.generate(PROMPTS)
    llm.close()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_and_later_calls_say_so(tiny_model, victim):
    pids: dict[int, int] = {}

    def kill() -> None:
        pids.update(workers_of(os.getpid()))
        os.kill(pids[victim], signal.SIGKILL)

    llm = Pipeline(PLAN, model=tiny_model("llama", seed=1), progress=At(20, kill))
    with pytest.raises(StageError, match=rf"stage {victim} \(rank {victim}, .*SIGKILL"):
        llm.generate(PROMPTS * 20, SamplingParams(ignore_eos=True))
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids.values())
    for _ in range(3):
        with pytest.raises(StageError, match=r"has ended, start another one; .*SIGKILL") as error:
            llm.generate(PROMPTS)
        assert str(error.value).count("has ended") == 1
    llm.close()


def test_a_rank_that_dies_while_the_pipeline_is_idle_is_named(tiny_model):
    with Pipeline(PLAN, model=tiny_model("llama", seed=1)) as llm:
        os.kill(workers_of(os.getpid())[1], signal.SIGKILL)
        with pytest.raises(StageError, match=r"stage 1 \(rank 1, .*SIGKILL"):
            llm.generate(PROMPTS * 2000)


def test_a_model_that_the_plan_is_not_for_is_refused_before_any_rank_starts(tiny_model):
    plan = make_plan((0, 1, 2))
    with pytest.raises(SpecError, match="found 3 decoder layers, expected the 2"):
        Pipeline(plan, model=tiny_model("llama", seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_ends_leaves_no_process_and_no_folder(tiny_model, tmp_path, end):
    PLAN.save(tmp_path / "plan.json")
    private = tmp_path / "private"
    private.mkdir()
    code = (
        "from llmpq import Pipeline\n"
        f"llm = Pipeline({str(tmp_path / 'plan.json')!r}, {str(tiny_model('llama', seed=1))!r})\n"
        "print('ready', flush=True)\n"
        "while True: llm.generate([[1, 2, 3]] * 50)\n"
    )
    script = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ) | {"TMPDIR": str(private)},
    )
    try:
        assert script.stdout is not None
        assert script.stdout.readline() == b"ready\n"
        pids = workers_of(script.pid)
        assert sorted(pids) == [0, 1]
        script.send_signal(end)
        script.wait(timeout=PATIENCE_S)
    finally:
        script.kill()
        script.communicate()
    wait_for(lambda: [pid for pid in pids.values() if is_running(pid)], lambda left: not left)
    wait_for(lambda: list(private.glob("*/job.json")), lambda left: not left)
