"""What a part of a cluster is worth as a replica: the requests a second of its best plan.

The plan of a part and a batch is the exact search's for least latency, within the quality budget of
the fleet. A replica's batch is the workload's, its half, its quarter and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmpq.assigner.constraints.resolve import NEVER
from llmpq.assigner.exact.search import find_exact
from llmpq.assigner.explain.infeasible import SMALLEST
from llmpq.assigner.fleet.partition import DeviceCounts, DevicePools
from llmpq.assigner.milp.search import find_plan
from llmpq.assigner.objective import evaluate, relative_gap
from llmpq.assigner.planner import FIRST_PLAN_GAP, plan_of, solve_task
from llmpq.assigner.problem import Assignment, FloatArray, IntArray
from llmpq.assigner.request import (
    GAP_ROUNDING,
    OutOfTimeError,
    PlanningTask,
    PlanRequest,
    Solution,
    build_task,
    silent,
)
from llmpq.errors import InfeasibleError
from llmpq.spec.plan import Plan

PRICES = 64
"""Prices of degradation tried for the bound."""

Key = tuple[DeviceCounts, int]
"""A part and its batch."""


@dataclass(frozen=True, slots=True)
class ReplicaValue:
    """What a part makes with a batch.

    Attributes:
        requests_per_s: batch over latency; 0 where no plan exists.
        used: devices that its plan uses, by pool.
        bound: no plan makes more.
        is_final: whether the search was finished, so that another one would find the same.
        share: part of the time limit that it was given.
    """

    requests_per_s: float
    used: DeviceCounts
    bound: float
    is_final: bool = True
    share: float = 1.0

    @property
    def proven(self) -> bool:
        """Whether no plan makes more."""
        return relative_gap(self.bound, self.requests_per_s) <= GAP_ROUNDING


@dataclass(frozen=True, slots=True)
class _Placed:
    """A solution of a part, by pools instead of groups, so that it serves equal parts too.

    Attributes:
        counts: the part, or what its plan uses of a larger one.
        pools: of the devices in use, in order.
    """

    counts: DeviceCounts
    pools: tuple[int, ...]
    solution: Solution


class ReplicaEvaluator:
    """Prices the parts of a request's cluster.

    Args:
        request: with the quality budget of every replica.
        pools: of its cluster.

    Attributes:
        searches: how many exact searches were made.
    """

    def __init__(self, request: PlanRequest, pools: DevicePools) -> None:
        self._request = request
        self._pools = pools
        self._known: dict[tuple[str, int], ReplicaValue] = {}
        self._placed: dict[tuple[str, int], _Placed] = {}
        self._plans: dict[tuple[Key, str], Plan] = {}
        self._rates = {
            batch: device_rates(_uncrowded(self._of(pools.counts, batch)))
            for batch in batches(request.workload.batch)
        }
        self.searches = 0

    def bounds(self, parts: IntArray, batch: int) -> FloatArray:
        """Return ``[P]`` upper bounds of the requests a second of parts ``[P, T]``."""
        found: FloatArray = parts @ self._rates[batch]
        return found

    def fastest_prompt_s(self) -> float:
        """Return a lower bound of the seconds of a prompt on its way through any replica.

        Each layer takes what it takes on the device and at the bitwidth where that is least.
        """
        seconds = []
        for batch in self._rates:
            task = build_task(self._of(self._pools.counts, batch))
            for pair in task.pairs:
                layer_s = pair.prefill_s.min(axis=(0, 2))[task.kinds].sum()
                seconds.append(float(layer_s) / pair.micro_batching.prefill)
        return min(seconds, default=0.0)

    def price(self, counts: DeviceCounts, batch: int, share: float = 1.0) -> ReplicaValue:
        """Return the price of a part and a batch, by the exact search.

        Args:
            counts: the part.
            batch: its sequences.
            share: part of the time limit that the search may take; one that was ended is made
                again where it may take more.
        """
        key = self._pools.key(counts), batch
        known = self._known.get(key)
        if known is not None and (known.is_final or share <= known.share):
            # Of a part that is equal up to symmetry: which of its devices are used is not known.
            return replace(known, used=counts)
        found = replace(self._search(counts, batch, share), share=share)
        if known is not None:
            found = replace(
                found,
                requests_per_s=max(found.requests_per_s, known.requests_per_s),
                bound=min(found.bound, known.bound),
            )
        self._known[key] = found
        return found

    def plan(self, counts: DeviceCounts, batch: int, command: str) -> Plan:
        """Return the best plan that was found for a part."""
        key = counts, batch
        if (key, command) not in self._plans:
            placed = self._placed[self._pools.key(counts), batch]
            own, others = (self._pools.in_order(part) for part in (counts, placed.counts))
            task = build_task(self._of(counts, batch))
            moved = _moved(task, placed, dict(zip(others, own, strict=True)), sorted(own))
            self._plans[key, command] = plan_of(
                task, moved, method="llmpq", command=command, planning_s=0.0
            )
        return self._plans[key, command]

    def _of(self, counts: DeviceCounts, batch: int) -> PlanRequest:
        return replace(
            self._request,
            cluster=self._pools.cluster_of(counts),
            workload=replace(self._request.workload, batch=batch),
        )

    def _search(self, counts: DeviceCounts, batch: int, share: float) -> ReplicaValue:
        request = self._of(counts, batch)
        if request.time_limit_s is not None:
            deadline = request.deadline.within(request.time_limit_s * share)
            request = replace(request, deadline=deadline)
        task = build_task(request)
        if not holds_model(task) or not _has_plan(task):
            return ReplicaValue(0.0, counts, 0.0)
        self.searches += 1
        found = _solution(task)
        if found is None:
            late = request.deadline.has_passed
            return ReplicaValue(0.0, counts, math.inf if late else 0.0, is_final=not late)
        pools = [pool for pool, count in enumerate(counts) if count]
        order = [found.problem.order[place] for place in found.assignment.used_positions()]
        used = tuple(pools[group] for group in order)
        counted = tuple(used.count(pool) for pool in range(len(counts)))
        rate = batch / found.evaluation.latency_s
        # A search of fewer orders than those of a smaller part bounds only its own.
        is_bound = found.bound_s is not None and found.order_set != "leading"
        bound = batch / found.bound_s if is_bound and found.bound_s else math.inf
        self._keep(_Placed(counts, used, found), batch, rate)
        self._keep(_Placed(counted, used, found), batch, rate)
        return ReplicaValue(rate, counted, bound, is_final=not request.deadline.has_passed)

    def _keep(self, placed: _Placed, batch: int, rate: float) -> None:
        """Keep the best solution of a part."""
        key = self._pools.key(placed.counts), batch
        known = self._placed.get(key)
        if known is None or batch / known.solution.evaluation.latency_s < rate:
            self._placed[key] = placed


def _moved(
    task: PlanningTask, placed: _Placed, own: Mapping[int, int], pools: Sequence[int]
) -> Solution:
    """Return a solution of an equal part as one of a task.

    Args:
        task: of the part.
        placed: the solution.
        own: for each pool of the equal part the one of this part.
        pools: of this part, in file order.
    """
    found = placed.solution
    micro_batching = found.problem.costs.micro_batching
    pair = next(one for one in task.pairs if one.micro_batching == micro_batching)
    problem = task.problem(pair, tuple(pools.index(own[pool]) for pool in placed.pools))
    places = {position: rank for rank, position in enumerate(found.assignment.used_positions())}
    positions = tuple(places[position] for position in found.assignment.positions)
    assignment = Assignment(positions, found.assignment.widths)
    evaluation = evaluate(problem, assignment)
    return replace(found, problem=problem, assignment=assignment, evaluation=evaluation)


def _uncrowded(request: PlanRequest) -> PlanRequest:
    """Return a request in which workers of a host do not slow each other down."""
    cluster = request.cluster
    nodes = tuple(replace(node, cores=None) for node in cluster.nodes)
    return replace(request, cluster=replace(cluster, nodes=nodes))


def _has_plan(task: PlanningTask) -> bool:
    """Whether any plan keeps memory and the quality budget, as far as there is time to know.

    Micro-batches of one sequence take the least memory: what does not fit with these, never does.
    """
    if task.request.solver != "exact":
        return True
    smallest = tuple(pair for pair in task.pairs if pair.micro_batching == SMALLEST)
    request = replace(task.request, gap=FIRST_PLAN_GAP)
    try:
        find_exact(replace(task, request=request, pairs=smallest), silent, explains=False)
    except OutOfTimeError:
        return True
    except InfeasibleError:
        return False
    return True


def _solution(task: PlanningTask) -> Solution | None:
    """Return the exact search's solution, or a heuristic's when time was over before it had any."""
    is_exact = task.request.solver == "exact"
    try:
        return find_exact(task, silent, explains=False) if is_exact else find_plan(task, silent)
    except OutOfTimeError:
        task = replace(task, request=replace(task.request, deadline=NEVER))
    except InfeasibleError:
        return None
    for method in ("adaptive_even", "memory_proportional"):
        try:
            return solve_task(task, method)
        except InfeasibleError:
            continue
    return None


def batches(largest: int) -> Iterator[int]:
    """Yield a batch and its halves, down to 1."""
    while largest:
        yield largest
        largest //= 2


def device_rates(request: PlanRequest) -> FloatArray:
    """Return ``[T]`` upper bounds of the requests a second of one device of each pool.

    A stage is busy for the sum of its layers' seconds over all micro-batches, and no plan is faster
    than its busiest stage, ``T``. For any price ``mu`` of degradation, let a layer count
    ``(1 + mu Q) / L - mu omega``: that is at most ``rho`` times its seconds on a device, for the
    largest such ratio ``rho``. Summed over layers and devices, ``1 <= T sum(rho)`` where the
    degradation is within the budget ``Q``. So a replica makes at most ``batch sum(rho)`` requests a
    second. The price with the smallest sum over the whole cluster is taken.
    """
    task = build_task(request)
    counts, budget = task.group_counts, request.quality_budget
    if not task.pairs:
        return np.zeros(len(counts))
    seconds = np.min(
        [
            pair.prefill_batches * pair.prefill_s
            + (pair.new_tokens - 1) * pair.decode_batches * pair.decode_s
            for pair in task.pairs
        ],
        axis=0,
    )  # [T, K, B]
    kinds = np.unique(task.kinds)  # a model may describe more kinds than it has
    seconds = seconds[:, kinds]
    # [K, B] least degradation of a layer of a kind.
    omega = np.array([task.omega[task.kinds == kind].min(axis=0) for kind in kinds])
    found = []
    for price in _prices(budget):
        worth = (1 + price * (budget or 0.0)) / len(task.kinds) - price * omega
        found.append(np.maximum(0.0, (worth / seconds).max(axis=(1, 2))))
    least: FloatArray = min(found, key=lambda rho: float(rho @ counts))
    return request.workload.batch * least


def _prices(budget: float | None) -> list[float]:
    """Return prices of degradation to try; any is valid."""
    return [0.0] if budget is None else [0.0, *np.geomspace(1e-3, 1e3, PRICES).tolist()]


def holds_model(task: PlanningTask) -> bool:
    """Whether all devices together may have room for the layers within the quality budget.

    For any price of degradation, the bytes of the cheapest bitwidths less the price of the budget
    are a lower bound of the bytes of any plan. The search alone tells whether a plan exists.
    """
    budget = task.request.quality_budget
    for pair in task.pairs:
        held = pair.capacity_bytes
        room = float(np.maximum(0, held) @ task.group_counts)
        room += float((pair.first_capacity_bytes - held).max())
        layer_bytes = pair.layer_bytes.min(axis=0)[task.kinds]  # [L, B]
        scale = float(layer_bytes.sum(axis=0).max())
        needed = max(
            (layer_bytes + price * scale * task.omega).min(axis=1).sum()
            - price * scale * (budget or 0.0)
            for price in _prices(budget)
        )
        if needed <= room:
            return True
    return False
