"""Several plans between the best quality and the highest speed, none of them dominated.

The fastest plan and the fastest one of the least degradation are the ends. In between the widest
gap is halved again and again: the fastest plan within a quality budget. A budget finds plans that
no price of degradation would, those in a dent of the front; the small price that is kept makes sure
that nothing is degraded in vain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmpq.assigner.constraints.deadline import NEVER
from llmpq.assigner.milp.search import OutOfTimeError
from llmpq.assigner.planner import blamed, check_method, plan_task
from llmpq.assigner.task import PlanningTask, PlanRequest, Progress, build_task
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.plan import Plan

LOW_PRICE = 5e-3
"""Price of one unit of degradation in latencies, where speed is what counts."""

HIGH_PRICE = 1e4
"""The same where only quality counts."""

SEARCHES_A_POINT = 4
"""Searches for each plan asked for, after which fewer are told."""

NARROWEST = 0.01
"""Share of the whole range of quality below which a gap is not looked into."""

SEARCH_LIMIT_S = 20.0
"""Seconds of each search when no limit is given: a front is an overview, its gaps are told."""

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

    Args:
        request: what is asked; its quality budget holds for every plan, its time limit for every
            single search (``SEARCH_LIMIT_S`` without one).
        count: plans at most; there may be fewer that differ.
        method: a name in ``METHODS``.
        command: the command line, for provenance.
        progress: told how many plans there are.

    Raises:
        SpecError: as ``make_plan``, and for fewer than two plans or a price of degradation.
        InfeasibleError: no plan exists at all.
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
        raise blamed(request, method, error) from None
    for _ in range(SEARCHES_A_POINT * count):
        if progress is not None:
            progress(min(len(front.plans), count), count, None)
        if len(front.plans) >= count or not front.halve_widest():
            break
    return front.plans


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """Two neighbours; within ``searched`` no plan is faster than ``better``."""

    better: Plan
    faster: Plan
    searched: float

    @property
    def span(self) -> tuple[float, float]:
        """Square roots of the degradations between which nothing is known.

        Degradation goes with the square of the quantizer's step, so the root is even in bits.
        """
        return math.sqrt(self.searched), math.sqrt(self.faster.estimate.quality)


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
        """What is not dominated, best quality first."""
        ranked = sorted(self.found, key=lambda p: (p.estimate.quality, p.estimate.latency_s))
        kept: list[Plan] = []
        for plan in ranked:
            if not kept or plan.estimate.latency_s < kept[-1].estimate.latency_s * (1 - SAME):
                kept.append(plan)
        return tuple(kept)

    def find_ends(self) -> None:
        """Find the fastest plan, and the fastest among those of the best quality."""
        fastest = self._plan(LOW_PRICE, self.task.request.quality_budget)
        least = self._plan(HIGH_PRICE, self.task.request.quality_budget)
        best = least
        try:
            best = self._plan(LOW_PRICE, least.estimate.quality)
        except InfeasibleError:  # the last bit of a rounded sum
            self.found.append(least)
        self.found += [best, fastest]
        self._open(best, fastest, best.estimate.quality)

    def halve_widest(self) -> bool:
        """Look into the widest gap; tell whether there was one."""
        if not self.gaps:
            return False
        gap = max(self.gaps, key=self._width)
        self.gaps.remove(gap)
        low, high = gap.span
        budget = (0.5 * (low + high)) ** 2
        try:
            plan = self._plan(LOW_PRICE, budget)
        except OutOfTimeError:  # there is one, the better neighbour at least: try a larger budget
            self._open(gap.better, gap.faster, budget)
            return True
        if plan.estimate.latency_s < gap.better.estimate.latency_s * (1 - SAME):
            self.found.append(plan)
            self._open(gap.better, plan, gap.searched)
            self._open(plan, gap.faster, budget)
        else:
            self._open(gap.better, gap.faster, budget)
        return True

    def _open(self, better: Plan, faster: Plan, searched: float) -> None:
        gap = _Gap(better=better, faster=faster, searched=searched)
        low, high = gap.span
        gains = faster.estimate.latency_s < better.estimate.latency_s * (1 - SAME)
        if gains and high - low > NARROWEST * max(
            math.sqrt(p.estimate.quality) for p in self.found
        ):
            self.gaps.append(gap)

    def _width(self, gap: _Gap) -> float:
        """Return how far apart two neighbours are, as shares of both ranges."""
        plans = self.plans
        latency_s = plans[0].estimate.latency_s - plans[-1].estimate.latency_s
        quality = math.sqrt(plans[-1].estimate.quality) - math.sqrt(plans[0].estimate.quality)
        low, high = gap.span
        apart_s = gap.better.estimate.latency_s - gap.faster.estimate.latency_s
        return math.hypot(
            (high - low) / quality if quality > 0 else 0.0,
            apart_s / latency_s if latency_s > 0 else 0.0,
        )

    def _plan(self, price: float, budget: float | None) -> Plan:
        given = self.task.request
        request = replace(
            given,
            theta_s=price * self.unit_s,
            quality_budget=budget,
            deadline=NEVER.within(
                SEARCH_LIMIT_S if given.time_limit_s is None else given.time_limit_s
            ),
        )
        return plan_task(replace(self.task, request=request), self.method, command=self.command)
