"""The simulator: a plan, a policy and a trace played on cost models instead of tensors."""

from llmpq.sim.costs import Hop, Layout, Shape, StepCosts, straight
from llmpq.sim.pipeline import simulate
from llmpq.sim.report import Activity, SimReport

__all__ = [
    "Activity",
    "Hop",
    "Layout",
    "Shape",
    "SimReport",
    "StepCosts",
    "simulate",
    "straight",
]
