"""Replicas for Ray Serve without ranks, and a Ray cluster of two nodes on this host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Read when Ray is imported: without it, Ray replaces 127.0.0.1 by an address that others can reach.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray
from helpers.fake_engine import FakeEngine
from helpers.served import make_service
from ray import serve
from ray.cluster_utils import Cluster

from llmpq.server.admission import AdmissionLimits
from llmpq.server.ray.options import FleetOptions, strategy_for
from llmpq.server.ray.replica import EngineReplica

ROOT = Path(__file__).resolve().parents[2]
LABEL = "llmpq-node"
NODES = ("a", "b")
HOST = "127.0.0.1"
MEMORY_BYTES = 80 << 20


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


@contextlib.contextmanager
def cluster(label: str = LABEL, values: Sequence[str] = NODES) -> Iterator[str]:
    """Run nodes with these values of a label, on loopback, without a dashboard.

    Yields:
        The address of the cluster, to which this process is connected.
    """
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    nodes = Cluster()
    try:
        for number, value in enumerate(values):
            nodes.add_node(
                wait=True,
                node_ip_address=HOST,
                num_cpus=2,
                object_store_memory=MEMORY_BYTES,
                labels={label: value},
                **({"include_dashboard": False} if number == 0 else {}),
            )
        ray.init(address=nodes.address, logging_level="error", log_to_driver=False)
        yield nodes.address
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        nodes.shutdown()
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
