"""The time limit covers all parts of planning: a fake clock advances during slow parts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers.builders import cluster_of, model_spec, plan_request, sensitivity

from llmpq.assigner import make_plan, planner
from llmpq.assigner import request as request_module
from llmpq.assigner.constraints.resolve import NEVER, Deadline, Overrides
from llmpq.assigner.exact import native
from llmpq.assigner.exact.native import NotCoveredError
from llmpq.assigner.explain import explanation
from llmpq.assigner.explain.compare import compare_methods
from llmpq.assigner.heuristics import baselines
from llmpq.assigner.heuristics.baselines import find_proportional
from llmpq.assigner.milp import ilp
from llmpq.assigner.milp.solvers import SolverResult
from llmpq.assigner.request import PlanRequest, build_task
from llmpq.errors import InfeasibleError


class FakeClock:
    """Stands still, but for what the test says takes long."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def uneven_request(**overrides) -> PlanRequest:
    """A request whose optimum takes a search: layers differ, devices too."""
    model = model_spec(layers=12)
    cluster = cluster_of(("V100-32G", 2, 90), ("T4-16G", 2, 70))
    values = {"model": model, "cluster": cluster, "sensitivity": sensitivity(model), "gap": 0.0}
    return plan_request(**(values | overrides))


def slow(monkeypatch: pytest.MonkeyPatch, clock: FakeClock, where: object, name: str) -> None:
    """Let a function take a hundred seconds."""
    real = getattr(where, name)

    def made(*arguments, **options):
        clock.now_s += 100.0
        return real(*arguments, **options)

    monkeypatch.setattr(where, name, made)


def forbidden(*arguments: object, **options: object) -> None:
    raise AssertionError("this was not to begin any more")


def test_the_earlier_of_two_deadlines_counts(clock: FakeClock) -> None:
    deadline = Deadline(10.0, clock)
    clock.now_s = 4.0
    assert deadline.left_s == 6.0
    assert deadline.within(3.0) == Deadline(7.0)
    assert deadline.within(30.0) == deadline.within(None) == deadline
    assert not deadline.has_passed
    clock.now_s = 10.0
    assert deadline.has_passed
    assert math.isinf(NEVER.left_s)
    assert not NEVER.has_passed


def test_the_deadline_of_a_request_is_set_once() -> None:
    request = plan_request(time_limit_s=5.0)
    first = request.with_deadline()
    assert first.with_deadline().deadline == first.deadline != NEVER
    assert plan_request().with_deadline().deadline == NEVER


@pytest.mark.parametrize("part", ["build_pairs", "build_costs"])
@pytest.mark.parametrize("solver", ["exact", "highs"])
def test_slow_preparation_leaves_a_feasible_plan_with_bound_and_gap(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock, part: str, solver: str
) -> None:
    best = make_plan(uneven_request())
    request = uneven_request(solver=solver, theta_s=best.search.theta_s)
    slow(monkeypatch, clock, request_module, part)
    # Neither the enumeration nor the transfer has any business after the time is up.
    monkeypatch.setattr(native, "search", forbidden)
    late = make_plan(replace(request, deadline=Deadline(50.0, clock)))
    assert clock.now_s >= 100.0
    assert late.search.status == "feasible"
    assert late.search.bound_s is not None
    assert late.search.gap is not None
    assert late.search.gap > 0
    assert late.search.bound_s <= best.estimate.objective_s * (1 + 1e-9)
    assert best.estimate.objective_s <= late.estimate.objective_s * (1 + 1e-9)


def test_without_a_core_or_time_to_compile_one_there_is_still_a_plan(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    asked = []

    def no_core(*, limit_s: float) -> None:
        asked.append(limit_s)
        raise NotCoveredError("found no time to compile")

    monkeypatch.setattr(native, "core_path", no_core)
    slow(monkeypatch, clock, request_module, "build_pairs")
    late = make_plan(uneven_request(deadline=Deadline(50.0, clock)))
    assert asked == [-50.0]
    assert late.search.status == "feasible"
    assert late.search.gap is not None


def test_a_solver_that_finds_nothing_in_time_leaves_the_proportional_plan(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    def nothing(*arguments: object, **options: object) -> SolverResult:
        clock.now_s += 100.0
        return SolverResult(status="unknown", values={}, objective=math.inf, bound=-math.inf)

    monkeypatch.setattr(ilp, "solve", nothing)
    request = plan_request(solver="highs", deadline=Deadline(50.0, clock))
    late = make_plan(request)
    fallback = find_proportional(build_task(replace(request, deadline=NEVER)))
    assert fallback is not None
    assert late.search.status == "feasible"
    assert late.estimate.objective_s == pytest.approx(fallback.evaluation.objective_s)


def test_baselines_stop_at_their_first_plan_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    request = replace(uneven_request(), deadline=Deadline(50.0, clock))
    for method, where, name in (
        ("adabits", baselines, "least_degradation"),
        ("pipeedge", baselines, "_splits"),
    ):
        calls = []
        real = getattr(where, name)

        def counted(*arguments, real=real, calls=calls):
            calls.append(1)
            clock.now_s += 100.0
            return real(*arguments)

        monkeypatch.setattr(where, name, counted)
        clock.now_s = 0.0
        make_plan(request, method)
        fallback = len(calls)
        make_plan(replace(request, deadline=NEVER), method)
        assert 1 <= fallback < len(calls) - fallback


def test_all_methods_share_one_limit(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    slow(monkeypatch, clock, baselines, "least_degradation")
    monkeypatch.setattr(native, "search", forbidden)
    outcomes = compare_methods(uneven_request(deadline=Deadline(50.0, clock)))
    found = outcomes[0].plan
    assert found is not None
    assert found.search.status == "feasible"


def test_nothing_is_searched_for_an_explanation_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    cluster = cluster_of(("V100-32G", 1, 400), ("T4-16G", 1, 60))
    request = plan_request(cluster=cluster, deadline=Deadline(50.0, clock))
    plan = make_plan(request)
    assert plan.dropped_devices
    asked = explanation.forced_use(request, plan)
    assert [one.plan is not None for one in asked] == [True]
    clock.now_s = 60.0
    monkeypatch.setattr(explanation, "build_task", forbidden)
    late = explanation.forced_use(request, plan)
    assert [one.reason for one in late] == ["not searched: the time was up"]
    monkeypatch.setattr(planner, "build_task", forbidden)
    refused = InfeasibleError("no plan fits")
    guided = replace(request, overrides=Overrides(exclude=("node0",)))
    assert planner.explain_infeasible_overrides(guided, "llmpq", refused) is refused
