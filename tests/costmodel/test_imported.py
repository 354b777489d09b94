import csv
import sys

import pytest

from llmpq.costmodel.costs import build_costs
from llmpq.costmodel.importers import aiconfigurator
from llmpq.costmodel.importers import import_table as importers
from llmpq.costmodel.importers.import_table import ImportRequest, import_table
from llmpq.costmodel.importers.operators import (
    AttentionTimes,
    GemmTimes,
    OperatorTimes,
    expert_shape,
    fused_products,
    layer_samples,
)
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencyTable

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
LLAMA = catalog.model("meta-llama/Llama-3.1-8B")
LAYER = LLAMA.layer_types[0]
PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


def request(**changes):
    options = {"model": LLAMA, "device": "a100_sxm", "device_type": "A100-80G"}
    return ImportRequest(**{**options, **changes})


def gemm_law(rows, out, inner):
    return 1e-12 * rows * out * inner


def grid(sizes=(1024, 4096, 8192, 32768)):
    return GemmTimes(
        points={
            (out, inner): tuple((rows, gemm_law(rows, out, inner)) for rows in (1, 64, 4096))
            for out in sizes
            for inner in sizes
        }
    )


def test_a_layer_is_multiplied_in_four_fused_products():
    assert fused_products(LAYER) == PRODUCTS
    opt = catalog.model("facebook/opt-13b").layer_types[0]
    assert fused_products(opt) == ((15360, 5120), (5120, 5120), (20480, 5120), (5120, 20480))


MIXTRAL = catalog.model("mistralai/Mixtral-8x7B-v0.1").layer_types[0]


def moe_times(experts):
    return OperatorTimes(
        gemms={16: grid(), 4: grid()},
        attention={phase: attention(phase) for phase in Phase},
        stream_bytes_per_s=1e12,
        launch_s=1e-6,
        experts=experts,
    )


def test_experts_that_were_measured_are_one_call_of_the_layer():
    shape = expert_shape(MIXTRAL)
    assert (shape.hidden, shape.inner, shape.active, shape.count) == (4096, 14336, 2, 8)
    assert fused_products(MIXTRAL) == ((6144, 4096), (4096, 4096), (8, 4096))
    free = layer_samples(MIXTRAL, 4096, moe_times({16: ((1, 0.0), (64, 0.0))}))
    full = layer_samples(MIXTRAL, 4096, moe_times({16: ((1, 0.1), (64, 0.2))}))
    assert {one.bits for one in full} == {16}
    added = {(a.phase, a.batch): b.seconds - a.seconds for a, b in zip(free, full, strict=True)}
    assert added[DECODE, 1] == pytest.approx(0.1)
    assert added[DECODE, 64] == pytest.approx(0.2)


def test_experts_of_another_shape_are_an_error():
    with pytest.raises(SpecError, match="no kernel of 8 experts of 4096 x 14336, 2 a token"):
        layer_samples(MIXTRAL, 4096, moe_times({}))


@pytest.mark.parametrize(
    ("rows", "out", "inner"), [(64, 4096, 4096), (70, 6144, 14336), (1, 1024, 65536)]
)
def test_products_between_measured_sizes_are_linear(rows, out, inner):
    assert grid().seconds(rows, out, inner) == pytest.approx(gemm_law(rows, out, inner))


def test_a_hole_in_the_grid_takes_its_neighbours_in_proportion():
    points = dict(grid().points)
    del points[32768, 32768]
    assert GemmTimes(points=points).seconds(64, 20000, 20000) == pytest.approx(
        gemm_law(64, 20000, 20000)
    )


def attention(phase, heads=(32, 8, 128)):
    return AttentionTimes(phase=phase, points={heads: {(1, 64): 1e-3, (64, 64): 2e-3}})


def test_heads_of_another_shape_scale_from_the_nearest():
    wanted = (56, 8, 128)
    assert attention(PREFILL).nearest(wanted) == ((32, 8, 128), 56 / 32)
    assert attention(DECODE).nearest(wanted) == ((32, 8, 128), 1.0)


def test_a_layer_is_the_sum_of_its_operators():
    times = OperatorTimes(
        gemms={16: grid()},
        attention={phase: attention(phase) for phase in Phase},
        stream_bytes_per_s=1e12,
        launch_s=1e-6,
    )
    samples = {(one.phase, one.batch): one.seconds for one in layer_samples(LAYER, 4096, times)}
    # Per token: two norms of 4 h, rotary over 40 heads in and out, a gated activation of 3 f.
    small = 2 * (8 * 4096 + 2 * 40 * 128 + 3 * 14336) / 1e12
    linear = sum(gemm_law(1, *shape) for shape in PRODUCTS)
    assert samples[PREFILL, 1] == pytest.approx(1e-3 + 64 * (linear + small) + 4e-6)
    assert samples[DECODE, 64] == pytest.approx(2e-3 + 64 * (linear + small) + 4e-6)
    assert len(samples) == 4


GEMM_COLUMNS = ("gemm_dtype", "m", "n", "k", "latency")
ATTENTION_COLUMNS = (
    "batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim",
    "attn_dtype", "kv_cache_dtype", "latency", "window_size",
)  # fmt: skip


@pytest.fixture
def database(tmp_path, monkeypatch):
    """A database of the package's layout, its files CSV instead of parquet."""
    base = tmp_path / "systems" / "data" / "a100_sxm"
    for version in ("1.9.0", "1.10.0"):
        folder = base / "gemm" / "trtllm" / version
        folder.mkdir(parents=True)
        scale = 1.0 if version == "1.10.0" else 50.0
        rows = [
            (name, rows, out, inner, 1e3 * scale * share * gemm_law(rows, out, inner))
            for name, share in (("bfloat16", 1.0), ("int4_wo", 0.5), ("fp8", 0.6))
            for rows in (1, 4096)
            for out, inner in PRODUCTS
        ]
        write_rows(folder / "gemm_perf.parquet", GEMM_COLUMNS, rows)
    (base / "gemm" / "trtllm" / "2.0.0").mkdir()  # a version that covers other operators
    folder = base / "attention" / "trtllm" / "1.0"
    folder.mkdir(parents=True)
    heads = (32, 8, 128, "bfloat16")
    prefill = [(1, 64, 0, *heads, "bfloat16", 1.0, 0), (1, 64, 0, *heads, "fp8", 9.0, 0)]
    decode = [(8, 1, 127, *heads, "bfloat16", 2.0, 0), (8, 1, 127, *heads, "bfloat16", 9.0, 128)]
    write_rows(folder / "context_attention_perf.parquet", ATTENTION_COLUMNS, prefill)
    write_rows(folder / "generation_attention_perf.parquet", ATTENTION_COLUMNS, decode)
    (tmp_path / "systems" / "a100_sxm.yaml").write_text(
        "gpu:\n  mem_bw: 2000000000000 # 2 TB/s\n  mem_bw_empirical_scaling_factor: 0.8 # guess\n"
        "  mem_empirical_constant_latency: 0.000003 # 3us\n"
    )
    monkeypatch.setattr(aiconfigurator, "_read_parquet", read_columns)
    return tmp_path


def write_rows(file, header, rows):
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([header, *rows])


def read_columns(file, names, among=None):
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    for name, wanted in (among or {}).items():
        texts = {str(one) for one in wanted}
        rows = [row for row in rows if row[name] in texts]

    def value(text):
        return (
            text if text[:1].isalpha() else float(text) if "." in text or "e" in text else int(text)
        )

    return tuple([value(row[name]) for row in rows] for name in names)


def test_the_newest_version_is_read_and_gaps_are_filled_by_the_stated_rule(database):
    table = import_table("aiconfigurator", request(path=database))
    origin = dict(table.provenance)
    assert origin["model"] == LLAMA.name
    assert origin["device"] == "A100-80G"
    assert "4 bits int4_wo (trtllm 1.10.0)" in origin["kernels"]
    assert "8 bits fp8" in origin["kernels"]
    assert origin["filled_3_bits"] == "4 bits times the roofline's ratio"
    assert origin["filled_norms_and_launches"].startswith("1.6e+12 bytes/s and 3e-06 s")
    assert {(one.phase, one.batch, one.tokens) for one in table.samples} == {
        (PREFILL, 1, 64), (DECODE, 8, 128),
    }  # fmt: skip
    seconds = {(one.phase, one.bits): one.seconds for one in table.samples}
    assert set(seconds) == {(phase, bits) for phase in Phase for bits in (3, 4, 8, 16)}
    products = sum(gemm_law(8, *shape) for shape in PRODUCTS)
    assert seconds[DECODE, 16] - seconds[DECODE, 4] == pytest.approx(products / 2)
    assert 1e-3 < seconds[PREFILL, 3] < seconds[PREFILL, 16]  # attention took 1 ms, not 9


def test_only_the_bits_asked_for_are_imported(database):
    table = import_table("aiconfigurator", request(path=database, bits=(16,)))
    assert {one.bits for one in table.samples} == {16}


def test_heads_of_another_shape_are_named_in_the_provenance(database):
    table = import_table(
        "aiconfigurator", request(path=database, model=catalog.model("facebook/opt-30b"))
    )
    assert dict(table.provenance)["filled_prefill_attention"].startswith("heads (56, 56, 128) from")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "abacus"}, r"--device: found 'abacus', expected one of a100_sxm"),
        ({"engine": "vllm"}, r"--engine: found 'vllm', expected one of trtllm"),
    ],
)
def test_what_the_database_lacks_is_named(database, changes, message):
    with pytest.raises(SpecError, match=message):
        import_table("aiconfigurator", request(path=database, **changes))


def test_an_absent_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(aiconfigurator, "find_spec", {}.get)
    with pytest.raises(SpecError, match=r"pip install 'llmpq\[profiles\]'"):
        import_table("aiconfigurator", request())


def test_an_absent_parquet_reader_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(SpecError, match="pyarrow is not installed"):
        aiconfigurator._read_parquet(tmp_path / "x.parquet", ("m",))


def test_an_unknown_layout_is_an_error():
    with pytest.raises(SpecError, match="expected one of aiconfigurator, helix, vidur"):
        import_table("abacus", request())


def test_the_installed_database_reproduces_the_speed_up_of_fewer_bits():
    pytest.importorskip("pyarrow")
    pytest.importorskip("aiconfigurator_core", reason="the extra 'profiles' is not installed")
    table = import_table("aiconfigurator", request(bits=(4, 16)))
    seconds = {(one.phase, one.bits, one.batch, one.tokens): one.seconds for one in table.samples}
    ratio = {
        shape: seconds[(shape[0], 16, *shape[1:])] / seconds[(shape[0], 4, *shape[1:])]
        for shape in ((PREFILL, 8, 1024), (DECODE, 1, 1024), (DECODE, 128, 1024))
    }
    assert ratio[PREFILL, 8, 1024] == pytest.approx(1.0, abs=0.15)
    assert ratio[DECODE, 1, 1024] > 1.7
    assert ratio[DECODE, 128, 1024] < 1.2


HELIX = (
    "model,machine,phase,batch_tokens,layer_ms\n"
    "m,t4,prompt,0.0,0.0\nm,t4,prompt,250.0,18.0\nm,t4,decode,2.0,7.1\nm,v100,decode,2.0,3.0\n"
)


def test_helix_gives_prompts_by_tokens_and_decode_by_sequences(tmp_path):
    file = tmp_path / "helix.csv"
    file.write_text(HELIX)
    table = import_table("helix", request(device="m/t4", path=file, context_tokens=300))
    found = [(one.phase, one.bits, one.batch, one.tokens, one.seconds) for one in table.samples]
    assert found == [
        (PREFILL, 16, 1, 250, pytest.approx(18e-3)),
        (DECODE, 16, 2, 300, pytest.approx(7.1e-3)),
    ]
    assert dict(table.provenance)["decode_context"] == "300 tokens, assumed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "found no column 'model'"),
        (HELIX + "m,t4,train,1,1\n", "line 6: phase 'train', expected prompt or decode"),
        (HELIX + "m,t4,decode,one,1\n", "line 6: found 'one', expected a number"),
        (HELIX.replace("t4", "p4"), "found no samples of m/t4"),
    ],
)
def test_a_malformed_helix_file_is_an_error_that_names_the_line(tmp_path, text, message):
    file = tmp_path / "helix.csv"
    file.write_text(text)
    with pytest.raises(SpecError, match=message):
        import_table("helix", request(device="m/t4", path=file))


def test_vidur_adds_products_norms_and_attention(tmp_path):
    names = vidur_columns()
    header = ["num_tokens", "num_tensor_parallel_workers", *names]
    rows = [
        [tokens, workers, *[0.001 * tokens] * len(names)]
        for tokens in (1, 8, 64)
        for workers in (1, 2)
    ]
    write_rows(tmp_path / "mlp.csv", header, rows)
    head = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill")
    write_rows(
        tmp_path / "attention.csv",
        (*head, "time_stats.attn_prefill.median", "time_stats.attn_decode.median"),
        [
            (1, 64, 0, True, 3.0, ""),
            (1, 64, 32, True, 4.0, ""),
            (8, 0, 128, False, "", 2.0),
            (8, 0, 0, False, "", 1.0),
        ],
    )
    table = import_table("vidur", request(path=tmp_path))
    found = {(one.phase, one.batch, one.tokens): one.seconds for one in table.samples}
    dense = 10 * 1e-6  # ten operators a token, the addition twice
    assert found == {
        (PREFILL, 1, 64): pytest.approx(3e-3 + 64 * dense),
        (DECODE, 8, 128): pytest.approx(2e-3 + 8 * dense),
    }


def vidur_columns():
    operators = (
        "attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "input_layernorm",
        "attn_rope", "post_attention_layernorm", "mlp_act", "add",
    )  # fmt: skip
    return [f"time_stats.{name}.median" for name in operators]


def test_layouts_of_files_require_a_path():
    with pytest.raises(SpecError, match="--path: found nothing"):
        import_table("vidur", request())


def test_a_roofline_plan_reads_no_table(monkeypatch):
    monkeypatch.setattr("llmpq.costmodel.costs.public_table", None)
    cluster = cluster_of_types({"A100-80G": 1})
    model = catalog.model("facebook/opt-125m")
    costs = build_costs(model, cluster, dtype="float16", kv_bits=16, latency="roofline")
    assert costs.latency_source(cluster.devices[0]) == "roofline"


def test_a_device_in_another_spelling_has_its_public_table(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "llmpq.costmodel.costs.public_table", lambda *args, **_: asked.append(args[1])
    )
    build_costs(LLAMA, cluster_of_types({"nvidia l40s": 1}), dtype="bfloat16", kv_bits=16)
    assert asked == ["L40S"]


def test_a_public_table_is_assembled_once(monkeypatch):
    table = LatencyTable(samples=(), provenance=(("device", "A100-80G"),))
    requests = []
    monkeypatch.setattr(importers, "is_installed", lambda: True)
    monkeypatch.setattr(importers, "import_table", lambda *args: requests.append(args) or table)
    importers.public_table.cache_clear()
    for _ in range(2):
        assert importers.public_table(LLAMA, "A100-80G", "float16") == table
    assert len(requests) == 1
    importers.public_table.cache_clear()
