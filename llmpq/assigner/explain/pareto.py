"""Several plans between the best quality and the highest speed, none of them dominated.

The ends are the fastest plan and the fastest plan of least degradation. In between the widest gap
is halved repeatedly: the fastest plan within a quality budget, which finds non-convex parts too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmpq.assigner.constraints.deadline import NEVER
from llmpq.assigner.planner import check_method, explain_infeasible_overrides, plan_task
from llmpq.assigner.request import OutOfTimeError, PlanningTask, PlanRequest, Progress, build_task
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.plan import Plan

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
    front = _Front(build_task(request), method, command)
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


class _Front:
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
