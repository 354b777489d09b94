"""What one of several devices holds of a layer, counted by hand, and what the layer takes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from llmpq.costmodel.aiconfigurator import _all_reduce
from llmpq.costmodel.imported import ImportRequest, import_table
from llmpq.costmodel.operators import (
    AllReduceTimes,
    AttentionTimes,
    GemmTimes,
    OperatorTimes,
    fused_products,
    layer_samples,
)
from llmpq.costmodel.profiles import ProfileKey
from llmpq.costmodel.sharding import ALL_REDUCES, shard_of
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.precision import Phase

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
def test_what_cannot_be_cut_evenly_is_refused(degree):
    with pytest.raises(SpecError, match=f"tensor_parallel: found {degree}, expected a divisor"):
        shard_of(LAYER, degree)


def test_experts_are_refused():
    mixtral = catalog.model("mistralai/Mixtral-8x7B-v0.1").layer_types[0]
    with pytest.raises(SpecError, match="with experts, expected a dense layer"):
        shard_of(mixtral, 2)


def test_a_shared_layer_is_a_devices_products_and_two_all_reduces():
    products = ((3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168))  # halves, by hand
    seconds = {shape: 1e-4 * (1 + number) for number, shape in enumerate(products)}
    gemm = GemmTimes(points={shape: ((1, one), (64, one)) for shape, one in seconds.items()})
    attention = AttentionTimes(phase=Phase.DECODE, points={(16, 4, 128): {(8, 128): 5e-4}})
    reduce = AllReduceTimes(points=((4096, 1e-5), (65536, 4e-5)))
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


def test_of_several_kernels_the_fastest_is_taken_and_other_degrees_are_told(tmp_path, monkeypatch):
    folder = tmp_path / "comm" / "vllm" / "1.0"
    folder.mkdir(parents=True)
    rows = [(2, 128, 0.05), (2, 128, 0.01), (2, 256, 0.02), (4, 128, 0.03)]
    (folder / "custom_allreduce_perf.parquet").write_text("")
    monkeypatch.setattr(
        "llmpq.costmodel.aiconfigurator._read_parquet",
        lambda *_, **__: tuple([row[column] for row in rows] for column in range(3)),
    )
    found = _all_reduce(tmp_path, "vllm", 2)
    assert found.points == ((128, pytest.approx(1e-5)), (256, pytest.approx(2e-5)))
    with pytest.raises(SpecError, match=r"found 8, expected one of \[2, 4\]"):
        _all_reduce(tmp_path, "vllm", 8)


def test_layouts_without_all_reduces_refuse_a_degree(tmp_path: Path):
    file = tmp_path / "helix.csv"
    with file.open("w", newline="") as out:
        csv.writer(out).writerow(("model", "machine", "phase", "batch_tokens", "layer_ms"))
    for layout, path in (("helix", file), ("vidur", tmp_path)):
        request = ImportRequest(
            model=LLAMA, device="m/d", device_type="L4", path=path, tensor_parallel=2
        )
        with pytest.raises(SpecError, match="--tensor_parallel: found 2, expected 1"):
            import_table(layout, request)


def test_a_plan_refuses_the_table_of_a_shared_layer():
    device = cluster_of_types({"L40S": 1}).devices[0]
    key = ProfileKey(model=LLAMA, dtype="bfloat16", device=device)
    origin = {"model": LLAMA.name, "device": "L40S", "dtype": "bfloat16"}
    assert key.mismatch(origin) is None
    told = key.mismatch(origin | {"tensor_parallel": "2"})
    assert told is not None
    assert "tensor_parallel '2', expected '1'" in told


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
