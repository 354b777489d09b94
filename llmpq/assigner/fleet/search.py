"""The best fleet: disjoint parts of a cluster, with the most requests a second in sum.

A set packing problem over parts with a batch each; the batches of all replicas together are at most
the workload's. Pricing a part is an exact search of its own, so parts are priced when needed: an
integer program over all parts takes bounds for those that are not priced, and those that it chooses
are priced next. Once it chooses priced parts only, its fleet is optimal. Of very large clusters not
all parts are enumerated; the bound then is the sum of the devices' own bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmpq.assigner.constraints.limits import BoolArray
from llmpq.assigner.fleet.partition import Counts, Pools
from llmpq.assigner.fleet.pricing import Key, Pricer, batches
from llmpq.assigner.milp.solvers import solve
from llmpq.assigner.objective import relative_gap
from llmpq.assigner.problem import FloatArray, IntArray
from llmpq.assigner.request import GAP_ROUNDING, PlanRequest, Progress
from llmpq.spec.fleet import OtherCut
from llmpq.spec.plan import Plan, Status

if TYPE_CHECKING:
    import pulp

SEARCH_SHARE = 0.05
"""Part of the time limit that one search may take where not all parts are enumerated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReplica:
    """One pipeline of a fleet.

    Attributes:
        devices: its devices, indices into the whole cluster's; the plan's cluster has these only.
        plan: for its batch.
        requests_per_s: batch over predicted latency.
        without: requests a second without one device of a node and type, 0 where the rest does not
            hold the model; only what was proven in time.
        arrivals_per_s: its share of the arrivals, ``None`` where their rate is not given.
    """

    devices: tuple[int, ...]
    plan: Plan
    requests_per_s: float
    without: tuple[tuple[str, float], ...]
    arrivals_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Replicas of a model on one cluster.

    Attributes:
        replicas: at least one.
        idle: devices that no replica uses, indices into the cluster's.
        quality_budget: largest degradation of any replica, ``None`` for no limit.
        bound: no fleet makes more requests a second.
        gap: of the requests a second, ``(bound - requests_per_s) / bound``, or of ``ttft_s``.
        status: ``optimal`` when proven.
        others: other ways to cut the cluster, with the same budget.
        searches: parts of the cluster that were planned.
        ttft_s: mean time to first token, which the fleet was chosen for; ``None``: it was chosen
            for its requests a second.
        ttft_bound_s: no fleet has less.
    """

    replicas: tuple[PlannedReplica, ...]
    idle: tuple[int, ...]
    quality_budget: float | None
    bound: float
    gap: float
    status: Status
    others: tuple[OtherCut, ...]
    searches: int
    ttft_s: float | None = None
    ttft_bound_s: float | None = None

    @property
    def requests_per_s(self) -> float:
        """Sum over the replicas."""
        return sum(replica.requests_per_s for replica in self.replicas)


class FleetSearch:
    """Chooses the parts and batches with the most requests a second, for one request.

    A column is a part with a batch; ``C`` columns.

    Attributes:
        fleet: parts and batches of the best fleet so far.
        value: its requests a second.
        bound: upper bound of any fleet's.
    """

    def __init__(self, request: PlanRequest, number: int | None, progress: Progress) -> None:
        self.fleet: tuple[Key, ...] = ()
        self.value = 0.0
        self._request = request
        self._number = number
        self._progress = progress
        self._pools = Pools.of(request.cluster)
        parts, self._is_complete = self._pools.parts()
        share = 1.0 if self._is_complete else SEARCH_SHARE
        self._pricer = Pricer(request, self._pools, share)
        self._batches = tuple(batches(request.workload.batch))
        self._columns: list[Key] = []
        self._index: dict[Key, int] = {}
        self._counts: IntArray = np.zeros((0, len(self._pools.counts)), dtype=np.int64)
        self._upper: FloatArray = np.zeros(0)
        self._lower: FloatArray = np.zeros(0)
        self._is_priced: BoolArray = np.zeros(0, dtype=np.bool_)
        self._add(parts)
        whole = np.array([self._pools.counts])
        self.bound = max(float(self._pricer.bounds(whole, size)[0]) for size in self._batches)

    def run(self) -> None:
        """Price columns until the best fleet is known, or time is over."""
        self.price_first()
        self._keep()
        while self._is_complete:
            chosen, bound = self._pack(self._upper)
            self.bound = min(self.bound, bound)
            unknown = [place for place in chosen if not self._is_priced[place]]
            if not unknown or self._request.deadline.has_passed:
                break
            for place in dict.fromkeys(unknown):
                self._price(place)
            self._keep()

    def price_first(self) -> None:
        """Price other ways to cut the cluster; of large clusters, as many parts as time allows."""
        cuts = [part for parts in self._cuts().values() for part in parts]
        self._add([part for part in dict.fromkeys(cuts) if (part, 1) not in self._index])
        if self._is_complete:
            for part in dict.fromkeys(cuts):
                for size in self._batches:
                    self._price(self._index[part, size])
        else:
            # The smallest of a kind first: they are planned in a moment.
            self._scan(sorted(dict.fromkeys(cuts), key=sum))
            parts = dict.fromkeys(part for part, _ in self._columns)
            self._scan(sorted(parts, key=lambda part: (sum(part), np.count_nonzero(part))))

    def _scan(self, parts: Sequence[Counts]) -> None:
        """Price parts in order, with batches near their share of all devices' speed."""
        rates = self._pricer.bounds(np.array(parts), self._batches[0])
        for part, wanted in zip(parts, self._batches[0] * rates / self.bound, strict=True):
            for size in self._batches:
                if size / 2 <= wanted <= 2 * size:
                    self._price(self._index[part, size])

    def _add(self, parts: Sequence[Counts]) -> None:
        """Add the columns of parts, with every batch."""
        if not parts:
            return
        rows = np.array(parts, dtype=np.int64)
        for size in self._batches:
            first = len(self._columns)
            own = [(part, size) for part in parts]
            self._columns += own
            self._index |= {key: first + place for place, key in enumerate(own)}
            self._counts = np.vstack([self._counts, rows])
            self._upper = np.append(self._upper, self._pricer.bounds(rows, size))
        more = len(self._columns) - len(self._lower)
        self._lower = np.append(self._lower, np.zeros(more))
        self._is_priced = np.append(self._is_priced, np.zeros(more, dtype=np.bool_))

    def _price(self, place: int) -> None:
        no_time = self._request.deadline.has_passed
        if self._is_priced[place] or not self._upper[place] or no_time:
            return
        part, size = self._columns[place]
        found = self._pricer.price(part, size)
        self._set(place, found.requests_per_s)
        if found.proven:
            # Fewer devices make no more with the same batch.
            sizes = np.array([batch for _, batch in self._columns])
            inside = (self._counts <= self._counts[place]).all(axis=1) & (sizes == size)
            self._upper[inside] = np.minimum(self._upper[inside], found.requests_per_s)
        if found.requests_per_s and found.used != part and (found.used, size) in self._index:
            self._set(self._index[found.used, size], found.requests_per_s)
        best = 1 / self.value if self.value else None
        self._progress(int(self._is_priced.sum()), len(self._columns), best)

    def _set(self, place: int, rate: float) -> None:
        self._lower[place] = rate
        self._is_priced[place] = True

    def _keep(self) -> None:
        """Keep the best fleet of priced columns."""
        chosen, _ = self._pack(self._lower)
        value = float(self._lower[chosen].sum())
        if value > self.value * (1 + GAP_ROUNDING):
            self.value = value
            self.fleet = tuple(self._columns[place] for place in chosen)

    def _pack(
        self, values: FloatArray, parts: Sequence[Counts] | None = None
    ) -> tuple[list[int], float]:
        """Return the columns of the best fleet by these values, each as often as it is taken.

        Args:
            values: ``[C]`` requests a second.
            parts: the only parts that may be taken.

        Returns:
            The columns, and an upper bound of their sum.
        """
        import pulp

        places = [int(place) for place in np.flatnonzero(values > 0)]
        if parts is not None:
            places = [place for place in places if self._columns[place][0] in parts]
        if not places:
            return [], 0.0
        program = pulp.LpProblem("fleet")
        taken = {
            place: program.add_variable(f"x{place}", 0, self._most(place), cat="Integer")
            for place in places
        }
        program += pulp.lpSum(-float(values[place]) * taken[place] for place in places)
        self._limit(program, taken, has_number=parts is None)
        found = solve(program, "highs", gap=0.0, time_limit_s=None)
        chosen = [
            place for place in places for _ in range(round(found.values.get(f"x{place}", 0.0)))
        ]
        return chosen, 0.0 if found.status == "infeasible" else -found.bound

    def _limit(
        self, program: pulp.LpProblem, taken: Mapping[int, pulp.LpVariable], *, has_number: bool
    ) -> None:
        """Limit how often columns are taken: by devices, sequences and the number of replicas."""
        import pulp

        for pool, count in enumerate(self._pools.counts):
            program += (
                pulp.lpSum(int(self._counts[place, pool]) * one for place, one in taken.items())
                <= count
            )
        program += (
            pulp.lpSum(self._columns[place][1] * one for place, one in taken.items())
            <= self._batches[0]
        )
        if self._number is not None and has_number:
            program += pulp.lpSum(taken.values()) == self._number

    def _most(self, place: int) -> int:
        part, size = self._columns[place]
        each = [whole // own for whole, own in zip(self._pools.counts, part, strict=True) if own]
        return min([*each, self._batches[0] // size])

    def _cuts(self) -> dict[str, list[Counts]]:
        """Return other ways to cut the cluster."""
        pools = self._pools
        return {
            "one pipeline": [pools.counts],
            "one replica a node": pools.of_nodes(),
            "one replica a device type": pools.of_types(),
            "one replica a device": pools.of_devices(),
        }

    def result(self, bound: float, command: str) -> FleetPlan:
        """Return the best fleet with its plans."""
        free = self._pools.members()
        replicas = []
        for part, size in self.ordered():
            groups = [free[pool] for pool, count in enumerate(part) for _ in range(count)]
            plan = self._pricer.plan(part, size, command)
            replicas.append(
                PlannedReplica(
                    devices=tuple(group.pop(0) for group in groups),
                    plan=plan,
                    requests_per_s=plan.workload.batch / plan.estimate.latency_s,
                    without=self._without(part, size),
                )
            )
        value = sum(map(self._rate, self.fleet))
        bound = max(bound, value)
        gap = relative_gap(bound, value)
        return FleetPlan(
            replicas=tuple(replicas),
            idle=tuple(sorted(device for group in free for device in group)),
            quality_budget=self._request.quality_budget,
            bound=bound,
            gap=gap,
            status="optimal" if gap <= GAP_ROUNDING else "feasible",
            others=tuple(self._other(*item) for item in self._cuts().items()),
            searches=self._pricer.searches,
        )

    def ordered(self) -> list[Key]:
        """Return parts and batches of the fleet, the fastest first."""
        return sorted(self.fleet, key=self._rate, reverse=True)

    def _without(self, part: Counts, size: int) -> tuple[tuple[str, float], ...]:
        if sum(part) == 1 or self._request.deadline.has_passed:
            return ()
        found = []
        for pool, name in enumerate(self._pools.names()):
            if part[pool]:
                rest = tuple(count - (place == pool) for place, count in enumerate(part))
                price = self._pricer.price(rest, size)
                if price.proven:
                    found.append((name, price.requests_per_s))
        return tuple(found)

    def _rate(self, key: Key) -> float:
        return float(self._lower[self._index[key]])

    def _other(self, name: str, parts: list[Counts]) -> OtherCut:
        chosen, _ = self._pack(self._lower, parts)
        # A bound that is left says that nothing was proven.
        left = any(self._upper[self._index[part, size]] for part in parts for size in self._batches)
        value = float(self._lower[chosen].sum()) if chosen or not left else None
        return OtherCut(name=name, replicas=len(chosen), requests_per_s=value)
