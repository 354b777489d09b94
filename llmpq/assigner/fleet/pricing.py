"""What a part of a cluster is worth as a replica: the requests a second of its best plan.

The plan of a part and a batch is the exact search's for least latency, within the quality budget of
the fleet. A replica's batch is the workload's, its half, its quarter and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmpq.assigner.constraints.deadline import NEVER
from llmpq.assigner.fleet.partition import Counts, Pools
from llmpq.assigner.planner import plan_of, solve_task
from llmpq.assigner.problem import FloatArray, IntArray
from llmpq.assigner.request import (
    OutOfTimeError,
    PlanningTask,
    PlanRequest,
    Solution,
    build_task,
)
from llmpq.errors import InfeasibleError
from llmpq.spec.plan import Plan

PRICES = 64
"""Prices of degradation tried for the bound."""

Key = tuple[Counts, int]
"""A part and its batch."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a part makes with a batch.

    Attributes:
        requests_per_s: batch over latency; 0 where no plan exists.
        used: devices that its plan uses, by pool.
        proven: whether the search was finished.
    """

    requests_per_s: float
    used: Counts
    proven: bool = True


class Pricer:
    """Prices the parts of a request's cluster, each once.

    Args:
        request: with the quality budget of every replica.
        pools: of its cluster.
        share: part of the time limit that one search may take.

    Attributes:
        searches: how many exact searches were made.
    """

    def __init__(self, request: PlanRequest, pools: Pools, share: float) -> None:
        self._request = request
        self._pools = pools
        self._share = share
        self._known: dict[tuple[str, int], Price] = {}
        self._solved: dict[Key, tuple[PlanningTask, Solution]] = {}
        self._equal: dict[tuple[str, int], Key] = {}
        self._plans: dict[tuple[Key, str], Plan] = {}
        self._rates = {
            batch: device_rates(self._of(pools.counts, batch))
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

    def price(self, counts: Counts, batch: int) -> Price:
        """Return the price of a part and a batch, by the exact search."""
        key = self._pools.key(counts), batch
        if key not in self._known:
            self._known[key] = self._search(counts, batch)
            return self._known[key]
        # Of a part that is equal up to symmetry: which of its devices are used is not known.
        return replace(self._known[key], used=counts)

    def solved(self, counts: Counts, batch: int) -> Key | None:
        """Return a part that is equal up to symmetry and was searched; ``None`` if none was."""
        return self._equal.get((self._pools.key(counts), batch))

    def plan(self, counts: Counts, batch: int, command: str) -> Plan:
        """Return the plan of a part."""
        key = counts, batch
        if key not in self._solved:
            # Priced by a part that is equal up to symmetry, or has more devices.
            request = replace(self._of(counts, batch), time_limit_s=None, deadline=NEVER)
            task = build_task(request)
            self._solved[key] = task, solve_task(task, "llmpq")
        if (key, command) not in self._plans:
            task, found = self._solved[key]
            self._plans[key, command] = plan_of(
                task, found, method="llmpq", command=command, planning_s=0.0
            )
        return self._plans[key, command]

    def _of(self, counts: Counts, batch: int) -> PlanRequest:
        return replace(
            self._request,
            cluster=self._pools.cluster_of(counts),
            workload=replace(self._request.workload, batch=batch),
        )

    def _search(self, counts: Counts, batch: int) -> Price:
        request = self._of(counts, batch)
        limit_s = request.time_limit_s
        if limit_s is not None:
            deadline = request.deadline.within(limit_s * self._share)
            request = replace(request, deadline=deadline)
        task = build_task(request)
        if not holds_model(task):
            return Price(0.0, counts)
        self.searches += 1
        found = _solution(task)
        if found is None:
            return Price(0.0, counts, proven=not request.deadline.has_passed)
        self._solved[counts, batch] = task, found
        self._equal[self._pools.key(counts), batch] = counts, batch
        groups = [found.problem.order[place] for place in found.assignment.used_positions()]
        rate = batch / found.evaluation.latency_s
        return Price(
            rate,
            self._used(counts, groups),
            proven=found.status == "optimal" and found.bound_s is not None,
        )

    def _used(self, counts: Counts, groups: Sequence[int]) -> Counts:
        pools = [pool for pool, count in enumerate(counts) if count]
        used = [0] * len(counts)
        for group in groups:
            used[pools[group]] += 1
        return tuple(used)


def _solution(task: PlanningTask) -> Solution | None:
    """Return the exact search's solution, or a heuristic's when time was over before it had any."""
    try:
        return solve_task(task, "llmpq")
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
