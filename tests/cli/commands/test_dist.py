"""llmpq-dist: bad input gets one clear line and status 2 before any rank starts."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.ranks import make_plan

from llmpq.batching import RequestRecord
from llmpq.batching.drift import GROUP_REQUESTS
from llmpq.cli import run_options
from llmpq.cli.commands.dist import forecast_of, main
from llmpq.dist.io.job import Job
from llmpq.dist.metrics.measurement import Measurement, StageStats
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import Schedule, write_plan
from llmpq.spec.workload import constant, load_lengths


@pytest.fixture
def files(tiny_model, tmp_path) -> dict[str, Path]:
    """Options of a run that would succeed."""
    found = {
        "--strat_file_name": tmp_path / "strategy.json",
        "--model": tiny_model("llama", seed=1),
        "--prompts": tmp_path / "prompts.jsonl",
        "--output": tmp_path / "results.jsonl",
    }
    write_plan(found["--strat_file_name"], make_plan((0, 1, 3), batch=3, decode=3))
    _write_prompt(found["--prompts"])
    return found


def _write_prompt(path: Path, **line: object) -> None:
    path.write_text(json.dumps({"id": "a", "prompt_token_ids": [1, 2]} | line) + "\n")


def _run(files: dict[str, Path], *more: str) -> int:
    return main([str(word) for option in files.items() for word in option] + list(more))


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("error:") == 1
    return err


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ({"prompt_token_ids": [1] * 97}, "97 prompt tokens.*96 that the plan"),
        ({"max_new_tokens": 95}, "2 prompt tokens and 95 new ones.*96 that the plan"),
        ({"max_new_tokens": 127}, "the model's 128 positions"),
        ({"prompt_token_ids": [100]}, "token 100.*vocabulary of 100"),
        ({"temperature": 1}, "field 'temperature'"),
    ],
)
def test_a_bad_prompt(files, capsys, line, names):
    _write_prompt(files["--prompts"], **line)
    assert _run(files) == 2
    error = _error(capsys)
    assert "prompts.jsonl: line 1" in error
    assert re.search(names, error)
    assert not files["--output"].exists()


def test_a_plan_over_several_hosts_runs_here_with_a_warning(files, capsys):
    group = DeviceGroup(type="cpu", count=1, threads=1)
    cluster = Cluster(name="c", nodes=tuple(Node(name=n, devices=(group,)) for n in ("a", "b")))
    write_plan(files["--strat_file_name"], make_plan((0, 1, 3), cluster=cluster))
    files["--prompts"].write_text("\n")
    assert _run(files) == 2
    assert "found stages on 2 nodes (a, b); without --nnodes all of them run on this host" in (
        capsys.readouterr().err
    )
    assert _run(files, "--nnodes", "2", "--master_addr", "127.0.0.1") == 2
    assert "without --nnodes" not in capsys.readouterr().err


def test_an_empty_prompt_file(files, capsys):
    files["--prompts"].write_text("\n")
    assert _run(files) == 2
    assert "found no prompts" in _error(capsys)


@pytest.mark.parametrize("option", ["--strat_file_name", "--model", "--prompts"])
def test_a_missing_file(files, capsys, option):
    files[option] = Path("/nowhere/at/all")
    assert _run(files) == 2
    assert "/nowhere/at/all: no such" in _error(capsys)


def test_a_strategy_that_is_none(files, capsys):
    files["--strat_file_name"].write_text("{}")
    assert _run(files) == 2
    assert "strategy.json: field 'schema'" in _error(capsys)


def test_a_strategy_for_another_model(files, capsys):
    write_plan(files["--strat_file_name"], make_plan((0, 1, 4)))
    assert _run(files) == 2
    assert "found 3 decoder layers, expected the 4" in _error(capsys)


def test_a_strategy_without_a_directory_of_weights(files, capsys):
    del files["--model"]
    assert _run(files) == 2
    assert "expected --model" in _error(capsys)


def test_results_that_exist_already(files, capsys):
    files["--output"].write_text("{}\n")
    assert _run(files) == 2
    assert "--resume" in _error(capsys)
    assert files["--output"].read_text() == "{}\n"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top_p", "0"], "top_p"),
        (["--top_k", "-2"], "top_k"),
        (["--step_timeout", "0"], "step_timeout"),
        (["--nnodes", "2"], "--master_addr"),
        (["--bins", "2"], "--bins"),
        (["--speculative_config", "{}"], "--speculative_config: field 'num_speculative_tokens'"),
        (["--policy", "waa"], "'waa' for stages that do both phases"),
        (["--nnodes", "2", "--master_addr", "127.0.0.1"], "nnodes"),
    ],
)
def test_invalid_option_exits_with_2(files, capsys, options, names):
    assert _run(files, *options) == 2
    assert names in _error(capsys)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("options", "policy"),
    [([], "rra"), (["--policy", "multibin", "--bins", "2", "--predictor", "noisy"], "multibin")],
    ids=["the strategy's own", "another"],
)
def test_run_uses_its_schedule_and_reports_latencies(files, capsys, options, policy):
    schedule = Schedule(policy="rra", encode_batch=1, decode_batch=2, decode_iterations=2)
    write_plan(files["--strat_file_name"], replace(make_plan((0, 1, 3)), schedule=schedule))
    lines = [
        {"id": number, "prompt_token_ids": [1, 2], "max_new_tokens": 1 + number % 3}
        for number in range(6)
    ]
    files["--prompts"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _run(files, "--json", *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["policy"]) == (6, policy)
    found = report["per_request"]
    assert 0 < found["time_to_first_token_s"]["mean"] <= found["latency_s"]["mean"]
    assert found["latency_s"]["p99"] <= report["elapsed_s"]


@pytest.mark.dist
@pytest.mark.parametrize("replan", [False, True])
def test_run_reports_drift(files, capfd, tmp_path, replan):
    schedule = Schedule(
        policy="rra", encode_batch=2, decode_batch=4, decode_iterations=1, mean_new_tokens=3.0
    )
    write_plan(files["--strat_file_name"], replace(make_plan((0, 1, 3)), schedule=schedule))
    lines = [
        {"id": number, "prompt_token_ids": [1, 2], "max_new_tokens": 5, "ignore_eos": True}
        for number in range(GROUP_REQUESTS + 6)
    ]
    files["--prompts"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "seen.json"
    more = ["--replan", "--lengths_out", str(out)] if replan else []
    assert _run(files, "--json", *more) == 0
    told = capfd.readouterr()
    drift = json.loads(told.out)["drift"]
    assert drift["is_notable"]
    assert (drift["expected_mean"], drift["observed_mean"]) == (3.0, 5.0)
    assert drift["suggested_decode_iterations"] == 2  # four iterations are two phases again
    assert drift["adjusted_decode_iterations"] == ([2] if replan else [])
    assert told.err.count("drift: answers have 5.0 tokens on average instead of 3.0") == 1
    written = out if replan else Path(f"{files['--output']}.lengths.json")
    assert f"llmpq-algo --policy rra --lengths {written}" in told.err
    assert load_lengths(written) == constant(5)


@pytest.mark.dist
def test_run_without_drift_reports_none(files, capfd):
    schedule = Schedule(policy="rra", encode_batch=1, decode_batch=2, decode_iterations=4)
    write_plan(files["--strat_file_name"], replace(make_plan((0, 1, 3)), schedule=schedule))
    line = {"id": "a", "prompt_token_ids": [1, 2], "max_new_tokens": 8, "ignore_eos": True}
    files["--prompts"].write_text(json.dumps(line) + "\n")
    assert _run(files) == 0
    told = capfd.readouterr()
    assert "drift" not in told.out + told.err
    assert not Path(f"{files['--output']}.lengths.json").exists()


def test_no_auto_needs_torchruns_environment(files, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert _run(files, "--no_auto") == 2
    assert "RANK" in _error(capsys)
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    assert _run(files, "--no_auto") == 2
    assert "WORLD_SIZE 3" in _error(capsys)


@pytest.mark.parametrize(
    ("given", "nnodes", "is_rank", "tasks", "expected"),
    [
        ("auto", 1, False, 1, "auto"),
        ("auto", 1, True, 1, "torch"),
        ("auto", 1, False, 2, "torch"),
        ("auto", 2, False, 2, "auto"),
        ("sockets", 1, True, 2, "sockets"),
        ("gloo", 1, False, 1, "gloo"),
    ],
)
def test_torch_carries_frames_where_another_launcher_starts_the_command(
    monkeypatch, given, nnodes, is_rank, tasks, expected
):
    names = {"RANK": 0, "SIZE": tasks, "LOCAL_RANK": 0, "LOCAL_SIZE": tasks}
    for name, value in names.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    options = argparse.Namespace(transport=given, nnodes=nnodes)
    assert run_options.transport_of(options, is_rank=is_rank) == expected


def test_keys_and_values_of_other_bits_are_refused_by_name(files, capsys):
    plan = make_plan((0, 1, 3))
    assert plan.dtype == "float32"
    write_plan(files["--strat_file_name"], replace(plan, kv_bits=16))
    assert _run(files) == 2
    assert "kv_bits" in _error(capsys)


def forecast_s(model_dir: Path, requests: int, *, profile: str | None = None, drafts: int = 0):
    """Return the forecast seconds of a run of equal requests, ``None`` without a forecast."""
    group = DeviceGroup(type="cpu", count=2, threads=1, profile=profile)
    cluster = Cluster(name="c", nodes=(Node(name="n", devices=(group,)),))
    plan = make_plan((0, 1, 3), cluster=cluster)
    record = RequestRecord(
        request=0, prompt_tokens=4, new_tokens=3, arrival_s=5.0, start_s=5.0, first_token_s=6.0,
        end_s=7.0,
    )  # fmt: skip
    ran = Measurement(
        requests=requests,
        generated_tokens=3 * requests,
        latency_s=2.0,
        load_s=1.0,
        stages=(StageStats(rank=0, load_s=1.0, busy_s=1.0, memory_bytes=1),),
        records=tuple(replace(record, request=number) for number in range(requests)),
        draft_tokens=drafts,
    )
    nowhere = Path("/nowhere")
    job = Job(
        strategy=nowhere, model_dir=model_dir, prompts=nowhere, output=nowhere,
        schedule=Schedule(policy="hybrid"),
    )  # fmt: skip
    found = forecast_of(plan, ran, job)
    return None if found is None else found.latency_s


def test_the_forecast_is_of_the_requests_that_ran(tiny_model):
    model = tiny_model("llama", seed=1)
    few, many = forecast_s(model, 4), forecast_s(model, 40)
    assert 5 * few < many < 12 * few
    assert forecast_s(model, 0) is None
    assert forecast_s(model, 4, drafts=7) is None


def test_a_plan_whose_table_is_not_here_has_a_forecast_too(tiny_model):
    model = tiny_model("llama", seed=1)
    assert forecast_s(model, 4, profile="/nowhere/at/all.csv") > 0
