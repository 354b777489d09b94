from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.costmodel import build_costs
from llmpq.costmodel.base import chunked_s
from llmpq.errors import ProfileMissError, SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node, cluster_of_types
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS
from llmpq.spec.tables import (
    CommSample,
    CommTable,
    LatencySample,
    LatencyTable,
    write_comm_table,
    write_latency_table,
)
from llmpq.spec.workload import Workload
from llmpq.units import GIB

OPT = catalog.model("facebook/opt-125m")
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
PAPER = cluster_of_types({"T4-16G": 3, "V100-32G": 1})


def write(path: Path, seconds: float, **provenance: str) -> str:
    samples = tuple(
        LatencySample(phase=phase, bits=16, batch=1, tokens=8, seconds=seconds) for phase in Phase
    )
    table = LatencyTable(samples=samples, provenance=tuple(provenance.items()))
    write_latency_table(path, table)
    return str(path)


def one_node(*groups: DeviceGroup) -> Cluster:
    return Cluster(name="box", nodes=(Node(name="box", devices=groups),))


def costs_of(cluster, profile_dir=None, model=OPT):
    return build_costs(model, cluster, dtype="float32", kv_bits=32, profile_dir=profile_dir)


def test_devices_of_one_group_cost_the_same_and_groups_differ():
    costs = costs_of(PAPER)
    seconds = [costs.layer_s(device, DECODE, 16, 8, 100, 0) for device in PAPER.devices]
    assert seconds[0] == seconds[1] == seconds[2] > seconds[3]
    assert {costs.latency_source(device) for device in PAPER.devices} == {"roofline"}


def test_gpus_have_a_reserve_unless_the_cluster_states_what_may_be_used():
    cluster = one_node(
        DeviceGroup(type="RTX3060-12G", count=1),
        DeviceGroup(type="RTX3060-12G", count=1, memory_bytes=12 * GIB),
        DeviceGroup(type="mine", count=1),
    )
    mine = DeviceEntry(type="mine", like="RTX3060-12G", reserve_bytes=2 * GIB)
    costs = costs_of(replace(cluster, device_types=(mine,)))
    found = [costs.capacity_bytes(device) / GIB for device in cluster.devices]
    assert found == [11.5, 12, 10]


def test_prompts_beyond_a_chunk_repeat_all_but_attention():
    """With seconds of ``1 + 2 v s + 3 v s^2``, attention adds up to that of the whole prompt."""
    chunk, batch = PROMPT_CHUNK_TOKENS, 3

    def seconds(rows, tokens):
        return 1.0 + 2.0 * rows * tokens + 3.0 * rows * tokens**2

    for tokens in (1, chunk, chunk + 1, 5 * chunk, 5 * chunk + 7):
        passes = -(-tokens // chunk)
        expected = passes + 2.0 * batch * tokens + 3.0 * batch * tokens**2
        assert chunked_s(seconds, batch, tokens) == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [512, PROMPT_CHUNK_TOKENS, 3000])
def test_a_layer_takes_the_time_of_its_steps(tokens):
    costs = costs_of(PAPER)
    device = PAPER.devices[0]
    whole_s = costs.layer_s(device, PREFILL, 16, 2, tokens, 0)
    steps_s = costs.layer_steps_s(device, PREFILL, 16, 2, tokens, 0)
    if tokens <= PROMPT_CHUNK_TOKENS:
        assert steps_s == whole_s
    else:
        assert whole_s < steps_s < 2 * whole_s
    decode_s = costs.layer_s(device, DECODE, 16, 2, tokens, 0)
    assert costs.layer_steps_s(device, DECODE, 16, 2, tokens, 0) == decode_s


def test_capacity_is_the_owners_or_the_catalogues():
    cluster = one_node(
        DeviceGroup(type="cpu", count=1, memory_bytes=10**9), DeviceGroup(type="cpu", count=1)
    )
    costs = costs_of(cluster)
    assert [costs.capacity_bytes(device) for device in cluster.devices] == [
        10**9,
        catalog.device("cpu").memory_bytes,
    ]
    assert costs.runtime_bytes(cluster.devices[0]) == catalog.device("cpu").runtime_bytes


def test_an_unknown_device_type_is_refused():
    with pytest.raises(SpecError, match="device type: found 'V101'"):
        costs_of(cluster_of_types({"V101": 1}))


def test_decode_sends_one_token_a_sequence():
    costs = costs_of(PAPER)
    first, last = PAPER.devices[0], PAPER.devices[3]
    assert costs.send_s(first, last, DECODE, 4, 500) == costs.send_s(first, last, PREFILL, 4, 1)
    link = PAPER.link(first, last)
    expected = link.latency_s + 4 * 500 * 768 * 4 / link.bytes_per_s
    assert costs.send_s(first, last, PREFILL, 4, 500) == pytest.approx(expected)


def test_bytes_are_those_of_the_memory_model():
    costs = costs_of(PAPER)
    device = PAPER.devices[0]
    layer = OPT.layer_types[0]
    assert costs.layer_weight_bytes(device, 0, 16) == layer.parameters * 4
    assert costs.layer_kv_bytes(0, 2, 10) == 2 * 16 * 2 * 768 * 4  # one block each
    assert costs.master_bytes() == OPT.master_parameters * 4
    workload = Workload(batch=4, prompt_tokens=16, new_tokens=4)
    sizes = MicroBatching(prefill=1, decode=2)
    off, on = (costs.temporary_bytes(device, workload, sizes, flag) for flag in (False, True))
    # On a CPU the layers' own tensors are gone when logits are made.
    assert on >= max(off, 2 * OPT.vocab_size * 4)


def test_the_clusters_own_table_answers(tmp_path):
    path = write(tmp_path / "any name.csv", 0.5, model=OPT.name, device="cpu", dtype="float32")
    cluster = one_node(
        DeviceGroup(type="cpu", count=1, profile=path), DeviceGroup(type="cpu", count=1)
    )
    costs = costs_of(cluster)
    measured, guessed = cluster.devices
    assert costs.layer_s(measured, DECODE, 16, 1, 8, 0) == 0.5
    assert costs.latency_source(measured) == f"table {path}"
    assert costs.latency_source(guessed) == "roofline"
    with pytest.raises(ProfileMissError, match="any name"):
        costs.layer_s(measured, DECODE, 4, 1, 8, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "facebook/opt-30b"),
        ("device", "T4-16G"),
        ("dtype", "bfloat16"),
        ("threads", "9"),
        ("cpu_share", "0.5"),
    ],
)
def test_a_named_table_of_something_else_is_refused(tmp_path, key, value):
    path = write(tmp_path / "t.csv", 0.5, **{key: value})
    cluster = one_node(DeviceGroup(type="cpu", count=1, profile=path, threads=1))
    with pytest.raises(SpecError, match=rf"t\.csv: not a table for.*found {key} '{value}'"):
        costs_of(cluster)


def test_a_device_may_have_a_folder_with_a_table_for_each_model(tmp_path):
    folder, known = tmp_path / "desk", {"device": "cpu", "dtype": "float32"}
    folder.mkdir()
    (folder / "notes.txt").write_text("of the desk")
    cluster = one_node(DeviceGroup(type="cpu", count=1, profile=str(folder)))
    (device,) = cluster.devices
    with pytest.raises(SpecError, match=rf"desk: no table for device {device.label}: found no l"):
        costs_of(cluster)
    write(folder / "b.csv", 0.7, model="facebook/opt-30b", **known)
    with pytest.raises(SpecError, match=r"b\.csv: found model 'facebook/opt-30b', expected"):
        costs_of(cluster)
    path = write(folder / "a.csv", 0.5, model=OPT.name, **known)
    costs = costs_of(cluster)
    assert costs.layer_s(device, DECODE, 16, 1, 8, 0) == 0.5
    assert costs.latency_source(device) == f"table {path}"


def test_a_folder_is_searched_by_provenance_not_by_name(tmp_path):
    write(tmp_path / "T4-16G.csv", 0.9, model=OPT.name, device="V100-32G")
    write(tmp_path / "b.csv", 0.7, model="facebook/opt-30b", device="T4-16G")
    write(tmp_path / "c.csv", 0.3)  # without a device
    (tmp_path / "notes.csv").write_text("phase,bits,batch,tokens,seconds is a header\nx,y\n")
    costs = costs_of(PAPER, tmp_path)
    t4, v100 = PAPER.devices[0], PAPER.devices[3]
    assert costs.latency_source(t4) == "roofline"
    assert costs.layer_s(v100, DECODE, 16, 1, 8, 0) == 0.9


def test_threads_and_instructions_tell_tables_of_one_type_apart(tmp_path):
    for threads in ("1", "2"):
        write(tmp_path / f"t{threads}.csv", float(threads), device="cpu", threads=threads)
    cluster = one_node(
        DeviceGroup(type="cpu", count=1, threads=1), DeviceGroup(type="cpu", count=1, threads=2)
    )
    costs = costs_of(cluster, tmp_path)
    seconds = [costs.layer_s(device, DECODE, 16, 1, 8, 0) for device in cluster.devices]
    assert seconds == [1.0, 2.0]


def test_tables_of_one_device_are_read_as_one(tmp_path):
    write(tmp_path / "a.csv", 0.2, device="cpu")
    write(tmp_path / "b.csv", 0.4, device="cpu")
    cluster = one_node(DeviceGroup(type="cpu", count=1))
    assert costs_of(cluster, tmp_path).layer_s(
        cluster.devices[0], DECODE, 16, 1, 8, 0
    ) == pytest.approx(0.3)


def test_tables_of_different_layers_are_rejected(tmp_path):
    write(tmp_path / "a.csv", 0.2, device="cpu", layer="0")
    write(tmp_path / "b.csv", 0.4, device="cpu", layer="1")
    with pytest.raises(SpecError, match="different layers"):
        costs_of(one_node(DeviceGroup(type="cpu", count=1)), tmp_path)


@pytest.mark.parametrize("layer", ["12", "-1", "first"])
def test_a_layer_the_model_lacks_is_refused(tmp_path, layer):
    write(tmp_path / "a.csv", 0.2, device="cpu", layer=layer)
    with pytest.raises(SpecError, match="'layer': found"):
        costs_of(one_node(DeviceGroup(type="cpu", count=1)), tmp_path)


def test_a_missing_folder_or_table_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no such folder"):
        costs_of(PAPER, tmp_path / "none")
    cluster = one_node(DeviceGroup(type="cpu", count=1, profile=str(tmp_path / "none.csv")))
    with pytest.raises(SpecError, match=r"none\.csv"):
        costs_of(cluster)


@pytest.mark.parametrize(("cluster_name", "is_used"), [("t4-16gx3-v100-32gx1", True), ("x", False)])
def test_measured_links_of_this_cluster_replace_the_stated_ones(tmp_path, cluster_name, is_used):
    samples = tuple(
        CommSample(source=source, target="node1", size_bytes=size, seconds=1.0 + size)
        for source in ("node0", "elsewhere")
        for size in (1, 1000)
    )
    table = CommTable(samples=samples, provenance=(("cluster", cluster_name),))
    write_comm_table(tmp_path / "links.csv", table)
    costs = costs_of(PAPER, tmp_path)
    seconds = costs.send_s(PAPER.devices[0], PAPER.devices[3], DECODE, 1, 1)
    assert (seconds > 1.0) == is_used


ENDS = ("ends_s node0 node1", "send 0.0002 receive 0.0001")


def links_saying(folder, *lines):
    samples = tuple(
        CommSample(source="node0", target="node1", size_bytes=size, seconds=1e-3)
        for size in (1, 1000)
    )
    write_comm_table(folder / "links.csv", CommTable(samples=samples, provenance=lines))
    return costs_of(PAPER, folder).comm


def test_what_a_message_takes_of_its_ends_is_their_mean_and_unknown_in_older_tables(tmp_path):
    first, second = PAPER.devices[0], PAPER.devices[3]
    comm = links_saying(tmp_path, ENDS)
    assert comm.end_s(first, second) == comm.end_s(second, first) == pytest.approx(1.5e-4)
    assert comm.end_s(first, first) is None
    assert links_saying(tmp_path).end_s(first, second) is None


@pytest.mark.parametrize(
    "text", ["send 1", "receive 1 send 1", "send -1 receive 1", "send nan receive 1"]
)
def test_ends_that_are_no_seconds_are_refused(tmp_path, text):
    with pytest.raises(SpecError, match=f"provenance 'ends_s node0 node1': found '{text}'"):
        links_saying(tmp_path, (ENDS[0], text))


def test_older_vector_extensions_slow_16_bit_products_and_not_float32():
    cluster = one_node(
        DeviceGroup(type="cpu", count=1), DeviceGroup(type="cpu", count=1, cpu_isa="avx2")
    )
    for dtype, is_slower in (("bfloat16", True), ("float32", False)):
        costs = build_costs(OPT, cluster, dtype=dtype, kv_bits=16)
        new, old = (costs.layer_s(one, PREFILL, 16, 4, 256, 0) for one in cluster.devices)
        assert (old > 4.5 * new) == is_slower
        assert old >= new


@pytest.mark.parametrize(
    ("has", "limit", "like"),
    [
        ("avx2", None, "avx2"),
        ("avx2_vnni", None, "avx2"),
        ("avx512_vnni", None, "avx512"),
        ("amx", "avx2", "avx2"),
        ("baseline", "avx512", "sse4"),
        ("amx", None, None),
        ("avx512_bf16", None, None),
    ],
)
def test_a_processor_costs_as_one_that_is_held_to_its_instructions(has, limit, like):
    cluster = one_node(
        DeviceGroup(type="cpu", count=1, instruction_set=has, cpu_isa=limit),
        DeviceGroup(type="cpu", count=1, cpu_isa=like),
    )
    costs = build_costs(OPT, cluster, dtype="bfloat16", kv_bits=16)
    for bits in (16, 8, 4):
        own, other = (costs.layer_s(one, PREFILL, bits, 4, 256, 0) for one in cluster.devices)
        assert own == other
    own, other = map(costs.runtime_bytes, cluster.devices)
    assert own == other


# benchmarks/kernel_times.py, an Intel Xeon held to AVX2: seconds of few bits over those of float32.
OLDER_CPU_RATIOS = {
    (DECODE, 1): {8: 0.29, 4: 0.18, 3: 0.18},
    (DECODE, 32): {8: 0.56, 4: 0.32, 3: 0.31},
    (PREFILL, 512): {8: 0.84, 4: 0.47, 3: 0.47},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize("shape", OLDER_CPU_RATIOS, ids=lambda one: f"{one[0].value}-{one[1]}")
def test_few_bits_on_a_cpu_without_bf16_products_cost_the_same_in_every_format(dtype, isa, shape):
    cluster = one_node(DeviceGroup(type="cpu", count=1, cpu_isa=isa))
    (device,) = cluster.devices
    phase, rows = shape
    batch, tokens = (1, rows) if phase is PREFILL else (rows, 1)
    model = catalog.model("meta-llama/Llama-3.1-8B")
    full, own = (build_costs(model, cluster, dtype=one, kv_bits=16) for one in ("float32", dtype))
    wide = full.layer_s(device, phase, 16, batch, tokens, 0)
    for bits, ratio in OLDER_CPU_RATIOS[shape].items():
        assert own.layer_s(device, phase, bits, batch, tokens, 0) == pytest.approx(
            ratio * wide, rel=0.25
        )


def test_processors_of_the_catalogue_without_bf16_products_take_their_own_factors():
    def share(name, bits):
        cluster = one_node(DeviceGroup(type=name, count=1))
        costs = build_costs(OPT, cluster, dtype="bfloat16", kv_bits=16)
        four, wide = (
            costs.layer_s(cluster.devices[0], PREFILL, one, 1, 512, 0) for one in (bits, 16)
        )
        return four / wide

    for name in ("EPYC-7763", "Xeon-8380"):  # they convert bfloat16
        assert share(name, 4) < 0.6
    assert share("EPYC-9654", 4) > 0.8


# Tokens a second of prompts of 512 tokens and of answers, by bits: llama.cpp's fork of ikawrakow
# (its discussion 164 and pull request 54), llama.cpp by ahelpme.com on an EPYC 9554 (the 9654's
# memory) and by slaren (llama.cpp issue 34; of 2023) with memory of 6.4 GT/s: 7/8 are compared.
PUBLISHED = {
    ("Ryzen-9-7950X", "meta-llama/Llama-3.1-8B"): {
        16: (256.90, 4.27), 8: (268.19, 7.79), 4: (273.54, 13.88), 3: (255.30, 12.99),
    },
    ("EPYC-9654", "microsoft/phi-4"): {8: (None, 19.19), 4: (None, 28.74)},
    ("Core-i9-13900K", "meta-llama/Llama-2-7b-hf"): {4: (None, 7 / 8 * 18.27)},
}  # fmt: skip


@pytest.mark.parametrize("key", PUBLISHED, ids=lambda key: key[0])
def test_whole_processors_meet_published_speeds(key):
    name, model = key[0], catalog.model(key[1])
    cluster = one_node(DeviceGroup(type=name, count=1, threads=catalog.device(name).cores))
    costs = build_costs(model, cluster, dtype="bfloat16", kv_bits=16)
    (device,) = cluster.devices
    for bits, (prompt, answer) in PUBLISHED[key].items():
        prefill_s, decode_s = (
            sum(costs.layer_s(device, phase, bits, 1, tokens, kind) for kind in model.layer_kinds)
            for phase, tokens in ((PREFILL, 512), (DECODE, 64))
        )
        if prompt is not None:
            faster, slower = costs.specs[device.group].deviation(PREFILL, bits)
            assert 1 - faster <= 512 / prompt / prefill_s <= 1 + slower
        decode_s += costs.latency[device.group].master_s(DECODE, 1, 64, 16 if bits == 16 else 8)
        assert 1 / answer / decode_s == pytest.approx(1, rel=0.3)


def test_few_bits_of_a_whole_processor_are_read_as_fast_as_memory_lets_them():
    def factors(name):
        cluster = one_node(DeviceGroup(type=name, count=1))
        (spec,) = build_costs(OPT, cluster, dtype="bfloat16", kv_bits=16).specs
        return [cost.stream for cost in spec.precision_costs]

    for name in ("Ryzen-9-7950X", "Core-i5-12400"):
        assert factors(name) == [0.97, 0.9, 0.8]
    assert factors("cpu") == [0.93, 0.74, 0.66]


def test_a_share_of_a_core_slows_everything_alike():
    cluster = one_node(
        DeviceGroup(type="cpu", count=1), DeviceGroup(type="cpu", count=1, cpu_share=0.25)
    )
    costs = build_costs(OPT, cluster, dtype="bfloat16", kv_bits=16)
    for phase, tokens in ((PREFILL, 256), (DECODE, 64)):
        for bits in (3, 4, 8, 16):
            whole, part = (costs.layer_s(one, phase, bits, 4, tokens, 0) for one in cluster.devices)
            assert part == pytest.approx(4 * whole)


def test_a_share_tells_tables_of_one_type_apart(tmp_path):
    write(tmp_path / "whole.csv", 1.0, device="cpu")
    write(tmp_path / "half.csv", 2.0, device="cpu", cpu_share="0.5")
    for share, seconds in ((None, 1.0), (0.5, 2.0)):
        cluster = one_node(DeviceGroup(type="cpu", count=1, cpu_share=share))
        costs = costs_of(cluster, tmp_path)
        assert costs.layer_s(cluster.devices[0], DECODE, 16, 1, 8, 0) == seconds


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_compiled_kernels_make_8_bits_the_fastest_of_many_rows_on_a_cpu(dtype):
    (device,) = (cluster := one_node(DeviceGroup(type="cpu", count=1))).devices
    costs = build_costs(OPT, cluster, dtype=dtype, kv_bits=16)
    for phase, batch, tokens in ((DECODE, 8, 64), (DECODE, 32, 64), (PREFILL, 4, 256)):
        seconds = {
            bits: costs.layer_s(device, phase, bits, batch, tokens, 0) for bits in (3, 4, 8, 16)
        }
        assert min(seconds, key=seconds.__getitem__) == 8
