"""The simulator: runs a policy and a trace on the cost models of a plan."""

from llmpq.sim.costs import BatchShape, Hop, MicroBatchCosts, PipelineLayout, linear_layout
from llmpq.sim.pipeline import simulate
from llmpq.sim.report import Activity, SimReport

__all__ = [
    "Activity",
    "BatchShape",
    "Hop",
    "MicroBatchCosts",
    "PipelineLayout",
    "SimReport",
    "linear_layout",
    "simulate",
]
