"""Cost models: bytes of memory, seconds of compute and of sending, for a model on a cluster."""

from llmpq.costmodel.base import CommModel, Estimate, LatencyModel
from llmpq.costmodel.costs import ClusterCosts, LatencySource, build_costs

__all__ = ["ClusterCosts", "CommModel", "Estimate", "LatencyModel", "LatencySource", "build_costs"]
