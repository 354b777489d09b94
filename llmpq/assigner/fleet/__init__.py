"""Planning a fleet: which devices of a cluster form which pipeline, each a replica of the model."""

from llmpq.assigner.fleet.planner import crowded_hosts, plan_fleet
from llmpq.assigner.fleet.rate_search import ReplicaSpeed, mean_ttft_s
from llmpq.assigner.fleet.search import FleetPlan, PlannedReplica

__all__ = [
    "FleetPlan",
    "PlannedReplica",
    "ReplicaSpeed",
    "crowded_hosts",
    "mean_ttft_s",
    "plan_fleet",
]
