"""Devices of this host for pipelines that run side by side: accelerators they see, CPU cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""The variable that says which accelerators of a kind a process sees."""


def visible_devices(
    cluster: Cluster,
    labels: Sequence[str],
    environment: Mapping[str, str],
    node: str | None = None,
) -> dict[str, str]:
    """Return the variables that show a pipeline its own accelerators.

    Accelerators of a kind are numbered in the order of the cluster, among those that
    ``environment`` shows.

    Args:
        cluster: all devices of this host, or of several.
        labels: the pipeline's devices, in the order of its plan's cluster.
        environment: of this process.
        node: which node of the cluster this host is; by default accelerators are on one.

    Raises:
        SpecError: the cluster has accelerators on several nodes, or more than are shown.
    """
    devices = [
        (device.label, device.node, catalog.device(device.type, cluster).kind)
        for device in cluster.devices
        if node in (None, device.node)
    ]
    nodes = {node for _, node, kind in devices if kind != "cpu"}
    if len(nodes) > 1:
        raise SpecError(
            f"cluster {cluster.name}: found accelerators on {', '.join(sorted(nodes))}, expected "
            "one node"
        )
    found = {}
    for kind, variable in VISIBLE.items():
        numbers = {
            label: place
            for place, label in enumerate(label for label, _, own in devices if own == kind)
        }
        if not numbers:
            continue
        shown = environment.get(variable)
        names = [str(i) for i in range(len(numbers))] if shown is None else shown.split(",")
        if len(names) < len(numbers):
            raise SpecError(
                f"{variable}: found {shown}, expected the {len(numbers)} devices of cluster "
                f"{cluster.name}"
            )
        found[variable] = ",".join(names[numbers[label]] for label in labels if label in numbers)
    return found


def cores_of_devices(cluster: Cluster, available: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the cores of every CPU device with a stated number of threads.

    Devices get cores of their own, in the order of the cluster; none do if there are too few, and
    the kernel then shares all cores.

    Args:
        cluster: all devices of this host.
        available: cores that may be used.
    """
    threads = {
        device.label: device.threads or 0
        for device in cluster.devices
        if catalog.device(device.type, cluster).kind == "cpu"
    }
    if sum(threads.values()) > len(available) or 0 in threads.values():
        return {}
    found, first = {}, 0
    for label, count in threads.items():
        found[label] = tuple(available[first : first + count])
        first += count
    return found
