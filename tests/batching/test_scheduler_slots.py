"""Slots have at most one owner, whatever the policy decides and in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmpq.batching import Decode, InFlightBatch, Prefill, Scheduler, WaitingRequest
from llmpq.errors import CapacityError, LlmpqError

SLOTS = 4


class Scripted:
    """Decides what the test says."""

    def __init__(self, *, holds_finished: bool) -> None:
        self.holds_finished = holds_finished
        self.decision = Decode(slots=())

    def decide(self, _):
        return self.decision


class SlotsHaveOneOwner(RuleBasedStateMachine):
    """Finished sequences leave at once."""

    holds_finished = False

    def __init__(self):
        super().__init__()
        self.policy = Scripted(holds_finished=self.holds_finished)
        self.scheduler = Scheduler(policy=self.policy, num_slots=SLOTS)
        self.arrived = 0
        self.in_flight: dict[int, InFlightBatch] = {}

    @property
    def owned(self):
        view = self.scheduler.view(0.0)
        flying = [slot for batch in view.in_flight for slot in batch.slots]
        return [item.slot for item in view.ready] + flying

    @property
    def waiting(self):
        return [item.request for item in self.scheduler.view(0.0).waiting]

    def dispatch(self, decision):
        self.policy.decision = decision
        _, batch = self.scheduler.decide(0.0)
        self.in_flight[batch.number] = batch
        return batch

    @rule()
    def arrive(self):
        self.scheduler.arrive(WaitingRequest(request=self.arrived, prompt_tokens=1))
        self.arrived += 1

    @rule(data=st.data())
    @precondition(lambda self: self.waiting and len(self.owned) < SLOTS)
    def prefill(self, data):
        free = sorted(set(range(SLOTS)) - set(self.owned))
        chosen = data.draw(
            st.lists(st.sampled_from(self.waiting), min_size=1, max_size=len(free), unique=True)
        )
        batch = self.dispatch(Prefill(requests=tuple(chosen)))
        assert batch.requests == tuple(chosen)
        assert batch.slots == tuple(free[: len(chosen)])  # the lowest ones

    @rule()
    @precondition(lambda self: len(self.waiting) > SLOTS - len(self.owned))
    def prefill_more_than_the_free_slots(self):
        before = self.owned, self.waiting
        with pytest.raises(LlmpqError, match="free slots"):
            self.dispatch(Prefill(requests=tuple(self.waiting)))
        assert (self.owned, self.waiting) == before

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.view(0.0).ready)
    def decode(self, data):
        ready = [item.slot for item in self.scheduler.view(0.0).ready]
        chosen = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
        assert self.dispatch(Decode(slots=tuple(chosen))).slots == tuple(chosen)

    @rule(slot=st.integers(-1, SLOTS))
    def decode_a_slot_that_is_not_ready(self, slot):
        if slot not in [item.slot for item in self.scheduler.view(0.0).ready]:
            with pytest.raises(LlmpqError, match="slots"):
                self.dispatch(Decode(slots=(slot,)))

    @rule(data=st.data())
    @precondition(lambda self: self.in_flight)
    def complete(self, data):
        number = data.draw(st.sampled_from(sorted(self.in_flight)))
        count = len(self.in_flight.pop(number).sequences)
        ends = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        self.scheduler.complete(number, ends)
        with pytest.raises(LlmpqError, match="not in flight"):
            self.scheduler.complete(number, ends)

    @invariant()
    def no_slot_has_two_owners(self):
        assert len(set(self.owned)) == len(self.owned)
        assert set(self.owned) <= set(range(SLOTS))
        assert self.scheduler.view(0.0).free_slots == SLOTS - len(self.owned)


class HeldSlotsHaveOneOwner(SlotsHaveOneOwner):
    """Finished sequences stay until their whole batch is finished."""

    holds_finished = True


TestSlotsHaveOneOwner = SlotsHaveOneOwner.TestCase
TestHeldSlotsHaveOneOwner = HeldSlotsHaveOneOwner.TestCase
TestSlotsHaveOneOwner.settings = settings(max_examples=40, stateful_step_count=30)
TestHeldSlotsHaveOneOwner.settings = TestSlotsHaveOneOwner.settings


def test_a_step_may_make_several_tokens_of_a_sequence():
    policy = Scripted(holds_finished=False)
    scheduler = Scheduler(policy=policy, num_slots=2)
    scheduler.arrive(WaitingRequest(request=0, prompt_tokens=5))
    scheduler.arrive(WaitingRequest(request=1, prompt_tokens=3))
    policy.decision = Prefill(requests=(0, 1))
    _, batch = scheduler.decide(0.0)
    scheduler.complete(batch.number, [False, False])
    policy.decision = Decode(slots=(0, 1))
    _, batch = scheduler.decide(0.0)
    assert scheduler.complete(batch.number, [False, True], [4, 2]) == (1,)
    (left,) = scheduler.view(0.0).ready
    assert (left.request, left.context_tokens, left.new_tokens) == (0, 10, 5)


def test_a_scheduler_needs_a_slot():
    with pytest.raises(CapacityError, match="found 0 slots"):
        Scheduler(policy=Scripted(holds_finished=False), num_slots=0)
