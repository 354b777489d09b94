"""One policy of each kind, for four slots."""

from __future__ import annotations

from llmpq.batching import (
    Admission,
    FirstComeFormer,
    HybridPolicy,
    IterationPolicy,
    MultiBinFormer,
    RraPolicy,
    StaticPolicy,
)
from llmpq.spec.plan import MicroBatching

SLOTS = 4
SIZES = MicroBatching(prefill=2, decode=3)
POLICIES = {
    "hybrid": lambda _: HybridPolicy(micro_batching=SIZES, num_slots=SLOTS, num_stages=2),
    "static": lambda _: StaticPolicy(former=FirstComeFormer(batch=SLOTS), micro_batching=SIZES),
    "multibin": lambda _: StaticPolicy(
        former=MultiBinFormer(batch=SLOTS, boundaries=(3,)),
        micro_batching=SIZES,
    ),
    "iteration": lambda _: IterationPolicy(micro_batching=SIZES),
    "rra": lambda _: RraPolicy(
        admission=Admission(encode_batch=2, decode_batch=SLOTS),
        decode_iterations=3,
        micro_batching=SIZES,
    ),
}
