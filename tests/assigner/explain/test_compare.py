"""All methods on one request: the search is never worse, whatever its gap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.builders import cluster_of, plan_request
from helpers.certificate import certify
from helpers.small_clusters import small_request

from llmpq.assigner import METHODS, make_plan
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.explain.compare import Outcome, best_with_bound, compare_methods
from llmpq.assigner.request import costs_of, omega_of
from llmpq.errors import InfeasibleError, SpecError


def objectives(outcomes) -> dict[str, float]:
    return {
        item.method: item.plan.estimate.objective_s for item in outcomes if item.plan is not None
    }


@pytest.mark.parametrize("seed", [1, 15])
def test_the_search_is_never_worse_however_early_it_stops(seed: int) -> None:
    request = replace(small_request(seed), gap=0.95)
    outcomes = compare_methods(request)
    assert [item.method for item in outcomes] == ["llmpq", *(m for m in METHODS if m != "llmpq")]
    values = objectives(outcomes)
    assert len(values) >= 4
    assert values["llmpq"] == min(values.values())
    omega, costs = omega_of(request), costs_of(request)
    for item in outcomes:
        if item.plan is not None:
            assert item.plan.search.method == item.method
            certify(
                item.plan,
                costs,
                lambda layer, width: float(omega[layer, request.bits.index(width)]),
            )


def test_a_baseline_inside_the_gap_replaces_the_plan_and_keeps_the_bound() -> None:
    request = plan_request(gap=0.5)
    best = make_plan(replace(request, gap=0.0))
    worse = make_plan(request, "uniform")
    bound_s = 0.9 * best.estimate.objective_s
    search = replace(worse.search, method="llmpq", bound_s=bound_s, gap=0.4, status="feasible")
    found = best_with_bound(
        Outcome(method="llmpq", plan=replace(worse, search=search)),
        [Outcome(method="heuristic", plan=best)],
        request.gap,
    ).plan
    assert found.stages == best.stages
    assert found.estimate == best.estimate
    assert found.search.bound_s == bound_s
    assert found.search.gap == pytest.approx(0.1)
    assert found.search.status == "optimal"  # within the gap asked for


def test_a_cheaper_search_keeps_its_plan() -> None:
    request = plan_request()
    search = Outcome(method="llmpq", plan=make_plan(request))
    baseline = Outcome(method="uniform", plan=make_plan(request, "uniform"))
    assert best_with_bound(search, [baseline], 0.0) is search
    assert best_with_bound(search, [], 0.0) is search


def test_at_the_time_limit_the_search_returns_a_baseline() -> None:
    late = Outcome(method="llmpq", plan=None, error=InfeasibleError("no plan within the limit"))
    baseline = make_plan(plan_request(), "uniform")
    found = best_with_bound(late, [Outcome(method="uniform", plan=baseline)], 0.0).plan
    assert found.stages == baseline.stages
    assert (found.search.method, found.search.status) == ("llmpq", "feasible")
    assert found.search.bound_s is None


def test_methods_that_do_not_support_an_override_raise() -> None:
    request = plan_request(overrides=Overrides(device_bits=(("node0", 8),)))
    search, *baselines = compare_methods(request)
    assert search.plan is not None
    assert all(isinstance(item.error, SpecError) for item in baselines)
    assert all("--fix_bits node0=8" in str(item.error) for item in baselines)


def test_nothing_fits_with_any_method() -> None:
    outcomes = compare_methods(plan_request(cluster=cluster_of(("T4-16G", 1, 9))))
    assert all(isinstance(item.error, InfeasibleError) for item in outcomes)
    assert {item.method for item in outcomes} == set(METHODS)
