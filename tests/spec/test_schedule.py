"""Schedules: what a policy needs, what it does not know, and the way through a file."""

from __future__ import annotations

import json

import pytest

from llmpq.batching import (
    MultiBinFormer,
    PipelineShape,
    SchedulerView,
    WaitingRequest,
    make_policy,
)
from llmpq.errors import LlmpqError, SpecError
from llmpq.spec.fields import Fields, from_json, to_json
from llmpq.spec.plan import (
    POLICY_NAMES,
    MicroBatching,
    Schedule,
    ScheduleEstimate,
    default_schedule,
)

SHAPE = PipelineShape(micro_batching=MicroBatching(prefill=2, decode=4), num_slots=16, num_stages=2)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("slots", [1, 16])
def test_default_schedule_exists_for_every_policy(policy, slots):
    schedule = default_schedule(policy, slots)
    text = json.dumps(to_json(schedule))
    assert from_json(Schedule, Fields(json.loads(text), "file")) == schedule
    shape = PipelineShape(
        micro_batching=MicroBatching(prefill=1, decode=1), num_slots=slots, num_stages=1
    )
    assert make_policy(schedule, shape).holds_finished == (policy in ("static", "multibin"))


def test_schedule_with_estimate_round_trips():
    estimate = ScheduleEstimate(requests_per_s=2.5, latency_s=3.0, new_tokens=63)
    schedule = Schedule(
        policy="rra", encode_batch=2, decode_batch=8, decode_iterations=4, estimate=estimate
    )
    again = from_json(Schedule, Fields(to_json(schedule), "file"))
    assert again == schedule


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"policy": "best"}, "'policy': found 'best'"),
        ({"policy": "rra", "encode_batch": 1, "decode_batch": 2}, "needs the field 'decode_iter"),
        ({"policy": "hybrid", "decode_batch": 2}, "has no such field"),
        ({"policy": "waa", "encode_batch": 0, "decode_batch": 2}, "'encode_batch': found 0"),
        (
            {"policy": "multibin", "decode_batch": 2, "boundaries": [3, 1]},
            "'boundaries': found",
        ),
        ({"policy": "hybrid", "extra": 1}, "extra"),
    ],
)
def test_invalid_schedules_name_the_field(value, message):
    with pytest.raises(SpecError, match=message):
        from_json(Schedule, Fields(value, "file"))


def test_batch_larger_than_slots_raises_an_error():
    with pytest.raises(SpecError, match="'decode_batch': found 17, expected at most the plan's 16"):
        make_policy(Schedule(policy="static", decode_batch=17), SHAPE)


def test_multibin_needs_predictions_where_it_has_bins():
    waiting = [WaitingRequest(request=3, prompt_tokens=1)]
    view = SchedulerView(waiting=waiting, ready=[], free_slots=1)
    assert MultiBinFormer(batch=1, boundaries=())(view) == (3,)
    with pytest.raises(LlmpqError, match="no predicted length of request 3"):
        MultiBinFormer(batch=1, boundaries=(8.0,))(view)
