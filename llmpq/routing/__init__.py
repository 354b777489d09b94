"""Load balancers over replicas of a model: one protocol for simulator, router and Ray Serve."""

from llmpq.routing.balancers import BALANCERS, LoadBalancer, load_balancer
from llmpq.routing.replica import (
    Replica,
    ReplicaCapacity,
    ReplicaStats,
    ReplicaView,
    RoutedRequest,
    WorkloadMeans,
)

__all__ = [
    "BALANCERS",
    "LoadBalancer",
    "Replica",
    "ReplicaCapacity",
    "ReplicaStats",
    "ReplicaView",
    "RoutedRequest",
    "WorkloadMeans",
    "load_balancer",
]
