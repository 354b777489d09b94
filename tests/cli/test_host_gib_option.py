"""``--host_gib``: the processor and memory beside GPUs that are named on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.assigner.planner import make_plan
from llmpq.assigner.request import PlanRequest
from llmpq.cli.commands import algo, check, sim
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, DeviceHost, Node
from llmpq.spec.plan import read_plan
from llmpq.spec.workload import Workload
from llmpq.units import GIB

MODEL = "openai/gpt-oss-20b"
SIZES = ["--s", "256", "--n", "32"]
GPU = ["--device_names", "RTX 3060 12GB"]
OWN = {
    "type": "mine", "kind": "cpu", "memory_bytes": 2**36, "memory_bytes_per_s": 6e10,
    "flops": {"float32": 1e12}, "cores": 12, "gather_bytes_per_s": 3e10,
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(*words, batch=1):
    argv = ["--model", MODEL, *SIZES, "--global_bz", str(batch), *words]
    assert algo.main([*argv, "--output", "p.json", "--no_explain"]) == 0
    return read_plan("p.json")


@pytest.mark.parametrize(("gpus", "batch"), [(1, 1), (2, 1), (2, 3)])
def test_the_plan_is_that_of_the_cluster_that_states_the_host(gpus, batch, capsys):
    words = [*GPU, "--device_numbers", str(gpus), "--host_gib", "5950x=48"]
    plan = planned(*words, "--bits", "16", "8", batch=batch)
    host = DeviceHost(
        type="Ryzen-9-5950X",
        threads=15 if batch == 1 else 16 // gpus - 1,
        memory_bytes=48 * GIB // gpus - catalog.device("Ryzen-9-5950X").runtime_bytes,
    )
    group = DeviceGroup(type="RTX3060-12G", count=gpus, host=host)
    cluster = Cluster(name=plan.cluster.name, nodes=(Node(name="node0", devices=(group,)),))
    assert plan.cluster == cluster
    model = catalog.model(MODEL)
    request = PlanRequest(
        model=model,
        cluster=cluster,
        workload=Workload(batch=batch, prompt_tokens=256, new_tokens=32),
        dtype=model.dtype,
        kv_bits=16,
        bits=(16, 8),
    )
    expected = make_plan(request)
    assert plan.stages == expected.stages
    assert any(stage.num_apart for stage in plan.stages)
    capsys.readouterr()
    assert check.main(["p.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    assert sim.main(["--strategy", "p.json", "--json"]) == 0


def test_more_memory_lets_more_bits_fit(capsys):
    fits = {}
    for words in ([], ["--host_gib", "Ryzen-9-5950X=10"], ["--host_gib", "Ryzen-9-5950X=48"]):
        assert check.main(["--model", MODEL, *SIZES, *GPU, *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        fits[tuple(words[1:])] = {one["bits"] for one in found["answers"] if one["fits"]}
        assert ("ryzen-9-5950x" in found["cluster"]) == bool(words)
    none, little, much = fits.values()
    assert none < little < much == {16, 8, 4, 3}


def test_a_measured_processor_is_that_of_the_file(capsys):
    Path("own.json").write_text(json.dumps({"schema": 1, "devices": [OWN]}))
    plan = planned(*GPU, "--devices", "own.json", "--host_gib", "mine=48", "--bits", "8")
    (device,) = plan.cluster.devices
    assert (device.host.type, device.host.threads) == ("mine", 11)
    assert [entry.type for entry in plan.cluster.device_types] == ["mine"]
    capsys.readouterr()
    assert check.main(["p.json", "--json"]) == 0


def test_one_more_gpu_shares_the_memory_of_the_host(capsys):
    """At 16 bits the experts need most of it: two parts of its size would hold more."""
    argv = ["--model", MODEL, *SIZES, *GPU, "--host_gib", "5950X=48", "--what_if", "--json"]
    assert check.main(argv) == 0
    (more,) = json.loads(capsys.readouterr().out)["one_more"]
    assert more["throughput_gain"] > 0
    spec, cluster = catalog.model(MODEL), planned(*GPU, "--host_gib", "5950X=48").cluster
    (group,) = cluster.nodes[0].devices
    half = replace(group.host, memory_bytes=group.host.memory_bytes // 2)
    two = replace(cluster.nodes[0], devices=(replace(group, count=2, host=half),))
    request = PlanRequest(
        model=spec,
        cluster=replace(cluster, nodes=(two,)),
        workload=Workload(batch=1, prompt_tokens=256, new_tokens=32),
        dtype=spec.dtype,
        kv_bits=16,
        bits=(16,),
        theta_s=0.0,
    )
    assert make_plan(request).estimate.latency_s == pytest.approx(more["latency_s"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*GPU, "--host_gib", "64"], "--host_gib: found '64', expected CPU=GIB, such as"),
        ([*GPU, "--host_gib", "5950X=0"], "and more than 0 GiB"),
        ([*GPU, "--host_gib", "5950X=-1"], "--host_gib: found '5950X=-1', expected CPU=GIB"),
        ([*GPU, "--host_gib", "5950Z=8"], "--host_gib: device type: found '5950Z', expected"),
        ([*GPU, "--host_gib", "L4=8"], "--host_gib: found 'L4', expected a whole processor"),
        ([*GPU, "--host_gib", "cpu=8"], "--host_gib: found 'cpu', expected a whole processor"),
        ([*GPU, "--host_gib", "5950X=0.1"], "expected more memory than the processes of the GPUs"),
        (["--device_names", "5950X", "--host_gib", "5950X=8"], "whose nodes all state a CPU or a"),
    ],
)
@pytest.mark.parametrize("command", [algo, check])
def test_bad_values_are_one_error(command, words, message, capsys):
    sizes = [*SIZES, "--global_bz", "1"]
    assert command.main(["--model", MODEL, *sizes, *words]) == 2
    found = capsys.readouterr().err
    assert message in found
    assert found.count("\n") == 1


def test_without_devices_it_is_an_error(capsys):
    assert check.main(["--model", MODEL, *SIZES, "--host_gib", "5950X=8"]) == 2
    assert "--host_gib: found without devices, expected --cluster" in capsys.readouterr().err


def test_bounds_settle_most_micro_batches_on_four_gpus(capsys):
    """Bounds that started from the last pair's prices had been below 0."""
    words = ["--device_names", "RTX4090", "--device_numbers", "4", "--host_gib", "Xeon-8480=512"]
    sizes = ["--global_bz", "32", "--s", "512", "--n", "128", "--output", "p.json", "--no_explain"]
    assert algo.main(["--model", "Qwen/Qwen3-235B-A22B", *words, *sizes]) == 0
    plan = read_plan("p.json")
    assert plan.search.pairs_searched < 10 < plan.search.pairs_pruned
    assert plan.search.status == "optimal"
    assert sum(stage.num_apart for stage in plan.stages) > 0


def test_replicas_keep_layers_whole(capsys):
    words = ["--device_names", "RTX3090", "--device_numbers", "2", "--host_gib", "5950X=48"]
    argv = ["--model", MODEL, *SIZES, "--global_bz", "2", "--replicas", "2", "--bits", "4"]
    assert algo.main([*argv, *words, "--output", "f.json", "--json"]) == 0
    plans = [read_plan(f"f__r{number}.json") for number in (1, 2)]
    assert [stage.experts for plan in plans for stage in plan.stages] == [None, None]
