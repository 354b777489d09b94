"""Clusters whose CPUs compute experts beside GPUs: who shares what, and where nothing changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmpq.costmodel import build_costs
from llmpq.costmodel.host_clusters import clusters_to_plan, with_experts_on_hosts
from llmpq.costmodel.roofline import GATHER_LIMIT
from llmpq.profiler.device import host_cluster
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.units import GIB

SPARSE = catalog.model("Qwen/Qwen3-30B-A3B")
DENSE = catalog.model("Qwen/Qwen3-8B")
MEASURED = DeviceEntry(
    type="cpu",
    kind="cpu",
    memory_bytes=64 * GIB,
    flops=(("float32", 1e12),),
    memory_bytes_per_s=5e10,
    cores=8,
    gather_bytes_per_s=2e10,
)


def box(*gpus, cpu=None, entry=MEASURED, name="here"):
    """A host with these GPUs beside a CPU with eight threads and 40 GiB."""
    own = cpu or DeviceGroup(
        type="cpu", count=1, threads=8, memory_bytes=40 * GIB, instruction_set="avx2"
    )
    groups = tuple(DeviceGroup(type=gpu, count=1, memory_bytes=10 * GIB) for gpu in gpus)
    nodes = (Node(name=name, devices=(*groups, own)),)
    return Cluster(name="box", nodes=nodes, device_types=(entry,) if entry else None)


@pytest.mark.parametrize("sequences", [1, 4])
def test_gpus_share_the_memory_and_with_several_sequences_the_cores(sequences):
    cluster = box("RTX3090", "T4-16G")
    found = with_experts_on_hosts(cluster, sequences)
    process = catalog.device("cpu", cluster).runtime_bytes
    assert [group.type for group in found.nodes[0].devices] == ["RTX3090", "T4-16G"]
    for group, before in zip(found.nodes[0].devices, cluster.nodes[0].devices, strict=False):
        assert replace(group, host=None) == before
        host = group.host
        assert (host.type, host.instruction_set) == ("cpu", "avx2")
        assert host.memory_bytes == 20 * GIB - process
        assert host.threads == (7 if sequences == 1 else 3)
    assert found.device_types == (MEASURED,)


def test_one_thread_is_left_where_there_is_no_other():
    cpu = DeviceGroup(type="cpu", count=1, threads=1, memory_bytes=8 * GIB)
    (group,) = with_experts_on_hosts(box("T4-16G", cpu=cpu)).nodes[0].devices
    assert group.host.threads == 1


CPU = box("T4-16G").nodes[0].devices[-1]


@pytest.mark.parametrize(
    "cluster",
    [
        box(),
        box("T4-16G", cpu=replace(CPU, count=2)),
        box("T4-16G", cpu=replace(CPU, instruction_set="baseline")),
        box("T4-16G", cpu=replace(CPU, memory_bytes=GIB // 8)),
        box("T4-16G", entry=replace(MEASURED, gather_bytes_per_s=None)),
        host_cluster([]),
    ],
    ids=["no GPU", "two CPUs", "no kernels", "no memory", "kernels that failed", "this host"],
)
def test_hosts_without_experts_stay_as_they_are(cluster):
    assert with_experts_on_hosts(cluster) == cluster
    assert clusters_to_plan(cluster, SPARSE, 1) == (cluster,)


def test_models_without_routed_experts_are_planned_once():
    cluster = box("T4-16G")
    assert clusters_to_plan(cluster, DENSE, 1) == (cluster,)
    assert clusters_to_plan(cluster, SPARSE, 1) == (cluster, with_experts_on_hosts(cluster))


@pytest.mark.parametrize("sequences", [1, 2])
def test_an_unmeasured_cpu_reads_experts_as_a_processor_with_its_bandwidth(sequences):
    found = with_experts_on_hosts(box("T4-16G", "T4-16G", entry=None), sequences)
    costs = build_costs(SPARSE, found, dtype="float16", kv_bits=16)
    spec, threads = catalog.device("cpu"), 7 if sequences == 1 else 3
    stream = spec.memory_bytes_per_s * spec.memory_efficiency * threads**0.4
    expected = 1 / (1 / stream + 1 / GATHER_LIMIT)
    for device in found.devices:
        assert costs.host_of(device).gather_bytes_per_s == pytest.approx(expected)
    (entry,) = found.device_types
    assert dict(entry.source)["gather_bytes_per_s"].startswith("predicted")


def test_the_instruction_set_of_a_host_counts_as_that_of_a_worker():
    rates = {}
    for name in ("avx512_bf16", "avx2"):
        cpu = replace(CPU, instruction_set=name)
        found = with_experts_on_hosts(box("T4-16G", cpu=cpu, entry=None))
        costs = build_costs(SPARSE, found, dtype="bfloat16", kv_bits=16)
        alone = Cluster(name="cpu", nodes=(Node(name="cpu", devices=(cpu,)),))
        own = build_costs(SPARSE, alone, dtype="bfloat16", kv_bits=16)
        assert costs.hosts[0].device.flops == own.specs[0].flops
        rates[name] = dict(own.specs[0].flops)["bfloat16"]
    assert rates["avx2"] < rates["avx512_bf16"]


def test_each_node_of_several_has_its_own():
    here, there = box("T4-16G", entry=None), box("RTX3090", entry=None, name="there")
    third = box(entry=None, name="third")
    nodes = (*here.nodes, *there.nodes, *third.nodes)
    cluster = Cluster(name="three", nodes=nodes)
    found = with_experts_on_hosts(cluster)
    hosts = [device.host and device.host.type for device in found.devices]
    assert hosts == ["cpu-here", "cpu-there", None]
    assert {entry.type for entry in found.device_types} == {"cpu-here", "cpu-there"}
    one = with_experts_on_hosts(cluster, nodes={"there"})
    assert one.nodes[0] == cluster.nodes[0]
    assert one.nodes[1] == found.nodes[1]
