"""Slots have at most one owner, whatever is asked in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmpq.batching import SlotAllocator
from llmpq.errors import CapacityError, LlmpqError


class SlotsHaveOneOwner(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = SlotAllocator(4)
        self.owned = []

    @rule()
    @precondition(lambda self: len(self.owned) < 4)
    def acquire(self):
        slot = self.pool.acquire()
        assert 0 <= slot < 4
        assert slot not in self.owned
        self.owned.append(slot)

    @rule()
    @precondition(lambda self: len(self.owned) == 4)
    def acquire_from_an_empty_pool(self):
        with pytest.raises(CapacityError):
            self.pool.acquire()

    @rule(data=st.data())
    @precondition(lambda self: self.owned)
    def release(self, data):
        slot = data.draw(st.sampled_from(self.owned))
        self.owned.remove(slot)
        self.pool.release(slot)

    @rule(slot=st.integers(-1, 5))
    def release_a_free_slot(self, slot):
        if slot not in self.owned:
            with pytest.raises(LlmpqError):
                self.pool.release(slot)

    @invariant()
    def counts_agree(self):
        assert self.pool.in_use == len(self.owned)


TestSlotsHaveOneOwner = SlotsHaveOneOwner.TestCase


def test_lowest_free_slot_comes_first():
    pool = SlotAllocator(3)
    assert [pool.acquire() for _ in range(3)] == [0, 1, 2]
    pool.release(2)
    pool.release(0)
    assert pool.acquire() == 0
