"""The planned grid covers what it was told to, with as few points as it was told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.errors import SpecError
from llmpq.profiler.grid import GridLimits, Shape, planned_grid, product_grid
from llmpq.spec.precision import Phase

LIMITS = GridLimits(batch=32, prompt_tokens=512, context_tokens=1024, prefill_tokens=2048)


def places(shapes, phase):
    return [
        (math.log2(s.batch * s.tokens if phase is Phase.PREFILL else s.batch), math.log2(s.tokens))
        for s in shapes
        if s.phase is phase
    ]


@given(
    batch=st.integers(1, 300),
    prompt=st.integers(1, 3000),
    context=st.integers(1, 3000),
    prefill=st.integers(1, 8192),
    points=st.integers(2, 40),
)
def test_a_grid_stays_within_its_limits_and_repeats_nothing(
    batch, prompt, context, prefill, points
):
    limits = GridLimits(
        batch=batch, prompt_tokens=prompt, context_tokens=context, prefill_tokens=prefill
    )
    grid = planned_grid(limits, points)
    assert len(set(grid)) == len(grid)
    for phase, longest in ((Phase.PREFILL, prompt), (Phase.DECODE, context)):
        own = [shape for shape in grid if shape.phase is phase]
        assert 1 <= len(own) <= points
        assert all(1 <= s.batch <= batch and 1 <= s.tokens <= longest for s in own)
    assert all(s.batch * s.tokens <= max(prefill, prompt) for s in grid if s.phase is Phase.PREFILL)


def test_a_grid_holds_the_smallest_and_the_largest_shapes():
    grid = planned_grid(LIMITS, 12)
    for shape in (
        Shape(phase=Phase.PREFILL, batch=1, tokens=16),
        Shape(phase=Phase.DECODE, batch=1, tokens=16),
        Shape(phase=Phase.DECODE, batch=32, tokens=1024),
    ):
        assert shape in grid
    assert max(s.batch * s.tokens for s in grid if s.phase is Phase.PREFILL) == 2048


@pytest.mark.parametrize("phase", list(Phase))
def test_more_points_leave_smaller_gaps(phase):
    def widest_gap(points):
        chosen = places(planned_grid(LIMITS, points), phase)
        every = places(planned_grid(LIMITS, 10_000), phase)
        return max(min(math.dist(one, other) for other in chosen) for one in every)

    gaps = [widest_gap(points) for points in (6, 12, 24, 48)]
    assert gaps == sorted(gaps, reverse=True)
    assert widest_gap(24) <= 1.6


def test_a_product_leaves_out_prefill_points_beyond_its_limit():
    grid = product_grid((1, 3), (4, 9), (5,), prefill_tokens=20)
    assert Shape(phase=Phase.PREFILL, batch=3, tokens=9) not in grid
    assert Shape(phase=Phase.PREFILL, batch=1, tokens=9) in grid
    assert Shape(phase=Phase.DECODE, batch=3, tokens=5) in grid


@pytest.mark.parametrize("field", ["batch", "prompt_tokens", "context_tokens", "prefill_tokens"])
def test_limits_below_one_are_refused(field):
    with pytest.raises(SpecError, match=field):
        GridLimits(**{field: 0})


def test_a_single_point_is_refused():
    with pytest.raises(SpecError, match="at least 2"):
        planned_grid(LIMITS, 1)
