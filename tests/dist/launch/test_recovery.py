"""Ranks that die and runs that are asked to end: every request is answered once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.clocks import PATIENCE_S
from helpers.processes import At, is_running, wait_for, workers_of
from helpers.ranks import make_plan, run_threads

from llmpq.cli.commands.dist import main
from llmpq.dist import Job, run_job
from llmpq.dist.io.prompts import Prompt, Request, write_prompts
from llmpq.dist.io.results import read_results
from llmpq.errors import StageError
from llmpq.spec.plan import write_plan

pytestmark = pytest.mark.dist

PLAN = make_plan((0, 1, 3), prefill=2, decode=2, batch=4, new_tokens=60)
PROMPTS = [
    Prompt(
        id=f"p{n}",
        where="test",
        token_ids=tuple(range(n, n + 1 + n % 7)),
        max_new_tokens=20 + 4 * n,
        ignore_eos=True,
    )
    for n in range(10)
]


def undisturbed(model_dir: Path) -> dict[str | int, tuple[int, ...]]:
    requests = [
        Request(id=p.id, prompt_token_ids=p.token_ids or (), max_new_tokens=p.max_new_tokens or 0)
        for p in PROMPTS
    ]
    answers, _ = run_threads(PLAN, model_dir, requests)
    return {name: tokens for name, (tokens, _) in answers.items()}


def kill(rank: int) -> None:
    with contextlib.suppress(KeyError):  # it is dead already
        os.kill(workers_of(os.getpid())[rank], signal.SIGKILL)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_survives_the_death_of_a_rank(tiny_model, tmp_path, victim):
    model_dir = tiny_model("llama", seed=1)
    job = job_of(tmp_path, model_dir)
    progress = At(150, lambda: kill(victim))
    run_job(job, progress=progress, max_restarts=1)
    found = {result.id: result.token_ids for result in read_results(job.output)}
    assert found == undisturbed(model_dir)


@pytest.mark.slow
def test_a_rank_that_dies_again_and_again_ends_the_run(tiny_model, tmp_path):
    class Always(At):
        def report(self, event):
            self.time_s = 0.0
            super().report(event)

    with pytest.raises(StageError, match=r"stage 1 .*SIGKILL.*started anew 1 of 1 times"):
        run_job(
            job_of(tmp_path, tiny_model("llama", seed=1)),
            progress=Always(1, lambda: kill(1)),
            max_restarts=1,
        )


@pytest.mark.slow
def test_a_bad_prompt_hurts_only_itself(tiny_model, tmp_path, capsys):
    model_dir = tiny_model("llama", seed=1)
    files = write_files(tmp_path, model_dir)
    path = tmp_path / "prompts.jsonl"
    bad = ['{"id": "huge", "prompt_token_ids": [999999]}', "no json", '{"id": "p0", "prompt": ""}']
    good = path.read_text().splitlines()
    path.write_text("\n".join([good[0], *bad, *good[1:]]) + "\n")
    assert main([*files, "--json"]) == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["requests"] == len(PROMPTS)
    assert [told.err.count(f"line {number}: ") for number in (2, 3, 4)] == [1, 1, 1]
    found = {result.id: result.token_ids for result in read_results(tmp_path / "results.jsonl")}
    assert found == undisturbed(model_dir)
    assert main([*files, "--resume", "--bad_prompts", "refuse"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_finishes_what_has_begun(tiny_model, tmp_path, end):
    model_dir = tiny_model("llama", seed=1)
    files = write_files(tmp_path, model_dir)
    output = tmp_path / "results.jsonl"
    launcher = start(files, tmp_path)
    wait_for(lambda: output.is_file() and output.read_text().count("\n"), bool)
    os.killpg(launcher.pid, end)  # as a terminal or a service manager does
    _, told = launcher.communicate(timeout=PATIENCE_S)
    results = {result.id: result.token_ids for result in read_results(output)}
    assert launcher.returncode == 130, told
    assert "--resume" in told
    assert PLAN.workload.batch <= len(results) < len(PROMPTS)
    assert main([*files, "--resume", "--json"]) == 0
    results = {result.id: result.token_ids for result in read_results(output)}
    assert results == undisturbed(model_dir)


@pytest.mark.slow
def test_told_twice_it_ends_now(tiny_model, tmp_path):
    files = write_files(tmp_path, tiny_model("llama", seed=1))
    health = tmp_path / "health.json"
    launcher = start([*files, "--health", str(health)], tmp_path)
    wait_for(lambda: health.is_file() and '"serving"' in health.read_text(), bool)
    workers = workers_of(launcher.pid)
    os.kill(workers[1], signal.SIGSTOP)  # nothing finishes any more
    launcher.send_signal(signal.SIGTERM)
    wait_for(lambda: '"draining"' in health.read_text(), bool)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=PATIENCE_S) == 130
    launcher.communicate()
    assert not any(is_running(pid) for pid in workers.values())
    assert not list((tmp_path / "private").glob("*/job.json"))


def start(files: list[str], tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "private").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "llmpq.cli.commands.dist", *files],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=dict(os.environ) | {"TMPDIR": str(tmp_path / "private")},
    )


def job_of(folder: Path, model_dir: Path) -> Job:
    write_files(folder, model_dir)
    return Job(
        strategy=folder / "strategy.json",
        model_dir=model_dir,
        prompts=folder / "prompts.jsonl",
        output=folder / "results.jsonl",
    )


def write_files(folder: Path, model_dir: Path) -> list[str]:
    """Write a strategy and prompts; return the command's options for them."""
    write_plan(folder / "strategy.json", PLAN)
    write_prompts(folder / "prompts.jsonl", PROMPTS)
    options = {
        "--strat_file_name": folder / "strategy.json",
        "--model": model_dir,
        "--prompts": folder / "prompts.jsonl",
        "--output": folder / "results.jsonl",
    }
    return [str(word) for option in options.items() for word in option]
