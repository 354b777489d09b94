"""The exact search: best-first over micro-batch pairs, all device orders of a pair at once.

The pair of least proven bound takes one more step: first from its bound without contiguity to the
lattice's, by a short and then a long ascent; then to levels above it, by enumerating every plan
below a level as labels over stage columns (``csrc/search.c``). When the least bound passes the
incumbent, the incumbent is the best plan. At the time limit, or when columns or labels exceed their
limit, the incumbent is returned with the bound proven so far.

Bounds are Lagrangian: relaxing "no stage or link is slower than the maximum" and "a stage fits in
its device" leaves a shortest path over the order lattice (``csrc/lagrangian.c``); without
contiguity every layer chooses its group and bitwidth alone (``csrc/dual.c``), and those multipliers
start the lattice's. All multipliers within their totals prove a bound. A plan near the relaxation
is the first incumbent.

Array legend: ``T`` groups of equal devices, ``K`` layer kinds, ``B`` bitwidths, ``L`` layers.
A device *class* is a group, or (``T`` further on) the same group as the first device: the master.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from llmpq.assigner.constraints.resolve import NEVER, Deadline, obeys
from llmpq.assigner.enumeration import layers_that_fit, most_layers
from llmpq.assigner.exact import native
from llmpq.assigner.exact.lattice import OrderLattice, Orders, build_lattice
from llmpq.assigner.exact.native import NotCoveredError
from llmpq.assigner.explain.infeasible import SMALLEST, explain_budget, memory_error
from llmpq.assigner.heuristics.baselines import find_proportional
from llmpq.assigner.heuristics.transfer import find_transfer
from llmpq.assigner.milp.search import find_plan
from llmpq.assigner.objective import (
    QUALITY_SLACK,
    Assignment,
    AssignmentProblem,
    Evaluation,
    FloatArray,
    PairCosts,
    SearchSpace,
    assignment_of_counts,
    evaluate,
    is_feasible,
    relative_gap,
)
from llmpq.assigner.request import (
    DEFAULT_GAP,
    FIRST_PLAN_GAP,
    GAP_ROUNDING,
    KEY_BITS,
    NO_PLAN,
    OutOfTimeError,
    PlanningTask,
    Progress,
    Solution,
    silent,
)
from llmpq.errors import InfeasibleError, SolverError
from llmpq.spec.plan import Formula, MicroBatching, OrderSet
from llmpq.spec.runtime_constants import STREAM_BUFFERS

MAX_BITS = 64


def key_radices(space: SearchSpace) -> tuple[int, ...]:
    """Return ``[K, B]`` flat: the part of one layer of a kind and width in a stage's key of counts.

    0 for the last width, whose count follows from the stage's length.

    Raises:
        NotCoveredError: the keys do not fit in 63 bits.
    """
    place, found = 1, []
    kinds, num_kinds = space.kinds.tolist(), space.pairs[0].prefill_s.shape[1]
    for kind in range(num_kinds):
        for width in range(len(space.bits)):
            last = width + 1 == len(space.bits)
            found.append(0 if last else place)
            place *= 1 if last else kinds.count(kind) + 1
    if place.bit_length() > KEY_BITS or len(space.bits) > MAX_BITS:
        raise NotCoveredError(
            f"{num_kinds} kinds of layers at {len(space.bits)} bitwidths: found {place} ways to "
            f"count a stage, expected at most 2^{KEY_BITS}"
        )
    return tuple(found)


def counts_of_key(space: SearchSpace, key: int, first: int, end: int) -> FloatArray:
    """Return ``[K, B]`` layers per kind and width of the stage ``[first, end)``, from its key."""
    found = np.zeros((space.pairs[0].prefill_s.shape[1], len(space.bits)))
    places = [(place, index) for index, place in enumerate(key_radices(space)) if place]
    for place, index in reversed(places):
        found.flat[index], key = divmod(key, place)
    for kind, row in enumerate(found):
        row[-1] = (space.kinds[first:end] == kind).sum() - row[:-1].sum()
    return found


class NativePair:
    """One pair as the core's structure, which points into arrays of this object.

    ``split`` is the share of reading in the bounds of stages that may read weights from disk,
    ``streams`` whether there are any. ``floor`` is that of ``native.noncontiguous_bound``; ``fits``
    whether the smallest layers fit in all devices together: necessary, and with one kind of layers
    sufficient.
    """

    def __init__(self, space: SearchSpace, costs: PairCosts, split: float = 0.0) -> None:
        self.costs = costs
        self.streams = bool(costs.stream_bytes.any())
        self.problem = native.PairProblem()
        no_master = np.zeros(space.num_groups)
        self._held = native.fill(
            self.problem,
            groups=space.num_groups,
            kinds=costs.prefill_s.shape[1],
            bits=len(space.bits),
            layers=space.num_layers,
            kind=space.kinds,
            prefill=costs.prefill_s,
            decode=costs.decode_s,
            bytes=costs.layer_bytes,
            capacity=np.concatenate([costs.capacity_bytes, costs.first_capacity_bytes]),
            host=costs.host_bytes,
            host_capacity=costs.host_capacity_bytes,
            streamable=costs.stream_bytes,
            stream_prefill=costs.stream_prefill_s,
            stream_decode=costs.stream_decode_s,
            split=np.where(costs.stream_bytes.any(axis=(1, 2)), split, 0.0),
            buffers=STREAM_BUFFERS,
            master_prefill=np.concatenate([no_master, costs.master_prefill_s]),
            master_decode=np.concatenate([no_master, costs.master_decode_s]),
            send_prefill=np.stack([costs.send_prefill_s, costs.return_prefill_s]),
            send_decode=np.stack([costs.send_decode_s, costs.return_decode_s]),
            omega=space.omega,
            **({} if space.limits is None else {"allowed": space.allowed}),
            theta=space.theta_s,
            budget=_budget(space),
            **_weights(costs, space.formula),
        )
        counts = np.array(space.group_counts)
        self.fits = bool(layers_that_fit(costs, counts).max() >= space.num_layers) and (
            most_layers(costs, counts, space.kinds.tolist()) == space.num_layers
        )
        smallest = np.maximum(1, costs.held_bytes[:, np.unique(space.kinds)].min(axis=(1, 2)))
        held = np.maximum(0, costs.capacity_bytes) // smallest
        most = np.sort(np.repeat(held, counts))[::-1].cumsum()
        fewest = 1 + int((most < space.num_layers).sum())
        alone = np.diag(counts == 1)  # a group of one device has no link to itself
        sends = [
            float(np.where(alone, np.inf, send).min()) if counts.sum() > 1 else 0.0
            for send in (costs.send_prefill_s, costs.send_decode_s)
        ]
        self.floor = (held > 0).astype(np.int32), np.array(sends), fewest


def _budget(space: SearchSpace) -> float:
    """Return the largest degradation that ``objective.within_budget`` accepts."""
    if space.quality_budget is None:
        return math.inf
    return space.quality_budget * (1 + QUALITY_SLACK) + 1e-15


def _weights(costs: PairCosts, formula: Formula) -> dict[str, object]:
    """Return the weights of maxima and sums in the latency formula (``objective``)."""
    rounds = costs.new_tokens - 1
    steady = formula == "steady"
    batches = costs.decode_batches if steady else costs.decode_batches - 1
    sums = (0.0, float(rounds)) if steady else (1.0, 1.0)
    return {
        "peak_prefill": float(costs.prefill_batches - 1),
        "peak_decode": float(rounds * batches),
        "sum_weight": sums,
        "rounds": float(costs.decode_batches),
        "steady": int(steady and rounds > 0),
        "links_in_sums": int(steady),
    }


class Incumbent(NamedTuple):
    """An evaluated plan of one pair and order."""

    problem: AssignmentProblem
    assignment: Assignment
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known before a search.

    Attributes:
        first_plan: returns a feasible plan of the space, or ``None``; called unless the first
            bounds settle all pairs.
        below_s: plans whose objective is not below this do not count.
    """

    first_plan: Callable[[], Incumbent | None] = lambda: None
    below_s: float = math.inf


NOTHING_KNOWN = Known()


def _schedule(
    iterations: int, patience: int, step: float, shrink: float, momentum: float
) -> native.Ascent:
    return native.Ascent(
        iterations=iterations,
        patience=patience,
        restart=1,
        step=step,
        shrink=shrink,
        momentum=momentum,
        smallest_step=1e-5,
    )


NONCONTIGUOUS = _schedule(200, 25, 0.1, 0.6, 0.85)
NONCONTIGUOUS_OUT_OF_TIME = _schedule(15, 25, 0.1, 0.6, 0.85)
"""A few per cent below ``NONCONTIGUOUS`` for a fifth of its work."""
SHORT = (_schedule(150, 25, 0.03, 0.7, 0.9),)
LONG = (
    _schedule(1200, 50, 0.05, 0.7, 0.9),
    _schedule(1200, 50, 0.03, 0.7, 0.0),
    _schedule(1200, 40, 0.03, 0.7, 0.9),
)
"""Deflected and plain subgradient steps in turn: each continues where the other stalls."""


def start_multipliers(space: SearchSpace, pair: NativePair) -> FloatArray:
    """Return multipliers that share the weight of each maximum evenly over all devices."""
    size = space.num_groups
    found = np.zeros(7 * size + 3)
    devices = sum(space.group_counts)
    found[:size] = pair.problem.peak_prefill / devices
    found[2 * size : 3 * size] = pair.problem.peak_decode / devices
    return found


def noncontiguous_bound(
    space: SearchSpace,
    pair: NativePair,
    lattice: OrderLattice,
    warm: tuple[NativePair, FloatArray],
    steps: native.Ascent = NONCONTIGUOUS,
) -> tuple[float, FloatArray]:
    """Return the bound without contiguity, and its multipliers.

    ``warm`` is another pair and its multipliers to start from, scaled to this pair's totals.
    """
    size = space.num_groups
    other, multipliers = warm
    found = multipliers.copy()
    parts = slice(0, 2 * size), slice(2 * size, 4 * size + 1)
    for part, name in zip(parts, ("peak_prefill", "peak_decode"), strict=True):
        total, old_total = getattr(pair.problem, name), getattr(other.problem, name)
        if old_total > 0:
            found[part] *= total / old_total
        else:
            found[part] = start_multipliers(space, pair)[part]
    bound = native.noncontiguous_bound(pair.problem, lattice.graph, pair.floor, found, steps)
    return bound, found


def lattice_multipliers(space: SearchSpace, multipliers: FloatArray) -> FloatArray:
    """Return the lattice's first multipliers, with the master's memory as that of its group."""
    size = space.num_groups
    found = multipliers.copy()
    found[size : 2 * size] = found[3 * size : 4 * size] = 0.0
    found[5 * size + 1 : 6 * size + 1] = found[4 * size + 1 : 5 * size + 1]
    return found


def repaired_plan(
    space: SearchSpace, pair: NativePair, lattice: OrderLattice, multipliers: FloatArray
) -> Incumbent | None:
    """Return a feasible plan near the one that attains the bound, ``None`` without one.

    Layers over memory are narrowed where that costs least a byte, and free memory is used.
    """
    stages, choice = native.relaxed_plan(pair.problem, lattice.graph, multipliers)
    if not len(stages):
        return None
    order = tuple(lattice.node_group[node] for node, _, _ in stages.tolist())
    problem = space.problem(pair.costs, order)
    widths = choice.astype(np.int64)
    relaxed = widths.copy()
    positions = np.zeros(space.num_layers, dtype=np.int64)
    for position, (_, first, end) in enumerate(stages.tolist()):
        positions[first:end] = position
        prices = _prices(space, pair, order[position], multipliers)[first:end]
        cells = order[position], space.kinds[first:end]
        sizes = np.stack([pair.costs.layer_bytes[cells], pair.costs.host_bytes[cells]])
        room = problem.capacity_bytes(position), problem.host_capacity_bytes(position)
        widths[first:end] = _fitted(widths[first:end], prices, sizes, np.array(room))
    best: Incumbent | None = None
    for chosen in (widths, relaxed) if pair.streams else (widths,):
        assignment = Assignment(tuple(positions.tolist()), tuple(chosen.tolist()))
        if not obeys(space.limits, order, assignment.positions, assignment.widths):
            continue
        found = evaluate(problem, assignment)
        is_better = best is None or found.objective_s < best.evaluation.objective_s
        if is_feasible(problem, found) and is_better:
            best = Incumbent(problem, assignment, found)
    return best


def _prices(
    space: SearchSpace, pair: NativePair, group: int, multipliers: FloatArray
) -> FloatArray:
    """Return ``[L, B]`` the Lagrangian cost of a layer on a group, without memory."""
    size = space.num_groups
    sums = pair.problem.sum_weight[0] + multipliers[4 * size]
    base = (1 + multipliers[group]) * pair.costs.prefill_s[group]
    base = base + (sums + multipliers[2 * size + group]) * pair.costs.decode_s[group]
    prices: FloatArray = (
        base[space.kinds] + (space.theta_s + multipliers[7 * size + 1]) * space.omega
    )
    return np.where(space.allowed[group], prices, np.inf)


def _fitted(
    widths: np.ndarray, prices: FloatArray, sizes: np.ndarray, capacities: np.ndarray
) -> np.ndarray:
    """Return widths ``[M]`` near ``widths`` that fit in both memories, where such are found.

    Args:
        widths: of the layers of a stage.
        prices: ``[M, B]`` of its layers.
        sizes: ``[2, M, B]`` bytes of a layer in the memory of the device, and of its host.
        capacities: ``[2]`` of both.
    """
    widths, rows = widths.copy(), np.arange(len(widths))
    unit = np.maximum(1, capacities)[:, None, None]
    while len(widths):
        now = sizes[:, rows, widths]
        over = now.sum(axis=1) - capacities
        after = over[:, None, None] + sizes - now[:, :, None]
        # Bytes over both memories, each relative to its own.
        excess = (np.maximum(0, after) / unit).sum(axis=0)
        dearer = prices - prices[rows, widths][:, None]
        with np.errstate(over="ignore"):  # prices of widths that no quality allows
            if (over > 0).any():
                freed = (np.maximum(0, over) / unit[:, 0, 0]).sum() - excess
                rate = np.where(freed > 0, dearer / np.where(freed > 0, freed, 1.0), np.inf)
            else:
                taken = (np.maximum(0, sizes - now[:, :, None]) / unit).sum(axis=0)
                gains = (dearer < 0) & (excess <= 0)
                rate = np.where(gains, dearer, np.inf) / np.maximum(taken, 1e-9)
        if rate.min() == np.inf:
            break
        layer, width = np.unravel_index(int(rate.argmin()), rate.shape)
        widths[layer] = width
    return widths


MAX_COLUMNS = 2_000_000
MAX_LABELS = 4_000_000
"""Limits of one label search, 100 and 250 MB; beyond them the pair stays open with its bound."""

PASS_LABELS = 1_500_000
"""Labels at which a search branches on the largest prefill time, which tightens its bounds."""

VALUE_TOLERANCE = 1e-9
"""Largest relative difference between the core's value and ``objective``'s."""

ROUNDING = 1e-10
"""Relative difference below which two values are equal."""

LEVELS = (0.003, 0.02, 0.1, 1.0, 10.0, math.inf)
"""How far above a pair's lattice bound to enumerate, visit by visit, relative to it."""

BEAM = 24
"""Labels that the first, inexact run of a level keeps at one node and layer."""

SPLITS = (0.3, 0.6, 0.8, 0.9, 0.95, 1.0)
"""Shares of reading that the bound without contiguity is tried with, beside 0."""

_ASCENTS = (SHORT, LONG)

Reason = Literal["memory", "noncontiguous", "lattice", "search", "open"]
"""Why a pair needs no further search: no plan of it fits; its bound without contiguity, or over all
orders, is no lower than the best plan; every plan below that was enumerated; or it is open (a limit
of time or memory was reached), with a proven bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairProof:
    """The certificate of one micro-batch pair: no plan of it costs less than ``bound_s``.

    ``multipliers`` attain a ``noncontiguous`` or ``lattice`` bound, in the core's layout; they are
    empty for other reasons.
    """

    micro_batching: MicroBatching
    bound_s: float
    reason: Reason
    multipliers: tuple[float, ...] = ()


@dataclass(slots=True, kw_only=True)
class SearchStats:
    """Numbers of pairs, nodes, columns and labels of an exact search.

    ``ascended`` and ``searched`` count pairs whose lattice bound was computed, and whose plans were
    enumerated; ``nodes`` those of the order lattice; ``columns`` and ``labels`` the most stage
    columns and partial plans in memory at once.
    """

    pairs: int
    nodes: int
    ascended: int = 0
    searched: int = 0
    columns: int = 0
    labels: int = 0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactResult:
    """A plan and its certificate.

    The problem's order names the used devices only. No plan of the whole space under any of the
    ``orders`` costs less than ``bound_s``; ``proofs`` has one entry a pair, in the order of the
    space. ``num_orders`` are those of all devices up to symmetry.
    """

    problem: AssignmentProblem
    assignment: Assignment
    evaluation: Evaluation
    bound_s: float
    proofs: tuple[PairProof, ...]
    stats: SearchStats
    orders: OrderSet
    num_orders: int

    @property
    def value_s(self) -> float:
        """The plan's objective."""
        return self.evaluation.objective_s

    @property
    def gap(self) -> float:
        """The optimality gap."""
        return relative_gap(self.value_s, self.bound_s)


@dataclass(slots=True)
class _Candidate:
    """One pair until it is closed.

    Attributes:
        bound_s, multipliers: proven so far, and what proves it or the lattice's bound.
        visits: steps so far: short ascent, long ascent, then enumeration of rising levels.
        base_s: lattice bound; the levels of enumeration are relative to it.
        failed_s: lowest level at which enumeration exceeded a limit.
    """

    index: int
    pair: NativePair
    bound_s: float
    multipliers: FloatArray
    reason: Reason = "open"
    visits: int = 0
    base_s: float = 0.0
    failed_s: float = math.inf


def solve_exact(  # noqa: PLR0913  where to start, and when to end
    space: SearchSpace,
    *,
    orders: Orders,
    gap: float = 0.0,
    deadline: Deadline = NEVER,
    progress: Progress = silent,
    known: Known = NOTHING_KNOWN,
    ends_without: bool = False,
) -> ExactResult:
    """Minimise latency plus priced degradation over pairs, orders, placements and bitwidths.

    Stops at the relative optimality ``gap``. After the deadline the core is not compiled, pairs are
    bounded in fewer steps, and the best or the first plan is returned with its bound. With
    ``ends_without``, the search ends at the deadline even before it has a plan.

    Raises:
        NotCoveredError: the exact search does not support the problem.
        InfeasibleError: no plan exists; an ``OutOfTimeError`` when that is not known.
        SolverError: the core's value differs from ``objective``'s.
    """
    native.prepare(deadline.left_s)
    key_radices(space)
    search = _Search(space, build_lattice(space, orders), gap, deadline, ends_without)
    search.best_s = known.below_s
    search.run(progress, known.first_plan)
    return search.result()


class _Search:
    def __init__(
        self,
        space: SearchSpace,
        lattice: OrderLattice,
        gap: float,
        deadline: Deadline,
        ends_without: bool,
    ) -> None:
        self.space = space
        self.lattice = lattice
        self.keep = 1 - max(gap, ROUNDING)
        self.started = time.monotonic()
        self.deadline = deadline
        self.ends_without = ends_without
        self.best: Incumbent | None = None
        self.best_s = math.inf
        self.stats = SearchStats(pairs=len(space.pairs), nodes=int(lattice.graph.nodes))
        self.candidates: list[_Candidate] = []

    @property
    def _needs_plan(self) -> bool:
        """Whether the search goes on after the deadline."""
        return self.best is None and not self.ends_without

    @property
    def cutoff_s(self) -> float:
        return self.best_s * self.keep

    def run(self, progress: Progress, first_plan: Callable[[], Incumbent | None]) -> None:
        """Visit the pair of least bound until that bound cannot win."""
        self._bound_without_contiguity()
        heap = [(c.bound_s, c.index, c) for c in self.candidates if c.reason == "open"]
        heapq.heapify(heap)
        if heap and heap[0][0] < self.cutoff_s:
            self._offer(first_plan())
        total, parked = len(heap), []
        while heap and (self.deadline.left_s > 0 or self._needs_plan):
            candidate = heapq.heappop(heap)[2]
            progress(total - len(heap) - 1, total, self.best_s if self.best else None)
            if candidate.bound_s >= self.cutoff_s:
                _close(candidate)
            elif self._visit(candidate):
                heapq.heappush(heap, (candidate.bound_s, candidate.index, candidate))
            elif candidate.reason == "open":
                parked.append(candidate)
            if self.deadline.left_s <= 0 and candidate.visits > len(_ASCENTS):
                break
        for candidate in parked:
            self._retry(candidate)
        progress(total, total, self.best_s if self.best else None)

    def result(self) -> ExactResult:
        if self.best is None:
            if any(item.reason == "open" for item in self.candidates):
                raise OutOfTimeError(
                    "the exact search found no plan within its limits of time and memory; "
                    "raise the time limit"
                )
            raise InfeasibleError(NO_PLAN)
        proofs = tuple(_proof(item) for item in self.candidates)
        self.stats.total_s = time.monotonic() - self.started
        return ExactResult(
            problem=self.best.problem,
            assignment=self.best.assignment,
            evaluation=self.best.evaluation,
            bound_s=min(self.best_s, *(proof.bound_s for proof in proofs)),
            proofs=proofs,
            stats=self.stats,
            orders=self.lattice.orders,
            num_orders=self.lattice.number,
        )

    def _bound_without_contiguity(self) -> None:
        """Bound every pair, each ascent started from the multipliers of the last pair."""
        warm: tuple[NativePair, FloatArray] | None = None
        for index, costs in enumerate(self.space.pairs):
            pair = NativePair(self.space, costs)
            if not pair.fits:
                nothing = start_multipliers(self.space, pair)
                self.candidates.append(_Candidate(index, pair, math.inf, nothing, "memory"))
                continue
            warm = warm or (pair, start_multipliers(self.space, pair))
            steps = NONCONTIGUOUS if self.deadline.left_s > 0 else NONCONTIGUOUS_OUT_OF_TIME
            bound_s, multipliers = noncontiguous_bound(self.space, pair, self.lattice, warm, steps)
            if costs.host_bytes.any() and warm[0] is not pair:
                # The last pair's prices of both memories may start a bound far below 0.
                cold = pair, start_multipliers(self.space, pair)
                found = noncontiguous_bound(self.space, pair, self.lattice, cold, steps)
                bound_s, multipliers = max((bound_s, multipliers), found, key=lambda one: one[0])
            for split in SPLITS if pair.streams and math.isfinite(bound_s) else ():
                other = NativePair(self.space, costs, split)
                found = noncontiguous_bound(self.space, other, self.lattice, warm, steps)
                if found[0] > bound_s:
                    pair, (bound_s, multipliers) = other, found
            self.candidates.append(_Candidate(index, pair, bound_s, multipliers))
            if math.isfinite(bound_s):
                warm = pair, multipliers

    def _visit(self, candidate: _Candidate) -> bool:
        """Take one step; return whether there is a further one."""
        step, candidate.visits = candidate.visits, candidate.visits + 1
        if step < len(_ASCENTS):
            self.stats.ascended += step == 0
            return self._ascend(candidate, _ASCENTS[step])
        self.stats.searched += step == len(_ASCENTS)
        return self._enumerate(candidate, LEVELS[min(step - len(_ASCENTS), len(LEVELS) - 1)])

    def _ascend(self, candidate: _Candidate, schedules: tuple[native.Ascent, ...]) -> bool:
        if candidate.visits == 1:
            candidate.multipliers = lattice_multipliers(self.space, candidate.multipliers)
        bound_s = native.lattice_bound(
            candidate.pair.problem,
            self.lattice.graph,
            candidate.multipliers,
            schedules,
            target=self.cutoff_s,
            seconds=max(0.0, self.deadline.left_s),
        )
        candidate.bound_s = candidate.base_s = max(candidate.bound_s, bound_s)
        if math.isinf(bound_s):
            candidate.reason = "memory"
            return False
        self._offer(repaired_plan(self.space, candidate.pair, self.lattice, candidate.multipliers))
        return True

    def _enumerate(self, candidate: _Candidate, above: float) -> bool:
        """Enumerate the plans up to a level above the lattice bound, or up to the cutoff."""
        level_s = candidate.base_s * (1 + above) if math.isfinite(above) else math.inf
        level_s = min(level_s, self.cutoff_s, 0.5 * (candidate.bound_s + candidate.failed_s))
        if not self._search_labels(candidate, level_s):
            candidate.failed_s = min(level_s, LEVELS[-2] * candidate.bound_s)
            candidate.visits -= 1
        return candidate.failed_s > candidate.bound_s * (1 + LEVELS[0])

    def _retry(self, candidate: _Candidate) -> None:
        """Search again where the incumbent is now below the level that failed."""
        if candidate.bound_s < self.cutoff_s < candidate.failed_s and self.deadline.left_s > 0:
            self._search_labels(candidate, self.cutoff_s)
        if candidate.bound_s >= self.cutoff_s:
            candidate.reason = "search"

    def _search_labels(self, candidate: _Candidate, limit_s: float) -> bool:
        """Enumerate below a limit; keep the plan and the bound; return whether it was complete."""
        limits = native.LabelSearch(
            limit=limit_s,
            seconds=min(1e9, max(0.0, self.deadline.left_s)),
            beam_limit=min(limit_s + 3 * (limit_s - candidate.base_s), self.best_s),
            max_columns=MAX_COLUMNS,
            max_labels=MAX_LABELS,
            pass_labels=PASS_LABELS,
            beam=BEAM if limit_s < self.cutoff_s else 0,
        )
        status, stages, keys = native.search(
            candidate.pair.problem, self.lattice.graph, candidate.multipliers, limits
        )
        self.stats.columns = max(self.stats.columns, limits.columns)
        self.stats.labels = max(self.stats.labels, limits.labels)
        if len(stages):
            self._offer(self._decoded(candidate.pair, stages.tolist(), keys.tolist(), limits.value))
        proven_s = min(limit_s, self.best_s) if status == native.DONE else limits.bound
        candidate.bound_s = max(candidate.bound_s, proven_s)
        return status == native.DONE

    def _decoded(
        self, pair: NativePair, stages: list[list[int]], keys: list[int], value_s: float
    ) -> Incumbent:
        order = tuple(self.lattice.node_group[node] for node, _, _ in stages)
        problem = self.space.problem(pair.costs, order)
        counts = [
            counts_of_key(self.space, key, first, end)
            for (_, first, end), key in zip(stages, keys, strict=True)
        ]
        assignment = assignment_of_counts(problem, counts)
        evaluation = evaluate(problem, assignment)
        if abs(evaluation.objective_s - value_s) > VALUE_TOLERANCE * abs(value_s):
            raise SolverError(
                f"the exact search claims {value_s!r} s, but its plan costs "
                f"{evaluation.objective_s!r} s"
            )
        if not is_feasible(problem, evaluation):
            raise SolverError("the exact search exceeds memory or the quality budget")
        if not obeys(problem.limits, order, assignment.positions, assignment.widths):
            raise SolverError("the exact search violates a manual decision")
        return Incumbent(problem, assignment, evaluation)

    def _offer(self, found: Incumbent | None) -> None:
        if found is not None and found.evaluation.objective_s < self.best_s:
            self.best, self.best_s = found, found.evaluation.objective_s


def _close(candidate: _Candidate) -> None:
    """Set the reason to the step that raised the bound above the cutoff."""
    if candidate.visits == 0:
        candidate.reason = "noncontiguous"
    else:
        candidate.reason = "lattice" if candidate.visits <= len(_ASCENTS) else "search"


def _proof(candidate: _Candidate) -> PairProof:
    by_multipliers = candidate.reason in ("noncontiguous", "lattice")
    return PairProof(
        micro_batching=candidate.pair.costs.micro_batching,
        bound_s=candidate.bound_s,
        reason=candidate.reason,
        multipliers=tuple(candidate.multipliers.tolist()) if by_multipliers else (),
    )


def find_exact(
    task: PlanningTask,
    progress: Progress,
    *,
    start: Solution | None = None,
    ends_without: bool = False,
) -> Solution:
    """Find the best plan; by integer programs where the exact search does not support a task.

    ``start`` is a plan of the task, if one is known; ``ends_without`` is that of ``solve_exact``.
    """
    request = task.request
    try:
        _check_budget(task)
        result = solve_exact(
            task.space,
            orders=task.fixed_order or request.orders,
            gap=request.gap,
            deadline=request.deadline,
            progress=progress,
            known=Known(
                first_plan=partial(_first_plan, task)
                if start is None
                else lambda: _incumbent(start),
                below_s=request.below_s,
            ),
            ends_without=ends_without,
        )
    except NotCoveredError:
        # Programs cannot close the last thousandth in reasonable time.
        programs = replace(request, gap=max(request.gap, DEFAULT_GAP))
        return find_plan(replace(task, request=programs), progress)
    except OutOfTimeError:
        fallback = find_proportional(task)
        if fallback is None and not request.deadline.has_passed:
            # Labels were too many, where little or nothing fits.
            programs = replace(request, gap=max(request.gap, DEFAULT_GAP))
            return find_plan(replace(task, request=programs), progress)
        if fallback is None:
            raise
        return fallback
    except InfeasibleError as error:
        if not request.gives_reasons or math.isfinite(request.below_s):
            raise
        if request.quality_budget is None:
            raise memory_error(request) from error
        raise InfeasibleError(explain_budget(task)) from error
    searched = result.stats.searched
    solution = Solution(
        problem=result.problem,
        assignment=result.assignment,
        evaluation=result.evaluation,
        solver="exact",
        status="optimal" if result.gap <= request.gap + GAP_ROUNDING else "feasible",
        bound_s=result.bound_s,
        orders=result.num_orders,
        order_set=result.orders,
        pairs_searched=searched,
        pairs_pruned=task.num_pairs - searched,
    )
    late = solution.status != "optimal" and request.deadline.has_passed
    return _with_fallback(solution, find_proportional(task)) if late else solution


def _check_budget(task: PlanningTask) -> None:
    """Raise ``InfeasibleError`` where memory does not allow the quality of the budget.

    Micro-batches of one sequence take the least memory: what does not fit with these, never does.
    Bounds of other pairs would have to grow without limit to show the same. Limited time is left to
    the search.
    """
    request = task.request
    smallest = tuple(pair for pair in task.pairs if pair.micro_batching == SMALLEST)
    has_others = 0 < len(smallest) < len(task.pairs)
    if request.quality_budget is None or request.deadline != NEVER or not has_others:
        return
    with contextlib.suppress(OutOfTimeError):
        solve_exact(
            replace(task.space, pairs=smallest),
            orders=task.fixed_order or request.orders,
            gap=FIRST_PLAN_GAP,
        )


FIRST_PLAN_S = 3.0
FIRST_PLAN_SHARE = 0.25
"""Longest search for a first plan by bitwidth transfer, also as a share of the time left."""


def _first_plan(task: PlanningTask) -> Incumbent | None:
    """Return the plan of bitwidth transfer where experts may be on hosts.

    Plans near the relaxation are poor there, as both memories press, and a good plan rules out most
    others. ``None`` under manual limits, which transfer ignores, where the objective of a good plan
    is known, and where it finds none.
    """
    if not task.apart or task.has_limits or math.isfinite(task.request.below_s):
        return None
    left_s = task.request.deadline.left_s
    deadline = task.request.deadline.within(min(FIRST_PLAN_S, FIRST_PLAN_SHARE * left_s))
    limited = replace(task, request=replace(task.request, deadline=deadline))
    try:
        found = find_transfer(limited, silent)
    except InfeasibleError:
        return None
    return _incumbent(found)


def _incumbent(found: Solution) -> Incumbent:
    return Incumbent(found.problem, found.assignment, found.evaluation)


def _with_fallback(found: Solution, fallback: Solution | None) -> Solution:
    """Return the search's solution, with the fallback's plan where that is cheaper."""
    if fallback is None or fallback.evaluation.objective_s >= found.evaluation.objective_s:
        return found
    assert found.bound_s is not None
    return replace(
        found,
        problem=fallback.problem,
        assignment=fallback.assignment,
        evaluation=fallback.evaluation,
        bound_s=min(found.bound_s, fallback.evaluation.objective_s),
    )
