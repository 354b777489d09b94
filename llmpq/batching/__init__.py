"""Scheduler and batching policies, shared by the runtime and the simulator."""

from llmpq.batching.policies.factory import PipelineShape, make_policy
from llmpq.batching.policies.hybrid import HybridPolicy
from llmpq.batching.policies.iteration import IterationPolicy
from llmpq.batching.policies.multibin import MultiBinFormer
from llmpq.batching.policies.rra import Admission, RraPolicy
from llmpq.batching.policies.static import FirstComeFormer, StaticPolicy
from llmpq.batching.policies.waa import WaaPolicy
from llmpq.batching.policy_scheduler import (
    BatchingPolicy,
    Decision,
    Decode,
    InFlightBatch,
    PipelineDepth,
    PolicyScheduler,
    Prefill,
    ReadySequence,
    SchedulerView,
    Wait,
    WaitingRequest,
    check_decision,
    uniform_depth,
)
from llmpq.batching.record import RequestRecord, percentile, summarise

__all__ = [
    "Admission",
    "BatchingPolicy",
    "Decision",
    "Decode",
    "FirstComeFormer",
    "HybridPolicy",
    "InFlightBatch",
    "IterationPolicy",
    "MultiBinFormer",
    "PipelineDepth",
    "PipelineShape",
    "PolicyScheduler",
    "Prefill",
    "ReadySequence",
    "RequestRecord",
    "RraPolicy",
    "SchedulerView",
    "StaticPolicy",
    "WaaPolicy",
    "Wait",
    "WaitingRequest",
    "check_decision",
    "make_policy",
    "percentile",
    "summarise",
    "uniform_depth",
]
