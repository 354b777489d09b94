"""Planning: which device runs which layers, at how many bits, in micro-batches of what size."""

from llmpq.assigner.planner import METHODS, make_plan
from llmpq.assigner.request import PlanRequest

__all__ = ["METHODS", "PlanRequest", "make_plan"]
