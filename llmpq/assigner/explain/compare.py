"""Questions that plan more than once: all methods, a Pareto front, and what fits at all.

All methods plan one request with the same costs. The search stops within its gap, and a baseline's
plan may lie inside it: then the search returns that plan with its own bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llmpq.assigner.constraints.resolve import NEVER
from llmpq.assigner.objective import relative_gap
from llmpq.assigner.planner import (
    METHODS,
    best_plan,
    check_method,
    explain_infeasible_overrides,
    plan_task,
)
from llmpq.assigner.request import (
    OutOfTimeError,
    PlanningTask,
    PlanRequest,
    Progress,
    build_task,
    silent,
)
from llmpq.errors import InfeasibleError, ProfileMissError, SpecError
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import Plan
from llmpq.spec.precision import BITS

SEARCH = "llmpq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A method's plan, or why there is none."""

    method: str
    plan: Plan | None
    error: InfeasibleError | SpecError | None = None


Runner = Callable[[str, Callable[[Progress], Plan]], Plan]
"""Calls a method's work, given its name, with a ``Progress``."""


def _silently(_: str, work: Callable[[Progress], Plan]) -> Plan:
    return work(silent)


def compare_methods(
    request: PlanRequest, *, command: str = "", run: Runner = _silently
) -> tuple[Outcome, ...]:
    """Return the outcome of every method, the search first.

    ``run`` calls the work of every method, for instance with a progress bar.

    Raises:
        SpecError: the request is invalid for every method.
    """
    check_method(request, SEARCH)
    started = time.perf_counter()
    request = request.with_deadline()
    task = build_task(request)
    build_s = time.perf_counter() - started

    def outcome(method: str) -> Outcome:
        def work(progress: Progress) -> Plan:
            begun = time.perf_counter() - build_s
            return plan_task(task, method, command=command, progress=progress, started=begun)

        try:
            check_method(request, method)
            return Outcome(method=method, plan=run(method, work))
        except InfeasibleError as error:
            explained = explain_infeasible_overrides(request, method, error)
            return Outcome(method=method, plan=None, error=explained)
        except SpecError as error:
            return Outcome(method=method, plan=None, error=error)

    baselines = [outcome(method) for method in METHODS if method != SEARCH]
    return best_with_bound(outcome(SEARCH), baselines, request.gap), *baselines


def best_with_bound(search: Outcome, baselines: list[Outcome], gap: float) -> Outcome:
    """Return the search's outcome, with the cheapest baseline's plan where that is cheaper."""
    plans = [baseline.plan for baseline in baselines if baseline.plan is not None]
    if not plans:
        return search
    best = min(plans, key=lambda plan: plan.estimate.objective_s)
    if search.plan is None:  # out of time
        own = replace(best.search, method=search.method)
        return Outcome(method=search.method, plan=replace(best, search=own))
    objective_s = best.estimate.objective_s
    if search.plan.estimate.objective_s <= objective_s:
        return search
    found = search.plan.search
    if found.bound_s is not None:
        bound_s = min(found.bound_s, objective_s)
        left = relative_gap(objective_s, bound_s)
        status = "optimal" if left <= gap else found.status
        found = replace(found, bound_s=bound_s, gap=left, status=status)
    return Outcome(
        method=search.method,
        plan=replace(
            search.plan,
            micro_batching=best.micro_batching,
            stages=best.stages,
            dropped_devices=best.dropped_devices,
            estimate=best.estimate,
            search=found,
        ),
    )


LOW_PRICE = 5e-3
"""Price of one unit of degradation in latencies, where speed counts."""

HIGH_PRICE = 1e4
"""The same where only quality counts."""

SEARCHES_A_POINT = 4
"""Most searches for each requested plan."""

NARROWEST = 0.01
"""Share of the whole range of quality below which a gap is not halved."""

SEARCH_LIMIT_S = 20.0
"""Seconds of each search without a time limit."""

SAME = 1e-6
"""Relative difference of latency below which a plan is no faster."""


def pareto_plans(
    request: PlanRequest,
    count: int,
    *,
    method: str = "llmpq",
    command: str = "",
    progress: Progress | None = None,
) -> tuple[Plan, ...]:
    """Return up to ``count`` plans, the best quality first and each next one faster.

    The request's quality budget holds for every plan, its time limit for every single search
    (``SEARCH_LIMIT_S`` without one). ``progress`` counts plans found.

    Raises:
        SpecError: as ``make_plan``, and for fewer than two plans or a price of degradation.
        InfeasibleError: no plan exists.
    """
    if count < 2:
        raise SpecError(f"--pareto: found {count}, expected at least 2 plans")
    if request.theta_s is not None:
        raise SpecError("--theta: found together with --pareto, which sets the price itself")
    check_method(request, method)
    front = _ParetoFront(build_task(request), method, command)
    try:
        front.find_ends()
    except InfeasibleError as error:
        raise explain_infeasible_overrides(request, method, error) from None
    for _ in range(SEARCHES_A_POINT * count):
        if progress is not None:
            progress(min(len(front.plans), count), count, None)
        if len(front.plans) >= count or not front.halve_widest():
            break
    return front.plans


def _root(plan: Plan) -> float:
    """Return the root of a plan's degradation, which is about linear in bits."""
    return math.sqrt(plan.estimate.quality)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """Two neighbours; no plan with a root of degradation up to ``low`` beats ``better``."""

    better: Plan
    faster: Plan
    low: float

    @property
    def width(self) -> float:
        return _root(self.faster) - self.low

    @property
    def gain_s(self) -> float:
        return self.better.estimate.latency_s - self.faster.estimate.latency_s


class _ParetoFront:
    def __init__(self, task: PlanningTask, method: str, command: str) -> None:
        self.task = task
        self.method = method
        self.command = command
        self.unit_s = float(task.bounds(0.0).min()) if task.pairs else 1.0
        self.found: list[Plan] = []
        self.gaps: list[_Gap] = []

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that are not dominated, best quality first."""
        ranked = sorted(self.found, key=lambda p: (p.estimate.quality, p.estimate.latency_s))
        kept: list[Plan] = []
        for plan in ranked:
            if not kept or _is_faster(plan, kept[-1]):
                kept.append(plan)
        return tuple(kept)

    def find_ends(self) -> None:
        fastest = self._plan(LOW_PRICE, self.task.request.quality_budget)
        least = self._plan(HIGH_PRICE, self.task.request.quality_budget)
        best = least
        try:
            best = self._plan(LOW_PRICE, least.estimate.quality)
        except InfeasibleError:  # the last bit of a rounded sum
            self.found.append(least)
        self.found += [best, fastest]
        self._open(best, fastest, _root(best))

    def halve_widest(self) -> bool:
        """Search in the widest gap; return whether there was one."""
        if not self.gaps:
            return False
        gap = max(self.gaps, key=self._size)
        self.gaps.remove(gap)
        middle = 0.5 * (gap.low + _root(gap.faster))
        try:
            plan = self._plan(LOW_PRICE, middle**2)
        except OutOfTimeError:  # the better neighbour is one: try a larger budget
            self._open(gap.better, gap.faster, middle)
            return True
        if _is_faster(plan, gap.better):
            self.found.append(plan)
            self._open(gap.better, plan, gap.low)
            self._open(plan, gap.faster, middle)
        else:
            self._open(gap.better, gap.faster, middle)
        return True

    def _open(self, better: Plan, faster: Plan, low: float) -> None:
        gap = _Gap(better=better, faster=faster, low=low)
        widest = max(_root(plan) for plan in self.found)
        if _is_faster(faster, better) and gap.width > NARROWEST * widest:
            self.gaps.append(gap)

    def _size(self, gap: _Gap) -> float:
        """Return the distance of two neighbours, relative to the ranges of quality and latency."""
        whole = _Gap(better=self.plans[0], faster=self.plans[-1], low=_root(self.plans[0]))
        return math.hypot(
            gap.width / whole.width if whole.width > 0 else 0.0,
            gap.gain_s / whole.gain_s if whole.gain_s > 0 else 0.0,
        )

    def _plan(self, price: float, budget: float | None) -> Plan:
        given = self.task.request
        limit_s = SEARCH_LIMIT_S if given.time_limit_s is None else given.time_limit_s
        request = replace(
            given,
            theta_s=price * self.unit_s,
            quality_budget=budget,
            deadline=NEVER.within(limit_s),
        )
        return plan_task(replace(self.task, request=request), self.method, command=self.command)


def _is_faster(plan: Plan, than: Plan) -> bool:
    return plan.estimate.latency_s < than.estimate.latency_s * (1 - SAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitAnswer:
    """Whether a model runs with every layer at ``bits``: its plan, or the reason why not.

    ``short`` is the reason in a few words.
    """

    bits: int
    plan: Plan | None = None
    reason: str | None = None
    short: str | None = None


def fit_answers(request: PlanRequest, others: Sequence[Cluster] = ()) -> tuple[FitAnswer, ...]:
    """Plan a request with every layer at one bitwidth, for each there is.

    Args:
        request: what to plan.
        others: clusters that a plan may be for instead of the request's.

    Raises:
        ProfileMissError: no bitwidth can be planned, and tables lack the seconds of one.
    """
    answers, missing = [], None
    for bits in BITS:
        try:
            own = replace(request, bits=(bits,), theta_s=0.0, sensitivity=None)
            plan = best_plan(own, (request.cluster, *others), command="llmpq-check")
            answers.append(FitAnswer(bits=bits, plan=plan))
        except InfeasibleError as error:
            answers.append(FitAnswer(bits=bits, reason=str(error), short=error.short))
        except ProfileMissError as error:  # a table of one bitwidth says nothing about others
            missing = error
            answers.append(FitAnswer(bits=bits, reason=str(error), short="not measured"))
    if missing is not None and all(one.plan is None for one in answers):
        raise missing
    return tuple(answers)
