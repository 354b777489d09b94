"""The simulator: runs a policy and a trace on the cost models of a plan."""

from llmpq.sim.costs import BatchShape, Hop, PipelineLayout, StepCosts, linear_layout
from llmpq.sim.pipeline import simulate
from llmpq.sim.report import Activity, SimReport

__all__ = [
    "Activity",
    "BatchShape",
    "Hop",
    "PipelineLayout",
    "SimReport",
    "StepCosts",
    "linear_layout",
    "simulate",
]
