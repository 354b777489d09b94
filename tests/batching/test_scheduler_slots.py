"""Slots have at most one owner, whatever the policy decides and in whatever order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.policies import POLICIES
from helpers.slots import complete, request_of, slots_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmpq.batching import Decode, Prefill, Wait
from llmpq.batching.engine_step import EngineStep
from llmpq.errors import CapacityError, LlmpqError, SpecError

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
        self.scheduler = slots_of(self.policy, SLOTS)
        self.arrived = 0
        self.in_flight: dict[int, EngineStep] = {}

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
        step = self.scheduler.schedule(0.0)
        self.in_flight[step.number] = step
        return step

    @rule()
    def arrive(self):
        self.scheduler.add(request_of(self.arrived))
        self.arrived += 1

    @rule(data=st.data())
    @precondition(lambda self: self.waiting and len(self.owned) < SLOTS)
    def prefill(self, data):
        free = sorted(set(range(SLOTS)) - set(self.owned))
        chosen = data.draw(
            st.lists(st.sampled_from(self.waiting), min_size=1, max_size=len(free), unique=True)
        )
        step = self.dispatch(Prefill(requests=tuple(chosen)))
        assert [chunk.request for chunk in step.chunks] == chosen
        # The lowest slots, whose blocks are one each here.
        assert [chunk.blocks for chunk in step.chunks] == [(slot,) for slot in free[: len(chosen)]]

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
        step = self.dispatch(Decode(slots=tuple(chosen)))
        assert [chunk.blocks for chunk in step.chunks] == [(slot,) for slot in chosen]

    @rule(slot=st.integers(-1, SLOTS))
    def decode_a_slot_that_is_not_ready(self, slot):
        if slot not in [item.slot for item in self.scheduler.view(0.0).ready]:
            with pytest.raises(LlmpqError, match="slots"):
                self.dispatch(Decode(slots=(slot,)))

    @rule(data=st.data())
    @precondition(lambda self: self.in_flight)
    def complete(self, data):
        step = self.in_flight.pop(data.draw(st.sampled_from(sorted(self.in_flight))))
        requests = [chunk.request for chunk in step.chunks]
        ends = data.draw(st.sets(st.sampled_from(requests)))
        complete(self.scheduler, step, ends)
        with pytest.raises(LlmpqError, match="not in flight"):
            complete(self.scheduler, step, ends)

    @rule(data=st.data())
    @precondition(lambda self: self.arrived)
    def abort(self, data):
        self.scheduler.abort(data.draw(st.integers(0, self.arrived - 1)))

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
    scheduler = slots_of(policy, 2, drafts=4)
    scheduler.add(request_of(0, 5))
    scheduler.add(request_of(1, 3))
    scheduler.drafts.propose = lambda _, most: most
    policy.decision = Prefill(requests=(0, 1))
    complete(scheduler, scheduler.schedule(0.0))
    policy.decision = Decode(slots=(0, 1))
    step = scheduler.schedule(0.0)
    assert [(chunk.first, chunk.count) for chunk in step.chunks] == [(5, 5), (3, 5)]
    complete(scheduler, step, {1}, {0: [0, 0, 0], 1: [0]})
    (left,) = scheduler.view(0.0).ready
    assert (left.request, left.context_tokens, left.new_tokens) == (0, 10, 5)
    drafts = scheduler.drafts
    assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (2, 8, 4)


def test_a_scheduler_needs_a_slot():
    with pytest.raises(SpecError, match="found 0, expected at least 1"):
        slots_of(Scripted(holds_finished=False), 0)


def test_a_request_longer_than_all_slots_does_not_enter():
    scheduler = slots_of(Scripted(holds_finished=False), 2)
    scheduler.add(request_of(0, 120, 9))
    with pytest.raises(CapacityError, match="need 3 KV blocks, more than the 2 available"):
        scheduler.add(request_of(1, 120, 10))
    assert [(item.request, item.slots) for item in scheduler.view(0.0).waiting] == [(0, 2)]


def test_a_long_prompt_takes_several_slots_and_several_steps():
    policy = Scripted(holds_finished=False)
    scheduler = slots_of(policy, 4, part_tokens=50)
    scheduler.add(request_of(0, 10, 3))
    scheduler.add(request_of(1, 120, 3))
    scheduler.add(request_of(2, 60, 3))
    policy.decision = Prefill(requests=(0, 1, 2))
    steps = [scheduler.schedule(0.0) for _ in range(3)]
    found = [
        [(one.request, one.first, one.count, one.makes_token) for one in step.chunks]
        for step in steps
    ]
    assert found == [
        [(1, 0, 40, False)],
        [(1, 40, 40, False), (2, 0, 30, False)],
        [(0, 0, 10, True), (1, 80, 40, True), (2, 30, 30, True)],
    ]
    assert [one.blocks for one in steps[-1].chunks] == [(0,), (1, 2), (3,)]
    assert scheduler.view(0.0).free_slots == 0
    policy.decision = Wait()
    for step in steps:
        assert not scheduler.view(0.0).ready
        complete(scheduler, step)
    assert [item.slot for item in scheduler.view(0.0).ready] == [0, 1, 3]
    policy.decision = Decode(slots=(1,))
    step = scheduler.schedule(0.0)
    assert step.chunks[0].blocks == (1, 2)
    complete(scheduler, step, {1})
    assert scheduler.view(0.0).free_slots == 2


def test_prompts_with_scores_take_parts_of_as_many_tokens_as_a_step_has_rows():
    policy = Scripted(holds_finished=False)
    scheduler = slots_of(policy, 4, part_tokens=50, scored_tokens=4)
    scheduler.add(replace(request_of(0, 5, 3), scores_prompt=True))
    scheduler.add(request_of(1, 10, 3))
    policy.decision = Prefill(requests=(0, 1))
    steps = [scheduler.schedule(0.0) for _ in range(3)]
    found = [
        [(one.request, one.first, one.count, one.makes_token) for one in step.chunks]
        for step in steps
    ]
    assert found == [
        [(0, 0, 1, False)],
        [(0, 1, 2, False)],
        [(0, 3, 2, True), (1, 0, 10, True)],
    ]


@pytest.mark.parametrize("name", POLICIES)
@given(
    requests=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 5)), min_size=1, max_size=12),
    part_tokens=st.integers(7, 64),
)
@example(requests=[*[(1, 1)] * 9, (64, 1), (1, 5)], part_tokens=7)  # held, with full blocks
def test_long_and_short_requests_are_all_answered(  # noqa: C901  one loop of a pipeline
    name, requests, part_tokens
):
    wanted = [tokens for _, tokens in requests]
    scheduler = slots_of(POLICIES[name](wanted), SLOTS, part_tokens=part_tokens)
    for number, (prompt, tokens) in enumerate(requests):
        scheduler.add(request_of(number, prompt, tokens))
    scheduler.close()
    made, computed = [0] * len(requests), [0] * len(requests)
    held: dict[int, set[int]] = {}  # blocks of unfinished requests
    in_flight = []
    for step_number in range(10_000):
        if scheduler.is_done:
            break
        step = scheduler.schedule(float(step_number))
        if step is not None:
            in_flight.append(step)
            for chunk in step.chunks:
                assert chunk.count <= part_tokens
                if chunk.makes_token:
                    held.setdefault(chunk.request, set()).update(chunk.blocks)
                if computed[chunk.request] < requests[chunk.request][0]:
                    assert chunk.first == computed[chunk.request]
                    computed[chunk.request] += chunk.count
            assert sum(map(len, held.values())) == len(set().union(*held.values()))
        elif in_flight:
            oldest, finished = in_flight.pop(0), set()
            for chunk in oldest.chunks:
                made[chunk.request] += chunk.makes_token
                if chunk.makes_token and made[chunk.request] == wanted[chunk.request]:
                    finished.add(chunk.request)
                    del held[chunk.request]
            complete(scheduler, oldest, finished)
    assert scheduler.is_done
    assert made == wanted
    assert computed == [prompt for prompt, _ in requests]
    assert scheduler.view(0.0).free_slots == SLOTS
