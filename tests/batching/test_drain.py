"""A drained scheduler finishes what has begun, under every policy and at every moment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching import (
    Admission,
    FirstComeFormer,
    HybridPolicy,
    IterationPolicy,
    MultiBinFormer,
    RraPolicy,
    Scheduler,
    StaticPolicy,
    WaitingRequest,
)
from llmpq.batching.length import OraclePredictor
from llmpq.errors import LlmpqError
from llmpq.spec.plan import MicroBatching

SLOTS = 4
SIZES = MicroBatching(prefill=2, decode=3)
POLICIES = {
    "hybrid": lambda _: HybridPolicy(micro_batching=SIZES, num_slots=SLOTS, num_stages=2),
    "static": lambda _: StaticPolicy(former=FirstComeFormer(batch=SLOTS), micro_batching=SIZES),
    "multibin": lambda wanted: StaticPolicy(
        former=MultiBinFormer(batch=SLOTS, boundaries=(3,), predictor=OraclePredictor(wanted)),
        micro_batching=SIZES,
    ),
    "iteration": lambda _: IterationPolicy(micro_batching=SIZES),
    "rra": lambda _: RraPolicy(
        admission=Admission(encode_batch=2, decode_batch=SLOTS),
        decode_iterations=3,
        micro_batching=SIZES,
    ),
}


@pytest.mark.parametrize("name", POLICIES)
@given(wanted=st.lists(st.integers(1, 6), min_size=1, max_size=15), at=st.integers(0, 20))
def test_drain_finishes_what_has_begun_and_nothing_else(name, wanted, at):
    scheduler = Scheduler(policy=POLICIES[name](wanted), num_slots=SLOTS)
    for number in range(len(wanted)):
        scheduler.arrive(WaitingRequest(request=number, prompt_tokens=1, arrival_s=0.0))
    scheduler.close()
    made = [0] * len(wanted)
    begun: set[int] = set()
    finished: set[int] = set()
    dropped: tuple[int, ...] = ()
    in_flight = []
    for step_number in range(10_000):
        if step_number == at:
            dropped = scheduler.drain()
        if scheduler.is_done:
            break
        _, batch = scheduler.decide(float(step_number))
        if batch is not None:
            assert step_number < at or begun.issuperset(batch.requests)
            begun.update(batch.requests)
            in_flight.append(batch)
        elif in_flight:
            oldest = in_flight.pop(0)
            for item in oldest.sequences:
                made[item.request] += not item.is_finished
            complete = [made[item.request] >= wanted[item.request] for item in oldest.sequences]
            finished.update(scheduler.complete(oldest.number, complete))
    assert scheduler.is_done
    assert finished == begun
    assert sorted(begun | set(dropped)) == list(range(len(wanted)))


def test_drained_scheduler_admits_no_request():
    scheduler = Scheduler(policy=IterationPolicy(micro_batching=SIZES), num_slots=SLOTS)
    scheduler.drain()
    with pytest.raises(LlmpqError, match="after the last one"):
        scheduler.arrive(WaitingRequest(request=0, prompt_tokens=1, arrival_s=0.0))
