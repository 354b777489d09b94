"""Lengths that are not those of the schedule, and the frequency that suits them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching.drift import drift_of
from llmpq.errors import SpecError
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
