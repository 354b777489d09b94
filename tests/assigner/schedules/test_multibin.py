"""Bins for a throughput: against the theorem, chance, and the played pipeline."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import costs_of
from llmpq.assigner.schedules.multibin import BinnedBatches, with_bins
from llmpq.assigner.schedules.plan import ScheduleRequest, simulated
from llmpq.batching.policies.multibin import quantile_boundaries
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import load_cluster
from llmpq.spec.workload import Workload, constant, empirical, truncated_normal
from reproduce.multibin import bins_needed, uniform_throughput

LONGEST = 4000
UNIFORM = empirical(range(1, LONGEST + 1))


def linear(lengths, batch=8, step_s=0.01):
    """Batches that take a fixed time a token of their longest answer."""
    longest = lengths.longest
    return BinnedBatches(
        lengths=lengths, batch=batch, played=((0, 0.0), (longest, longest * step_s))
    )


@pytest.mark.parametrize("bins", [1, 2, 4, 8, 16, 32])
def test_uniform_lengths_have_the_throughput_of_theorem_4_2(bins):
    found = linear(UNIFORM)
    theorem = uniform_throughput(0.0, LONGEST * 0.01, 8, bins)
    assert found.requests_per_s(found.boundaries(bins)) == pytest.approx(theorem, rel=1e-3)


@given(share=st.floats(0.05, 0.95), batch=st.integers(2, 40))
@settings(max_examples=40, deadline=None)
def test_uniform_lengths_need_the_bins_of_theorem_4_3(share, batch):
    found = linear(UNIFORM, batch)
    one = found.requests_per_s(())
    target = one + share * (found.most_requests_per_s - one)
    bins = found.bins_for(target)
    # Whole tokens round the theorem's interval, which matters where it is next to a step.
    near = {bins_needed(0.0, LONGEST * 0.01, batch, target * edge) for edge in (0.999, 1, 1.001)}
    assert min(near) <= bins <= max(near)


@given(
    observed=st.lists(st.integers(1, 300), min_size=2, max_size=40),
    bins=st.integers(1, 6),
    batch=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_any_lengths_have_the_throughput_of_drawn_batches(observed, bins, batch, seed):
    lengths = empirical(observed)
    found = linear(lengths, batch)
    boundaries = found.boundaries(bins)
    assert boundaries == quantile_boundaries(observed, bins)
    chance = random.Random(seed)
    drawn = lengths.sample(24_000, chance)
    filling: dict[int, list[int]] = {}
    seconds, served = 0.0, 0
    for one in drawn:
        members = filling.setdefault(int(np.searchsorted(boundaries, one, side="right")), [])
        members.append(one)
        if len(members) == batch:
            seconds += 0.01 * max(members)
            served += batch
            members.clear()
    assert found.requests_per_s(boundaries) == pytest.approx(served / seconds, rel=0.06)


def test_more_bins_are_never_slower_where_lengths_are_spread():
    found = linear(truncated_normal(130, 60, 512))
    rates = [found.requests_per_s(found.boundaries(bins)) for bins in (1, 2, 4, 8, 16, 32, 64)]
    assert rates == sorted(rates)
    assert rates[-1] < found.most_requests_per_s


def test_a_throughput_that_no_bins_reach_is_refused():
    found = linear(truncated_normal(130, 60, 512))
    with pytest.raises(InfeasibleError, match=r"no number of bins answers 100 requests a second"):
        found.bins_for(100.0)


@pytest.fixture(scope="module")
def planned():
    request = PlanRequest(
        model=resolve_model("facebook/opt-13b")[0],
        cluster=load_cluster("inputs/clusters/paper-03.json"),
        workload=Workload(batch=16, prompt_tokens=128, new_tokens=128),
        dtype="float16",
        kv_bits=16,
    )
    plan = make_plan(request, "llmpq")
    return plan, costs_of(request, plan.cluster)


def asked(lengths):
    return ScheduleRequest(prompt_tokens=constant(128), new_tokens=lengths)


@pytest.mark.parametrize("bins", [1, 3])
def test_the_estimate_is_what_the_simulator_plays(planned, bins):
    plan, costs = planned
    request = asked(truncated_normal(60, 30, 128))
    made = with_bins(plan, costs, request, bins=bins)
    assert made.schedule is not None
    assert made.schedule.boundaries is not None
    assert made.schedule.estimate is not None
    assert len(made.schedule.boundaries) == bins - 1
    played = simulated(made, costs, request, 4000)
    # The last batches are not full.
    assert made.schedule.estimate.requests_per_s == pytest.approx(
        played.throughput_requests_per_s, rel=0.03
    )


def test_a_target_has_as_few_bins_as_reach_it(planned):
    plan, costs = planned
    request = asked(truncated_normal(60, 30, 128))
    rates = [
        with_bins(plan, costs, request, bins=bins).schedule.estimate.requests_per_s
        for bins in (4, 5)
    ]
    made = with_bins(plan, costs, request, target=(rates[0] + rates[1]) / 2)
    assert len(made.schedule.boundaries) == 4
    assert made.schedule.estimate.requests_per_s == rates[1]


def test_lengths_without_room_are_refused(planned):
    with pytest.raises(SpecError, match="answers of up to 500"):
        with_bins(*planned, asked(constant(500)), bins=2)
