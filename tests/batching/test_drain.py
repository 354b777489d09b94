"""A drained scheduler finishes what has begun, under every policy and at every moment."""

from __future__ import annotations

import pytest
from helpers.policies import POLICIES, SIZES, SLOTS
from helpers.slots import complete, request_of, slots_of
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching import IterationPolicy
from llmpq.errors import LlmpqError


@pytest.mark.parametrize("name", POLICIES)
@given(wanted=st.lists(st.integers(1, 6), min_size=1, max_size=15), at=st.integers(0, 20))
def test_drain_finishes_what_has_begun_and_nothing_else(name, wanted, at):
    scheduler = slots_of(POLICIES[name](wanted), SLOTS)
    for number in range(len(wanted)):
        scheduler.add(request_of(number))
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
        step = scheduler.schedule(float(step_number))
        if step is not None:
            requests = [chunk.request for chunk in step.chunks]
            assert step_number < at or begun.issuperset(requests)
            begun.update(requests)
            in_flight.append(step)
        elif in_flight:
            oldest = in_flight.pop(0)
            ended = set()
            for chunk in oldest.chunks:
                made[chunk.request] += chunk.makes_token
                if chunk.makes_token and made[chunk.request] >= wanted[chunk.request]:
                    ended.add(chunk.request)
            complete(scheduler, oldest, ended)
            finished |= ended
    assert scheduler.is_done
    assert finished == begun
    assert sorted(begun | set(dropped)) == list(range(len(wanted)))


def test_drained_scheduler_admits_no_request():
    scheduler = slots_of(IterationPolicy(micro_batching=SIZES), SLOTS)
    scheduler.drain()
    with pytest.raises(LlmpqError, match="after the last one"):
        scheduler.add(request_of(0))


@pytest.mark.parametrize("name", POLICIES)
@given(
    wanted=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    aborts=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 11)), max_size=8),
)
def test_aborted_requests_free_their_slots_and_the_others_are_answered(name, wanted, aborts):
    scheduler = slots_of(POLICIES[name](wanted), SLOTS)
    for number in range(len(wanted)):
        scheduler.add(request_of(number))
    scheduler.close()
    made = [0] * len(wanted)
    ended: set[int] = set()
    in_flight = []
    for step_number in range(10_000):
        for at, number in aborts:
            if at == step_number and number < len(wanted):
                assert scheduler.abort(number) is (number not in ended)
                ended.add(number)
        if scheduler.is_done:
            break
        step = scheduler.schedule(float(step_number))
        if step is not None:
            in_flight.append(step)
        elif in_flight:
            oldest = in_flight.pop(0)
            finished = set()
            for chunk in oldest.chunks:
                made[chunk.request] += chunk.makes_token
                if chunk.makes_token and made[chunk.request] >= wanted[chunk.request]:
                    finished.add(chunk.request)
            complete(scheduler, oldest, finished)
            ended |= finished
    assert scheduler.is_done
    assert ended == set(range(len(wanted)))
    assert scheduler.view(0.0).free_slots == SLOTS
