"""The blocks of a draft model against what is in them; what it costs; which sequences begin."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching.engine_step import (
    FEW_TOKENS,
    FIRST_BALANCE,
    DraftCandidate,
    DraftCosts,
    DraftLimits,
    DraftModelSchedule,
    DraftWork,
)
from llmpq.batching.speculation import CREDIT_OF_TOKEN, KNOWN_STEPS, DraftCredit
from llmpq.errors import SpecError

BLOCK = 4


def schedule(num_blocks=64, cost=0.2, max_tokens=None) -> DraftModelSchedule:
    limits = DraftLimits(num_blocks=num_blocks, cost=cost, max_tokens=max_tokens)
    return DraftModelSchedule(limits, BLOCK)


def work(count=1, first=0, tokens=4) -> DraftWork:
    return DraftWork(0, first, tokens, count, (0,))


@settings(max_examples=80)
@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(0, 5), st.integers(0, 3)),
            max_size=5, unique_by=lambda item: item[0],
        ),
        max_size=25,
    ),
    num_blocks=st.integers(1, 12),
)  # fmt: skip
def test_blocks_hold_what_a_work_says(steps, num_blocks):
    """``cells`` has the request and the position that was written last in every place."""
    model = schedule(num_blocks)
    tokens = dict.fromkeys(range(5), 3)
    cells: dict[tuple[int, int], object] = {}
    for step in steps:
        for request, most, _, gap in step:
            tokens[request] += gap
            count = model.reserve(request, tokens[request], most)
            assert count in (0, most)
        works = model.take_works()
        used = [block for item in works for block in item.blocks]
        assert len(used) == len(set(used))
        for item in works:
            assert max(item.blocks) < num_blocks
            end = item.tokens + item.length - 1
            assert BLOCK * (len(item.blocks) - 1) < max(end, 1) or item.first
            assert end <= BLOCK * len(item.blocks)
            for at in range(item.first):
                assert cells[item.blocks[at // BLOCK], at % BLOCK] == (item.request, at)
            for at in range(item.first, end):
                is_draft = at >= item.tokens
                cells[item.blocks[at // BLOCK], at % BLOCK] = (
                    None if is_draft else (item.request, at)
                )
        counts = {item.request: item for item in works}
        for request, _, right, _ in step:
            item = counts.get(request)
            accepted = min(right, item.length) if item is not None else 0
            if item is not None:
                for at in range(item.tokens, item.tokens + min(accepted, item.length - 1)):
                    cells[item.blocks[at // BLOCK], at % BLOCK] = (request, at)
            tokens[request] += accepted + 1
            model.verify(request, accepted, 5)
            if right == 5:
                model.forget(request)
                tokens[request] = 3


def credit_of(share: float, steps: float = 4.0) -> DraftCredit:
    """Return a credit whose drafts were accepted with this share."""
    credit = DraftCredit(steps)
    credit._accepted, credit._rejected = share, 1 - share
    return credit


def test_one_sequence_begins_in_a_step_and_goes_on_with_few_tokens():
    model = schedule()
    assert [model.reserve(number, 10, 3) for number in range(3)] == [3, 0, 0]
    (first,) = model.take_works()
    assert (first.first, first.tokens, first.length) == (0, 10, 3)
    model.verify(0, 3, 1)
    assert [model.reserve(0, 14, 2), model.reserve(1, 10, 3)] == [2, 3]
    assert [item.first for item in model.take_works()] == [12, 0]  # the last draft was no input
    model.verify(0, 1, 1)
    assert model.reserve(0, 16, 2) == 2
    assert model.take_works()[0].first == 15


def test_a_sequence_is_no_longer_than_the_model_knows():
    model = schedule(max_tokens=12)
    assert [model.reserve(0, tokens, 5) for tokens in (9, 11, 12, 13)] == [3, 1, 0, 0]
    assert schedule(num_blocks=2).reserve(0, 7, 3) == 0
    assert schedule(num_blocks=2).reserve(0, 7, 2) == 2


@given(
    shares=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=5),
    others=st.integers(0, 3),
    row_cost=st.floats(0, 0.5),
    cost=st.floats(0.01, 0.5),
    most=st.integers(1, 8),
)
def test_a_pass_is_made_where_it_saves_what_it_takes(shares, others, row_cost, cost, most):
    """``others`` are sequences of the step that have no draft; all contexts are short."""
    model, sequences = schedule(cost=cost), len(shares) + others
    candidates = [
        DraftCandidate(i, FEW_TOKENS, 99, credit_of(share)) for i, share in enumerate(shares)
    ]
    counts, of_token = model.lengths(candidates, most, DraftCosts(row_cost, 0.1, sequences))
    alone = [min(most, credit_of(share).longest(row_cost + cost)) for share in shares]
    for passes in range(2, max(counts.values(), default=0) + 1):
        drafted = [share for share, one in zip(shares, alone, strict=True) if one >= passes]
        saved = sum(share**passes - row_cost for share in drafted)
        assert saved >= sequences * cost - 1e-9
    for request, count in counts.items():
        assert min(1, alone[request]) <= count <= alone[request]
    if others == 0:
        drafted_share = sum(one > 0 for one in alone) / len(shares)
        assert of_token == pytest.approx(row_cost + cost / max(drafted_share, 1 / len(shares)))
    if len(shares) == 1 and others == 0:
        assert counts[0] == alone[0]


def begins(model, tokens, left, sequences=1) -> bool:
    candidate = DraftCandidate(0, tokens, left, credit_of(0.7))
    counts, _ = model.lengths([candidate], 4, DraftCosts(0.1, 0.1, sequences))
    return counts[0] > 0


def test_a_sequence_begins_where_its_answer_may_pay_for_its_prompt():
    """Two thirds are accepted at first; the best draft has two tokens of 0.3 steps each."""
    made = 1 + 2 / 3 + 4 / 9
    left = 0.2 * (1 + 0.1 * 499) / ((made - 1 - 2 * 0.3) / made)
    assert not begins(schedule(), 500, int(left))
    assert begins(schedule(), 500, int(left) + 1)
    assert not begins(schedule(), 500, int(left) + 1, sequences=2)
    assert begins(schedule(), FEW_TOKENS, 1)


def test_what_is_rejected_ends_beginnings_for_a_while():
    model = schedule()
    assert begins(model, 50, 200)
    for request in range(1, 9):
        model.reserve(request, 4, 2)
        model.take_works()
        model.verify(request, 0, 1)
    assert not begins(model, 50, 200)
    for _ in range(3 * KNOWN_STEPS):
        model.verify(99, 0, 1)
    assert begins(model, 50, 200)


def test_all_drafts_together_lose_a_bounded_part_of_the_steps():
    """Passes before one step may take more than is left; prompts are not in this account."""
    model, lost = schedule(cost=0.3), 0.0
    candidate = DraftCandidate(0, FEW_TOKENS, 99, credit_of(0.7))
    for step in range(2000):
        counts, _ = model.lengths([candidate], 2, DraftCosts(0.1, 0.1, 1))
        if counts[0]:
            count = model.reserve(0, candidate.tokens, counts[0])
            lost += 0.9 + 0.1 * count
            model.measure(model.take_works(), 0.9, 1.0, 0.1)
        model.verify(0, 0, 1)
        assert lost <= FIRST_BALANCE + 1.1 + 0.9 + CREDIT_OF_TOKEN * step
    assert lost > 2


@given(share=st.floats(0.01, 0.9), passes=st.integers(1, 8), step_s=st.floats(1e-4, 10))
def test_measured_passes_replace_the_first_cost(share, passes, step_s):
    model = schedule(cost=0.2)
    model.reserve(0, 4, passes)
    for _ in range(120):
        seconds = share * step_s * (passes + 0.1 * 3)  # four rows in the first pass
        model.measure([work(passes)], seconds, step_s, 0.1)
    assert model.share == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize(
    ("works", "step_s"), [([work(tokens=40)], 1.0), ([work()], None), ([work()], 0.0)]
)
def test_prompts_and_unknown_steps_say_nothing_about_a_pass(works, step_s):
    model = schedule(cost=0.2)
    model.reserve(0, 4, 1)
    model.measure(works, 100.0, step_s, 0.1)
    assert model.share == 0.2


def test_a_draft_model_that_has_ended_has_no_drafts():
    drafts = schedule()
    candidate = DraftCandidate(0, 4, 100, DraftCredit(3.0))
    lengths, _ = drafts.lengths([candidate], 4, DraftCosts(0.01, 0.1, 1))
    assert lengths[0] > 0
    drafts.end()
    for _ in range(1000):
        drafts.verify(0, 4, 1)
    lengths, _ = drafts.lengths([candidate], 4, DraftCosts(0.01, 0.1, 1))
    assert lengths == {0: 0}


def test_no_disturbance_ends_drafts_for_good():
    model = schedule(cost=0.2)
    model.reserve(0, 4, 1)
    for _ in range(3):
        model.measure([work()], 1000.0, 1.0, 0.1)
    assert 0.9 < model.share < 2.5
    for _ in range(3 * KNOWN_STEPS):
        model.verify(0, 0, 1)
    assert model.share < 0.3


@pytest.mark.parametrize("fields", [{"num_blocks": 0, "cost": 0.1}, {"num_blocks": 1, "cost": 0}])
def test_sizes_out_of_range_are_errors(fields):
    with pytest.raises(SpecError, match="draft model: found"):
        DraftLimits(**fields)
