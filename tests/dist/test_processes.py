"""Ranks as real processes over gloo: same tokens, and an end to every kind of failure."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.clocks import PATIENCE_S
from helpers.processes import At, is_running, listening_addresses, wait_for, workers_of
from helpers.ranks import make_plan, run_threads

from llmpq.cli.commands.dist import main
from llmpq.dist import Hosts, generate_offline, run_job
from llmpq.dist.async_engine import Session
from llmpq.dist.io.job import Job
from llmpq.dist.io.prompts import Prompt, Request, write_prompts
from llmpq.dist.io.results import read_results
from llmpq.errors import SpecError, StageError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import Plan, write_plan

# Each takes as long as importing torch in every rank: the gate runs the first three.
pytestmark = pytest.mark.dist

PROMPTS = [
    Prompt(id=f"p{n}", where="test", token_ids=tuple(range(n, n + 1 + n % 7)), max_new_tokens=60)
    for n in range(12)
]
PLAN = make_plan((0, 1, 3), prefill=3, decode=2, batch=4, new_tokens=60)


def expected_answers(plan: Plan, model_dir: Path) -> dict[str | int, tuple[int, ...]]:
    requests = [
        Request(id=p.id, prompt_token_ids=p.token_ids or (), max_new_tokens=p.max_new_tokens or 0)
        for p in PROMPTS
    ]
    answers, _ = run_threads(plan, model_dir, requests)
    return {name: tokens for name, (tokens, _) in answers.items()}


def prompts_without_end() -> list[Prompt]:
    return [
        Prompt(id=p.id, where="", token_ids=p.token_ids, max_new_tokens=60, ignore_eos=True)
        for p in PROMPTS
    ]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_two_processes_say_what_one_does_until_one_is_killed(tiny_model, victim):
    """They listen on no address, and a killed one ends the run at once."""
    model_dir = tiny_model("llama", seed=1)
    listening: set[str] = set()
    pids: dict[int, int] = {}

    def look() -> None:
        pids.update(workers_of(os.getpid()))
        listening.update(listening_addresses(list(pids.values())))

    progress = At(20, look)
    with Session(PLAN, model_dir, progress=progress) as session:
        results = session.generate(prompts_without_end())
        progress.next(lambda: os.kill(pids[victim], signal.SIGKILL))
        error = rf"stage {victim} \(rank {victim}, .*SIGKILL"
        with pytest.raises(StageError, match=error) as caught:
            session.generate(prompts_without_end())
    assert [result.id for result in results] == [prompt.id for prompt in PROMPTS]
    expected = expected_answers(PLAN, model_dir)
    assert {result.id: result.token_ids for result in results} == expected
    assert sorted(pids) == [0, 1]
    assert not listening
    assert socket.gethostname() in str(caught.value)
    assert caught.value.exit_status == 4
    assert not any(is_running(pid) for pid in pids.values())


@pytest.mark.slow
def test_a_stopped_rank_without_peers_is_a_timeout_too(tiny_model):
    pids: dict[int, int] = {}

    def stop() -> None:
        pids.update(workers_of(os.getpid()))
        os.kill(pids[0], signal.SIGSTOP)

    progress = At(20, stop)
    with pytest.raises(StageError, match=r"stage 0 \(rank 0, .*no sign of life for 1 s"):
        generate_offline(
            make_plan((0, 3), new_tokens=60),
            prompts_without_end(),
            model_dir=tiny_model("llama", seed=1),
            step_timeout_s=1.0,
            progress=progress,
        )
    assert not any(is_running(pid) for pid in pids.values())


def test_a_rank_that_never_begins_is_told_from_one_that_fell_silent(tiny_model, monkeypatch):
    monkeypatch.setattr("llmpq.dist.launch.ranks.START_TIMEOUT_S", 0.2)  # no time to load libraries
    with pytest.raises(StageError, match=r"stage 0 \(rank 0, .*did not start within 0.2 s"):
        generate_offline(PLAN, prompts_without_end(), model_dir=tiny_model("llama", seed=1))


def test_a_stopped_rank_is_a_timeout(tiny_model):
    pids: dict[int, int] = {}

    def stop() -> None:
        pids.update(workers_of(os.getpid()))
        os.kill(pids[1], signal.SIGSTOP)

    progress = At(20, stop)
    plan = make_plan((0, 1, 2, 3), prefill=3, decode=2, new_tokens=60)
    with pytest.raises(StageError, match=r"stage 1 \(rank 1, .*no sign of life for 2 s") as caught:
        generate_offline(
            plan,
            prompts_without_end(),
            model_dir=tiny_model("llama", seed=1),
            step_timeout_s=2.0,
            progress=progress,
        )
    assert caught.value.exit_status == 4
    assert len(pids) == 3
    assert not any(is_running(pid) for pid in pids.values())


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_its_launcher(tiny_model, tmp_path, end):
    files = write_files(tmp_path, PLAN, tiny_model("llama", seed=1))
    (tmp_path / "private").mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "llmpq.cli.commands.dist", *files],
        stderr=subprocess.DEVNULL,
        env=dict(os.environ) | {"TMPDIR": str(tmp_path / "private")},
    )
    try:
        workers = wait_for(lambda: workers_of(launcher.pid), lambda found: len(found) == 2)
        launcher.send_signal(end)
        assert launcher.wait(timeout=PATIENCE_S) == (
            -signal.SIGKILL if end is signal.SIGKILL else 130
        )
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(lambda: [p for p in workers.values() if is_running(p)], lambda left: not left)
    wait_for(lambda: list((tmp_path / "private").iterdir()), lambda left: not left)


@pytest.mark.slow
def test_the_command_reports_and_resumes(tiny_model, tmp_path, capsys):
    model_dir = tiny_model("llama", seed=1)
    files = write_files(tmp_path, PLAN, model_dir)
    whole = expected_answers(PLAN, model_dir)
    first = {"id": "p3", "token_ids": list(whole["p3"]), "text": "", "finish_reason": "length"}
    output = tmp_path / "results.jsonl"
    output.write_text(json.dumps(first) + '\n{"id": "p4", "tok')
    drafts = '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    assert main([*files, "--resume", "--json", "--speculative_config", drafts]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["requests"]) == ("done", 11)
    assert 0 < report["drafts"]["accepted"] <= report["drafts"]["tokens"]
    assert report["generated_tokens"] == 11 * 60
    assert report["latency_s"]["predicted"] is None  # draft tokens have no forecast
    assert report["latency_s"]["measured"] == report["elapsed_s"] > 0
    assert [stage["device"] for stage in report["stages"]] == ["here/cpu#0", "here/cpu#1"]
    for stage in report["stages"]:
        assert 0 < stage["busy_fraction"] <= 1
        assert stage["memory_bytes"]["measured"] > 50e6
        assert stage["decode_s"]["measured"] > 0
    assert {result.id: result.token_ids for result in read_results(output)} == whole


@pytest.mark.slow
def test_two_hosts_meet_at_an_address(tiny_model, tmp_path):
    model_dir = tiny_model("llama", seed=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = DeviceGroup(type="cpu", count=1, threads=1)
    cluster = Cluster(
        name="two", nodes=tuple(Node(name=name, devices=(group,)) for name in ("a", "b"))
    )
    plan = make_plan((0, 1, 3), prefill=3, decode=2, new_tokens=60, cluster=cluster)
    files = write_files(tmp_path, plan, model_dir)
    there = [*files, "--nnodes", "2", "--node_rank", "1"]
    there += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    other = subprocess.Popen([sys.executable, "-m", "llmpq.cli.commands.dist", *there])
    listening: set[str] = set()

    def look() -> None:
        listening.update(listening_addresses(list(workers_of(os.getpid()).values())))

    try:
        measurement = run_job(
            Job(
                strategy=tmp_path / "strategy.json",
                model_dir=model_dir,
                prompts=tmp_path / "prompts.jsonl",
                output=tmp_path / "results.jsonl",
            ),
            hosts=Hosts(num_nodes=2, node_rank=0, address=("127.0.0.1", port)),
            progress=At(20, look),
        )
        assert other.wait(timeout=PATIENCE_S) == 0
    finally:
        other.kill()
        other.wait()
    assert measurement is not None
    assert listening <= {"0100007F"}
    results = {result.id: result.token_ids for result in read_results(tmp_path / "results.jsonl")}
    assert results == expected_answers(plan, model_dir)


@pytest.mark.slow
def test_torchrun_starts_the_same_ranks(tiny_model, tmp_path):
    model_dir = tiny_model("llama", seed=1)
    files = write_files(tmp_path, PLAN, model_dir)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc_per_node",
        "2",
        "-m",
        "llmpq.cli.commands.dist",
        "--no_auto",
        "--json",
        *files,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["generated_tokens"] == 12 * 60
    assert report["latency_s"]["predicted"] > 0
    results = {result.id: result.token_ids for result in read_results(tmp_path / "results.jsonl")}
    assert results == expected_answers(PLAN, model_dir)


def task_variables(launcher: str, rank: int) -> dict[str, str]:
    """Return the variables of one of two tasks on this host."""
    if launcher == "mpirun":
        names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
    names = {"STEP_NUM_TASKS": 2, "PROCID": rank, "LOCALID": rank, "NODEID": 0}
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here"}
    return {f"SLURM_{name}": str(value) for name, value in names.items()} | tasks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "nodes"), [("mpirun", ("here",)), ("srun", ("a", "b"))], ids=["ranks", "hosts"]
)
def test_tasks_of_srun_and_mpirun_are_ranks_or_hosts(tiny_model, tmp_path, launcher, nodes):
    """Two tasks are the two ranks of a plan with one node, or the launchers of its two nodes."""
    model_dir = tiny_model("llama", seed=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    group = DeviceGroup(type="cpu", count=2 // len(nodes), threads=1)
    cluster = Cluster(
        name="tasks", nodes=tuple(Node(name=name, devices=(group,)) for name in nodes)
    )
    plan = make_plan((0, 1, 3), prefill=3, decode=2, new_tokens=60, cluster=cluster)
    files = write_files(tmp_path, plan, model_dir)
    command = [sys.executable, "-m", "llmpq.cli.commands.dist", "--master_port", port, *files]
    tasks = [
        subprocess.Popen(
            command,
            env=dict(os.environ) | task_variables(launcher, rank),
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        assert [task.wait(timeout=PATIENCE_S) for task in tasks] == [0, 0]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    results = {result.id: result.token_ids for result in read_results(tmp_path / "results.jsonl")}
    assert results == expected_answers(plan, model_dir)


@pytest.mark.slow
def test_a_missing_shard_is_said_once(tiny_model, tmp_path, capsys):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for file in tiny_model("llama", seed=1, max_shard_size="20KB").iterdir():
        (model_dir / file.name).write_bytes(file.read_bytes())
    sorted(model_dir.glob("*.safetensors"))[-1].unlink()
    assert main(write_files(tmp_path, PLAN, model_dir)) == SpecError.exit_status
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert ".safetensors" in errors[0]


def write_files(folder: Path, plan: Plan, model_dir: Path) -> list[str]:
    """Write a strategy and prompts; return the command's options for them."""
    write_plan(folder / "strategy.json", plan)
    write_prompts(folder / "prompts.jsonl", prompts_without_end())
    options = {
        "--strat_file_name": folder / "strategy.json",
        "--model": model_dir,
        "--prompts": folder / "prompts.jsonl",
        "--output": folder / "results.jsonl",
    }
    return [str(word) for option in options.items() for word in option]
