"""llmpq-dist doctor: what is wrong is said, with where, and by the exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers.ranks import make_plan

from llmpq.cli.commands.dist import main
from llmpq.dist.launch.doctor import judge, report
from llmpq.spec.plan import write_plan


def facts(rank: int, **changed: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "name": f"stage {rank} (rank {rank}, here/cpu#{rank})",
        "versions": {"llmpq": "1", "torch": "2.13"},
        "available_bytes": 1000,
        "device": "cpu",
        "wall_clock_s": 1000.0 + rank,
        "perf_clock_s": 10.0 + rank,
        "clock_offset_s": 0.0,
        "weights_digest": "a" * 64,
        "failures": {},
    } | changed


PLAN = make_plan((0, 1, 3))


def test_a_healthy_cluster_has_no_findings():
    found = report(PLAN, [facts(0), facts(1)])
    assert (found["status"], found["findings"]) == ("ready", [])


@pytest.mark.parametrize(
    ("changed", "check", "level", "says"),
    [
        ({"versions": {"llmpq": "2", "torch": "2.13"}}, "versions", "error", "found 2, expected"),
        ({"versions": {"llmpq": "1", "torch": "2.11"}}, "versions", "warning", "found 2.11"),
        ({"weights_digest": "b" * 64}, "weights", "error", "bbbb"),
        ({"wall_clock_s": 1100.0}, "clocks", "warning", "+99.0 s"),
        ({"failures": {"device": "no CUDA device"}}, "device", "error", "no CUDA"),
    ],
)
def test_what_differs_on_one_rank_is_named(changed, check, level, says):
    (finding,) = judge(PLAN, [facts(0), facts(1, **changed)])
    assert (finding.rank, finding.check, finding.level) == (1, check, level)
    assert says in finding.message
    status = report(PLAN, [facts(0), facts(1, **changed)])["status"]
    assert status == ("not ready" if level == "error" else "ready")


def test_ranks_of_one_host_share_its_memory():
    # The plan of these tests asks for 5 bytes a stage.
    assert not judge(PLAN, [facts(0, available_bytes=10), facts(1, available_bytes=10)])
    (finding,) = judge(PLAN, [facts(0, available_bytes=9), facts(1, available_bytes=9)])
    assert (finding.check, finding.level) == ("memory", "error")
    assert "rank 0, 1" in finding.message


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("transport", "found_as"), [("auto", "unix"), ("torch", "gloo")])
def test_the_command_examines_every_rank(tiny_model, tmp_path, capsys, transport, found_as):
    strategy = tmp_path / "strategy.json"
    write_plan(strategy, replace(PLAN, kv_bits=32))
    words = ["doctor", "--transport", transport, "--strat_file_name", str(strategy), "--model"]
    assert main([*words, str(tiny_model("llama", seed=1)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "ready"
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    for one in found["ranks"]:
        assert one["link"]["transport_to_next"] == found_as
        assert one["link"]["bytes_per_s"] > 0


@pytest.mark.slow
@pytest.mark.dist
def test_missing_weights_are_an_exit_status(tiny_model, tmp_path, capsys):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for file in tiny_model("llama", seed=1).iterdir():
        if file.suffix != ".safetensors":
            (model_dir / file.name).write_bytes(file.read_bytes())
    strategy = tmp_path / "strategy.json"
    write_plan(strategy, PLAN)
    words = ["doctor", "--strat_file_name", str(strategy), "--model", str(model_dir)]
    assert main(words) == 2
    assert "not ready" in capsys.readouterr().out


def test_a_doctor_needs_a_strategy(capsys):
    assert main(["doctor"]) == 2
    assert "required: --strat_file_name" in capsys.readouterr().err
