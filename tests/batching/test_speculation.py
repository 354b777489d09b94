"""Prompt lookup against brute force, and what drafts may lose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching.prompt_lookup import PromptLookup
from llmpq.batching.speculation import (
    CREDIT_OF_TOKEN,
    FIRST_CREDIT,
    DraftCredit,
    SpeculativeConfig,
    draft_cost,
)
from llmpq.errors import SpecError


def config(**given_) -> SpeculativeConfig:
    return SpeculativeConfig(**({"num_speculative_tokens": 5} | given_))


def brute_force(tokens, lookup_min, lookup_max, most):
    """Try every length and every place, the longest and the latest first."""
    for length in range(lookup_max, lookup_min - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                found = list(tokens)
                for place in range(start + length, start + length + most):
                    found.append(found[place])
                return found[len(tokens) :]
    return []


@settings(max_examples=200)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    lookup_min=st.integers(1, 3),
    more=st.integers(0, 3),
    most=st.integers(1, 8),
)
def test_lookup_finds_what_followed_the_longest_latest_match(tokens, lookup_min, more, most):
    lookup_max = lookup_min + more
    lookup = PromptLookup(config(prompt_lookup_min=lookup_min, prompt_lookup_max=lookup_max))
    for end in range(1, len(tokens) + 1):
        known = tokens[:end]
        assert lookup.propose(known, most) == brute_force(known, lookup_min, lookup_max, most)


def test_lookup_follows_a_long_sequence():
    lookup = PromptLookup(config())
    tokens = list(range(3000))
    assert lookup.propose(tokens, 5) == []
    tokens += [700, 701, 702]
    assert lookup.propose(tokens, 3) == [703, 704, 705]


def test_a_period_goes_on():
    assert PromptLookup(config()).propose([9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


@given(
    steps=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1), st.integers(1, 40)), max_size=300)
)
def test_drafts_lose_a_bounded_part_of_the_steps(steps):
    credit, lost, tokens = DraftCredit(), 0.0, 0
    for wanted, share, step_tokens in steps:
        draft = min(wanted, credit.longest(step_tokens))
        accepted = int(draft * share)
        credit.spend(draft, step_tokens)
        lost += draft * draft_cost(step_tokens)
        assert lost <= FIRST_CREDIT + CREDIT_OF_TOKEN * tokens + 1e-9
        credit.earn(accepted)
        lost -= accepted
        tokens += accepted + 1


def test_drafts_grow_while_they_are_accepted_and_end_soon_after():
    credit, lengths = DraftCredit(), []
    for accepts in [True] * 5 + [False] * 12:
        draft = min(5, credit.longest(1))
        credit.spend(draft, 1)
        credit.earn(draft if accepts else 0)
        lengths.append(draft)
    assert lengths[:5] == [1, 4, 5, 5, 5]
    assert sum(lengths[5:]) == 16
    assert lengths[-8:] == [0] * 8


def test_a_draft_token_costs_more_in_a_larger_step():
    costs = [draft_cost(tokens) for tokens in (1, 2, 8, 32, 1000)]
    assert costs == sorted(costs)
    assert costs[0] == pytest.approx(0.25)
    assert costs[-1] < 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_speculative_tokens": 0}, "'num_speculative_tokens': found 0, expected 1 to 31"),
        ({"num_speculative_tokens": 32}, "'num_speculative_tokens': found 32, expected 1 to 31"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min 5 and prompt_lookup_max 4"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min 0"),
    ],
)
def test_numbers_out_of_order_raise_errors(fields, message):
    with pytest.raises(SpecError, match=message):
        config(**fields)
