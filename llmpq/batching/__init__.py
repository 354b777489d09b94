"""Batching policies, shared by the runtime and the simulator."""

from llmpq.batching.admission import Admission
from llmpq.batching.base import (
    BatchingPolicy,
    Decision,
    Decode,
    Flight,
    Prefill,
    ReadySequence,
    SchedulerView,
    Wait,
    WaitingRequest,
    check_decision,
)
from llmpq.batching.book import RequestBook, SlotPool, Step
from llmpq.batching.factory import PipelineShape, make_policy
from llmpq.batching.hybrid import HybridPolicy
from llmpq.batching.iteration import IterationPolicy
from llmpq.batching.multibin import MultiBinFormer
from llmpq.batching.record import RequestRecord, percentile, summarise
from llmpq.batching.rra import RraPolicy
from llmpq.batching.static import FirstComeFormer, StaticPolicy
from llmpq.batching.waa import WaaPolicy
from llmpq.batching.ways import Ways, straight_ways

__all__ = [
    "Admission",
    "BatchingPolicy",
    "Decision",
    "Decode",
    "FirstComeFormer",
    "Flight",
    "HybridPolicy",
    "IterationPolicy",
    "MultiBinFormer",
    "PipelineShape",
    "Prefill",
    "ReadySequence",
    "RequestBook",
    "RequestRecord",
    "RraPolicy",
    "SchedulerView",
    "SlotPool",
    "StaticPolicy",
    "Step",
    "WaaPolicy",
    "Wait",
    "WaitingRequest",
    "Ways",
    "check_decision",
    "make_policy",
    "percentile",
    "straight_ways",
    "summarise",
]
