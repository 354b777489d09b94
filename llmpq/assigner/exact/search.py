"""The exact search: best-first over micro-batch pairs, all device orders of a pair at once.

Every pair has a proven bound, and the pair of least bound is taken one step further:

1. from its pool bound to the lattice's, by a short ascent and then a long one;
2. to a level a little above it, by enumerating every plan below that level as labels over stage
   columns (``csrc/labels.c``), and so on upwards, at most to the incumbent.

Once the least bound passes the incumbent, the incumbent is the best plan there is.

Every plan that is told was priced by ``objective``. At the time limit, or when columns or labels
pass their cap, the incumbent is told with the bound that is proven so far.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llmpq.assigner.constraints.deadline import NEVER, Deadline
from llmpq.assigner.constraints.limits import obeys
from llmpq.assigner.exact import native
from llmpq.assigner.exact.bounds import (
    HASTY,
    LONG,
    POOL,
    SHORT,
    lattice_bound,
    lattice_start,
    pool_bound,
    start_multipliers,
)
from llmpq.assigner.exact.lattice import OrderLattice, Orders, build_lattice
from llmpq.assigner.exact.repair import Plan, repaired_plan
from llmpq.assigner.exact.result import ExactResult, PairProof, Reason, SearchStats
from llmpq.assigner.exact.space import NativePair, SearchSpace
from llmpq.assigner.milp.search import OutOfTimeError
from llmpq.assigner.objective import evaluate, is_feasible
from llmpq.assigner.problem import FloatArray
from llmpq.assigner.spread import assignment_of_counts
from llmpq.errors import InfeasibleError, SolverError

Progress = Callable[[int, int, float | None], None]
"""Called with pairs settled, pairs in all, and the best objective so far."""

MAX_COLUMNS = 2_000_000
MAX_LABELS = 4_000_000
"""Caps of one label search, 100 and 250 MB; beyond them the pair stays open with its bound."""

PASS_LABELS = 1_500_000
"""Labels at which a search is split by the largest prefill time, which tightens its bounds."""

VALUE_TOLERANCE = 1e-9
"""Largest relative difference between the core's value and the price of its plan."""

ROUNDING = 1e-10
"""Relative slack below which two values are equal."""

STEPS = (0.003, 0.02, 0.1, 1.0, 10.0, math.inf)
"""How far above a pair's lattice bound to enumerate, visit by visit, relative to it."""

BEAM = 24
"""Labels that the first, inexact run of a level keeps at one node and layer."""

_ASCENTS = (SHORT, LONG)


@dataclass(slots=True)
class _Candidate:
    """One pair on its way to being closed.

    Attributes:
        index: its place in the space.
        pair: its costs.
        bound_s: proven so far.
        multipliers: that prove it, or the lattice's.
        reason: why it is closed, ``open`` until then.
        visits: steps taken: short ascent, long ascent, then enumeration further and further up.
        base_s: lattice bound; the levels of enumeration are relative to it.
        failed_s: lowest limit at which enumeration passed a cap.
    """

    index: int
    pair: NativePair
    bound_s: float
    multipliers: FloatArray
    reason: Reason = "open"
    visits: int = 0
    base_s: float = 0.0
    failed_s: float = math.inf


@dataclass(slots=True)
class _Work:
    polished: int = 0
    searched: int = 0
    columns: int = 0
    labels: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"pool": 0.0, "lattice": 0.0, "search": 0.0}
    )


def solve_exact(
    space: SearchSpace,
    *,
    orders: Orders,
    gap: float = 0.0,
    deadline: Deadline = NEVER,
    progress: Progress | None = None,
) -> ExactResult:
    """Minimise latency plus priced degradation over all pairs, orders, placements and bitwidths.

    Args:
        space: what to choose from.
        orders: blocks of groups, every interleaving, or one fixed order.
        gap: relative gap to the proven bound at which to stop.
        deadline: when the best plan so far is told with its bound. Past it the core is not
            compiled, pairs are bounded in fewer steps, and the first plan is taken.
        progress: told how far the search is.

    Raises:
        NotCoveredError: the integer program is needed.
        InfeasibleError: no plan exists; an ``OutOfTimeError`` when that is not known.
        SolverError: the core's value is not the price of its plan.
    """
    native.prepare(deadline.left_s)
    _ = space.radices
    search = _Search(space, build_lattice(space, orders), gap, deadline)
    search.run(progress or _silent)
    return search.result()


def _silent(done: int, total: int, best_s: float | None) -> None:
    """Report to nobody."""
    del done, total, best_s


class _Search:
    def __init__(
        self, space: SearchSpace, lattice: OrderLattice, gap: float, deadline: Deadline
    ) -> None:
        self.space = space
        self.lattice = lattice
        self.keep = 1 - max(gap, ROUNDING)
        self.started = time.monotonic()
        self.deadline = deadline
        self.best: Plan | None = None
        self.best_s = math.inf
        self.work = _Work()
        self.candidates: list[_Candidate] = []

    @property
    def cutoff_s(self) -> float:
        """Only plans below this are of interest."""
        return self.best_s * self.keep

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.deadline.left_s

    def run(self, progress: Progress) -> None:
        """Take the pair of least bound one step further, until that bound cannot win."""
        self._bound_pool()
        heap = [(c.bound_s, c.index, c) for c in self.candidates if c.reason == "open"]
        heapq.heapify(heap)
        total, parked = len(heap), []
        while heap and (self.left_s > 0 or self.best is None):
            candidate = heapq.heappop(heap)[2]
            progress(total - len(heap) - 1, total, self.best_s if self.best else None)
            if candidate.bound_s >= self.cutoff_s:
                self._close(candidate)
            elif self._visit(candidate):
                heapq.heappush(heap, (candidate.bound_s, candidate.index, candidate))
            elif candidate.reason == "open":
                parked.append(candidate)
            if self.left_s <= 0 and candidate.visits > len(_ASCENTS):
                break
        for candidate in parked:
            self._retry(candidate)
        progress(total, total, self.best_s if self.best else None)

    def result(self) -> ExactResult:
        """Return the best plan and the certificate."""
        if self.best is None:
            if any(item.reason == "open" for item in self.candidates):
                raise OutOfTimeError(
                    "the exact search found no plan within its limits of time and memory; "
                    "raise the time limit"
                )
            raise InfeasibleError("no plan fits in memory and within the quality budget")
        problem, assignment, priced = self.best
        proofs = tuple(
            PairProof(
                micro_batching=item.pair.costs.micro_batching,
                bound_s=item.bound_s,
                reason=item.reason,
                multipliers=tuple(item.multipliers.tolist())
                if item.reason in ("pool", "lattice")
                else (),
            )
            for item in self.candidates
        )
        return ExactResult(
            problem=problem,
            assignment=assignment,
            evaluation=priced,
            bound_s=min(self.best_s, *(proof.bound_s for proof in proofs)),
            proofs=proofs,
            stats=self._stats(),
        )

    def _stats(self) -> SearchStats:
        return SearchStats(
            pairs=len(self.candidates),
            polished=self.work.polished,
            searched=self.work.searched,
            nodes=int(self.lattice.graph.nodes),
            columns=self.work.columns,
            labels=self.work.labels,
            pool_s=self.work.seconds["pool"],
            lattice_s=self.work.seconds["lattice"],
            search_s=self.work.seconds["search"],
            total_s=time.monotonic() - self.started,
        )

    def _bound_pool(self) -> None:
        """Bound every pair with contiguity dropped, each started from the one before."""
        started = time.monotonic()
        warm: tuple[NativePair, FloatArray] | None = None
        for index, costs in enumerate(self.space.pairs):
            pair = NativePair(self.space, costs)
            if not pair.fits:
                nothing = start_multipliers(self.space, pair)
                self.candidates.append(_Candidate(index, pair, math.inf, nothing, "memory"))
                continue
            warm = warm or (pair, start_multipliers(self.space, pair))
            steps = POOL if self.left_s > 0 else HASTY
            bound_s, multipliers = pool_bound(self.space, pair, self.lattice, warm, steps)
            self.candidates.append(_Candidate(index, pair, bound_s, multipliers))
            if math.isfinite(bound_s):
                warm = pair, multipliers
        self.work.seconds["pool"] += time.monotonic() - started

    def _close(self, candidate: _Candidate) -> None:
        """Note which step raised the bound past the cutoff."""
        if candidate.visits == 0:
            candidate.reason = "pool"
        else:
            candidate.reason = "lattice" if candidate.visits <= len(_ASCENTS) else "search"

    def _visit(self, candidate: _Candidate) -> bool:
        """Take one step; tell whether there is a further one."""
        started = time.monotonic()
        step, candidate.visits = candidate.visits, candidate.visits + 1
        if step < len(_ASCENTS):
            self.work.polished += step == 0
            more = self._ascend(candidate, _ASCENTS[step])
            self.work.seconds["lattice"] += time.monotonic() - started
        else:
            self.work.searched += step == len(_ASCENTS)
            more = self._enumerate(candidate, STEPS[min(step - len(_ASCENTS), len(STEPS) - 1)])
            self.work.seconds["search"] += time.monotonic() - started
        return more

    def _ascend(self, candidate: _Candidate, schedules: tuple[native.Ascent, ...]) -> bool:
        if candidate.visits == 1:
            candidate.multipliers = lattice_start(self.space, candidate.multipliers)
        bound_s = lattice_bound(
            candidate.pair,
            self.lattice,
            candidate.multipliers,
            schedules,
            target=self.cutoff_s,
            seconds=max(0.0, self.left_s),
        )
        candidate.bound_s = candidate.base_s = max(candidate.bound_s, bound_s)
        if math.isinf(bound_s):
            candidate.reason = "memory"
            return False
        plan = repaired_plan(self.space, candidate.pair, self.lattice, candidate.multipliers)
        self._offer(plan)
        return True

    def _enumerate(self, candidate: _Candidate, above: float) -> bool:
        """Enumerate the plans up to a level above the lattice bound, or up to the cutoff."""
        level_s = candidate.base_s * (1 + above) if math.isfinite(above) else math.inf
        level_s = min(level_s, self.cutoff_s, 0.5 * (candidate.bound_s + candidate.failed_s))
        if not self._labels(candidate, level_s):
            candidate.failed_s = min(level_s, STEPS[-2] * candidate.bound_s)
            candidate.visits -= 1
        return candidate.failed_s > candidate.bound_s * (1 + STEPS[0])

    def _retry(self, candidate: _Candidate) -> None:
        """Try once more where a better plan has come down below the limit that failed."""
        if candidate.bound_s < self.cutoff_s < candidate.failed_s and self.left_s > 0:
            self._labels(candidate, self.cutoff_s)
        if candidate.bound_s >= self.cutoff_s:
            candidate.reason = "search"

    def _labels(self, candidate: _Candidate, limit_s: float) -> bool:
        """Enumerate below a limit; keep what is found and proven; tell whether it was complete."""
        limits = native.Search(
            limit=limit_s,
            seconds=min(1e9, max(0.0, self.left_s)),
            beam_limit=min(limit_s + 3 * (limit_s - candidate.base_s), self.best_s),
            max_columns=MAX_COLUMNS,
            max_labels=MAX_LABELS,
            pass_labels=PASS_LABELS,
            beam=BEAM if limit_s < self.cutoff_s else 0,
        )
        status, stages, keys = native.search(
            candidate.pair.problem, self.lattice.graph, candidate.multipliers, limits
        )
        self.work.columns = max(self.work.columns, limits.columns)
        self.work.labels = max(self.work.labels, limits.labels)
        if len(stages):
            self._offer(self._decoded(candidate.pair, stages.tolist(), keys.tolist(), limits.value))
        proven_s = min(limit_s, self.best_s) if status == native.DONE else limits.bound
        candidate.bound_s = max(candidate.bound_s, proven_s)
        return status == native.DONE

    def _decoded(
        self, pair: NativePair, stages: list[list[int]], keys: list[int], value_s: float
    ) -> Plan:
        order = tuple(self.lattice.node_group[node] for node, _, _ in stages)
        problem = self.space.problem(pair.costs, order)
        counts = [
            self.space.counts_of(key, first, end)
            for (_, first, end), key in zip(stages, keys, strict=True)
        ]
        assignment = assignment_of_counts(problem, counts)
        priced = evaluate(problem, assignment)
        if abs(priced.objective_s - value_s) > VALUE_TOLERANCE * abs(value_s):
            raise SolverError(
                f"the exact search claims {value_s!r} s, but its plan costs {priced.objective_s!r}"
            )
        if not is_feasible(problem, priced):
            raise SolverError("the exact search overdraws memory or the quality budget")
        if not obeys(problem.limits, order, assignment.positions, assignment.widths):
            raise SolverError("the exact search breaks a manual decision")
        return problem, assignment, priced

    def _offer(self, plan: Plan | None) -> None:
        if plan is not None and plan[2].objective_s < self.best_s:
            self.best, self.best_s = plan, plan[2].objective_s
