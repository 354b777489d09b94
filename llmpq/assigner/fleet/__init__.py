"""Planning a fleet: which devices of a cluster form which pipeline, each a replica of the model."""

from llmpq.assigner.fleet.search import FleetPlan, PlannedReplica, plan_fleet

__all__ = ["FleetPlan", "PlannedReplica", "plan_fleet"]
