"""Properties of any optimum, checked with the oracle and with the solver."""

from __future__ import annotations

from dataclasses import replace

from helpers.brute_force import brute_force
from helpers.builders import tiny_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp

quick = settings(max_examples=25, deadline=None, derandomize=True)


def with_costs(problem, **changes):
    return replace(problem, costs=replace(problem.costs, **changes))


@quick
@given(problem=tiny_problems, extra=st.integers(min_value=1, max_value=30))
def test_more_memory_never_worsens_the_optimum(problem, extra) -> None:
    before = solve_ilp(problem, IlpOptions()).evaluation
    roomy = with_costs(problem, total_bytes=problem.costs.total_bytes + extra)
    after = solve_ilp(roomy, IlpOptions()).evaluation
    if before is not None:
        assert after.objective_s <= before.objective_s * (1 + 1e-7)


@quick
@given(problem=tiny_problems, factor=st.floats(min_value=0.0, max_value=1.0))
def test_faster_links_never_worsen_the_optimum(problem, factor) -> None:
    names = ("send_prefill_s", "send_decode_s", "return_prefill_s", "return_decode_s")
    faster = with_costs(problem, **{n: factor * getattr(problem.costs, n) for n in names})
    before, after = (solve_ilp(item, IlpOptions()).evaluation for item in (problem, faster))
    if before is not None:
        assert after.objective_s <= before.objective_s * (1 + 1e-7)


@quick
@given(problem=tiny_problems, theta=st.floats(min_value=0.0, max_value=50.0))
def test_a_larger_theta_never_worsens_quality(problem, theta) -> None:
    cheap = brute_force(replace(problem, theta_s=theta))
    dear = brute_force(replace(problem, theta_s=2 * theta + 1))
    if cheap is not None:
        assert dear[1].quality <= cheap[1].quality + 1e-9


@quick
@given(problem=tiny_problems)
def test_a_looser_budget_never_worsens_the_optimum(problem) -> None:
    tight = brute_force(replace(problem, quality_budget=0.3))
    loose = brute_force(replace(problem, quality_budget=0.6))
    if tight is not None:
        assert loose[1].objective_s <= tight[1].objective_s
