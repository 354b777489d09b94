"""llmpq-algo --policy: a schedule under a latency bound, written down and simulated."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from llmpq.cli.commands import algo as algo_module
from llmpq.cli.commands.algo import main as algo
from llmpq.cli.commands.check import main as check
from llmpq.cli.commands.dist import main as dist
from llmpq.cli.commands.sim import main as sim
from llmpq.spec.plan import read_plan

COMMAND = [
    *["--model", "facebook/opt-13b", "--device_names", "T4-16G", "V100-32G"],
    *["--device_numbers", "1", "2", "--global_bz", "64", "--s", "256", "--n", "40", "--no_explain"],
]
CLOSED_FORM = ("--sla", "length")
"""Schedules that are not simulated while they are searched: it takes a fifth of the time."""


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text('{"schema": 1, "truncated_normal": {"mean": 16, "std": 6, "longest": 40}}')
    return path


def _plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: object) -> dict:
    path = tmp_path / "plan.json"
    capsys.readouterr()
    assert algo([*COMMAND, *map(str, options), "--output", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_schedule_is_searched_written_and_simulated(tmp_path, lengths, capsys):
    free = _plan(tmp_path, capsys, "--policy", "rra", "--lengths", lengths)
    estimate = free["schedule"]["estimate"]
    bound_s = 0.8 * estimate["latency_s"]
    tight = _plan(
        tmp_path, capsys, "--policy", "rra", "--lengths", lengths, "--latency_bound", bound_s
    )["schedule"]["estimate"]
    assert tight["latency_s"] <= bound_s
    assert tight["requests_per_s"] <= estimate["requests_per_s"] * 1.001
    assert tight["new_tokens"] == 30  # the 99th percentile of the law
    plan = read_plan(tmp_path / "plan.json")
    assert plan.schedule is not None
    assert plan.schedule.policy == "rra"
    options = ["--strategy", tmp_path / "plan.json", "--lengths", lengths, "--requests", 1500]
    assert sim([*map(str, options), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"] == "rra"
    # A finite run has a ramp and stragglers, so it stays below the steady state.
    assert found["throughput_requests_per_s"] == pytest.approx(tight["requests_per_s"], rel=0.15)


def test_bins_for_a_throughput_are_chosen_written_and_simulated(tmp_path, lengths, capsys):
    found = {}
    for bins in (1, 6):
        words = ["--policy", "multibin", "--lengths", lengths, "--bins", bins]
        found[bins] = _plan(tmp_path, capsys, *words)["schedule"]["estimate"]["requests_per_s"]
    assert found[1] < found[6]
    target = (found[1] + found[6]) / 2
    words = ["--policy", "multibin", "--lengths", lengths, "--target", target, "--max_wait", 9]
    made = _plan(tmp_path, capsys, *words)["schedule"]
    assert 2 <= len(made["boundaries"]) + 1 <= 6
    assert (made["decode_batch"], made["max_wait_s"]) == (64, 9)
    assert target <= made["estimate"]["requests_per_s"] <= found[6]
    options = ["--strategy", tmp_path / "plan.json", "--lengths", lengths, "--requests", 2000]
    rates = {}
    for predictor in ("oracle", "empirical"):
        assert sim([*map(str, options), "--predictor", predictor, "--json"]) == 0
        rates[predictor] = json.loads(capsys.readouterr().out)["throughput_requests_per_s"]
    # The last batches are not full; one prediction for all is one bin.
    assert rates["oracle"] == pytest.approx(made["estimate"]["requests_per_s"], rel=0.1)
    assert rates["empirical"] < rates["oracle"]


def test_people_are_told_the_bins(tmp_path, lengths, capsys):
    output = ["--output", str(tmp_path / "p.json")]
    words = ["--policy", "multibin", "--lengths", str(lengths), "--bins", "2"]
    assert algo([*COMMAND, *words, *output]) == 0
    assert "batches of 64, 2 bins, answers from 16 tokens" in capsys.readouterr().out
    words[-2:] = ["--target", "100000"]
    assert algo([*COMMAND, *words, *output]) == 3
    assert "no number of bins answers 100000 requests" in capsys.readouterr().err


def test_drift_is_reported_and_replanned(tmp_path, lengths, capsys):
    made = _plan(tmp_path, capsys, "--policy", "rra", "--lengths", lengths)["schedule"]
    other = tmp_path / "other.json"
    other.write_text('{"schema": 1, "truncated_normal": {"mean": 30, "std": 6, "longest": 40}}')
    options = [str(tmp_path / "plan.json"), "--requests", "600", "--lengths"]

    def drift(*more: object) -> dict:
        assert sim(["--strategy", *options, *map(str, more), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["drift"]

    assert not drift(lengths)["is_notable"]
    assert drift(lengths, "--replan")["adjusted_decode_iterations"] == []
    told = drift(other)
    assert told["is_notable"]
    assert told["expected_mean"] == pytest.approx(made["mean_new_tokens"])
    assert 1.6 < told["observed_mean"] / told["expected_mean"] < 2
    assert told["adjusted_decode_iterations"] == []
    adjusted = drift(other, "--replan")["adjusted_decode_iterations"]
    assert adjusted[-1] == pytest.approx(told["suggested_decode_iterations"], abs=2)
    assert sim(["--strategy", *options, str(other), "--replan"]) == 0
    assert f"went on with {adjusted[0]}" in capsys.readouterr().out


def test_a_bound_for_all_queries_is_kept_in_simulation(tmp_path, lengths, capsys):
    free = _plan(tmp_path, capsys, "--policy", "rra", "--lengths", lengths)
    bound_s = 0.9 * free["schedule"]["estimate"]["latency_s"]
    _plan(
        tmp_path, capsys, "--policy", "rra", "--lengths", lengths,
        "--latency_bound", bound_s, "--sla", "queries",
    )  # fmt: skip
    options = ["--strategy", tmp_path / "plan.json", "--lengths", lengths, "--requests", 2000]
    assert sim([*map(str, options), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["service_s"]["p99"] <= bound_s


def test_auto_is_at_least_as_fast_as_rra(tmp_path, lengths, capsys):
    rates = {}
    for policy in ("rra", "auto"):
        _plan(tmp_path, capsys, "--policy", policy, "--lengths", lengths, *CLOSED_FORM)
        options = ["--strategy", tmp_path / "plan.json", "--lengths", lengths, "--requests", 2000]
        assert sim([*map(str, options), "--json"]) == 0
        rates[policy] = json.loads(capsys.readouterr().out)["throughput_requests_per_s"]
    assert rates["auto"] >= rates["rra"] * 0.999


def test_people_are_told_the_schedule(tmp_path, lengths, capsys):
    options = ["--policy", "rra", "--lengths", str(lengths), "--output", str(tmp_path / "p.json")]
    assert algo([*COMMAND, *options]) == 0
    text = capsys.readouterr().out
    assert "policy         rra: encode" in text
    assert "requests/s; 30 tokens take" in text


def test_waa_plan_with_split_stages_is_checked_and_simulated(tmp_path, lengths, capsys):
    path = tmp_path / "p.json"
    small = ["--bits", "4", "--kv_bits", "8"]
    options = ["--policy", "waa", "--lengths", str(lengths), "--output", str(path), *small]
    assert algo([*COMMAND, *options, *CLOSED_FORM]) == 0
    text = capsys.readouterr().out
    assert "stages encode" in text
    plan = read_plan(path)
    assert plan.is_split
    assert plan.schedule is not None
    assert plan.schedule.policy == "waa"
    assert plan.schedule.estimate is not None
    assert check([str(path)]) == 0
    assert "fits" in capsys.readouterr().out
    assert sim(["--strategy", str(path), "--lengths", str(lengths), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"] == "waa"
    expected = plan.schedule.estimate.requests_per_s
    assert found["throughput_requests_per_s"] == pytest.approx(expected, rel=0.25)


def test_what_cannot_be_kept_is_infeasible(tmp_path, lengths, capsys):
    output = ["--output", str(tmp_path / "p.json")]
    options = ["--policy", "rra", "--lengths", str(lengths), "--latency_bound", "0.001"]
    assert algo([*COMMAND, *options, *output]) == 3
    assert "no RRA schedule answers 30 tokens within 0.001 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "rra"], "found no --lengths"),
        (["--policy", "waa"], "found no --lengths"),
        (["--policy", "multibin"], "found no --lengths"),
        (["--policy", "multibin", "--bins", "auto"], "--bins: found auto without --target"),
        (["--policy", "multibin", "--bins", "2", "--target", "1"], "expected one of them"),
        (["--policy", "multibin", "--bins", "none"], "expected auto or a number from 1"),
        (["--bins", "3"], "--bins: found without --policy multibin"),
        (["--policy", "rra", "--target", "3"], "--target: found without --policy multibin"),
        (["--policy", "iteration", "--max_wait", "3"], "--max_wait: found without --policy"),
        (["--latency_bound", "3"], "expected together with --policy rra, waa or auto"),
        (
            ["--policy", "rra", "--lengths", "LENGTHS", "--latency_bound", "0"],
            "--latency_bound: found 0, expected more than 0",
        ),
        (["--policy", "rra", "--lengths", "missing.json"], "no such file"),
    ],
)
def test_mistakes_exit_with_2(lengths, options, message, tmp_path, capsys):
    options = [str(lengths) if option == "LENGTHS" else option for option in options]
    assert algo([*COMMAND, *options, "--output", str(tmp_path / "p.json")]) == 2
    assert message in capsys.readouterr().err


def test_lengths_beyond_the_workload_are_refused(tmp_path, capsys):
    path = tmp_path / "long.json"
    path.write_text('{"schema": 1, "observed": [10, 500]}')
    options = ["--policy", "rra", "--lengths", str(path), "--output", str(tmp_path / "p.json")]
    assert algo([*COMMAND, *options]) == 2
    assert "answers of up to 500 tokens" in capsys.readouterr().err


def _shared_tables(folder: Path, prefill_gain: float) -> Path:
    """Tables of T4s alone and in twos, the twos faster by so much and otherwise alike."""
    folder.mkdir()
    for degree in (1, 2):
        rows = [
            (phase, bits, batch, tokens, 1e-4 * batch * (tokens if phase == "prefill" else 8))
            for phase in ("prefill", "decode")
            for bits in (16, 8, 4, 3)
            for batch in (1, 4, 16, 64)
            for tokens in (64, 256, 512)
        ]
        gain = 1.0 if degree == 1 else prefill_gain
        origin = "# model: facebook/opt-13b\n# device: T4-16G\n# dtype: float16\n"
        origin += "" if degree == 1 else f"# tensor_parallel: {degree}\n"
        lines = [f"{p},{b},{n},{t},{s / gain}" for p, b, n, t, s in rows]
        text = "\n".join([origin + "phase,bits,batch,tokens,seconds", *lines])
        (folder / f"t4-{degree}.csv").write_text(text + "\n")
    return folder


@pytest.mark.parametrize(("gain", "members"), [(1.9, 2), (1.05, 1)])
def test_tensor_parallel_degree_with_most_requests_is_chosen(
    tmp_path, lengths, capsys, gain, members
):
    tables = _shared_tables(tmp_path / "tables", gain)
    path = tmp_path / "plan.json"
    command = [
        *["--model", "facebook/opt-13b", "--device_names", "T4-16G", "--device_numbers", "4"],
        *["--global_bz", "32", "--s", "256", "--n", "40", "--bits", "8", "--no_explain"],
        *["--profile", str(tables), "--policy", "rra", "--lengths", str(lengths), *CLOSED_FORM],
    ]
    assert algo([*command, "--tensor_parallel", "1", "2", "--output", str(path)]) == 0
    told = capsys.readouterr().out
    plan = read_plan(path)
    assert {device.members for device in plan.cluster.devices} == {members}
    assert ("2 devices share every layer" in told) == (members == 2)
    options = ["--strategy", str(path), "--profile", str(tables), "--lengths", str(lengths)]
    assert sim([*options, "--requests", "200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "rra"
    if members == 2:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "x"}\n')
        words = ["--strat_file_name", path, "--prompts", prompts, "--output", tmp_path / "out"]
        assert dist([*map(str, words)]) == 2
        assert "found tensor_parallel 2, expected none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tensor_parallel", "2"], "expected together with --policy rra, waa or auto"),
        (["--policy", "rra", "--tensor_parallel", "0"], "found 0, expected 1 or more"),
        (["--policy", "rra", "--tensor_parallel", "3"], "divide into teams of 3"),
    ],
)
def test_degrees_that_mean_nothing_are_refused(tmp_path, lengths, capsys, options, said):
    more = ["--lengths", str(lengths)] if "--policy" in options else []
    words = [*COMMAND, *options, *more, "--output", str(tmp_path / "plan.json")]
    assert algo(words) == 2
    assert said in capsys.readouterr().err


def test_a_search_reports_how_far_it_is(lengths, capsys, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def bar(name):
        yield lambda done, total, _: seen.append((name, done, total))

    monkeypatch.setattr(algo_module, "progress_bar", bar)
    words = ["--policy", "waa", "--lengths", str(lengths), "--output", str(lengths) + ".plan"]
    assert algo([*COMMAND, *words]) == 0
    assert [one for one in seen if one[0] == "schedules"] == [
        ("schedules", done, 6) for done in range(1, 7)
    ]
