"""The exact search: best-first over micro-batch pairs, all device orders of a pair at once.

The pair of least proven bound takes one more step: first from its bound without contiguity to the
lattice's, by a short and then a long ascent; then to levels above it, by enumerating every plan
below a level as labels over stage columns (``csrc/labels.c``). When the least bound passes the
incumbent, the incumbent is the best plan. At the time limit, or when columns or labels exceed their
limit, the incumbent is returned with the bound proven so far.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass
from typing import Literal

from llmpq.assigner.bit_assignment import assignment_of_counts
from llmpq.assigner.constraints.deadline import NEVER, Deadline
from llmpq.assigner.constraints.limits import obeys
from llmpq.assigner.exact import native
from llmpq.assigner.exact.lattice import OrderLattice, Orders, build_lattice
from llmpq.assigner.exact.relaxation import (
    LONG,
    NONCONTIGUOUS,
    NONCONTIGUOUS_OUT_OF_TIME,
    SHORT,
    Incumbent,
    lattice_multipliers,
    noncontiguous_bound,
    repaired_plan,
    start_multipliers,
)
from llmpq.assigner.exact.space import NativePair, counts_of_key, key_radices
from llmpq.assigner.objective import Evaluation, evaluate, is_feasible, relative_gap
from llmpq.assigner.problem import Assignment, AssignmentProblem, FloatArray, SearchSpace
from llmpq.assigner.request import OutOfTimeError, Progress, silent
from llmpq.errors import InfeasibleError, SolverError
from llmpq.spec.plan import MicroBatching, OrderSet

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


def solve_exact(
    space: SearchSpace,
    *,
    orders: Orders,
    gap: float = 0.0,
    deadline: Deadline = NEVER,
    progress: Progress = silent,
) -> ExactResult:
    """Minimise latency plus priced degradation over pairs, orders, placements and bitwidths.

    Stops at the relative optimality ``gap``. After the deadline the core is not compiled, pairs are
    bounded in fewer steps, and the best or the first plan is returned with its bound.

    Raises:
        NotCoveredError: the exact search does not support the problem.
        InfeasibleError: no plan exists; an ``OutOfTimeError`` when that is not known.
        SolverError: the core's value differs from ``objective``'s.
    """
    native.prepare(deadline.left_s)
    key_radices(space)
    search = _Search(space, build_lattice(space, orders), gap, deadline)
    search.run(progress)
    return search.result()


class _Search:
    def __init__(
        self, space: SearchSpace, lattice: OrderLattice, gap: float, deadline: Deadline
    ) -> None:
        self.space = space
        self.lattice = lattice
        self.keep = 1 - max(gap, ROUNDING)
        self.started = time.monotonic()
        self.deadline = deadline
        self.best: Incumbent | None = None
        self.best_s = math.inf
        self.stats = SearchStats(pairs=len(space.pairs), nodes=int(lattice.graph.nodes))
        self.candidates: list[_Candidate] = []

    @property
    def cutoff_s(self) -> float:
        return self.best_s * self.keep

    def run(self, progress: Progress) -> None:
        """Visit the pair of least bound until that bound cannot win."""
        self._bound_without_contiguity()
        heap = [(c.bound_s, c.index, c) for c in self.candidates if c.reason == "open"]
        heapq.heapify(heap)
        total, parked = len(heap), []
        while heap and (self.deadline.left_s > 0 or self.best is None):
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
            raise InfeasibleError("no plan fits in memory and within the quality budget")
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
        limits = native.Search(
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
