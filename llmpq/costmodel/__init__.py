"""Cost models: bytes of memory, seconds of compute and of sending, for a model on a cluster."""

from llmpq.costmodel.base import CommModel, LatencyModel
from llmpq.costmodel.costs import ClusterCosts, build_costs

__all__ = ["ClusterCosts", "CommModel", "LatencyModel", "build_costs"]
