"""A plan priced from a wrong table, a run of the right machine, and the table corrected by it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmpq.assigner import make_plan
from llmpq.assigner.forecast import forecast
from llmpq.assigner.request import PlanRequest, costs_of
from llmpq.cli.commands.profile import main
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import write_plan
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable, read_latency_table, write_latency_table
from llmpq.spec.workload import Workload

BITS = (4, 8, 16)
PROVENANCE = (("device", "cpu"), ("dtype", "float32"), ("stage_s", "prefill 0.0002 decode 0.0001"))


def truth(phase, bits, batch, tokens):
    rows = batch * tokens if phase is Phase.PREFILL else batch
    if bits == 0:
        return 2e-3 + 1e-5 * rows
    return 1e-3 + 1e-5 * rows * (20 + bits) + 1e-6 * batch * tokens


def table_of(wrong=None):
    """Return a table of the true seconds, some of them times a wrong factor."""
    factors = wrong or {}
    samples = [
        LatencySample(
            phase=phase,
            bits=bits,
            batch=batch,
            tokens=tokens,
            seconds=truth(phase, bits, batch, tokens) * factors.get((phase, bits), 1.0),
        )
        for phase in Phase
        for bits in (0, *BITS)
        for batch in (1, 2, 4, 8)
        for tokens in ((1,) if (bits, phase) == (0, Phase.DECODE) else (8, 16, 32, 64))
    ]
    return LatencyTable(samples=tuple(samples), provenance=PROVENANCE)


WRONG = {(Phase.DECODE, 8): 2.0, (Phase.PREFILL, 4): 0.5, (Phase.DECODE, 0): 1.5}


@pytest.fixture
def folder(tmp_path, tiny_model):
    """A folder with the wrong table, the plan it led to, and the report of a true run of it."""
    write_latency_table(tmp_path / "wrong.csv", table_of(WRONG))
    write_latency_table(tmp_path / "right.csv", table_of())
    request = request_with(tmp_path / "wrong.csv", tiny_model("llama"))
    plan = make_plan(request, command="test")
    write_plan(tmp_path / "plan.json", plan)
    right = costs_of(request_with(tmp_path / "right.csv", tiny_model("llama")))
    (tmp_path / "report.json").write_text(json.dumps(report_of(plan, right)))
    return tmp_path, plan, request, right


def request_with(table, model_dir):
    group = DeviceGroup(type="cpu", count=2, threads=1, profile=str(table))
    return PlanRequest(
        model=load_model_dir(model_dir),
        model_source=str(model_dir),
        cluster=Cluster(name="box", nodes=(Node(name="here", devices=(group,)),)),
        workload=Workload(batch=8, prompt_tokens=16, new_tokens=16),
        dtype="float32",
        kv_bits=32,
        bits=(4, 8),
        theta_s=0.5,
    )


def report_of(plan, costs):
    """Return what ``llmpq-dist`` would write of a run that takes exactly the true seconds."""
    work, sizes = plan.workload, plan.micro_batching
    stages = []
    for stage in plan.stages:
        device = plan.device_of(stage)
        kinds = []
        for phase, rows, tokens in (
            (Phase.PREFILL, sizes.prefill, work.prompt_tokens),
            (Phase.DECODE, sizes.decode, work.mean_context_tokens),
        ):
            layers = [costs.layer_s(device, phase, b, rows, tokens, 0) for b in stage.bits]
            head = costs.master_s(device, phase, rows, tokens if phase is Phase.PREFILL else 1)
            apart = costs.stage_s(device, phase) if layers else 0.0
            kinds.append(
                {
                    "phase": phase.value, "rows": rows, "tokens": tokens, "count": 5,
                    "seconds": 5 * (sum(layers) + apart),
                    "master_s": 0.0 if stage.rank else 5 * head,
                }
            )  # fmt: skip
        stages.append({"rank": stage.rank, "work": kinds})
    return {"stages": stages}


def recalibrate(folder, *more):
    words = ["recalibrate", "--report", "report.json", "--strat_file_name", "plan.json"]
    words += ["--table", "wrong.csv", "--output", "new.csv"]
    return main([str(folder / w) if w.endswith((".json", ".csv")) else w for w in words] + [*more])


def test_the_corrected_table_forecasts_what_was_measured(folder, capsys, tiny_model):
    path, plan, _, right = folder
    assert recalibrate(path, "--json") == 0
    factors = json.loads(capsys.readouterr().out)["factors"]
    assert factors["decode master"] == pytest.approx(1 / 1.5, rel=0.02)
    measured_s = forecast(plan, right).latency_s
    before = abs(plan.estimate.forecast.latency_s / measured_s - 1)
    new = costs_of(request_with(path / "new.csv", tiny_model("llama")))
    after = abs(forecast(plan, new).latency_s / measured_s - 1)
    assert before > 0.1
    assert after < 0.02


def test_planning_again_with_the_corrected_table_is_no_worse_on_the_machine(folder, tiny_model):
    path, plan, request, right = folder
    assert recalibrate(path) == 0
    group = replace(request.cluster.nodes[0].devices[0], profile=str(path / "new.csv"))
    cluster = replace(request.cluster, nodes=(Node(name="here", devices=(group,)),))
    better = make_plan(replace(request, cluster=cluster), command="test")

    def true_s(found):
        own = replace(found, cluster=plan.cluster)
        return forecast(own, right).latency_s + 0.5 * found.estimate.quality

    assert true_s(better) <= true_s(plan) * 1.02


def test_the_provenance_of_the_new_table_names_its_origin(folder):
    path, *_ = folder
    assert recalibrate(path) == 0
    origin = dict(read_latency_table(path / "new.csv").provenance)
    assert origin["command"].startswith("llmpq-profile recalibrate")
    assert origin["device"] == "cpu"
    assert origin["stage_s"] == dict(PROVENANCE)["stage_s"]
    assert "decode" in origin["recalibrated"]
    assert origin["recalibrated by"].startswith("report ")


def test_a_plan_whose_stages_share_cores_is_rejected(folder, capsys):
    path, plan, *_ = folder
    nodes = tuple(replace(node, cores=1) for node in plan.cluster.nodes)
    write_plan(path / "plan.json", replace(plan, cluster=replace(plan.cluster, nodes=nodes)))
    assert recalibrate(path) == (2 if len(plan.stages) > 1 else 0)
    if len(plan.stages) > 1:
        assert "found 2 threads on 1 cores" in capsys.readouterr().err


def test_a_report_of_another_plan_is_rejected(folder, capsys):
    path, *_ = folder
    (path / "report.json").write_text(json.dumps({"stages": [{"work": []}] * 5}))
    assert recalibrate(path) == 2
    assert "found 5, expected the" in capsys.readouterr().err


def changed(report, slower, **shares):
    """Return a report of a run that was slower, with shares of its stages' time."""
    stages = [
        {
            **stage,
            **shares,
            "work": [
                {**one, "seconds": slower * one["seconds"], "master_s": slower * one["master_s"]}
                for one in stage["work"]
            ],
        }
        for stage in report["stages"]
    ]
    return {"stages": stages, "elapsed_s": 10.0}


def test_several_runs_are_corrected_by_their_mean(folder, capsys):
    path, *_ = folder
    report = json.loads((path / "report.json").read_text())
    for name, slower in (("slow.json", 1.1), ("fast.json", 0.9)):
        (path / name).write_text(json.dumps(changed(report, slower)))
    words = ["recalibrate", "--report", "slow.json", "fast.json", "--strat_file_name", "plan.json"]
    words += ["--table", "right.csv", "--output", "new.csv"]
    assert main([str(path / w) if "." in w else w for w in words] + ["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(factor == pytest.approx(1.0, abs=0.02) for factor in found["factors"].values())


def test_time_that_the_master_neither_computes_nor_waits_nor_sends_is_its_own_work(folder, capsys):
    path, *_ = folder
    report = json.loads((path / "report.json").read_text())
    shares = {"busy_fraction": 0.5, "wait_fraction": 0.3, "send_fraction": 0.1995}
    (path / "report.json").write_text(json.dumps(changed(report, 1.0, **shares)))
    words = ["recalibrate", "--report", "report.json", "--strat_file_name", "plan.json", "--json"]
    words += ["--table", "right.csv", "--output", "new.csv"]
    assert main([str(path / w) if "." in w else w for w in words]) == 0
    factors = json.loads(capsys.readouterr().out)["factors"]
    master = report["stages"][0]["work"]
    each_s = 0.0005 * 10.0 / sum(one["count"] for one in master)
    for one in master:
        expected = 1.0 + each_s * one["count"] / one["master_s"]
        assert factors[f"{one['phase']} master"] == pytest.approx(expected, rel=0.01)
    layers = {name: value for name, value in factors.items() if "master" not in name}
    assert all(value == pytest.approx(1.0, abs=0.01) for value in layers.values())


def test_a_wrong_number_of_plans_is_rejected(folder, capsys):
    path, *_ = folder
    words = ["recalibrate", "--table", "wrong.csv", "--output", "new.csv", "--report"]
    words += ["report.json"] * 3 + ["--strat_file_name"] + ["plan.json"] * 2
    assert main([str(path / w) if "." in w else w for w in words]) == 2
    assert "found 2 plans for 3 reports" in capsys.readouterr().err
