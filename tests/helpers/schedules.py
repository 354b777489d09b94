"""Small application schedules on a cluster of four T4 and two V100."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.builders import cluster_of

from llmpq.multillm.graph import Application, AppModel, AppNode
from llmpq.multillm.schedule import (
    ApplicationSchedule,
    ExecutionStage,
    ModelReplica,
    ScheduledModel,
    application_digest,
    cluster_digest,
)
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import Provenance

CLUSTER = cluster_of(("T4-16G", 4, 1), ("V100-32G", 2, 1))
T = tuple(f"node0/T4-16G#{number}" for number in range(4))
V = tuple(f"node1/V100-32G#{number}" for number in range(2))


def app_of(names: str) -> Application:
    """One node for each letter, of the model of the same letter in upper case."""
    return Application(
        name="many",
        models=tuple(AppModel(name=name.upper(), model="m") for name in names),
        nodes=tuple(AppNode(name=name, model=name.upper(), requests="r.jsonl") for name in names),
    )


def pair(text: str, *, tp: int | None = None) -> ScheduledModel:
    """``a T0 T1``: node a of model A on two devices, one replica each; ``tp`` shares layers."""
    node, *devices = text.split()
    labels = [{"T": T, "V": V}[one[0]][int(one[1:])] for one in devices]
    size = tp or 1
    cut = [tuple(labels[first : first + size]) for first in range(0, len(labels), size)]
    replicas = tuple(ModelReplica(devices=one, tensor_parallel=size) for one in cut)
    return ScheduledModel(model=node.upper(), nodes=(node,), replicas=replicas)


def schedule_of(app: Application, *stages: Sequence[ScheduledModel]) -> ApplicationSchedule:
    """A schedule on that cluster with stages of a second each."""
    return schedule_on(app, CLUSTER, *stages)


def schedule_on(
    app: Application, cluster: Cluster, *stages: Sequence[ScheduledModel]
) -> ApplicationSchedule:
    """A schedule on a cluster with stages of a second each."""
    found = ApplicationSchedule(
        application=app.name,
        application_digest=application_digest(app),
        cluster=cluster.name,
        cluster_digest=cluster_digest(cluster),
        method="test",
        stages=tuple(
            ExecutionStage(start_s=number, end_s=number + 1, models=tuple(models))
            for number, models in enumerate(stages)
        ),
        provenance=Provenance(command="test", version="0"),
    )
    found.check(app, cluster)
    return found
