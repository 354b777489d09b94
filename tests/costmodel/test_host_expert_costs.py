"""The law of experts in the host's memory, and what a layer costs whose experts are apart."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.costmodel import build_costs
from llmpq.costmodel.host_experts import HostExperts, distinct_experts
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, DeviceHost, Node
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.precision import BITS, Phase, Variant
from llmpq.units import GIB

LAW = HostExperts(
    experts=128,
    chosen=8,
    on_host=100,
    expert_bytes=9_000_000,
    gather_bytes_per_s=2e10,
    row_s=2e-5,
    hop_s=1e-5,
)
MODEL = catalog.model("Qwen/Qwen3-30B-A3B")
XEON = DeviceEntry(type="xeon", like="cpu", gather_bytes_per_s=1e10)
HOST = DeviceHost(type="xeon", threads=4, memory_bytes=64 * GIB)


@cache
def costs_of(device="RTX3090", host=HOST, types=(XEON,), model=MODEL):
    group = DeviceGroup(type=device, count=1, host=host)
    cluster = Cluster(
        name="box", nodes=(Node(name="box", devices=(group,)),), device_types=types or None
    )
    costs = build_costs(model, cluster, dtype="float16", kv_bits=16)
    return costs, cluster.devices[0]


@pytest.mark.parametrize(("rows", "chosen", "experts"), [(1, 2, 8), (5, 8, 128), (64, 4, 32)])
def test_distinct_experts_are_those_of_random_choices(rows, chosen, experts):
    rng = np.random.default_rng(0)
    counts = [
        len({e for _ in range(rows) for e in rng.choice(experts, chosen, replace=False)})
        for _ in range(400)
    ]
    spread = np.std(counts) / 20
    assert distinct_experts(rows, chosen, experts) == pytest.approx(
        np.mean(counts), abs=4 * spread + 1e-9
    )


@given(st.integers(1, 512), st.integers(0, 300), st.data())
def test_distinct_experts_have_bounds_and_grow(experts, rows, data):
    chosen = data.draw(st.integers(1, experts))
    found = distinct_experts(rows, chosen, experts)
    assert 0 <= found <= min(experts, rows * chosen) + 1e-9
    assert found <= distinct_experts(rows + 1, chosen, experts) + 1e-9


def test_a_step_by_hand():
    read_s = 100 / 128 * 8 * 9e6 / 2e10
    assert LAW.layer_s(1, 1e-3, 0.0) == pytest.approx(1e-3 + 2e-5 + read_s)
    assert LAW.layer_s(1, 1e-3, 1.0) == pytest.approx(1 + 1e-3)
    assert LAW.host_s(4096) == pytest.approx(4096 * 8 * 100 / 128 * 2e-5)
    assert replace(LAW, on_host=0).layer_s(1, 1e-3, 2e-3) == pytest.approx(3e-3)


@given(st.integers(1, 4096))
def test_more_speed_never_takes_longer(rows):
    for name, factor in (("gather_bytes_per_s", 2), ("row_s", 0.5), ("hop_s", 0.5)):
        faster = replace(LAW, **{name: factor * getattr(LAW, name)})
        assert faster.layer_s(rows, 1e-3, 1e-4) <= LAW.layer_s(rows, 1e-3, 1e-4)


SHAPES = st.tuples(st.sampled_from(Phase), st.integers(1, 32), st.integers(1, 4096))


@given(SHAPES, st.sampled_from(BITS))
def test_a_layer_with_all_experts_on_its_device_costs_a_whole_layer(shape, bits):
    costs, device = costs_of()
    phase, batch, tokens = shape
    whole_s = costs.layer_s(device, phase, bits, batch, tokens, 0)
    for variant in (Variant(bits), Variant(bits, None, 128), Variant(bits, bits, 128)):
        assert costs.variant_s(device, phase, variant, batch, tokens, 0) == pytest.approx(whole_s)
        whole = costs.layer_weight_bytes(device, 0, bits)
        assert costs.variant_bytes(device, 0, variant) == (whole, 0)


@given(SHAPES, st.sampled_from(BITS), st.sampled_from(BITS), st.integers(0, 128))
def test_seconds_are_the_law_of_the_hosts_figures(shape, bits, width, resident):
    costs, device = costs_of()
    phase, batch, tokens = shape
    rows = batch * (tokens if phase is Phase.PREFILL else 1)
    spec, weights = costs.specs[0], 3 * 2048 * 768
    expert_bytes = costs.variant_bytes(device, 0, Variant(bits, width, 127))[1]

    def apart_s(on_host):
        read_s = on_host / 128 * distinct_experts(rows, 8, 128) * expert_bytes / (1e10 * 4**0.4)
        work_s = rows * 8 * on_host / 128 * costs.hosts[0].row_s(phase, width, weights)
        return max(read_s, work_s) + 2 * (
            spec.link_latency_s + rows * 2048 * 2 / spec.link_bytes_per_s
        )

    def seconds(count):
        return costs.variant_s(device, phase, Variant(bits, width, count), batch, tokens, 0)

    dense_s = seconds(0) - apart_s(128)
    all_s = seconds(128) - dense_s
    assert dense_s > 0
    assert all_s >= -1e-12
    if resident < 128:
        expected_s = dense_s + max(all_s * resident / 128, apart_s(128 - resident))
        assert seconds(resident) == pytest.approx(expected_s)


@given(st.sampled_from(BITS), st.sampled_from(BITS), st.integers(0, 128))
def test_bytes_of_device_and_host_add_up(bits, width, resident):
    costs, device = costs_of()
    here, there = costs.variant_bytes(device, 0, Variant(bits, width, resident))
    all_here, none = costs.variant_bytes(device, 0, Variant(bits, width, 128))
    assert none == 0
    assert here + there == all_here
    assert there * 128 == (128 - resident) * (all_here - costs.variant_bytes(
        device, 0, Variant(bits, width, 0))[0])  # fmt: skip


@pytest.mark.parametrize(
    ("device", "host", "types", "message"),
    [
        ("RTX3090", None, (), r"cluster box: field 'host': found none of box/RTX3090#0"),
        (
            "RTX3090",
            replace(HOST, type="cpu"),
            (),
            r"device type cpu: field 'gather_bytes_per_s': found none, expected it of the host",
        ),
        (
            "RTX3090",
            replace(HOST, type="T4-16G"),
            (),
            r"field 'host.type': found T4-16G of box/RTX3090#0, of kind 'cuda', expected a CPU",
        ),
    ],
)
def test_what_is_not_known_is_named(device, host, types, message):
    def seconds():
        costs, own = costs_of(device, host, types)
        return costs.variant_s(own, Phase.DECODE, Variant(4, None, 0), 1, 100, 0)

    with pytest.raises(SpecError, match=message):
        seconds()


def test_a_layer_without_experts_cannot_have_them_apart():
    costs, device = costs_of(model=catalog.model("facebook/opt-125m"))
    with pytest.raises(SpecError, match="found no routed experts in layer 0, expected some"):
        costs.variant_s(device, Phase.DECODE, Variant(4, None, 0), 1, 100, 0)
    with pytest.raises(SpecError, match="found no routed experts in layer 0, expected some"):
        costs.variant_bytes(device, 0, Variant(4, None, 0))


def crowded(cores, *, device="RTX3090", workers=None):
    """Costs of a device with a host of four threads, on a node of so many cores."""
    group = DeviceGroup(type=device, count=1, host=HOST, threads=workers)
    node = Node(name="box", devices=(group,), cores=cores)
    cluster = Cluster(name="box", nodes=(node,), device_types=(XEON,))
    return build_costs(MODEL, cluster, dtype="float16", kv_bits=16), cluster.devices[0]


def test_threads_of_hosts_share_the_cores_of_their_node():
    costs, device = costs_of()
    read_s = 8 * costs.variant_bytes(device, 0, Variant(4, None, 127))[1] / (1e10 * 4**0.4)

    def seconds(*args, **options):
        costs, device = crowded(*args, **options)
        variant = Variant(4, None, 0)
        return costs.crowding(device) * costs.variant_s(
            device, Phase.DECODE, variant, 1, 100, 0
        ), costs.crowding(device)

    free_s, alone = seconds(4)
    half_s, still = seconds(2)
    assert (alone, still) == (1.0, 1.0)  # a GPU has no cores to share
    assert free_s > read_s
    assert half_s - free_s == pytest.approx(read_s)  # once more: twice the threads
    own_s, worker = seconds(8, device="cpu", workers=4)
    both_s, crowded_worker = seconds(4, device="cpu", workers=4)
    assert (worker, crowded_worker) == (1.0, 2.0)
    assert both_s == pytest.approx(2 * own_s)  # all of the layer once


@given(st.sampled_from(["Ryzen-9-5950X", "Core-i7-12700K", "Xeon-8480", "EPYC-9755"]))
def test_whole_processors_have_a_predicted_rate_of_scattered_reads(name):
    costs, _ = costs_of(host=replace(HOST, type=name, threads=256), types=())
    (host,) = costs.hosts
    stream = catalog.device(name).memory_bytes_per_s
    assert 0 < host.gather_bytes_per_s < min(stream, 1.5e11)
    measured = DeviceEntry(type="mine", like=name, gather_bytes_per_s=1e10)
    costs, _ = costs_of(host=replace(HOST, type="mine", threads=256), types=(measured,))
    assert costs.hosts[0].gather_bytes_per_s == pytest.approx(1e10)
