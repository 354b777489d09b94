"""The simulator: a plan, a policy and a trace played on cost models instead of tensors."""

from llmpq.sim.pipeline import Shape, StepCosts, simulate
from llmpq.sim.report import Activity, RequestRecord, SimReport

__all__ = ["Activity", "RequestRecord", "Shape", "SimReport", "StepCosts", "simulate"]
