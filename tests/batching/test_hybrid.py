"""The hybrid policy drives an abstract pipeline: nothing is lost, sizes hold, it always ends."""

from __future__ import annotations

import pytest
from helpers.abstract_pipeline import Pipeline
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching import (
    Decode,
    HybridPolicy,
    InFlightBatch,
    Prefill,
    ReadySequence,
    SchedulerView,
    Wait,
    WaitingRequest,
    check_decision,
)
from llmpq.errors import LlmpqError
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


def _policy(prefill: int, decode: int, slots: int, stages: int) -> HybridPolicy:
    sizes = MicroBatching(prefill=prefill, decode=decode)
    return HybridPolicy(micro_batching=sizes, num_slots=slots, num_stages=stages)


@given(
    wanted=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    slots=st.integers(1, 12),
    prefill=st.integers(1, 12),
    decode=st.integers(1, 12),
    stages=st.integers(1, 5),
    data=st.data(),
)
def test_every_request_gets_exactly_its_tokens(wanted, slots, prefill, decode, stages, data):
    prefill, decode = min(prefill, slots), min(decode, slots)
    pipeline = Pipeline(wanted, slots, limit=data.draw(st.integers(1, stages + 2)))
    pipeline.run(_policy(prefill, decode, slots, stages))
    assert pipeline.made == dict(enumerate(wanted))
    for decision in pipeline.decisions:
        if isinstance(decision, Prefill):
            assert 1 <= len(decision.requests) <= prefill
        elif isinstance(decision, Decode):
            assert 1 <= len(decision.slots) <= decode


def test_prefills_everything_then_decodes_in_full_micro_batches():
    pipeline = Pipeline([3] * 8, num_slots=8, limit=3)
    pipeline.run(_policy(prefill=2, decode=4, slots=8, stages=2))
    steps = [d for d in pipeline.decisions if not isinstance(d, Wait)]
    assert [len(d.requests) for d in steps[:4] if isinstance(d, Prefill)] == [2, 2, 2, 2]
    assert [len(d.slots) for d in steps[4:] if isinstance(d, Decode)] == [4, 4, 4, 4]


@given(
    wanted=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    slots=st.integers(1, 12),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    stages=st.integers(1, 5),
    prompt=st.integers(1, 9),
    data=st.data(),
)
def test_short_prompts_share_a_micro_batch(wanted, slots, sizes, stages, prompt, data):
    prefill, decode = (min(size, slots) for size in sizes)
    planned = data.draw(st.integers(prompt, 9))
    pipeline = Pipeline(wanted, slots, limit=stages + 1, prompt_tokens=prompt)
    pipeline.run(
        HybridPolicy(
            micro_batching=MicroBatching(prefill=prefill, decode=decode),
            num_slots=slots, num_stages=stages, prompt_tokens=planned,
        )
    )  # fmt: skip
    assert pipeline.made == dict(enumerate(wanted))
    for decision in pipeline.decisions:
        if isinstance(decision, Prefill):
            assert len(decision.requests) * prompt <= prefill * planned
            assert len(decision.requests) <= max(prefill, decode)


@pytest.mark.parametrize(
    ("prompt", "stages", "expected"),
    [(8, 2, 1), (3, 2, 2), (2, 2, 4), (1, 2, 4), (2, 4, 2), (1, 1, 6)],
)
def test_a_micro_batch_has_the_planned_tokens_but_leaves_some_for_every_stage(
    prompt, stages, expected
):
    policy = HybridPolicy(
        micro_batching=MicroBatching(prefill=1, decode=6),
        num_slots=8, num_stages=stages, prompt_tokens=8,
    )  # fmt: skip
    waiting = [WaitingRequest(request=number, prompt_tokens=prompt) for number in range(20)]
    view = SchedulerView(waiting=waiting, ready=[], free_slots=8)
    assert policy.decide(view) == Prefill(requests=tuple(range(expected)))


def test_sequence_starts_when_a_slot_is_free():
    view = SchedulerView(
        waiting=[WaitingRequest(request=7, prompt_tokens=2)],
        ready=[ReadySequence(request=0, slot=0, context_tokens=5, new_tokens=2)],
        free_slots=1,
    )
    assert _policy(prefill=1, decode=2, slots=2, stages=1).decide(view) == Prefill(requests=(7,))


def test_running_sequences_do_not_wait_for_a_prefill():
    prefilled = ReadySequence(request=1, slot=0, context_tokens=5, new_tokens=0)
    view = SchedulerView(
        waiting=[],
        ready=[ReadySequence(request=0, slot=3, context_tokens=5, new_tokens=2)],
        free_slots=0,
        in_flight=(InFlightBatch(number=0, phase=Phase.PREFILL, sequences=(prefilled,)),),
    )
    assert _policy(prefill=1, decode=4, slots=4, stages=2).decide(view) == Decode(slots=(3,))


@pytest.mark.parametrize(
    "decision",
    [
        Wait(),
        Prefill(requests=()),
        Prefill(requests=(1, 1)),
        Prefill(requests=(1, 2)),
        Prefill(requests=(9,)),
        Decode(slots=(5,)),
        Decode(slots=()),
    ],
)
def test_check_decision_rejects_invalid_decisions(decision):
    view = SchedulerView(
        waiting=[WaitingRequest(request=r, prompt_tokens=1) for r in (1, 2)],
        ready=[ReadySequence(request=0, slot=0, context_tokens=2, new_tokens=1)],
        free_slots=1,
    )
    with pytest.raises(LlmpqError, match="batching policy"):
        check_decision(view, decision)
