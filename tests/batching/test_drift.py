"""Answer lengths that differ from the schedule, and the adjusted frequency."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching import PipelineShape, make_policy
from llmpq.batching.drift import GROUP_REQUESTS, MAX_GROUPS, Drift, DriftMonitor
from llmpq.errors import SpecError
from llmpq.spec.plan import MicroBatching, Schedule


def _rra(encode=4, decode=16, iterations=8):
    return Schedule(
        policy="rra", encode_batch=encode, decode_batch=decode, decode_iterations=iterations
    )


def test_planned_lengths_are_no_drift():
    found = Drift.of(_rra(), [33] * 50)  # four phases of eight iterations
    assert found.change == 0
    assert not found.is_notable
    assert found.suggested.decode_iterations == 8


def test_longer_answers_suggest_less_frequent_encoding():
    found = Drift.of(_rra(), [65] * 99 + [200])
    assert found.is_notable
    assert found.observed_phases == pytest.approx(8.17)
    assert found.suggested.decode_iterations == 21  # 99 answers stay for 4, one for 10
    assert found.observed_longest == 65


def test_other_policies_do_not_depend_on_lengths():
    assert Drift.of(Schedule(policy="static", decode_batch=4), [1, 2]) is None
    with pytest.raises(SpecError, match="no answers"):
        Drift.of(_rra(), [])


@given(
    answers=st.lists(st.integers(2, 60), min_size=1, max_size=40),
    encode=st.integers(1, 8),
    more=st.integers(0, 40),
    iterations=st.integers(1, 40),
)
def test_suggested_frequency_is_optimal(answers, encode, more, iterations):
    schedule = _rra(encode, encode + more, iterations)
    after = Drift.of(Drift.of(schedule, answers).suggested, answers)
    for other in range(1, max(answers)):
        found = Drift.of(_rra(encode, encode + more, other), answers)
        off = abs(found.observed_phases - found.expected_phases)
        assert abs(after.observed_phases - after.expected_phases) <= off + 1e-9


def test_waa_depends_on_its_mean_answer():
    waa = Schedule(policy="waa", encode_batch=2, decode_batch=16, mean_new_tokens=33.0)
    found = Drift.of(waa, [49] * 50)
    assert found.change == pytest.approx(48 / 32 - 1)
    assert found.is_notable
    assert found.suggested is None  # other answers need another plan
    assert Drift.of(waa, [33] * 50).change == 0
    assert Drift.of(Schedule(policy="waa", encode_batch=2, decode_batch=16), [49]) is None


def test_a_few_different_answers_are_no_drift():
    few, many = ([20, 80] * count for count in (2, 200))
    assert Drift.of(_rra(), few).change == Drift.of(_rra(), many).change > 0.1
    assert not Drift.of(_rra(), few).is_notable
    assert Drift.of(_rra(), many).is_notable


def _feed(lengths, monitor):
    """Two groups start together; their shortest answers finish first."""
    for first in range(0, len(lengths), 2 * GROUP_REQUESTS):
        numbers = range(first, min(first + 2 * GROUP_REQUESTS, len(lengths)))
        monitor.started(numbers)
        for number in sorted(numbers, key=lambda one: lengths[one]):
            monitor.finished(number, lengths[number])


def test_short_answers_that_finish_first_are_no_drift():
    chance = random.Random(0)
    lengths = [chance.randint(2, 64) for _ in range(20 * GROUP_REQUESTS)]  # 33 tokens on average
    schedule = Drift.of(_rra(), lengths).suggested
    monitor = DriftMonitor(schedule)
    _feed(lengths, monitor)
    assert monitor.drifts == ()
    # In order of completion the first answers would look like drift.
    assert Drift.of(schedule, sorted(lengths[: 2 * GROUP_REQUESTS])[:GROUP_REQUESTS]).is_notable


def test_drift_is_reported_once():
    reported = []
    monitor = DriftMonitor(_rra(), on_drift=reported.append)
    _feed([33] * 4 * GROUP_REQUESTS + [65] * 8 * GROUP_REQUESTS, monitor)
    assert len(reported) == 1
    assert monitor.drifts == tuple(reported)
    assert monitor.adjusted == ()
    assert len(monitor.observed) == 12 * GROUP_REQUESTS


def test_policy_is_adjusted_until_phases_are_restored():
    schedule = _rra()
    shape = PipelineShape(
        micro_batching=MicroBatching(prefill=4, decode=8), num_slots=16, num_stages=2
    )
    monitor = DriftMonitor.of(schedule, make_policy(schedule, shape), replans=True)
    _feed([33] * 2 * GROUP_REQUESTS + [65] * 2 * MAX_GROUPS * GROUP_REQUESTS, monitor)
    # The newest groups have 65 tokens: four phases of sixteen iterations.
    assert monitor.adjusted[-1] == 16
    assert len(monitor.adjusted) <= 4
    assert Drift.of(replace(schedule, decode_iterations=16), [65] * 50).change == 0


def test_policies_that_depend_on_no_lengths_have_no_monitor():
    schedule = Schedule(policy="static", decode_batch=4)
    shape = PipelineShape(
        micro_batching=MicroBatching(prefill=2, decode=2), num_slots=4, num_stages=1
    )
    assert DriftMonitor.of(schedule, make_policy(schedule, shape), replans=True) is None
