"""Planning of applications of several models: methods, bounds, schedules."""

from llmpq.multillm.planner.application import (
    PlannedApplication,
    PlanOptions,
    plan_application,
)
from llmpq.multillm.planner.search import METHODS, Method

__all__ = ["METHODS", "Method", "PlanOptions", "PlannedApplication", "plan_application"]
