"""Expected batch sizes compared with a Monte Carlo simulation."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers.builders import uniform
from hypothesis import given
from hypothesis import strategies as st

from llmpq.assigner.schedules.steady_state import SteadyBatch, expected_longest, prefill_shape
from llmpq.errors import SpecError
from llmpq.sim.costs import batch_shape
from llmpq.spec.precision import Phase
from llmpq.spec.workload import LengthDistribution, constant, empirical, truncated_normal
from reproduce.exegpt_paper import paper_encode_batch, paper_ending

TASKS = {  # ExeGPT, Table 3: output mean, std, longest
    "S": truncated_normal(32, 13, 80),
    "T": truncated_normal(128, 68, 320),
    "C1": truncated_normal(64, 30, 160),
}


def _play(law: LengthDistribution, iterations: int, encode_batch: int, phases: int, seed: int):
    """Encode ``encode_batch`` requests a phase; return mean members and endings by iteration."""
    drawn = np.array(law.sample(encode_batch * phases, random.Random(seed)))
    steps = drawn - 1
    start = np.arange(len(drawn)) // encode_batch
    stay = -(-steps // iterations)
    warm = -(-int(law.longest) // iterations)
    members = np.zeros(phases + warm + 1)
    np.add.at(members, start, stay > 0)
    np.add.at(members, start + stay, -1 * (stay > 0))
    alive = members.cumsum()[warm : phases - 1]
    ends = (start + stay - 1)[steps > 0]
    at = ((steps - 1) % iterations)[steps > 0]
    counted = (ends >= warm) & (ends < phases - 1)
    endings = np.bincount(at[counted], minlength=iterations) / alive.sum()
    return alive.mean(), endings


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("iterations", [1, 4, 13, 100])
def test_batches_and_endings_agree_with_monte_carlo(task, iterations):
    law = TASKS[task]
    steady = SteadyBatch(prompt_tokens=constant(8), new_tokens=law, decode_iterations=iterations)
    members, endings = _play(law, iterations, encode_batch=200, phases=2500, seed=iterations)
    assert members == pytest.approx(steady.decode_batch(200), rel=0.005)
    assert steady.encode_batch(members) == pytest.approx(200, rel=0.005)
    assert endings.sum() == pytest.approx(sum(steady.ending), rel=0.005)
    assert np.abs(endings.cumsum() - np.cumsum(steady.ending)).max() < 0.005


def test_the_paper_formula_is_wrong_where_lengths_differ():
    law = TASKS["S"]
    members, _ = _play(law, 1, encode_batch=200, phases=2500, seed=0)
    assert paper_encode_batch(law, 1, members) > 200 * 1.15
    # Its own formula for WAA, B_D = B_E E[S], is right, apart from the token that prefill makes.
    assert members == pytest.approx(200 * (law.mean - 1), rel=0.005)


def test_the_paper_formula_equals_ours_for_equal_lengths():
    assert paper_ending(constant(10), 4) == pytest.approx((0, 1 / 3, 0, 0))
    assert paper_ending(constant(3), 4) == (0, 0, 1, 0)
    # By hand, N_D = 3: 2 tokens end at U = 2; of 5 tokens half of the phases end at 1 + 4 mod 3.
    assert paper_ending(empirical([2, 5]), 3) == pytest.approx((0, 0.75, 0))
    assert paper_encode_batch(empirical([2, 5]), 3, 16) == pytest.approx(12)
    steady = SteadyBatch(prompt_tokens=constant(1), new_tokens=constant(11), decode_iterations=4)
    assert steady.ending == pytest.approx((0, 1 / 3, 0, 0))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), iterations=st.integers(1, 50))
def test_shares_are_between_zero_and_one(lengths, iterations):
    steady = SteadyBatch(
        prompt_tokens=constant(5), new_tokens=empirical(lengths), decode_iterations=iterations
    )
    assert 0 <= sum(steady.ending) <= 1 + 1e-9
    assert list(steady.alive) == sorted(steady.alive, reverse=True)
    assert steady.encode_batch(steady.decode_batch(7.0)) == pytest.approx(7) or max(lengths) == 1
    assert 5 <= steady.mean_context_tokens <= 5 + max(lengths)


def test_fewer_iterations_keep_larger_batches():
    batches = [
        SteadyBatch(
            prompt_tokens=constant(5), new_tokens=TASKS["T"], decode_iterations=iterations
        ).decode_batch(10)
        for iterations in (1, 2, 8, 32, 400)
    ]
    assert batches == sorted(batches, reverse=True)
    assert batches[-1] == pytest.approx(10, rel=0.01)  # everyone ends within a phase


def test_the_expected_longest_of_several_lengths():
    assert expected_longest(constant(7), 5) == pytest.approx(7)
    assert expected_longest(uniform(1, 100), 1) == pytest.approx(50.5)
    draws = np.random.default_rng(0).integers(1, 101, size=(200_000, 6)).max(axis=1)
    assert expected_longest(uniform(1, 100), 6) == pytest.approx(draws.mean(), rel=0.005)
    with pytest.raises(SpecError):
        expected_longest(constant(1), 0)


def test_prefill_has_the_expected_tokens_and_squares_of_prompts():
    rng = np.random.default_rng(0)
    drawn = [batch_shape(Phase.PREFILL, rng.integers(1, 100, size=8).tolist()) for _ in range(9999)]
    shape = prefill_shape(uniform(1, 99), 8)
    assert shape.total == pytest.approx(np.mean([one.total for one in drawn]), rel=0.01)
    squares = [one.spread * one.total**2 for one in drawn]
    assert shape.spread * shape.total**2 == pytest.approx(np.mean(squares), rel=0.01)
    assert prefill_shape(constant(7), 5) == batch_shape(Phase.PREFILL, [7] * 5)
