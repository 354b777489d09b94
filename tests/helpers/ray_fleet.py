"""Replicas and a router for tests in Ray Serve, and a Ray cluster of two nodes on this host."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Read when Ray is imported: without it, Ray replaces 127.0.0.1 by an address that others can reach.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray
from helpers.fake_engine import FakeEngine
from helpers.fake_replica import random_load
from helpers.served import make_service
from ray import serve
from ray.cluster_utils import Cluster

from llmpq.routing import load_balancer
from llmpq.server.admission import AdmissionLimits
from llmpq.server.ray.options import FleetOptions, strategy_for
from llmpq.server.ray.replica import EngineReplica
from llmpq.server.ray.replica_table import ReplicaTable
from llmpq.server.ray.request_router import BalancedRequestRouter

ROOT = Path(__file__).resolve().parents[2]
LABEL = "llmpq-device"
NODES = ("cpu-a", "cpu-b")
HOST = "127.0.0.1"
MEMORY_BYTES = 80 << 20
TRACES = "LLMPQ_TEST_TRACES"


class FakeEngineReplica(EngineReplica):
    """Serves a fake engine; its load is what a test says.

    The "strategy file" of its node is its name in answers.
    """

    async def __init__(self, options: FleetOptions) -> None:
        labels = ray.get_runtime_context().get_node_labels()
        self._load: dict[str, Any] = {}
        limits = AdmissionLimits(max_num_queued_reqs=options.max_num_queued_reqs)
        self.engine = FakeEngine(step_s=0.01)
        names = (strategy_for(options, labels), "demo")
        self._start(make_service(self.engine, limits=limits, names=names))

    async def record_routing_stats(self) -> dict[str, Any]:
        return await super().record_routing_stats() | self._load


class VaryingReplica(FakeEngineReplica):
    """Reports another random load each time; that of node ``b`` takes no requests at times."""

    async def __init__(self, options: FleetOptions) -> None:
        await super().__init__(options)
        self._source = random.Random(self._service.model.names[0])

    async def record_routing_stats(self) -> dict[str, Any]:
        can_refuse = self._service.model.names[0] == f"{NODES[1]}.json"
        self._load = random_load(self._source, can_refuse=can_refuse)
        return await super().record_routing_stats()


class RecordingRouter(BalancedRequestRouter):
    """Appends its decisions, with the statistics they follow from, and the ends to a file.

    The environment has its folder, for Ray imports this class by its name.
    """

    def initialize_state(self, balancer: str, seed: int) -> None:
        super().initialize_state(balancer, seed)
        self._file = Path(os.environ[TRACES]) / f"{balancer}.jsonl"
        self._now_s = 0.0
        self._table = ReplicaTable(load_balancer(balancer, seed=seed), self._clock)

    def _clock(self) -> float:
        self._now_s = time.time()
        return self._now_s

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        order = await super().choose_replicas(candidate_replicas, pending_request)
        request = pending_request.args[0].request
        self._write(
            key=pending_request.metadata.internal_request_id,
            now_s=self._now_s,
            prompt_tokens=request.prompt_tokens,
            prefix=request.prefix,
            stats={one.replica_id.unique_id: one.routing_stats for one in candidate_replicas},
            order=[rank[0].replica_id.unique_id for rank in order],
        )
        return order

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        key = pending_request.metadata.internal_request_id
        self._write(key=key, now_s=self._now_s, routed=replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._write(key=internal_request_id, end=replica_id.unique_id)

    def _write(self, **event: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


@contextlib.contextmanager
def cluster(values: Sequence[str] = NODES) -> Iterator[str]:
    """Run nodes with these values of the label, on loopback, without a dashboard.

    Yields:
        The address of the cluster, to which this process is connected.
    """
    with cluster_of([{"num_cpus": 2, "labels": {LABEL: value}} for value in values]) as nodes:
        yield nodes.address


@contextlib.contextmanager
def cluster_of(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Cluster]:
    """Run nodes with these settings, on loopback, without a dashboard.

    Yields:
        The cluster, to which this process is connected; commands connect to its first node.
    """
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    made = Cluster()
    try:
        for number, node in enumerate(nodes):
            made.add_node(
                wait=True,
                node_ip_address=HOST,
                object_store_memory=MEMORY_BYTES,
                **node,
                **({"include_dashboard": False} if number == 0 else {}),
            )
        ray.init(address=made.address, logging_level="error", log_to_driver=False)
        yield made
    finally:
        if ray.is_initialized():  # else it would look for another cluster
            with contextlib.suppress(Exception):
                serve.shutdown()
        ray.shutdown()
        made.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def children_of(pid: int) -> set[int]:
    """Return the processes that descend from one, itself included."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            text = status.read_text()
            parents[int(status.parent.name)] = int(text.split("\nPPid:\t")[1].split("\n")[0])
    found = {pid}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found
