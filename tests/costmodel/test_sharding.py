"""What one of several devices holds of a layer, counted by hand, and what the layer takes."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from llmpq.costmodel import build_costs
from llmpq.costmodel.importers.aiconfigurator import _all_reduce
from llmpq.costmodel.importers.import_table import ImportRequest, import_table
from llmpq.costmodel.importers.operators import (
    ALL_REDUCES,
    AttentionTimes,
    GemmTimes,
    OperatorTimes,
    fused_products,
    layer_samples,
    shard_of,
)
from llmpq.costmodel.tables.profiles import ProfileKey
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import (
    Cluster,
    cluster_of_types,
    with_tensor_parallel,
)
from llmpq.spec.fields import Fields, from_json, to_json
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable, write_latency_table
from llmpq.spec.workload import Workload

LLAMA = catalog.model("meta-llama/Llama-3.1-8B")
LAYER = LLAMA.layer_types[0]
OPT = catalog.model("facebook/opt-13b").layer_types[0]


def test_a_quarter_of_a_layer_is_cut_by_outputs_then_by_inputs():
    # 32 query and 8 key-value heads of 128: 8 and 2 of them are 1024 + 2 * 256 outputs.
    assert fused_products(shard_of(LAYER, 4)) == (
        (1536, 4096), (4096, 1024), (7168, 4096), (4096, 3584),
    )  # fmt: skip
    assert fused_products(shard_of(OPT, 2)) == (
        (7680, 5120), (5120, 2560), (10240, 5120), (5120, 10240),
    )  # fmt: skip
    quarter = shard_of(LAYER, 4)
    assert (quarter.num_heads, quarter.num_kv_heads, quarter.head_dim) == (8, 2, 128)
    assert quarter.norm_parameters == LAYER.norm_parameters
    assert shard_of(LAYER, 1) is LAYER


@pytest.mark.parametrize(
    "name",
    [
        "facebook/opt-13b",
        "bigscience/bloom",
        "meta-llama/Llama-3.1-8B",
        "Qwen/Qwen3-32B",
    ],
)
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_shards_together_are_the_layer(name, degree):
    layer = catalog.model(name).layer_types[0]
    shard = shard_of(layer, degree)
    for one, whole in zip(shard.linears, layer.linears, strict=True):
        assert degree * one.weight_parameters == whole.weight_parameters, one.name
    assert degree * shard.kv_bytes_per_token(2) == layer.kv_bytes_per_token(2)
    # Two matrices write the residual stream, each all of it; the others read all of it.
    pairs = list(zip(shard.linears, layer.linears, strict=True))
    writers = [one for one, whole in pairs if one.out_features == whole.out_features]
    readers = [one for one, whole in pairs if one.in_features == whole.in_features]
    assert len(writers) == ALL_REDUCES == len(pairs) - len(readers)
    assert writers[-1] is shard.linears[-1]


@pytest.mark.parametrize("degree", [0, -2, 3, 16])
def test_a_layer_that_cannot_be_cut_evenly_is_an_error(degree):
    with pytest.raises(SpecError, match=f"tensor_parallel: found {degree}, expected a divisor"):
        shard_of(LAYER, degree)


def test_experts_are_an_error():
    mixtral = catalog.model("mistralai/Mixtral-8x7B-v0.1").layer_types[0]
    with pytest.raises(SpecError, match="with experts, expected a dense layer"):
        shard_of(mixtral, 2)


def test_a_shared_layer_is_a_devices_products_and_two_all_reduces():
    products = ((3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168))  # halves, by hand
    seconds = {shape: 1e-4 * (1 + number) for number, shape in enumerate(products)}
    gemm = GemmTimes(points={shape: ((1, one), (64, one)) for shape, one in seconds.items()})
    attention = AttentionTimes(phase=Phase.DECODE, points={(16, 4, 128): {(8, 128): 5e-4}})
    reduce = ((4096, 1e-5), (65536, 4e-5))
    times = OperatorTimes(
        gemms={16: gemm},
        attention={Phase.DECODE: attention},
        stream_bytes_per_s=1e30,
        launch_s=0.0,
        all_reduce=reduce,
    )
    (sample,) = layer_samples(shard_of(LAYER, 2), LLAMA.hidden_size, times)
    hidden_values = 8 * 4096
    between = 1e-5 + 3e-5 * (hidden_values - 4096) / (65536 - 4096)
    assert sample.seconds == pytest.approx(5e-4 + 1e-3 + 2 * between)


def test_of_several_kernels_the_fastest_is_taken_and_another_degree_is_an_error(
    tmp_path, monkeypatch
):
    folder = tmp_path / "comm" / "vllm" / "1.0"
    folder.mkdir(parents=True)
    rows = [(2, 128, 0.05), (2, 128, 0.01), (2, 256, 0.02), (4, 128, 0.03)]
    (folder / "custom_allreduce_perf.parquet").write_text("")
    monkeypatch.setattr(
        "llmpq.costmodel.importers.aiconfigurator._read_parquet",
        lambda *_, **__: tuple([row[column] for row in rows] for column in range(3)),
    )
    found = _all_reduce(tmp_path, "vllm", 2)
    assert found == ((128, pytest.approx(1e-5)), (256, pytest.approx(2e-5)))
    with pytest.raises(SpecError, match=r"found 8, expected one of \[2, 4\]"):
        _all_reduce(tmp_path, "vllm", 8)


def test_a_degree_is_an_error_for_layouts_without_all_reduces(tmp_path: Path):
    file = tmp_path / "helix.csv"
    with file.open("w", newline="") as out:
        csv.writer(out).writerow(("model", "machine", "phase", "batch_tokens", "layer_ms"))
    for layout, path in (("helix", file), ("vidur", tmp_path)):
        request = ImportRequest(
            model=LLAMA, device="m/d", device_type="L4", path=path, tensor_parallel=2
        )
        with pytest.raises(SpecError, match="--tensor_parallel: found 2, expected 1"):
            import_table(layout, request)


def test_the_table_of_a_shared_layer_does_not_match_a_single_device():
    device = cluster_of_types({"L40S": 1}).devices[0]
    key = ProfileKey(model=LLAMA, dtype="bfloat16", device=device)
    origin = {"model": LLAMA.name, "device": "L40S", "dtype": "bfloat16"}
    assert key.mismatch(origin) is None
    mismatch = key.mismatch(origin | {"tensor_parallel": "2"})
    assert mismatch is not None
    assert "tensor_parallel '2', expected '1'" in mismatch
    team = replace(key, device=replace(device, tensor_parallel=2))
    assert team.mismatch(origin | {"tensor_parallel": "2"}) is None
    assert "tensor_parallel '1', expected '2'" in (team.mismatch(origin) or "")


def test_a_team_has_the_memory_of_all_and_every_one_its_own_step(tmp_path: Path):
    alone = cluster_of_types({"L40S": 4})
    teams = with_tensor_parallel(alone, 2)
    assert [device.members for device in teams.devices] == [2, 2]
    table = LatencyTable(
        samples=tuple(
            LatencySample(phase=phase, bits=16, batch=batch, tokens=256, seconds=1e-3 * batch)
            for phase in Phase
            for batch in (1, 2, 4)
        ),
        provenance=(("model", LLAMA.name), ("device", "L40S"), ("tensor_parallel", "2")),
    )
    write_latency_table(tmp_path / "shared.csv", table)
    built = partial(build_costs, LLAMA, dtype="bfloat16", kv_bits=16)
    one = built(alone, latency="roofline")
    two = built(teams, profile_dir=tmp_path)
    first, team = one.cluster.devices[0], two.cluster.devices[0]
    assert two.layer_s(team, Phase.DECODE, 16, 2, 256, 0) == pytest.approx(2e-3, rel=0.05)
    assert two.capacity_bytes(team) == 2 * one.capacity_bytes(first)
    assert two.runtime_bytes(team) == 2 * one.runtime_bytes(first)
    work = Workload(batch=4, prompt_tokens=256, new_tokens=16)
    step = (work, MicroBatching(prefill=2, decode=4), True)
    assert two.temporary_bytes(team, *step) == 2 * one.temporary_bytes(first, *step)
    # Weights and slots are cut: a team holds each once.
    assert two.layer_weight_bytes(team, 0, 16) == one.layer_weight_bytes(first, 0, 16)


def test_a_team_without_a_table_is_an_error():
    teams = with_tensor_parallel(cluster_of_types({"T4-16G": 4}), 2)
    with pytest.raises(SpecError, match=r"node0/T4-16G#0: found no table of 2 devices"):
        build_costs(LLAMA, teams, dtype="float16", kv_bits=16, latency="roofline")


def test_only_whole_teams_of_one_group_share():
    mixed = cluster_of_types({"L40S": 4, "H100": 3})
    shared = with_tensor_parallel(mixed, 2)
    assert [(one.type, one.members) for one in shared.devices] == [
        ("L40S", 2), ("L40S", 2), ("H100", 1), ("H100", 1), ("H100", 1),
    ]  # fmt: skip
    assert from_json(Cluster, Fields(to_json(shared), "c")) == shared
    with pytest.raises(SpecError, match="teams of 4"):
        with_tensor_parallel(shared, 4)  # they share already, and three are no team


def test_the_installed_database_has_layers_shared_by_several_devices():
    pytest.importorskip("aiconfigurator_core")
    pytest.importorskip("pyarrow")
    tables = {
        degree: import_table(
            "aiconfigurator",
            ImportRequest(
                model=LLAMA, device="h100_sxm", device_type="H100", bits=(16,),
                tensor_parallel=degree,
            ),
        )
        for degree in (1, 2, 4)
    }  # fmt: skip
    origins = {degree: dict(table.provenance) for degree, table in tables.items()}
    assert [origins[degree].get("tensor_parallel") for degree in (1, 2, 4)] == [None, "2", "4"]
    seconds = {
        degree: {(one.phase, one.batch, one.tokens): one.seconds for one in table.samples}
        for degree, table in tables.items()
    }
    prefill = [
        shape
        for shape in set(seconds[1]) & set(seconds[2]) & set(seconds[4])
        if shape[0] is Phase.PREFILL and shape[1] * shape[2] >= 8192
    ]
    assert prefill
    for shape in prefill:  # much work is shared well, and never better than evenly
        one, two, four = (seconds[degree][shape] for degree in (1, 2, 4))
        assert one / 2 < two < one
        assert one / 4 < four < two
