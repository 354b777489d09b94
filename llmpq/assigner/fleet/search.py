"""The best fleet: disjoint parts of a cluster, with the most requests a second in sum.

A set packing problem over parts with a batch each; the batches of all replicas together are at most
the workload's. A part is priced without the others, so replicas never share the cores of a host: it
has cores for the threads of all of them, or one replica. Pricing a part is an exact search of its
own, so parts are priced when needed: an integer program over all parts takes bounds for those that
are not priced, and those that it chooses are priced next. Once it chooses priced parts only, its
fleet is optimal. The obvious ways to cut the cluster are priced first, and bound their own parts.
Where time is short, the clusters without some device types are searched by themselves, so that
devices of little use do not take the time of the others. Of very large clusters not all parts are
considered; the bound then is the sum of the devices' own bounds.

The set packing program is given as arrays: thousands of columns, a row for each pool.

What a part of a cluster is worth as a replica: the requests a second of its best plan.

The plan of a part and a batch is the exact search's for least latency, within the quality budget of
the fleet. A replica's batch is the workload's, its half, its quarter and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmpq.assigner.constraints.resolve import NEVER, BoolArray
from llmpq.assigner.enumeration import micro_batch_pairs
from llmpq.assigner.exact.search import find_exact
from llmpq.assigner.explain.infeasible import SMALLEST
from llmpq.assigner.fleet.partition import DeviceCounts, DevicePools, common
from llmpq.assigner.heuristics.baselines import find_proportional
from llmpq.assigner.milp.search import find_plan
from llmpq.assigner.objective import Assignment, FloatArray, IntArray, evaluate, relative_gap
from llmpq.assigner.planner import plan_of, solve_task
from llmpq.assigner.request import (
    FIRST_PLAN_GAP,
    GAP_ROUNDING,
    OutOfTimeError,
    PlanningTask,
    PlanRequest,
    Progress,
    Solution,
    build_task,
    silent,
)
from llmpq.errors import InfeasibleError, SolverError
from llmpq.spec.plan import OtherCut, Plan, Status

ROUGH_SIZES = 7
"""Micro-batch sizes a phase of a rough price."""
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

    def price(
        self, counts: DeviceCounts, batch: int, share: float = 1.0, *, ends_without: bool = False
    ) -> ReplicaValue:
        """Return the price of a part and a batch, by the exact search.

        Args:
            counts: the part.
            batch: its sequences.
            share: part of the time limit that the search may take; one that was ended is made
                again where it may take more.
            ends_without: whether the search ends in time even before it has a plan.
        """
        key = self._pools.key(counts), batch
        known = self._known.get(key)
        if known is not None and (known.is_final or share <= known.share):
            # Of a part that is equal up to symmetry: which of its devices are used is not known.
            return replace(known, used=counts)
        found = replace(self._search(counts, batch, share, ends_without), share=share)
        if known is not None:
            found = replace(
                found,
                requests_per_s=max(found.requests_per_s, known.requests_per_s),
                bound=min(found.bound, known.bound),
            )
        self._known[key] = found
        return found

    def price_roughly(self, counts: DeviceCounts, batch: int) -> ReplicaValue:
        """Return what a proportional split of a part makes; it does not look at the time limit.

        It takes hundredths of a second, with few micro-batch pairs.
        """
        key = self._pools.key(counts), batch
        if key not in self._known:
            task = build_task(self._of(counts, batch), micro_batch_pairs(batch, ROUGH_SIZES))
            found = _first_plan(task) if holds_model(task) else None
            value = ReplicaValue(0.0, counts, math.inf, is_final=False, share=0.0)
            if found is not None:
                value = replace(self._value(counts, batch, found), is_final=False, share=0.0)
            self._known[key] = value
        return replace(self._known[key], used=counts)

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

    def _search(
        self, counts: DeviceCounts, batch: int, share: float, ends_without: bool
    ) -> ReplicaValue:
        request = self._of(counts, batch)
        if request.time_limit_s is not None:
            deadline = request.deadline.within(request.time_limit_s * share)
            request = replace(request, deadline=deadline)
        task = build_task(request)
        if not holds_model(task):
            return ReplicaValue(0.0, counts, 0.0)
        start = find_proportional(task)
        if start is None and not _has_plan(task):
            return ReplicaValue(0.0, counts, 0.0)
        self.searches += 1
        found = _solution(task, start, ends_without)
        late = request.deadline.has_passed
        if found is None:
            return ReplicaValue(0.0, counts, math.inf if late else 0.0, is_final=not late)
        return replace(self._value(counts, batch, found), is_final=not late)

    def _value(self, counts: DeviceCounts, batch: int, found: Solution) -> ReplicaValue:
        """Return what a solution of a part makes, and keep it."""
        pools = [pool for pool, count in enumerate(counts) if count]
        order = [found.problem.order[place] for place in found.assignment.used_positions()]
        used = tuple(pools[group] for group in order)
        counted = tuple(used.count(pool) for pool in range(len(counts)))
        rate = batch / found.evaluation.latency_s
        # A search of fewer orders than those of a smaller part bounds only its own.
        bound_s = 0.0 if found.order_set == "leading" else found.bound_s or 0.0
        # Bounds of searches that were ended may be below 0 s, and say nothing then.
        bound = batch / bound_s if bound_s > 0 else math.inf
        self._keep(_Placed(counts, used, found), batch, rate)
        self._keep(_Placed(counted, used, found), batch, rate)
        return ReplicaValue(rate, counted, bound)

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
    request = replace(task.request, gap=FIRST_PLAN_GAP, gives_reasons=False)
    try:
        find_exact(replace(task, request=request, pairs=smallest), silent)
    except OutOfTimeError:
        return True
    except InfeasibleError:
        return False
    return True


def _solution(task: PlanningTask, start: Solution | None, ends_without: bool) -> Solution | None:
    """Return the exact search's solution, or a heuristic's when time was over before it had any.

    Args:
        task: of a part.
        start: a plan of it that the exact search starts from.
        ends_without: as of ``ReplicaEvaluator.price``.
    """
    task = replace(task, request=replace(task.request, gives_reasons=False))
    try:
        if task.request.solver == "exact":
            return find_exact(task, silent, start=start, ends_without=ends_without)
        return find_plan(task, silent)
    except OutOfTimeError:
        return _first_plan(task) if start is None else start
    except InfeasibleError:
        return None


def _first_plan(task: PlanningTask) -> Solution | None:
    """Return a heuristic's plan, ``None`` where none was found; it takes no notice of the time."""
    found = find_proportional(task)
    if found is not None or not task.pairs:
        return found
    try:
        return solve_task(
            replace(task, request=replace(task.request, deadline=NEVER)), "adaptive_even"
        )
    except InfeasibleError:
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


ROUNDED_TO = 1e-6
"""Values up to here count as 0: the solver's tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """The best packing.

    Attributes:
        taken: ``[C]`` how often each column is taken, also in part unless whole ones are wanted.
        bound: of the sum of values.
        costs: ``[C]`` by how much the bound falls where a column is taken once, of packings in
            part; else 0.
    """

    taken: FloatArray
    bound: float
    costs: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """What columns take of the cluster; ``C`` columns, ``T`` pools, ``H`` hosts with shared cores.

    Attributes:
        counts: ``[C, T]`` devices of a column.
        sizes: ``[C]`` its sequences.
        core_shares: ``[C, H]`` the part of a host's cores that it takes.
        devices: ``[T]`` devices there are.
        sequences: sequences there are.
        number: of columns to take, ``None`` for any.
    """

    counts: IntArray
    sizes: IntArray
    core_shares: FloatArray
    devices: IntArray
    sequences: int
    number: int | None

    def best(self, values: FloatArray, *, is_whole: bool, time_limit_s: float) -> Packed:
        """Return the best packing.

        Args:
            values: ``[C]``, all positive.
            is_whole: whether columns are taken a whole number of times.
            time_limit_s: of the solver. No column is taken where it finds nothing in time.
        """
        import highspy

        largest = float(values.max())  # for the solver's tolerances
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0),
                            ("mip_abs_gap", 0.0)):  # fmt: skip
            solver.setOptionValue(name, value)
        if math.isfinite(time_limit_s):
            solver.setOptionValue("time_limit", max(0.0, time_limit_s))
        solver.passModel(self._model(values / largest, is_whole=is_whole))
        solver.run()
        outcome, states = solver.getModelStatus(), highspy.HighsModelStatus
        nothing = np.zeros(len(values))
        if outcome in (states.kInfeasible, states.kUnboundedOrInfeasible):
            return Packed(taken=nothing, bound=0.0, costs=nothing)
        if outcome not in (states.kOptimal, states.kTimeLimit):
            text = solver.modelStatusToString(outcome)
            raise SolverError(f"solver 'highs' stopped with '{text}'")
        info, found = solver.getInfo(), solver.getSolution()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Packed(taken=nothing, bound=math.inf, costs=nothing)
        taken = np.array(found.col_value)
        is_optimal = outcome == states.kOptimal
        least = info.mip_dual_bound if is_whole else info.objective_function_value
        return Packed(
            taken=np.where(taken > ROUNDED_TO, taken, 0.0),
            bound=-float(least) * largest if is_whole or is_optimal else math.inf,
            costs=nothing if is_whole else np.maximum(0.0, np.array(found.col_dual)) * largest,
        )

    def _model(self, values: FloatArray, *, is_whole: bool) -> Any:
        """Return the program in the solver's form."""
        import highspy

        numbers = [] if self.number is None else [np.ones(len(values))]
        shares = self.core_shares.T
        rows = np.vstack([self.counts.T, shares, self.sizes, *numbers]).astype(np.float64)  # [R, C]
        upper = np.array(
            [*self.devices, *np.ones(len(shares)), self.sequences, *([self.number] * len(numbers))],
            dtype=np.float64,
        )
        lower = np.zeros(len(upper))
        if numbers:
            lower[-1] = upper[-1]
        columns, places = np.nonzero(rows.T)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(values), len(rows)
        model.col_cost_ = -values
        model.col_lower_ = np.zeros(len(values))
        model.col_upper_ = np.full(len(values), float(self.sequences))
        model.row_lower_, model.row_upper_ = lower, upper
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_ = np.searchsorted(columns, np.arange(len(values) + 1))
        model.a_matrix_.index_ = places
        model.a_matrix_.value_ = rows.T[columns, places]
        if is_whole:
            model.integrality_ = [highspy.HighsVarType.kInteger] * len(values)
        return model


LEAST_PACKING_S = 0.2
"""Seconds of an integer program where the time is up."""
ROUGH_BATCHES = 8
"""Batches up to which each is priced roughly, whatever the time limit."""
ROUGH_ERROR = 0.25
"""By how much more an exact search may make than a proportional split, as is assumed."""
FIRST_SHARE, LAST_SHARE = 0.05, 0.25
"""Parts of the time limit that a first and a second search of a part may take."""
CUTS_UNTIL, WHOLE_UNTIL, TYPES_UNTIL, REST_UNTIL = 0.25, 0.5, 0.75, 0.85
"""Shares of the time limit: to price the obvious cuts, to search the whole cluster, the clusters
without some device types, and the whole cluster again. In the rest, searches of the fleet's own
parts that were ended are made again, and then those of the other cuts."""


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
class FleetLimits:
    """What keeps a fleet from being better, or from being proven the best.

    Attributes:
        time_limit_s: the time limit, where it ended the search.
        planned, candidates: parts with a batch that were planned, and that were considered.
        is_complete: whether all parts were considered.
        has_all_orders: whether all distinct orders of devices were, in every part.
        budget, bits: where the quality budget leaves no layer fewer bits, the least budget that
            allows all layers at the next fewer bits, and these.
    """

    time_limit_s: float | None
    planned: int
    candidates: int
    is_complete: bool
    has_all_orders: bool
    budget: float | None = None
    bits: int | None = None


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
        limits: what keeps the fleet from being better, or from being proven the best.
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
    limits: FleetLimits
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
        self._pools = DevicePools.of(request.cluster)
        parts, self._is_complete = self._pools.parts()
        self._pricer = ReplicaEvaluator(request, self._pools)
        self._batches = tuple(batches(request.workload.batch))
        self._has_shared_cores = any(node.cores is not None for node in request.cluster.nodes)
        self._columns: list[Key] = []
        self._index: dict[Key, int] = {}
        self._keys: dict[DeviceCounts, str] = {}
        self._equal_parts: dict[str, list[DeviceCounts]] = {}
        self._counts: IntArray = np.zeros((0, len(self._pools.counts)), dtype=np.int64)
        self._sizes: IntArray = np.zeros(0, dtype=np.int64)
        self._core_shares: FloatArray = self._pools.core_shares([])
        self._upper: FloatArray = np.zeros(0)
        self._lower: FloatArray = np.zeros(0)
        self._is_priced: BoolArray = np.zeros(0, dtype=np.bool_)
        self._is_final: BoolArray = np.zeros(0, dtype=np.bool_)
        self._add(parts)
        whole = np.array([self._pools.counts])
        self.bound = max(float(self._pricer.bounds(whole, size)[0]) for size in self._batches)

    def run(self) -> None:
        """Price columns until the best fleet is known, or time is over."""
        self.price_first()
        if self._is_complete:
            self._improve(WHOLE_UNTIL)
        if not self.is_proven:
            kept = self._pools.without_types()
            for number, counts in enumerate(kept, start=1):
                share = WHOLE_UNTIL + (TYPES_UNTIL - WHOLE_UNTIL) * number / len(kept)
                self._improve(share, self._is_inside(counts))
            self._improve(REST_UNTIL)
        self._finish()

    @property
    def is_proven(self) -> bool:
        """Whether no fleet makes more."""
        return bool(self.value) and relative_gap(self.bound, self.value) <= GAP_ROUNDING

    def price_first(self) -> None:
        """Price the obvious ways to cut the cluster, and what is left without some types.

        Each is priced roughly, whatever the time limit: a cluster then has every rough fleet that
        it has without some types. Of many batches that holds for every second one. What the best
        fleets take by these prices is searched next.
        """
        cuts = [part for parts in self._cuts().values() for part in parts]
        kept = [self._pools.counts, *self._pools.without_types()]
        parts = list(dict.fromkeys(filter(any, (common(cut, own) for cut in cuts for own in kept))))
        self._add([part for part in parts if (part, 1) not in self._index])
        # The smallest of a kind first: they are planned in a moment.
        ordered = sorted(parts, key=sum)
        # The others bound what their parts make; the largest bound the most.
        rest = [self._index[part, size] for part in ordered[::-1] for size in self._batches]
        is_few = len(self._batches) <= ROUGH_BATCHES
        always = self._batches if is_few else self._batches[::2]
        for place in sorted(rest, key=lambda place: self._columns[place][1] not in always):
            if self._columns[place][1] in always or not self._is_late(CUTS_UNTIL):
                rough = self._pricer.price_roughly(*self._columns[place])
                self._lower[place] = max(self._lower[place], rough.requests_per_s)
        self._keep()
        self._price_promising()
        near = self._near_share(ordered)
        for place in (*near, *rest):
            if self._is_late(CUTS_UNTIL):
                break
            self._price(place)
        self._keep()

    def _price_promising(self) -> None:
        """Price what the best fleet takes where other prices may rise by ``ROUGH_ERROR``.

        What its sum may rise by the most is priced next; a search that was ended is made again.
        """
        while not self._is_late(REST_UNTIL):
            hoped = np.minimum(self._upper, self._lower * (1 + ROUGH_ERROR))
            chosen, _ = self._pack(np.where(self._is_final, self._lower, hoped))
            gains: dict[int, float] = {}
            for place in chosen:
                if not self._is_final[place]:
                    gain = float(hoped[place] - self._lower[place])
                    gains[place] = gains.get(place, 0.0) + gain
            if not gains:
                break
            self._price(max(gains, key=lambda place: gains[place]))
            self._keep()

    def _near_share(self, parts: Sequence[DeviceCounts]) -> list[int]:
        """Return the columns of parts with batches near their share of all devices' speed."""
        rates = self._pricer.bounds(np.array(parts), self._batches[0])
        shares = self._batches[0] * rates / self.bound if self.bound else rates
        return [
            self._index[part, size]
            for part, wanted in zip(parts, shares, strict=True)
            for size in self._batches
            if size / 2 <= wanted <= 2 * size
        ]

    def _improve(
        self, until: float, inside: BoolArray | None = None, *, has_number: bool = True
    ) -> None:
        """Price what the best fleet by bounds takes, until its prices are final.

        Args:
            until: share of the time limit at which to stop.
            inside: ``[C]`` the only columns that may be taken, ``None`` for all.
            has_number: whether it has the number of replicas that is wanted.
        """
        while not self._is_late(until):
            values = np.where(self._is_final, self._lower, self._upper)
            chosen, bound = self._promising(values, inside, has_number=has_number)
            if inside is None and self._is_complete:
                is_open = (self._is_final & ~self._is_known()).any()
                self.bound = min(self.bound, self._pack(self._upper)[1] if is_open else bound)
            unknown = [place for place in chosen if not self._is_final[place]]
            if not unknown:
                break
            for place in dict.fromkeys(unknown):
                self._price(place)
            self._keep()

    def _promising(
        self, values: FloatArray, inside: BoolArray | None, *, has_number: bool
    ) -> tuple[list[int], float]:
        """Return columns that the best fleet may take by these values, and a bound of its sum.

        These are what a fleet takes that may take parts of columns, which is a matter of
        milliseconds; once all of them are final, what a fleet of whole columns takes.
        """
        places = self._positive(values, inside)
        found = self._packed(values, places, has_number=has_number, is_whole=False)
        chosen = places[found.taken > 0]
        if not self._is_final[chosen].all() or not (self._is_complete or inside is not None):
            return chosen.tolist(), found.bound
        # Columns with which the bound falls below the best fleet cannot be of a better one.
        least = self.value if has_number else 0.0
        kept = places[found.bound - found.costs >= least * (1 - GAP_ROUNDING)]
        whole = self._packed(values, kept, has_number=has_number, is_whole=True)
        return kept[whole.taken > 0].tolist(), max(least, min(found.bound, whole.bound))

    def _finish(self) -> None:
        """Price the fleet's own columns again, then those of the other cuts, while time is left.

        With better prices another fleet may be the best, so it is chosen again.
        """
        while not self._request.deadline.has_passed:
            places = [self._index[key] for key in dict.fromkeys(self.fleet)]
            unknown = [place for place in places if not self._is_final[place]]
            if not unknown:
                break
            for place in unknown:
                self._price(place)
            self._keep()
        for parts in self._cuts().values():
            self._improve(1.0, self._is_of(parts), has_number=False)

    def _is_late(self, share: float) -> bool:
        """Whether this share of the time limit is over."""
        limit_s = self._request.time_limit_s or 0.0
        return self._request.deadline.left_s <= (1 - share) * limit_s

    def _is_of(self, parts: Sequence[DeviceCounts]) -> BoolArray:
        """Return ``[C]`` which columns are of these parts."""
        return np.array([part in parts for part, _ in self._columns])

    def _add(self, parts: Sequence[DeviceCounts]) -> None:
        """Add the columns of parts, with every batch."""
        if not parts:
            return
        rows = np.array(parts, dtype=np.int64)
        for part in parts:
            self._keys[part] = self._pools.key(part)
            self._equal_parts.setdefault(self._keys[part], []).append(part)
        for size in self._batches:
            first = len(self._columns)
            own = [(part, size) for part in parts]
            self._columns += own
            self._index |= {key: first + place for place, key in enumerate(own)}
            self._counts = np.vstack([self._counts, rows])
            self._sizes = np.append(self._sizes, np.full(len(parts), size))
            self._core_shares = np.vstack([self._core_shares, self._pools.core_shares(parts)])
            self._upper = np.append(self._upper, self._pricer.bounds(rows, size))
        more = len(self._columns) - len(self._lower)
        self._lower = np.append(self._lower, np.zeros(more))
        self._is_priced = np.append(self._is_priced, np.zeros(more, dtype=np.bool_))
        self._is_final = np.append(self._is_final, np.zeros(more, dtype=np.bool_))

    def _price(self, place: int) -> None:
        """Plan a column; the second time with more time, where the first search was ended."""
        no_time = self._request.deadline.has_passed
        if self._is_final[place] or not self._upper[place] or no_time:
            return
        part, size = self._columns[place]
        is_last = bool(self._is_priced[place])
        share = LAST_SHARE if is_last else FIRST_SHARE
        # Without any fleet so far, a plan is worth more than the share.
        found = self._pricer.price(part, size, share, ends_without=bool(self.value))
        is_final = is_last or found.is_final or found.proven
        for equal in self._equal_to(place):
            self._set(equal, found.requests_per_s, is_final=is_final)
            self._limit_upper(equal, found.bound)
        used = self._index.get((found.used, size))
        if found.requests_per_s and used is not None and used != place:
            is_final = found.proven and not self._has_shared_cores
            for equal in self._equal_to(used):
                self._set(equal, found.requests_per_s, is_final=is_final)
        best = 1 / self.value if self.value else None
        self._progress(int(self._is_priced.sum()), len(self._columns), best)

    def _equal_to(self, place: int) -> list[int]:
        """Return the columns of equal parts with the same batch, itself among them."""
        part, size = self._columns[place]
        return [self._index[other, size] for other in self._equal_parts[self._keys[part]]]

    def _limit_upper(self, place: int, bound: float) -> None:
        """Lower the bounds of a column and of what makes no more: fewer devices, same batch.

        What does not hold the model with a batch, does not with a larger one.
        """
        part, size = self._columns[place]
        # Where workers share a host's cores, fewer workers may make more.
        smaller = self._is_of([part]) if self._has_shared_cores else self._is_inside(part)
        inside = smaller & (self._sizes == size if bound else self._sizes >= size)
        self._upper[inside] = np.minimum(self._upper[inside], bound)

    def _is_known(self) -> BoolArray:
        """Return ``[C]`` which columns are proven to make no more."""
        found: BoolArray = self._upper <= self._lower * (1 + GAP_ROUNDING)
        return found

    def _is_inside(self, counts: DeviceCounts) -> BoolArray:
        """Return ``[C]`` which columns have no other devices."""
        found: BoolArray = np.all(self._counts <= np.array(counts), axis=1)
        return found

    def _set(self, place: int, rate: float, *, is_final: bool) -> None:
        self._lower[place] = max(self._lower[place], rate)
        self._is_priced[place] = True
        self._is_final[place] |= is_final

    def _keep(self) -> None:
        """Keep the best fleet of priced columns."""
        chosen, _ = self._pack(self._lower)
        value = float(self._lower[chosen].sum())
        if value > self.value * (1 + GAP_ROUNDING):
            self.fleet = tuple(self._columns[place] for place in chosen)
        self.value = sum(map(self._rate, self.fleet))

    def _pack(
        self, values: FloatArray, inside: BoolArray | None = None, *, has_number: bool = True
    ) -> tuple[list[int], float]:
        """Return the columns of the best fleet by these values, each as often as it is taken.

        Args:
            values: ``[C]`` requests a second.
            inside: ``[C]`` the only columns that may be taken, ``None`` for all.
            has_number: whether it has the number of replicas that is wanted.

        Returns:
            The columns, and an upper bound of their sum.
        """
        places = self._positive(values, inside)
        found = self._packed(values, places, has_number=has_number, is_whole=True)
        taken = np.round(found.taken).astype(np.int64)
        return np.repeat(places, taken).tolist(), found.bound

    def _positive(self, values: FloatArray, inside: BoolArray | None) -> IntArray:
        """Return the columns with a value, inside of others where these are given."""
        return np.flatnonzero(values > 0 if inside is None else (values > 0) & inside)

    def _packed(
        self, values: FloatArray, places: IntArray, *, has_number: bool, is_whole: bool
    ) -> Packed:
        """Return the best packing of columns."""
        if not len(places):
            return Packed(taken=np.zeros(0), bound=0.0, costs=np.zeros(0))
        packing = Packing(
            counts=self._counts[places],
            sizes=self._sizes[places],
            core_shares=self._core_shares[places],
            devices=np.array(self._pools.counts),
            sequences=self._batches[0],
            number=self._number if has_number else None,
        )
        left_s = max(LEAST_PACKING_S, self._request.deadline.left_s)
        return packing.best(values[places], is_whole=is_whole, time_limit_s=left_s)

    def _cuts(self) -> dict[str, list[DeviceCounts]]:
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
        # A part whose search was ended is one, too.
        is_late = self._is_late(REST_UNTIL) or (self._is_final & ~self._is_known()).any()
        return FleetPlan(
            replicas=tuple(replicas),
            idle=tuple(sorted(device for group in free for device in group)),
            quality_budget=self._request.quality_budget,
            bound=bound,
            gap=gap,
            status="optimal" if gap <= GAP_ROUNDING else "feasible",
            others=tuple(self._other(*item) for item in self._cuts().items()),
            searches=self._pricer.searches,
            limits=FleetLimits(
                time_limit_s=self._request.time_limit_s if is_late else None,
                planned=int(self._is_priced.sum()),
                candidates=len(self._columns),
                is_complete=self._is_complete,
                has_all_orders=self._request.orders == "all",
            ),
        )

    def ordered(self) -> list[Key]:
        """Return parts and batches of the fleet, the fastest first."""
        return sorted(self.fleet, key=self._rate, reverse=True)

    def _without(self, part: DeviceCounts, size: int) -> tuple[tuple[str, float], ...]:
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

    def _other(self, name: str, parts: list[DeviceCounts]) -> OtherCut:
        inside = self._is_of(parts)
        chosen, _ = self._pack(self._lower, inside, has_number=False)
        # A bound that is left says that nothing was proven.
        is_known = bool(chosen) or not self._upper[inside].any()
        value = float(self._lower[chosen].sum()) if is_known else None
        return OtherCut(name=name, replicas=len(chosen), requests_per_s=value)
