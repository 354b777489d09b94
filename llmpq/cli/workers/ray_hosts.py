"""The nodes of a Ray cluster, for ``--launcher ray``: all that have CPUs or GPUs, and this one."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from pathlib import Path

from llmpq import __version__
from llmpq.cli.workers.connection import LINK
from llmpq.cli.workers.hosts import OtherHost, OtherHosts
from llmpq.cli.workers.lender import ActorLender, HostLimits
from llmpq.cli.workers.link import measure_link
from llmpq.dist.transport.endpoint import HANDSHAKE_S, Endpoint
from llmpq.errors import SpecError, StageError
from llmpq.options.run import WorkersOptions
from llmpq.server.ray.launcher import host_threads, ray_cluster, reserved, with_threads
from llmpq.server.ray.nodes import (
    Bundle,
    NodeConnection,
    RayNode,
    ray_nodes,
    release,
    reserve,
)
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import Plan


def limits_of(node: RayNode) -> HostLimits:
    """Return what Ray gives out of a node."""
    return HostLimits(threads=node.cpus, gpus=node.gpus, memory_bytes=node.memory_bytes)


class RayHosts(OtherHosts):
    """The other nodes of a Ray cluster.

    Args:
        options: as of :class:`OtherHosts`.
        timeout_s: likewise.
        program: likewise.
        address: of the cluster; by default the one that Ray finds.

    Raises:
        SpecError: there is no cluster, or another version of llmpq on a node.
        StageError: a node is lost.
    """

    TITLE = "node"

    def __init__(
        self, options: WorkersOptions, timeout_s: float, program: str, *, address: str | None
    ) -> None:
        self._resources = contextlib.ExitStack()
        self._group = contextlib.ExitStack()  # what the plan has reserved
        self._connections: dict[str, NodeConnection] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(ray_cluster(address))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmpq-")))
            self._secret = secrets.token_hex(32)
            self._file = folder / "token"
            self._file.touch(mode=0o600)
            self._file.write_text(self._secret, encoding="ascii")
            self._here, self._nodes = ray_nodes()
            self._ids = {node.name: node.id for node in self._nodes}
            self._resources = stack.pop_all()
        super().__init__(options, timeout_s, program)

    def close(self) -> None:
        """Leave all nodes, and the cluster."""
        super().close()
        for connection in self._connections.values():
            connection.close()
        self._group.close()
        self._resources.close()

    def own(self, cluster: Cluster) -> Cluster:
        """Return what Ray gives out of this node."""
        try:
            return limits_of(self._here).applied(cluster)
        except SpecError as error:
            raise SpecError(f"--launcher ray: {error} (ray start --num-cpus N)") from None

    def _token_file(self) -> Path:
        return self._file

    def _connect_all(self) -> None:
        for node in self._nodes:  # all at once: starting them takes seconds
            arguments = (self._secret, limits_of(node))
            connection = NodeConnection(node, ActorLender, arguments, self._timeout_s)
            self._connections[node.name] = connection
        for node in self._nodes:
            self._connect(node, self._connections[node.name])
        self._measure_between()
        for connection in self._connections.values():
            connection.call("stop_listening")

    def _connect(self, node: RayNode, connection: NodeConnection) -> None:
        """Compare the versions, and measure the link to a node."""
        title = f"{self.TITLE} {node.name}"
        try:
            if (version := connection.call("version")) != __version__:
                raise SpecError(
                    f"{title}: found llmpq {version}, expected {__version__} as on this node"
                )
            address = (node.address, connection.call("listen", node.address))
            deadline_s = time.monotonic() + HANDSHAKE_S
            endpoint = Endpoint(address=address)
            probe = endpoint.connect_authenticated(self._secret.encode(), LINK, deadline_s)
            here = probe.getsockname()[0]
            measured = measure_link(probe, HANDSHAKE_S)
        except (OSError, StageError) as error:
            raise StageError(f"{title}: {str(error).removeprefix(f'{node.name}: ')}") from None
        self._join(
            OtherHost(
                name=node.name,
                title=title,
                connection=connection,
                address=address,
                here=here,
                link=measured,
            )
        )

    def _place(self, plan: Plan) -> None:
        """Reserve a bundle for each rank of a plan, and go into the first one of each node."""
        self._displace()
        bundles = bundles_of(plan, {plan.nodes[0]: self._here.id, **self._ids})
        group = reserve(bundles)
        self._group.callback(release, group)
        numbers = {bundle.node: n for n, bundle in reversed(list(enumerate(bundles)))}
        for host in self._hosts:
            number = numbers.get(self._ids[host.name])
            if number is not None:
                self._connections[host.name].place(group, number)

    def drop_lost(self) -> bool:
        """Leave out the lost nodes, and give back what the plan had reserved if one had ranks."""
        is_over = super().drop_lost()
        if is_over:
            self._displace()
        return is_over

    def _displace(self) -> None:
        """Give back what the last plan has reserved."""
        for host in self._hosts:
            self._connections[host.name].displace()
        self._group.close()


def bundles_of(plan: Plan, ids: dict[str, str]) -> list[Bundle]:
    """Return what each rank of a plan takes, in their order.

    Args:
        plan: the plan.
        ids: of the nodes of Ray, by the names of nodes in the plan.
    """
    memory_of = {
        stage.device: estimate.memory
        for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True)
    }
    nodes = [plan.cluster.devices[index].node for index in plan.rank_devices]
    found = []
    for rank, index in enumerate(plan.rank_devices):
        device, memory = plan.cluster.devices[index], memory_of.get(index)
        resources = reserved([device], plan.cluster)
        if nodes.index(device.node) == rank:  # the first of its node, for all of them
            own = [other for other, node in enumerate(nodes) if node == device.node]
            resources = with_threads(resources, host_threads(plan, own))
        if catalog.device(device.type, plan.cluster).kind == "cpu":
            resources["memory"] = 0 if memory is None else memory.total
        if memory is not None and memory.host is not None:
            resources["memory"] = resources.get("memory", 0) + memory.host
        found.append(Bundle(node=ids[device.node], resources=resources))
    return found
