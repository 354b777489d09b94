"""Whoever drains a book is left with what has begun, under every policy and at every moment."""

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
def test_what_has_begun_is_finished_and_nothing_else(name, wanted, at):
    scheduler = Scheduler(policy=POLICIES[name](wanted), num_slots=SLOTS)
    for number in range(len(wanted)):
        scheduler.arrive(WaitingRequest(request=number, prompt_tokens=1, arrival_s=0.0))
    scheduler.close()
    made = [0] * len(wanted)
    begun: set[int] = set()
    finished: set[int] = set()
    dropped: tuple[int, ...] = ()
    flying = []
    for step_number in range(10_000):
        if step_number == at:
            dropped = scheduler.drain()
        if scheduler.is_done:
            break
        _, step = scheduler.decide(float(step_number))
        if step is not None:
            assert step_number < at or begun.issuperset(step.flight.requests)
            begun.update(step.flight.requests)
            flying.append(step)
        elif flying:
            landing = flying.pop(0)
            for item in landing.sequences:
                made[item.request] += not item.is_finished
            complete = [made[item.request] >= wanted[item.request] for item in landing.sequences]
            finished.update(scheduler.land(landing.flight.number, complete))
    assert scheduler.is_done
    assert finished == begun
    assert sorted(begun | set(dropped)) == list(range(len(wanted)))


def test_a_drained_book_takes_nothing_more():
    scheduler = Scheduler(policy=IterationPolicy(micro_batching=SIZES), num_slots=SLOTS)
    scheduler.drain()
    with pytest.raises(LlmpqError, match="after the last one"):
        scheduler.arrive(WaitingRequest(request=0, prompt_tokens=1, arrival_s=0.0))
