"""The hybrid policy drives an abstract pipeline: nothing is lost, sizes hold, it always ends."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching import (
    Decision,
    Decode,
    HybridPolicy,
    Prefill,
    ReadySequence,
    SchedulerView,
    Wait,
    WaitingRequest,
    check_decision,
)
from llmpq.errors import LlmpqError
from llmpq.spec.plan import MicroBatching


@dataclass
class Pipeline:
    """An in-order pipeline without time: what enters first comes back first."""

    wanted: list[int]
    num_slots: int
    limit: int
    made: dict[int, int] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def run(self, policy: HybridPolicy) -> None:
        waiting = deque(WaitingRequest(request=r, prompt_tokens=3) for r in range(len(self.wanted)))
        ready: list[ReadySequence] = []
        free = set(range(self.num_slots))
        owner: dict[int, int] = {}
        flights: deque[tuple[str, list[int]]] = deque()
        while waiting or ready or flights:
            view = SchedulerView(
                waiting=waiting,
                ready=tuple(ready),
                free_slots=len(free),
                prefills_in_flight=tuple(len(s) for kind, s in flights if kind == "prefill"),
                decodes_in_flight=tuple(len(s) for kind, s in flights if kind == "decode"),
            )
            decision = policy.decide(view) if len(flights) < self.limit else Wait()
            check_decision(view, decision)
            self.decisions.append(decision)
            if isinstance(decision, Prefill):
                slots = [free.pop() for _ in decision.requests]
                for slot, request in zip(slots, decision.requests, strict=True):
                    assert slot not in owner
                    owner[slot] = request
                chosen = set(decision.requests)
                waiting = deque(item for item in waiting if item.request not in chosen)
                flights.append(("prefill", slots))
            elif isinstance(decision, Decode):
                ready = [item for item in ready if item.slot not in decision.slots]
                flights.append(("decode", list(decision.slots)))
            else:
                ready += self._land(flights.popleft()[1], owner, free)

    def _land(self, slots: list[int], owner: dict[int, int], free: set[int]) -> list[ReadySequence]:
        landed = []
        for slot in slots:
            request = owner[slot]
            self.made[request] = self.made.get(request, 0) + 1
            if self.made[request] == self.wanted[request]:
                del owner[slot]
                free.add(slot)
            else:
                made = self.made[request]
                landed.append(
                    ReadySequence(
                        request=request, slot=slot, context_tokens=3 + made, new_tokens=made
                    )
                )
        return landed


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


def test_a_sequence_joins_when_a_slot_is_free():
    view = SchedulerView(
        waiting=[WaitingRequest(request=7, prompt_tokens=2)],
        ready=[ReadySequence(request=0, slot=0, context_tokens=5, new_tokens=2)],
        free_slots=1,
    )
    assert _policy(prefill=1, decode=2, slots=2, stages=1).decide(view) == Prefill(requests=(7,))


def test_running_sequences_do_not_wait_for_a_prefill():
    view = SchedulerView(
        waiting=[],
        ready=[ReadySequence(request=0, slot=3, context_tokens=5, new_tokens=2)],
        free_slots=0,
        prefills_in_flight=(1,),
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
def test_check_decision_refuses(decision):
    view = SchedulerView(
        waiting=[WaitingRequest(request=r, prompt_tokens=1) for r in (1, 2)],
        ready=[ReadySequence(request=0, slot=0, context_tokens=2, new_tokens=1)],
        free_slots=1,
    )
    with pytest.raises(LlmpqError, match="batching policy"):
        check_decision(view, decision)
