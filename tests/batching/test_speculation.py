"""Prompt lookup against brute force, what a row costs, and what drafts may lose."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching.speculation import (
    CREDIT_OF_TOKEN,
    FIRST_CREDIT,
    DraftCredit,
    RowCost,
    SpeculativeConfig,
)
from llmpq.dist.engine.drafters import PromptLookup
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


SHARES = st.floats(0, 1)


@given(
    share=SHARES,
    steps=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1), st.integers(1, 40)), max_size=300),
)
def test_drafts_lose_a_bounded_part_of_the_steps(share, steps):
    row_cost = RowCost(share)
    credit, lost, tokens = DraftCredit(), 0.0, 0
    for wanted, right, step_tokens in steps:
        cost = row_cost.of_draft_token(step_tokens)
        draft = min(wanted, credit.longest(cost))
        accepted = int(draft * right)
        credit.spend(draft, cost)
        lost += draft * cost
        assert lost <= FIRST_CREDIT + CREDIT_OF_TOKEN * tokens + 1e-9
        credit.earn(accepted, draft)
        lost -= accepted
        tokens += accepted + 1


@given(share=st.floats(0.01, 1), step_tokens=st.integers(1, 31), tokens=st.integers(0, 400))
def test_without_accepted_tokens_drafts_end(share, step_tokens, tokens):
    """All that is left are the draft tokens that the credit of the tokens pays for."""
    cost = RowCost(share).of_draft_token(step_tokens)
    credit, drafted = DraftCredit(), 0
    for _ in range(tokens):
        draft = credit.longest(cost)
        credit.spend(draft, cost)
        credit.earn(0, draft)
        drafted += draft
    assert drafted * cost <= FIRST_CREDIT + CREDIT_OF_TOKEN * tokens + 1e-9


@given(step_tokens=st.integers(1, 31), earned=st.lists(st.integers(0, 31), max_size=30))
def test_a_row_that_takes_as_long_as_a_step_is_never_drafted(step_tokens, earned):
    cost = RowCost(1.0).of_draft_token(step_tokens)
    credit = DraftCredit()
    for accepted in earned:
        assert credit.longest(cost) == 0
        credit.earn(accepted, accepted)


@given(cheap=SHARES, dear=SHARES, step_tokens=st.integers(1, 31), accepted=st.integers(0, 31))
def test_a_dearer_row_has_no_longer_draft(cheap, dear, step_tokens, accepted):
    cheap, dear = sorted((cheap, dear))
    credit = DraftCredit()
    credit.earn(accepted, 31)
    lengths = [
        credit.longest(RowCost(share).of_draft_token(step_tokens)) for share in (cheap, dear)
    ]
    assert lengths[0] >= lengths[1] >= 0


@given(
    cost=st.floats(0.01, 0.99),
    drafts=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60),
)
def test_a_draft_is_as_long_as_its_last_token_pays(cost, drafts):
    credit, accepted, rejected = DraftCredit(), 2.0, 1.0
    credit.earn(100, 0)
    for length, most in drafts:
        right = min(length, most)
        credit.earn(right, length)
        accepted, rejected = 0.9 * accepted + right, 0.9 * rejected + (right < length)
        share = accepted / (accepted + rejected)
        pays = [tokens for tokens in range(2, 33) if share**tokens >= cost]
        paid = int(4.0 / cost)
        assert credit.longest(cost) == min(paid, 1 + len(pays), 32)


def observed(first, share, rows, *, start_s=1.0, growth=1.0, shift=lambda _: 1.0) -> RowCost:
    """Return the cost after steps of these rows, where a row takes a share of ``start_s``."""
    cost = RowCost(first)
    for step, count in enumerate(rows):
        seconds = start_s * growth**step * (1 + share * (count - 1))
        cost.observe(count, seconds * shift(step))
    return cost


@given(
    first=SHARES, share=SHARES, start_s=st.floats(1e-4, 10), count=st.integers(2, 6),
    growth=st.sampled_from([1.0, 1.001, 0.999]),
)  # fmt: skip
def test_measured_steps_replace_the_first_cost(first, share, start_s, count, growth):
    """Also while every step takes longer than the one before, as contexts grow."""
    found = observed(first, share, [1, 1, 1, count] * 40, start_s=start_s, growth=growth)
    assert found.share == pytest.approx(share, abs=0.12)


@given(first=SHARES, start_s=st.floats(1e-4, 10), count=st.integers(1, 31))
def test_steps_of_one_size_say_nothing_about_a_row(first, start_s, count):
    assert observed(first, 0.5, [count] * 40, start_s=start_s).share == pytest.approx(first)


@given(share=SHARES, slower=st.floats(0.3, 4))
def test_another_speed_is_not_taken_for_another_cost(share, slower):
    """All steps have six rows when the clocks change, so that nothing else shows it."""
    rows = [1, 1, 1, 6] * 25 + [6] * 100
    found = observed(0.25, share, rows, shift=lambda step: 1 if step < 110 else slower)
    assert found.share == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.7])
@pytest.mark.parametrize("seed", range(4))
def test_disturbed_steps_do_not_change_the_cost_much(share, seed):
    """One step of twenty takes up to a hundred times as long, and all vary by 3 %."""
    chance = random.Random(seed)

    def shift(_: int) -> float:
        disturbed = chance.random() < 0.05
        return chance.uniform(2, 100) if disturbed else chance.uniform(0.97, 1.03)

    rows = [chance.choice([1, 1, 2, 6]) for _ in range(200)]
    assert observed(0.25, share, rows, shift=shift).share == pytest.approx(share, abs=0.2)


@settings(max_examples=30)
@given(first=SHARES, share=st.floats(0, 0.5), count=st.integers(2, 6), times=st.floats(1, 1e4))
def test_one_disturbed_draft_does_not_end_drafts_for_good(first, share, count, times):
    """No step after it has a draft, which would show what a row takes."""
    rows = [1] * 10 + [count] + [1] * 1000
    found = observed(first / 2, share, rows, shift=lambda step: times if step == 10 else 1)
    assert found.of_draft_token(1) < 0.8


@given(
    first=SHARES,
    steps=st.lists(
        st.tuples(st.integers(1, 300), st.floats(0, 1e6, allow_subnormal=False)), max_size=60
    ),
    step_tokens=st.integers(1, 300),
)
def test_any_times_give_a_cost_between_nothing_and_a_step(first, steps, step_tokens):
    cost = RowCost(first)
    for rows, seconds in steps:
        cost.observe(rows, seconds)
    assert 0 <= cost.share <= 1 + 1e-9
    assert 0 <= cost.of_draft_token(step_tokens) <= 1 + 1e-9


def test_drafts_grow_while_they_are_accepted_and_end_soon_after():
    credit, lengths = DraftCredit(), []
    cost = RowCost().of_draft_token(1)
    for accepts in [True] * 5 + [False] * 12:
        draft = min(5, credit.longest(cost))
        credit.spend(draft, cost)
        credit.earn(draft if accepts else 0, draft)
        lengths.append(draft)
    assert lengths[:5] == [1, 4, 5, 5, 5]
    assert sum(lengths[5:]) == 16
    assert lengths[-8:] == [0] * 8


def test_a_draft_token_costs_more_in_a_larger_step():
    costs = [RowCost().of_draft_token(tokens) for tokens in (1, 2, 8, 32, 1000)]
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
