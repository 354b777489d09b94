"""Ray Serve's request router with our load balancers, by name.

Ray keeps a router in every process that has a handle of the replicas. Each adds what it routed
itself since the last statistics, so that one process should route all requests: the ingress of
``llmpq.server.ray.app`` is one replica.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from llmpq.routing import load_balancer
from llmpq.server.ray.replica_table import ReplicaTable


class BalancedRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped here
    """Routes each request to the replica that a load balancer ranks first.

    The first argument of a request is its :class:`~llmpq.server.ray.replica_table.RoutingHint`.
    """

    def initialize_state(self, balancer: str, seed: int) -> None:
        """Make the balancer; called by Ray with ``request_router_kwargs``."""
        self._table = ReplicaTable(load_balancer(balancer, seed=seed))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in ranks of one; Ray takes the first whose queue is not full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        key = pending_request.metadata.internal_request_id
        found = {one.replica_id.unique_id: one for one in candidate_replicas}
        stats = {name: one.routing_stats for name, one in found.items()}
        order = self._table.rank(key, pending_request.args[0], stats)

        def end(future: Any) -> None:
            if future.cancelled():  # it was never sent
                self._table.forget(key)

        pending_request.future.add_done_callback(end)
        return [[found[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Move a request that went to another replica than the first."""
        del result
        key = pending_request.metadata.internal_request_id
        self._table.routed(key, pending_request.args[0].request, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request."""
        self._table.finished(internal_request_id, replica_id.unique_id)
