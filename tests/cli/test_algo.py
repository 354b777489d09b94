"""llmpq-algo through ``main(argv)``: what it prints, writes and answers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.builders import model_spec, sensitivity

from llmpq.cli.algo import main
from llmpq.spec import catalog
from llmpq.spec.plan_io import read_plan
from llmpq.spec.tables import write_sensitivity

SMALL = ["--model", "facebook/opt-1.3b", "--global_bz", "4", "--s", "128", "--n", "20"]
ONE = ["--device_names", "T4-16G", "--device_numbers", "1"]
STAGE_KEYS = {
    "rank",
    "device",
    "first_layer",
    "end_layer",
    "bits",
    "memory_bytes",
    "capacity_bytes",
    "prefill_s",
    "decode_s",
}
PLAN_KEYS = {
    "status",
    "method",
    "objective_s",
    "latency_s",
    "quality",
    "throughput_tokens_per_s",
    "bound_s",
    "gap",
    "planning_s",
    "orders",
    "pairs_searched",
    "pairs_pruned",
    "prefill_micro_batch",
    "decode_micro_batch",
    "dropped_devices",
    "stages",
    "strategy",
}


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_json_is_one_object_with_the_promised_fields(capsys, tmp_path) -> None:
    assert main([*SMALL, *ONE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= PLAN_KEYS
    assert all(set(stage) >= STAGE_KEYS for stage in found["stages"])
    assert found["strategy"] == "strategies/opt-1.3b__t4-16gx1__s128-n20-b4__llmpq.json"
    plan = read_plan(tmp_path / found["strategy"])
    assert plan.estimate.latency_s == found["latency_s"]
    assert plan.provenance.command.startswith("llmpq-algo --model facebook/opt-1.3b")
    assert found["throughput_tokens_per_s"] == pytest.approx(4 * 20 / found["latency_s"])


def test_the_papers_own_command_line(capsys) -> None:
    argv = ["--model-name", "opt", "--model_size", "30b", "--device_names", "T4-16G", "V100-32G"]
    argv += ["--device_numbers", "3", "1", "--global_bz", "32", "--s", "512", "--n", "100"]
    assert main([*argv, "--output", "plan.json", "--theta", "1", "--method", "llmpq"]) == 0
    text = capsys.readouterr().out
    assert "facebook/opt-30b on t4-16gx3-v100-32gx1" in text
    assert "proven optimal over 2 device orders" in text
    plan = read_plan("plan.json")
    assert plan.search.theta_s == 1.0
    assert len(plan.bits) == 48


def test_all_methods_and_the_infeasible_among_them(capsys) -> None:
    cluster = {
        "schema": 1,
        "name": "lopsided",
        "nodes": [
            {"name": "big", "devices": [{"type": "T4-16G", "count": 1}]},
            {
                "name": "tiny",
                "devices": [{"type": "T4-16G", "count": 1, "memory_bytes": 1_400_000_000}],
            },
        ],
    }
    with open("cluster.json", "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(cluster, file)
    assert main([*SMALL, "--cluster", "cluster.json", "--method", "all", "--json"]) == 0
    plans = {plan["method"]: plan for plan in json.loads(capsys.readouterr().out)["plans"]}
    assert plans["llmpq"]["dropped_devices"] == ["tiny/T4-16G#0"]
    assert plans["uniform"]["status"] == "infeasible"
    assert "even split" in plans["uniform"]["reason"]


def test_a_model_that_does_not_fit_is_status_3_with_a_fix(capsys) -> None:
    argv = ["--model", "facebook/opt-66b", *ONE, "--global_bz", "8", "--s", "512", "--n", "100"]
    assert main([*argv, "--json"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("llmpq-algo: error: facebook/opt-66b does not fit on t4-16gx1")
    assert "T4-16G" in printed.err.rpartition("smallest single fixes: ")[2]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*SMALL, *ONE, "--global_bz", "-4"], "field 'batch': found -4"),
        (["--model", "facebook/opt-1.3", *ONE, *SMALL[2:]], "facebook/opt-1.3b"),
        ([*SMALL, "--device_names", "T5", "--device_numbers", "1"], "T5"),
        ([*SMALL, "--device_names", "T4-16G", "--device_numbers", "1", "2"], "one for each"),
        ([*SMALL, "--device_names", "T4-16G", "--device_numbers", "0"], "found 0"),
        ([*SMALL], "--cluster"),
        ([*SMALL[:2], *ONE], "--workload"),
        ([*SMALL[2:], *ONE], "--model"),
        ([*SMALL, *ONE, "--cluster", "x.json"], "either --cluster"),
        ([*SMALL, *ONE, "--s", "4000"], "2048"),
        ([*SMALL, *ONE, "--omega_file", "missing.json"], "missing.json: no such file"),
        ([*SMALL, *ONE, "--profile", "nowhere"], "no such folder"),
        ([*SMALL, *ONE, "--theta", "nan"], "theta_s: found nan"),
        ([*SMALL, *ONE, "--gap", "2"], "gap: found 2.0"),
    ],
)
def test_bad_input_is_status_2_and_names_it(argv, message, capsys) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("llmpq-algo: error: ")
    assert message in printed.err


def test_omega_of_another_length_names_file_and_field(capsys) -> None:
    write_sensitivity("omega.json", sensitivity(model_spec(layers=5)))
    assert main([*SMALL, *ONE, "--omega_file", "omega.json"]) == 2
    text = capsys.readouterr().err
    assert "omega.json: field 'omega': found '5 layers', expected 24 layers" in text


def test_omega_file_decides_which_layers_lose_bits(capsys) -> None:
    model = replace(model_spec(layers=24), name="facebook/opt-1.3b")
    table = sensitivity(model)
    write_sensitivity("omega.json", table)
    argv = [*SMALL, "--cluster", "cluster.json", "--omega_file", "omega.json", "--json"]
    cluster = {
        "schema": 1,
        "name": "tight",
        "nodes": [
            {
                "name": "n",
                "devices": [{"type": "T4-16G", "count": 1, "memory_bytes": 2_500_000_000}],
            }
        ],
    }
    with open("cluster.json", "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(cluster, file)
    assert main([*argv, "--theta", "100"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    widths = sorted(set(stage["bits"]))
    assert len(widths) > 1
    column = dict(table.omega)[4]
    low = [column[i] for i, b in enumerate(stage["bits"]) if b == widths[0]]
    high = [column[i] for i, b in enumerate(stage["bits"]) if b == widths[-1]]
    assert sum(low) / len(low) < sum(high) / len(high)


def test_float32_is_planned_in_float32(capsys) -> None:
    assert main([*SMALL, *ONE, "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "float32"
    assert read_plan(found["strategy"]).kv_bits == 32


def test_every_listed_model_is_known_to_the_planner(capsys) -> None:
    names = [name for name in catalog.model_names() if "125m" in name or "Mixtral-8x7B" in name]
    assert len(names) == 2
    for name in names:
        argv = ["--model", name, "--device_names", "H200", "--device_numbers", "1", *SMALL[2:]]
        assert main(argv) == 0
        assert f"{name} on h200x1" in capsys.readouterr().out


def test_help_lists_no_option_of_a_later_release(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "--pareto" not in text
    assert "--solver {highs,cbc,gurobi}" in text
