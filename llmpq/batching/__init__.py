"""Batching policies, shared by the runtime and the simulator."""

from llmpq.batching.base import (
    BatchingPolicy,
    Decision,
    Decode,
    Prefill,
    ReadySequence,
    SchedulerView,
    Wait,
    WaitingRequest,
    check_decision,
)
from llmpq.batching.hybrid import HybridPolicy

__all__ = [
    "BatchingPolicy",
    "Decision",
    "Decode",
    "HybridPolicy",
    "Prefill",
    "ReadySequence",
    "SchedulerView",
    "Wait",
    "WaitingRequest",
    "check_decision",
]
