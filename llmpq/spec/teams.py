"""Teams: like devices of a cluster that share every layer of a stage (tensor parallelism)."""

from __future__ import annotations

from dataclasses import replace

from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster


def with_tensor_parallel(cluster: Cluster, degree: int) -> Cluster:
    """Return a cluster whose devices share layers in teams of ``degree``, where they can.

    A group can whose devices divide into such teams and have no table of their own; its devices
    must not share layers yet.

    Raises:
        SpecError: no group can.
    """
    teams = 0
    nodes = []
    for node in cluster.nodes:
        groups = []
        for group in node.devices:
            fits = group.count % degree == 0 and (group.tensor_parallel or 1) == 1
            if fits and group.profile is None and group.threads is None:
                count = group.count // degree
                teams += count
                groups.append(replace(group, count=count, tensor_parallel=degree))
            else:
                groups.append(group)
        nodes.append(replace(node, devices=tuple(groups)))
    if not teams:
        raise SpecError(
            f"cluster {cluster.name}: found no devices of one group that divide into teams of "
            f"{degree}, expected some to share layers"
        )
    return replace(cluster, nodes=tuple(nodes))
