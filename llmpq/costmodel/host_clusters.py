"""Clusters whose CPUs compute routed experts beside GPUs, instead of layers of their own.

A small GPU beside much memory can use it in two ways: the CPU is a stage with layers of its own, or
it computes routed experts of the GPU's layers. Which is better depends on the model and the
figures of both, so both are planned.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from llmpq.costmodel.roofline import thread_gather_bytes_per_s
from llmpq.spec import catalog
from llmpq.spec.cluster import MAX_HOST_THREADS, Cluster, DeviceGroup, DeviceHost, Node
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.model import ModelSpec


def clusters_to_plan(cluster: Cluster, model: ModelSpec, sequences: int) -> tuple[Cluster, ...]:
    """Return a cluster, and where that may be better the same with experts on its hosts.

    Args:
        cluster: of hosts that state threads and free memory of their CPU.
        model: that is planned for; one without routed experts leaves none to hosts.
        sequences: at the same time.
    """
    has_experts = any(layer.num_experts for layer in model.layer_types)
    other = with_experts_on_hosts(cluster, sequences) if has_experts else cluster
    return (cluster,) if other == cluster else (cluster, other)


def with_experts_on_hosts(
    cluster: Cluster, sequences: int = 1, nodes: Collection[str] | None = None
) -> Cluster:
    """Return a cluster whose CPUs compute experts beside the GPUs of their node, and no layers.

    This is so on each node with GPUs and one CPU that has kernels for experts; others stay as they
    are. GPUs share the CPU's memory equally, less what their processes take of it. A core is left
    to the process of each. With one sequence, GPUs take turns and all other cores compute the
    experts of each; with more, GPUs share the cores, too.

    Args:
        cluster: of hosts that state threads and free memory of their CPU.
        sequences: at the same time.
        nodes: names of those that may be so; by default all.
    """
    entries, made = list(cluster.device_types or ()), []
    for node in cluster.nodes:
        kinds = [catalog.device(group.type, cluster).kind for group in node.devices]
        gpus = [group for group, kind in zip(node.devices, kinds, strict=True) if kind != "cpu"]
        cpus = [group for group, kind in zip(node.devices, kinds, strict=True) if kind == "cpu"]
        found = node
        is_open = nodes is None or node.name in nodes
        if is_open and gpus and len(cpus) == 1 and cpus[0].count == 1:
            number = sum(gpu.count for gpu in gpus)
            own = _experts_beside(cpus[0], number if sequences > 1 else 1, number, cluster)
            if own is not None:
                host, entry = _with_rate(own, node, cluster)
                entries += entry
                found = replace(node, devices=tuple(replace(gpu, host=host) for gpu in gpus))
        made.append(found)
    return catalog.with_device_types(replace(cluster, nodes=tuple(made)), entries)


def _experts_beside(
    cpu: DeviceGroup, at_once: int, gpus: int, cluster: Cluster
) -> DeviceHost | None:
    """Return what computes experts beside each of so many GPUs, ``None`` where nothing can.

    Args:
        cpu: of their node.
        at_once: GPUs that compute at the same time.
        gpus: that share its memory.
        cluster: with its figures.
    """
    spec = catalog.device(cpu.type, cluster)
    entries = {entry.type: entry for entry in cluster.device_types or ()}
    is_measured = cpu.type in entries and entries[cpu.type].like is None
    # Measuring reads scattered experts with the kernels that would compute them.
    has_kernels = cpu.instruction_set != "baseline" and (
        spec.gather_bytes_per_s is not None or not is_measured
    )
    memory = (cpu.memory_bytes or 0) // gpus - spec.runtime_bytes
    if not has_kernels or cpu.threads is None or memory < 1:
        return None
    return DeviceHost(
        type=cpu.type,
        threads=min(max(1, cpu.threads // at_once - 1), MAX_HOST_THREADS),
        memory_bytes=memory,
        instruction_set=cpu.instruction_set,
    )


def _with_rate(
    host: DeviceHost, node: Node, cluster: Cluster
) -> tuple[DeviceHost, tuple[DeviceEntry, ...]]:
    """Return a host whose rate of scattered reads is known, and figures that it needs."""
    spec = catalog.device(host.type, cluster)
    if spec.gather_bytes_per_s is not None or spec.cores is not None:
        return host, ()
    name, rate = f"{host.type}-{node.name}", thread_gather_bytes_per_s(spec, host.threads)
    source = (("gather_bytes_per_s", "predicted from the bandwidth of its type; not measured"),)
    entry = DeviceEntry(type=name, like=host.type, gather_bytes_per_s=rate, source=source)
    return replace(host, type=name), (entry,)
