"""Sampled answer lengths follow the distribution and stay below limit and context."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.errors import SpecError
from llmpq.multillm.workload import sample_answers
from llmpq.spec.workload import empirical


def chance(seed=0):
    return np.random.default_rng(seed)


def test_samples_follow_the_distribution():
    law = empirical([1, 1, 5, 20])
    found = sample_answers(law, np.ones(40_000), limit=None, context=None, chance=chance())
    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == [1, 5, 20]
    assert counts / 40_000 == pytest.approx([0.5, 0.25, 0.25], abs=0.01)


@given(
    observed=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    prompts=st.lists(st.integers(1, 99), max_size=20),
    limit=st.none() | st.integers(1, 400),
    context=st.none() | st.integers(100, 300),
    seed=st.integers(0, 99),
)
def test_a_cap_changes_the_longer_answers_only(observed, prompts, limit, context, seed):
    law = empirical(observed)
    free = sample_answers(law, prompts, limit=None, context=None, chance=chance(seed))
    found = sample_answers(law, prompts, limit=limit, context=context, chance=chance(seed))
    assert len(found) == len(prompts)
    for prompt, drawn, capped in zip(prompts, free, found, strict=True):
        bounds = [drawn, limit or drawn, (context - prompt) if context else drawn]
        assert capped == min(bounds) >= 1


def test_without_a_distribution_answers_reach_their_limits():
    found = sample_answers(None, [10, 90], limit=[20, 20], context=100, chance=chance())
    assert found.tolist() == [20, 10]


def test_what_bounds_no_answer_or_leaves_no_room_is_an_error():
    with pytest.raises(SpecError, match="no distribution, limit or context"):
        sample_answers(None, [1], limit=None, context=None, chance=chance())
    with pytest.raises(SpecError, match=r"prompt of 100 tokens, expected fewer .* 100"):
        sample_answers(None, [1, 100], limit=5, context=100, chance=chance())
