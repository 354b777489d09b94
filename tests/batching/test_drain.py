"""A drained scheduler finishes what has begun, under every policy and at every moment."""

from __future__ import annotations

import pytest
from helpers.policies import POLICIES, SIZES, SLOTS
from helpers.slots import complete, request_of, slots_of
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching import IterationPolicy
from llmpq.errors import LlmpqError


def play(scheduler, wanted, before_step):
    """Serve in order until the scheduler is done; return the requests that began and finished."""
    made, in_flight = [0] * len(wanted), []
    begun: set[int] = set()
    ended: set[int] = set()
    for number in range(10_000):
        before_step(number, ended)
        if scheduler.is_done:
            break
        step = scheduler.schedule(float(number))
        if step is not None:
            begun.update(chunk.request for chunk in step.chunks)
            in_flight.append(step)
        elif in_flight:
            oldest, finished = in_flight.pop(0), set()
            for chunk in oldest.chunks:
                made[chunk.request] += chunk.makes_token
                if chunk.makes_token and made[chunk.request] >= wanted[chunk.request]:
                    finished.add(chunk.request)
            complete(scheduler, oldest, finished)
            ended |= finished
    assert scheduler.is_done
    assert scheduler.view(0.0).free_slots == SLOTS
    return begun, ended


@pytest.mark.parametrize("name", POLICIES)
@given(wanted=st.lists(st.integers(1, 6), min_size=1, max_size=15), at=st.integers(0, 20))
def test_drain_finishes_what_has_begun_and_nothing_else(name, wanted, at):
    scheduler = slots_of(POLICIES[name](wanted), SLOTS)
    for number in range(len(wanted)):
        scheduler.add(request_of(number, predicted=wanted[number]))
    scheduler.close()
    dropped: set[int] = set()

    def before_step(number, _ended):
        if number == at:
            dropped.update(scheduler.drain())

    begun, ended = play(scheduler, wanted, before_step)
    assert ended == begun
    assert not begun & dropped
    assert begun | dropped == set(range(len(wanted)))


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
        scheduler.add(request_of(number, predicted=wanted[number]))
    scheduler.close()
    aborted: set[int] = set()

    def before_step(number, ended):
        for at, request in aborts:
            if at == number and request < len(wanted):
                assert scheduler.abort(request) is (request not in ended | aborted)
                aborted.add(request)

    _, ended = play(scheduler, wanted, before_step)
    assert ended | aborted == set(range(len(wanted)))
