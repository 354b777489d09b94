"""Planning a fleet: which devices of a cluster form which pipeline, each a replica of the model."""

from llmpq.assigner.fleet.search import FleetPlan, FleetRival, PlannedReplica, plan_fleet

__all__ = ["FleetPlan", "FleetRival", "PlannedReplica", "plan_fleet"]
