"""``llmpq-profile device`` on a small scale: it writes what ``--devices`` takes."""

import json

import pytest

from llmpq.cli.commands import algo, profile
from llmpq.spec import catalog


def test_the_file_is_one_that_a_plan_takes(tmp_path, capsys):
    path = tmp_path / "here.json"
    argv = ["device", "--features", "64", "--budget", "0.01", "--name", "here"]
    assert profile.main([*argv, "--output", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert 0 <= printed.pop("cpu_taken") <= 1
    assert printed == json.loads(path.read_text())
    (entry,) = catalog.load_devices(path)
    assert {cost.bits for cost in entry.precision_costs} == {16, 8, 4, 3}
    assert "float32" in dict(entry.flops)
    plan = [
        "--model", "facebook/opt-125m", "--device_names", "here", "--device_numbers", "1",
        "--devices", str(path), "--global_bz", "2", "--s", "32", "--n", "4",
        "--output", str(tmp_path / "plan.json"), "--json",
    ]  # fmt: skip
    assert algo.main(plan) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["device"] == "node0/here#0"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "warp:9"], "--device: found 'warp:9', expected a device here"),
        (["--budget", "0"], "--budget, --threads, --features"),
        (["--features", "100"], "a multiple of 64"),
    ],
)
def test_bad_input_is_status_2(argv, message, tmp_path, capsys):
    assert profile.main(["device", *argv, "--output", str(tmp_path / "x.json")]) == 2
    assert message in capsys.readouterr().err
