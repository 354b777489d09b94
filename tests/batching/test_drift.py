"""Lengths that are not those of the schedule, and the frequency that suits them."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching import PipelineShape, make_policy
from llmpq.batching.workload_shift import COHORT, COHORTS, DriftWatch, drift_of, watch_of
from llmpq.errors import SpecError
from llmpq.spec.plan import MicroBatching
from llmpq.spec.schedule import Schedule


def _rra(encode=4, decode=16, iterations=8):
    return Schedule(
        policy="rra", encode_batch=encode, decode_batch=decode, decode_iterations=iterations
    )


def test_lengths_as_planned_are_no_drift():
    found = drift_of(_rra(), [33] * 50)  # four phases of eight iterations
    assert found.change == 0
    assert not found.is_notable
    assert found.suggested.decode_iterations == 8


def test_longer_answers_ask_for_rarer_encoding():
    found = drift_of(_rra(), [65] * 99 + [200])
    assert found.is_notable
    assert found.observed_phases == pytest.approx(8.17)
    assert found.suggested.decode_iterations == 21  # 99 answers stay for 4, one for 10
    assert found.observed_longest == 65


def test_other_policies_rest_on_no_lengths():
    assert drift_of(Schedule(policy="static", decode_batch=4), [1, 2]) is None
    with pytest.raises(SpecError, match="no answers"):
        drift_of(_rra(), [])


@given(
    answers=st.lists(st.integers(2, 60), min_size=1, max_size=40),
    encode=st.integers(1, 8),
    more=st.integers(0, 40),
    iterations=st.integers(1, 40),
)
def test_no_frequency_suits_better_than_the_suggested(answers, encode, more, iterations):
    schedule = _rra(encode, encode + more, iterations)
    after = drift_of(drift_of(schedule, answers).suggested, answers)
    for other in range(1, max(answers)):
        found = drift_of(_rra(encode, encode + more, other), answers)
        off = abs(found.observed_phases - found.expected_phases)
        assert abs(after.observed_phases - after.expected_phases) <= off + 1e-9


def test_waa_rests_on_its_mean_answer():
    waa = Schedule(policy="waa", encode_batch=2, decode_batch=16, mean_new_tokens=33.0)
    found = drift_of(waa, [49] * 50)
    assert found.change == pytest.approx(48 / 32 - 1)
    assert found.is_notable
    assert found.suggested is None  # other answers ask for other stages
    assert drift_of(waa, [33] * 50).change == 0
    assert drift_of(Schedule(policy="waa", encode_batch=2, decode_batch=16), [49]) is None


def test_a_few_unlike_answers_are_no_drift():
    few, many = ([20, 80] * count for count in (2, 200))
    assert drift_of(_rra(), few).change == drift_of(_rra(), many).change > 0.1
    assert not drift_of(_rra(), few).is_notable
    assert drift_of(_rra(), many).is_notable


def _watched(lengths, watch):
    """Answers end the shortest first, while all of a cohort are on their way."""
    for first in range(0, len(lengths), 2 * COHORT):
        numbers = range(first, min(first + 2 * COHORT, len(lengths)))
        watch.begin(numbers)
        for number in sorted(numbers, key=lambda one: lengths[one]):
            watch.ends(number, lengths[number])


def test_short_answers_that_end_first_are_no_drift():
    chance = random.Random(0)
    lengths = [chance.randint(2, 64) for _ in range(20 * COHORT)]  # 33 tokens on average
    schedule = drift_of(_rra(), lengths).suggested
    watch = DriftWatch(schedule)
    _watched(lengths, watch)
    assert watch.drifts == ()
    # Judged as they end, the first of them would have been a drift.
    assert drift_of(schedule, sorted(lengths[: 2 * COHORT])[:COHORT]).is_notable


def test_a_drift_is_told_once():
    told = []
    watch = DriftWatch(_rra(), tell=told.append)
    _watched([33] * 4 * COHORT + [65] * 8 * COHORT, watch)
    assert len(told) == 1
    assert watch.drifts == tuple(told)
    assert watch.adjusted == ()
    assert len(watch.observed) == 12 * COHORT


def test_a_policy_is_adjusted_until_its_phases_are_back():
    schedule = _rra()
    shape = PipelineShape(
        micro_batching=MicroBatching(prefill=4, decode=8), num_slots=16, num_stages=2
    )
    watch = watch_of(schedule, make_policy(schedule, shape), replans=True)
    _watched([33] * 2 * COHORT + [65] * 2 * COHORTS * COHORT, watch)
    # All that counts now is 65 tokens: four phases of sixteen iterations.
    assert watch.adjusted[-1] == 16
    assert len(watch.adjusted) <= 4
    assert drift_of(replace(schedule, decode_iterations=16), [65] * 50).change == 0


def test_policies_that_rest_on_no_lengths_are_not_watched():
    schedule = Schedule(policy="static", decode_batch=4)
    shape = PipelineShape(
        micro_batching=MicroBatching(prefill=2, decode=2), num_slots=4, num_stages=1
    )
    assert watch_of(schedule, make_policy(schedule, shape), replans=True) is None
