"""llmpq-sim, called as a user would."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.builders import uniform, write_trace

from llmpq.cli.commands.algo import main as algo
from llmpq.cli.commands.sim import main as sim
from llmpq.spec.plan import PlannedDraft, read_plan, write_plan
from llmpq.spec.workload import draw_trace


@pytest.fixture(scope="module")
def strategy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sim") / "plan.json"
    command = "--model facebook/opt-13b --device_names T4-16G V100-32G --device_numbers 1 1"
    work = "--global_bz 16 --s 128 --n 64"
    assert algo([*command.split(), *work.split(), "--output", str(path), "--no_explain"]) == 0
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sim") / "trace.csv"
    write_trace(path, draw_trace(60, uniform(10, 128), uniform(1, 64), requests_per_s=2.0))
    return path


def _run(capsys: pytest.CaptureFixture[str], *options: object) -> dict:
    assert sim([*map(str, options), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_strategy_s_own_workload_takes_what_its_forecast_says(strategy, capsys):
    capsys.readouterr()
    found = _run(capsys, "--strategy", strategy)
    plan = json.loads(strategy.read_text())
    assert found["requests"] == 16
    assert found["generated_tokens"] == 16 * 64
    expected = plan["estimate"].get("forecast", plan["estimate"])["latency_s"]
    assert found["makespan_s"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("policy", ["hybrid", "static", "iteration", "rra", "multibin"])
def test_every_policy_serves_a_trace(strategy, trace, policy, capsys):
    found = _run(capsys, "--strategy", strategy, "--trace", trace, "--policy", policy)
    assert found["policy"] == policy
    assert found["requests"] == 60
    assert found["answer_tokens_per_s"] > 0
    assert found["latency_s"]["p50"] <= found["latency_s"]["p99"]
    assert [stage["device"] for stage in found["stages"]]
    for stage in found["stages"]:
        assert 0 < stage["busy_fraction"] <= 1
        assert stage["busy_fraction"] + stage["bubble_fraction"] == pytest.approx(1)


def test_a_drawn_trace_and_its_timeline(strategy, tmp_path, capsys):
    lengths = tmp_path / "lengths.json"
    lengths.write_text('{"schema": 1, "truncated_normal": {"mean": 20, "std": 9, "longest": 60}}')
    picture = tmp_path / "timeline.json"
    found = _run(
        capsys, "--strategy", strategy, "--lengths", lengths, "--requests", 40,
        "--rate", 1.5, "--trace_out", picture,
    )  # fmt: skip
    assert found["requests"] == 40
    events = json.loads(picture.read_text())["traceEvents"]
    blocks = [event for event in events if event["ph"] == "X"]
    busy_s = sum(event["dur"] for event in blocks) / 1e6
    assert busy_s >= sum(stage["busy_s"] for stage in found["stages"]) * 0.999


def test_people_get_a_table(strategy, trace, capsys):
    assert sim(["--strategy", str(strategy), "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^throughput +[\d.,]+ tokens/s of all, ", text, re.M)
    assert re.search(r"^one answer +[\d.,]+ tokens/s$", text, re.M)
    assert "first token" in text
    assert "stage 0" in text


def test_what_does_not_fit_is_refused_skipped_or_cut(strategy, tmp_path, capsys):
    path = tmp_path / "long.csv"
    path.write_text("arrival_s,prompt_tokens,new_tokens\n0,20,4\n1,500,4\n")
    assert sim(["--strategy", str(strategy), "--trace", str(path)]) == 2
    assert "found 1 of 2 too long" in capsys.readouterr().err
    found = _run(capsys, "--strategy", strategy, "--trace", path, "--too_long", "skip")
    assert (found["requests"], found["skipped"]) == (1, 1)
    found = _run(capsys, "--strategy", strategy, "--trace", path, "--too_long", "cut")
    assert found["requests"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bins", "3"], "--bins: found 3 with policy 'hybrid'"),
        (["--workload", "w.json", "--trace", "t.csv"], "expected one of them"),
        (["--trace", "missing.csv"], "no such file"),
    ],
)
def test_mistakes_exit_with_2(strategy, options, message, capsys):
    assert sim(["--strategy", str(strategy), *options]) == 2
    assert message in capsys.readouterr().err


def test_engine_serves_a_trace_at_several_rates(strategy, trace, capsys, tmp_path):
    command = "--engine --scheduler larry --alpha 2 --token_budget 256 --num_blocks 400"
    picture = tmp_path / "engine.png"
    found = _run(
        capsys,
        *("--strategy", strategy, "--trace", trace, *command.split()),
        *("--rate_scale", 0.5, 20, "--trace_slice", "10:50", "--plot", picture),
    )
    slow, fast = found["rates"]
    assert (found["scheduler"], found["skipped"], found["num_blocks"]) == ("larry", 0, 400)
    assert (slow["requests"], fast["requests"]) == (40, 40)
    assert fast["requests_per_s"] == pytest.approx(40 * slow["requests_per_s"])
    for name in ("time_to_first_token_s", "normalized_ttft_s", "total_generation_time_s"):
        assert set(slow[name]) == {"mean", "p50", "p95", "p99"}
        assert fast[name]["p95"] > slow[name]["p95"]
    stages = json.loads(strategy.read_text())["stages"]
    assert len(slow["busy_fractions"]) == len(stages)
    assert picture.stat().st_size > 10_000


def test_engine_finds_the_rate_of_a_bound(strategy, trace, capsys):
    options = ("--strategy", strategy, "--trace", trace, "--engine", "--num_blocks", 30)
    found = _run(capsys, *options, "--arrivals", "gamma", "--rate", 3, "--ttft_bound", 5)
    scale = found["capacity"]["rate_scale"]
    at = [_run(capsys, *options, "--arrivals", "gamma", "--rate", 3, "--rate_scale", scale * share)
          for share in (1.0, 1.05)]  # fmt: skip
    low, high = (one["rates"][0]["time_to_first_token_s"]["p95"] for one in at)
    assert low <= 5 < high
    assert sim([*map(str, options), "--ttft_bound", "5"]) == 0
    text = capsys.readouterr().out
    assert "scheduler      fcfs, 1024 tokens a step, 30 KV blocks" in text
    assert "capacity " in text


def test_engine_forecasts_the_gain_of_drafts(strategy, trace, capsys):
    options = ("--strategy", strategy, "--trace", trace, "--engine", "--trace_slice", "0:6")
    alone = (*options, "--arrivals", "poisson", "--rate", 0.01)
    times = {}
    for drafts, rate in ((0, 0), (5, 0), (5, 0.5), (5, 1)):
        given = ("--num_speculative_tokens", drafts, "--acceptance_rate", rate)
        (row,) = _run(capsys, *alone, *given)["rates"]
        times[drafts, rate] = row["time_per_token_s"]["mean"]
        share = row["accepted_tokens"] / max(1, row["draft_tokens"])
        assert share == (rate if rate in (0, 1) else pytest.approx(0.3, abs=0.2))
    assert times[5, 1] < times[5, 0.5] < times[0, 0]
    assert times[5, 0] < 1.04 * times[0, 0]
    assert sim([*map(str, alone), "--num_speculative_tokens", "5"]) == 0
    assert "  drafts       " in capsys.readouterr().out


def test_engine_forecasts_the_gain_of_a_draft_model(strategy, trace, capsys):
    options = ("--strategy", strategy, "--trace", trace, "--engine", "--trace_slice", "0:6")
    alone = (*options, "--arrivals", "poisson", "--rate", 0.01, "--num_speculative_tokens", 5)
    times = {}
    for cost, rate in ((0.1, 0.9), (0.4, 0.9), (2, 0.9), (0.2, 0)):
        given = ("--draft_cost", cost, "--acceptance_rate", rate)
        (row,) = _run(capsys, *alone, *given)["rates"]
        times[cost, rate] = row["time_per_token_s"]["mean"]
        assert (row["draft_tokens"] == 0) == (cost == 2)
    (row,) = _run(capsys, *alone[:-2])["rates"]
    plain = row["time_per_token_s"]["mean"]
    assert times[0.1, 0.9] < times[0.4, 0.9] < plain
    assert times[2, 0.9] == plain
    assert times[0.2, 0] < 1.06 * plain


def test_engine_has_the_draft_model_of_the_strategy(strategy, trace, tmp_path, capsys):
    """With its place, number of tokens and acceptance rate, unless options say otherwise."""
    plan = read_plan(strategy)
    times = {}
    for handover in (None, 0.3):
        draft = PlannedDraft(
            model="m", num_speculative_tokens=5, device=0, acceptance_rate=0.9, cost=0.1,
            handover=handover, speedup=1.5, memory_bytes=1,
        )  # fmt: skip
        path = tmp_path / f"{handover}.json"
        write_plan(path, replace(plan, draft=draft))
        options = ("--strategy", path, "--trace", trace, "--engine", "--trace_slice", "0:6")
        options += ("--arrivals", "poisson", "--rate", 0.01)
        own = ("--num_speculative_tokens", 5, "--draft_cost", 0.1)
        given = {"plan": (), "options": own, "none": ("--num_speculative_tokens", 0)}
        for name, more in given.items():
            (row,) = _run(capsys, *options, *more)["rates"]
            times[name, handover] = row["time_per_token_s"]["mean"]
    assert times["plan", None] == times["options", None] == times["options", 0.3]
    assert times["plan", None] < times["plan", 0.3] < times["none", None]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--engine", "--draft_cost", "0.1"], "--draft_cost: found without"),
        (
            ["--engine", "--draft_cost", "0", "--num_speculative_tokens", "2"],
            "--draft_cost: found 0, expected more than 0",
        ),
        (["--scheduler", "spf"], "--scheduler: found without --engine"),
        (["--engine", "--trace_slice", "5:5"], "expected some in the slice 5:5"),
        (["--engine", "--arrivals", "poisson"], "found no rate, expected --rate"),
        (["--engine", "--ttft_bound", "1"], "all arrive at once"),
        (["--engine", "--num_blocks", "3"], "requests: found 16 of 16 too long"),
        (["--engine", "--token_budget", "0"], "--token_budget: found 0, expected at least 1"),
        (["--engine", "--acceptance_rate", "1.5"], "--acceptance_rate: found 1.5"),
        (["--engine", "--state_cache_size", "1"], "state_cache_size: found 1.00 GiB, expected 0"),
        (
            ["--engine", "--num_speculative_tokens", "-1"],
            "--num_speculative_tokens: found -1, expected at least 0",
        ),
    ],
)
def test_invalid_engine_options_are_named(strategy, capsys, options, found):
    assert sim(["--strategy", str(strategy), *options]) == 2
    assert found in capsys.readouterr().err
