"""Multi-bin theory compared with Monte Carlo, perturbed boundaries and the policy."""

from __future__ import annotations

import random
from bisect import bisect_left

import numpy as np
import pytest
from helpers.abstract_pipeline import Pipeline
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching import MultiBinFormer, StaticPolicy
from llmpq.errors import SpecError
from llmpq.spec.plan import MicroBatching
from reproduce.multibin import (
    bins_needed,
    exponential_boundaries,
    exponential_service_bound_s,
    uniform_bin_mix_service_s,
    uniform_boundaries,
    uniform_service_s,
    uniform_throughput,
)


@pytest.mark.parametrize("bins", [1, 2, 3, 4, 8, 16, 32])
def test_throughput_equals_the_theorem(bins):
    draws = np.random.default_rng(bins)
    low, high, batch, rounds = 1.0, 20.0, 8, 40_000
    width = (high - low) / bins
    chosen = np.arange(rounds) % bins  # every bin equally often, as its probability says
    longest = low + width * (chosen + draws.random((batch, rounds)).max(axis=0))
    assert batch / longest.mean() == pytest.approx(
        uniform_throughput(low, high, batch, bins), rel=0.003
    )


def test_throughput_approaches_that_of_perfect_batches():
    values = [uniform_throughput(1, 20, 128, bins) for bins in (1, 2, 4, 8, 1000)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(128 / 10.5, rel=1e-3)


@given(
    low=st.floats(0, 5),
    spread=st.floats(0.1, 20),
    batch=st.integers(2, 64),
    share=st.floats(0.05, 0.98),
)
def test_bins_needed_is_minimal(low, spread, batch, share):
    one = uniform_throughput(low, low + spread, batch, 1)
    perfect = batch / (low + spread / 2)
    wanted = one + share * (perfect - one)
    bins = bins_needed(low, low + spread, batch, wanted)
    assert uniform_throughput(low, low + spread, batch, bins) >= wanted * (1 - 1e-9)
    assert bins == 1 or uniform_throughput(low, low + spread, batch, bins - 1) < wanted * (1 + 1e-9)


def test_unreachable_throughput_raises_an_error():
    with pytest.raises(SpecError, match="no number of bins"):
        bins_needed(1, 20, 8, 8 / 10.5)


def test_uniform_boundaries_split_evenly():
    assert uniform_boundaries(1, 20, 1) == ()
    assert uniform_boundaries(0, 20, 4) == (5, 10, 15)


@given(data=st.data(), bins=st.integers(2, 6), batch=st.integers(2, 32))
def test_equal_bins_are_optimal_for_uniform_lengths(data, bins, batch):
    best = uniform_service_s(1, 20, batch, bins)
    inner = data.draw(st.lists(st.floats(1, 20), min_size=bins - 1, max_size=bins - 1))
    assert uniform_bin_mix_service_s([1, *sorted(inner), 20], batch) >= best - 1e-9
    even = [1, *uniform_boundaries(1, 20, bins), 20]
    assert uniform_bin_mix_service_s(even, batch) == pytest.approx(best)


@given(seed=st.integers(0, 10_000), bins=st.integers(2, 6), batch=st.integers(2, 64))
def test_exponential_boundaries_minimise_the_bound(seed, bins, batch):
    chance = random.Random(seed)
    best = exponential_boundaries(3.0, batch, bins)
    bound = exponential_service_bound_s(3.0, batch, best)
    moved = sorted(abs(edge + chance.gauss(0, 0.5)) for edge in best)
    assert exponential_service_bound_s(3.0, batch, moved) >= bound - 1e-9


def test_exponential_bound_holds():
    draws = np.random.default_rng(1)
    batch, bins = 16, 4
    edges = np.array(exponential_boundaries(1.0, batch, bins))
    times = draws.exponential(size=400_000)
    own = np.searchsorted(edges, times)
    served = [times[own == bin] for bin in range(bins)]
    batches = [part[: len(part) // batch * batch].reshape(-1, batch).max(axis=1) for part in served]
    mean = np.concatenate(batches).mean()
    assert mean <= exponential_service_bound_s(1.0, batch, edges)
    assert mean < times[: 16 * 20_000].reshape(-1, 16).max(axis=1).mean() * 0.7


def rounds_of(lengths, boundaries, batch):
    """Count the rounds of batches as they fill: a batch takes what its longest answer takes."""
    filling = [[] for _ in range(len(boundaries) + 1)]
    rounds = 0
    for length in lengths:
        own = filling[bisect_left(boundaries, length)]
        own.append(length)
        if len(own) == batch:
            rounds += max(own)
            own.clear()
    return rounds + sum(max(own) for own in filling if own)


@pytest.mark.parametrize("bins", [1, 2, 4, 8])
def test_policy_serves_batches_until_the_longest_answer(bins):
    chance = random.Random(bins)
    lengths = [chance.randint(1, 200) for _ in range(400)]
    boundaries = uniform_boundaries(0.5, 200.5, bins)
    former = MultiBinFormer(batch=10, boundaries=boundaries)
    pipeline = Pipeline(lengths, num_slots=10, limit=1)
    sizes = MicroBatching(prefill=10, decode=10)
    pipeline.run(StaticPolicy(former=former, micro_batching=sizes))
    assert len(pipeline.sizes) == rounds_of(lengths, boundaries, 10)


@pytest.mark.parametrize("bins", [1, 2, 4, 8, 16, 32])
def test_batches_reach_the_throughput_of_the_theorem(bins):
    # Every length equally often: what is left to chance is who shares a batch.
    lengths = np.random.default_rng(bins).permutation(np.tile(np.arange(1, 201), 1000)).tolist()
    measured = len(lengths) / rounds_of(lengths, uniform_boundaries(0.5, 200.5, bins), 10)
    assert measured == pytest.approx(uniform_throughput(0.5, 200.5, 10, bins), rel=0.003)
