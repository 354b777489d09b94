"""llmpq-algo through ``main(argv)``: what it prints, writes and answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.builders import model_spec, sensitivity

from llmpq.assigner import METHODS
from llmpq.cli.commands.algo import main
from llmpq.cli.commands.check import main as check
from llmpq.spec import catalog
from llmpq.spec.plan import read_plan
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
    "explanation",
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


def test_export_writes_a_directory_for_another_engine(capsys, tmp_path) -> None:
    words = [*SMALL, *ONE, "--bits", "8", "16", "--export", "vllm"]
    assert main([*words, "--output", "out"]) == 0
    plan = read_plan(tmp_path / "out" / "plan.json")
    text = (tmp_path / "out" / "node-0.sh").read_text()
    assert f"export VLLM_PP_LAYER_PARTITION={plan.model.num_layers}" in text
    capsys.readouterr()
    assert main([*words, "--output", "out"]) == 2
    assert "out: exists already" in capsys.readouterr().err
    assert main(words) == 2
    assert "expected --output DIR" in capsys.readouterr().err


def test_the_papers_own_command_line(capsys) -> None:
    argv = ["--model-name", "opt", "--model_size", "30b", "--device_names", "T4-16G", "V100-32G"]
    argv += ["--device_numbers", "3", "1", "--global_bz", "32", "--s", "512", "--n", "100"]
    assert main([*argv, "--output", "plan.json", "--theta", "1", "--method", "llmpq"]) == 0
    text = capsys.readouterr().out
    assert "facebook/opt-30b on t4-16gx3-v100-32gx1" in text
    assert "proven optimal over all 4 orders of devices" in text
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
        ([*SMALL, *ONE, "--cluster", "x.json"], "found both"),
        ([*SMALL, *ONE, "--s", "4000"], "2048"),
        ([*SMALL, *ONE, "--omega_file", "missing.json"], "missing.json: no such file"),
        ([*SMALL, *ONE, "--profile", "nowhere"], "no such folder"),
        ([*SMALL, *ONE, "--theta", "nan"], "--theta: found nan"),
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
    assert "omega.json: field 'omega': found 5 layers" in text
    assert "expected the 24 layers of facebook/opt-1.3b" in text


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


def test_help_offers_the_solvers_there_are(capsys) -> None:
    assert main(["--help"]) == 0
    assert "--solver {" in capsys.readouterr().out


MIXED = [*SMALL, "--device_names", "A100-40G", "P100-12G", "--device_numbers", "1", "2"]


def test_every_device_says_what_binds_and_every_dropped_one_what_it_costs(capsys) -> None:
    assert main([*MIXED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    told = found["explanation"]
    assert len(told["stages"]) == len(found["stages"])
    assert {item["device"] for item in told["dropped"]} == set(found["dropped_devices"]) != set()
    for item in told["dropped"]:
        used = item["if_used"]
        assert used["costs_s"] == pytest.approx(used["objective_s"] - found["objective_s"])
        assert used["costs_s"] > 0
        # The claim is a plan that can be had.
        argv = [*MIXED, "--use", item["device"], "--theta", str(found["theta_s"]), "--json"]
        assert main([*argv, "--no_explain"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["objective_s"] == pytest.approx(used["objective_s"], rel=1e-3)
        assert all("if_used" not in entry for entry in again["explanation"]["dropped"])


def test_what_if_tells_what_one_more_device_brings(capsys) -> None:
    assert main([*MIXED, "--what_if", "--no_explain", "--json"]) == 0
    more = json.loads(capsys.readouterr().out)["explanation"]["one_more"]
    assert [item["device"] for item in more] == ["node0/A100-40G", "node1/P100-12G"]
    assert all(item["throughput_gain"] >= -1e-3 for item in more)
    assert main([*MIXED, "--what_if", "--no_explain"]) == 0
    assert "one more       node1/P100-12G: " in capsys.readouterr().out


def test_manual_decisions_reach_the_plan(capsys) -> None:
    argv = [*MIXED, "--fix_layers", "node1/P100-12G#1=0:3", "--fix_bits", "0:2=8", "node0=16"]
    argv += ["--micro_batch", "2", "4", "--exclude", "node1/P100-12G#0", "--memory_gib"]
    assert main([*argv, "node0=4", "--json", "--no_explain"]) == 0
    found = json.loads(capsys.readouterr().out)
    small, large = found["stages"]
    assert (small["device"], small["first_layer"], small["end_layer"]) == (
        "node1/P100-12G#1",
        0,
        3,
    )
    assert small["bits"][:2] == [8, 8]
    assert set(large["bits"]) == {16}
    assert large["memory_bytes"] <= large["capacity_bytes"] == 4 * 2**30
    assert (found["prefill_micro_batch"], found["decode_micro_batch"]) == (2, 4)
    (dropped,) = found["explanation"]["dropped"]
    assert dropped == {"device": "node1/P100-12G#0", "reason": "as decided by --exclude"}
    plan = read_plan(found["strategy"])
    assert "--fix_bits 0:2=8" in dict(plan.provenance.inputs)["overrides"]


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--use", "node7"], 2, "--use: found no device 'node7', expected one of node0/A100"),
        (["--fix_layers", "node0=5"], 2, "--fix_layers: found 'node0=5'"),
        (["--fix_bits", "4"], 2, "--fix_bits: found '4'"),
        (["--fix_bits", "0:4=x"], 2, "--fix_bits: found '0:4=x'"),
        (["--memory_gib", "node0=-1"], 2, "--memory_gib: found 'node0=-1'"),
        (["--micro_batch", "9", "1"], 2, "micro-batches: found 9 and 1"),
        (["--use", "node0", "--exclude", "node0"], 2, "which --exclude leaves out"),
        (["--pareto", "1"], 2, "--pareto: found 1"),
        (["--pareto", "3", "--theta", "1"], 2, "--theta: found together with --pareto"),
        (["--pareto", "3", "--method", "all"], 2, "--method all"),
        (["--method", "uniform", "--use", "node0"], 2, "found method 'uniform'"),
        (["--memory_gib", "node0=1", "node1=1"], 3, "no plan exists with --memory_gib"),
    ],
)  # fmt: skip
def test_bad_decisions_are_named(argv, status, message, capsys) -> None:
    assert main([*MIXED, *argv]) == status
    assert message in capsys.readouterr().err


def test_pareto_writes_plans_json_and_picture(capsys) -> None:
    assert main([*MIXED, "--pareto", "4", "--json", "--output", "front/plan.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["picture"] == "front/plan__pareto.png"
    assert read_bytes("front/plan__pareto.png").startswith(b"\x89PNG")
    assert json.loads(read_bytes("front/plan__pareto.json")) == found
    plans = [read_plan(record["strategy"]) for record in found["plans"]]
    assert 2 <= len(plans) <= 4
    lost = [plan.estimate.quality for plan in plans]
    speed = [plan.throughput_tokens_per_s for plan in plans]
    assert lost == sorted(lost)
    assert speed == sorted(speed)
    assert len(set(lost)) == len(set(speed)) == len(plans)
    assert found["plans"][0]["strategy"] == "front/plan__p1.json"
    assert main([*MIXED, "--pareto", "4", "--output", "front/plan.json"]) == 0
    text = capsys.readouterr().out
    assert "front/plan__p1.json" in text
    assert "quality lost" in text


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def test_eight_bit_keys_and_values_take_less_memory(capsys) -> None:
    sizes = {}
    for bits in ("8", "16"):
        assert main([*SMALL, *ONE, "--kv_bits", bits, "--fix_bits", "0:24=8", "--json"]) == 0
        (stage,) = json.loads(capsys.readouterr().out)["stages"]
        sizes[bits] = stage["memory_parts_bytes"]["kv"]
    # A head of 64 values keeps 64 bytes and a scale of 2 instead of 128 bytes.
    assert sizes["8"] / sizes["16"] == pytest.approx(66 / 128)


def test_fit_prices_measured_shapes_by_the_regression(capsys) -> None:
    Path("tables").mkdir()
    rows = ["# device: T4-16G", "phase,bits,batch,tokens,seconds"]
    for phase, unit in (("prefill", 1e-5), ("decode", 1e-7)):
        for batch in (1, 2, 4):
            for tokens in (64, 128, 256):
                odd = 1.3 if (batch, tokens) == (4, 128) else 1.0
                rows += [
                    f"{phase},{bits},{batch},{tokens},{odd * unit * batch * tokens}"
                    for bits in (8, 16)
                ]
    Path("tables/t4.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    argv = [*SMALL, *ONE, "--profile", "tables", "--bits", "16", "--micro_batch", "4", "4"]
    stages = {}
    for name, option in (("fit", ["--fit"]), ("table", ["--use_profiler_prediction"])):
        assert main([*argv, *option, "--output", f"{name}.json", "--json"]) == 0
        (stage,) = json.loads(capsys.readouterr().out)["stages"]
        stages[name] = stage["prefill_s"]
        assert check([f"{name}.json", "--profile", "tables"]) == 0
        assert "every stored figure is confirmed" in capsys.readouterr().out
    assert stages["fit"] < stages["table"]
    assert main([*argv, "--fit", "--use_profiler_prediction"]) == 2


def test_method_all_prints_one_table_and_writes_one_file_per_method(
    capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["--model", "facebook/opt-1.3b", "--global_bz", "4", "--s", "64", "--n", "8"]
    argv += ["--device_names", "T4-16G", "P100-12G", "--device_numbers", "1", "1"]
    assert main([*argv, "--method", "all"]) == 0
    printed = capsys.readouterr().out
    table, _, files = printed.partition("written ")
    rows = [line.split()[0] for line in table.splitlines() if line]
    assert sorted(rows[1:]) == sorted(METHODS)
    assert rows[1] == "llmpq"
    assert files.count(".json") == len(list((tmp_path / "strategies").iterdir())) == len(METHODS)


def test_the_head_has_the_bits_that_are_fixed_or_those_of_the_best_plan(capsys) -> None:
    found = {}
    for asked in ("8", "auto"):
        assert main([*SMALL, *ONE, "--fix_bits", f"head={asked}", "--json"]) == 0
        found[asked] = json.loads(capsys.readouterr().out)
    assert found["8"]["head_bits"] == 8
    assert found["8"]["head_loss"].endswith("(default: half of what all layers lose)")
    assert found["auto"]["objective_s"] <= found["8"]["objective_s"]
    for wrong, message in (
        (["--fix_bits", "head=8", "head=auto"], "found head 2 times"),
        (["--fix_bits", "head=5"], "--fix_bits head: found 5"),
        (["--fix_bits", "0:2=auto"], "found '0:2=auto'"),
        (["--fix_bits", "head=auto", "--pareto", "3"], "only the search for a single plan"),
    ):
        assert main([*SMALL, *ONE, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_the_time_of_many_requests_is_printed(capsys) -> None:
    assert main([*MIXED, "--no_explain", "--requests", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    batches = math.ceil(1000 / read_plan(found["strategy"]).workload.batch)
    assert found["requests"]["seconds"] == pytest.approx(batches * found["latency_s"])
    assert main([*MIXED, "--no_explain", "--requests", "1000"]) == 0
    assert "requests       1,000 take " in capsys.readouterr().out
    assert main([*MIXED, "--pareto", "2", "--requests", "1000"]) == 2
    assert "--requests: found with --method all or --pareto" in capsys.readouterr().err
