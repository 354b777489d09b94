"""The whole search: every device order and micro-batch pair, best bound first (Algorithm 1).

Each candidate has a lower bound before anything is solved. Candidates are solved in its order,
each only for plans better than the best so far, until the next bound cannot win. The result
carries a bound over all candidates, solved or not. Where no two layers need be alike the best so
far is at first the plan of bitwidth transfer: programs are slow at finding plans there, and far
quicker at proving that there is none below a cutoff.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmpq.assigner.enumeration import layers_that_fit
from llmpq.assigner.explain.explain import explain_budget, explain_memory
from llmpq.assigner.heuristics.quick import find_quick
from llmpq.assigner.heuristics.transfer import find_transfer
from llmpq.assigner.milp.ilp import IlpOptions, IlpResult, is_exact_without_steps, solve_ilp
from llmpq.assigner.problem import AssignmentProblem, PairCosts
from llmpq.assigner.task import PlanningTask, Progress, Solution
from llmpq.errors import InfeasibleError

GAP_SLACK = 1e-9

TRANSFER_SHARE = 0.25
"""Part of a time limit that bitwidth transfer may take before the programs."""


class OutOfTimeError(InfeasibleError):
    """The time limit came before any plan; whether there is one is not known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    bound_s: float
    pair: PairCosts
    order: tuple[int, ...]


def find_plan(task: PlanningTask, progress: Progress) -> Solution:
    """Minimise latency plus priced degradation over all orders, pairs, placements and bitwidths.

    Raises:
        InfeasibleError: memory, the quality budget or the time limit leaves no plan; says which.
    """
    request = task.request
    orders = task.orders()
    if not task.pairs:
        raise InfeasibleError(explain_memory(request))
    search = _Search(task, progress, _candidates(task, orders))
    search.run()
    search.finish()
    total = len(orders) * task.num_pairs
    if search.best is None:
        if search.out_of_time:
            raise OutOfTimeError(
                f"no plan within the time limit of {request.time_limit_s} s "
                f"({search.searched} of {len(search.candidates)} candidates solved); memory does "
                "not rule one out, so raise the time limit"
            )
        raise InfeasibleError(
            explain_memory(request)
            if request.quality_budget is None
            else explain_budget(task, orders)
        )
    problem, result = search.best
    assert result.assignment is not None
    assert result.evaluation is not None
    objective_s = result.evaluation.objective_s
    bound_s = min(objective_s, search.proven_s)
    gap = (objective_s - bound_s) / objective_s if objective_s > 0 else 0.0
    return Solution(
        problem=problem,
        assignment=result.assignment,
        evaluation=result.evaluation,
        solver=request.program_solver,
        status="optimal" if gap <= request.gap + GAP_SLACK else "feasible",
        bound_s=bound_s,
        orders=len(orders),
        pairs_searched=search.searched,
        pairs_pruned=total - search.searched,
    )


def _candidates(task: PlanningTask, orders: tuple[tuple[int, ...], ...]) -> list[_Candidate]:
    bounds = task.bounds(task.theta_s)
    found = []
    for pair, row in zip(task.pairs, bounds.tolist(), strict=True):
        fits = layers_that_fit(pair, task.group_counts) >= len(task.kinds)
        found += [
            _Candidate(bound_s=row[order[0]], pair=pair, order=order)
            for order in orders
            if fits[order[0]]
        ]
    return sorted(found, key=lambda item: item.bound_s)


class _Search:
    """Best-first search with an incumbent, in two passes.

    The first pass solves programs in which equal neighbours share their layers freely, which is
    quick and bounds every candidate that matters well. The second pass settles with the full
    program what those bounds leave open; when all layers are alike, that is nothing.
    """

    def __init__(
        self, task: PlanningTask, progress: Progress, candidates: list[_Candidate]
    ) -> None:
        self.task = task
        self.progress = progress
        self.candidates = candidates
        self.best: tuple[AssignmentProblem, IlpResult] | None = None
        self.best_s = math.inf
        self.proven_s = math.inf
        self.searched = 0
        self.out_of_time = False
        self.deadline = task.request.deadline

    def run(self) -> None:
        """Solve until the next bound cannot win, or time is up."""
        self._start()
        still_open = self._pass(self.candidates, contiguous=False)
        self._pass(sorted(still_open, key=lambda item: item.bound_s), contiguous=True)
        self.progress(len(self.candidates), len(self.candidates), self.best_s)

    def finish(self) -> None:
        """Out of time, take the plan of proportional splits where that is the better one."""
        hasty = find_quick(self.task) if self.out_of_time else None
        if hasty is not None and hasty.evaluation.objective_s < self.best_s:
            self._take(hasty)

    def _take(self, found: Solution) -> None:
        result = IlpResult(
            status="feasible",
            assignment=found.assignment,
            evaluation=found.evaluation,
            bound_s=-math.inf,
        )
        self.best = found.problem, result
        self.best_s = found.evaluation.objective_s

    def _start(self) -> None:
        """Take the plan of bitwidth transfer as the first to beat, where it may be asked."""
        task, deadline = self.task, self.task.request.deadline
        # It knows no manual decisions about layers, and with layers alike programs find plans fast.
        if task.limits is not None or task.fixed_order is not None or not self.candidates:
            return
        if is_exact_without_steps(task.problem(task.pairs[0], self.candidates[0].order)):
            return
        share = deadline.within(TRANSFER_SHARE * deadline.left_s)
        try:
            found = find_transfer(
                replace(task, request=replace(task.request, deadline=share)), _silent
            )
        except InfeasibleError:
            return
        self._take(found)

    def _pass(self, candidates: list[_Candidate], *, contiguous: bool) -> list[_Candidate]:
        """Solve best bound first; return the candidates whose full program may still win."""
        still_open = []
        for done, candidate in enumerate(candidates):
            self.progress(done, len(self.candidates), self.best_s if self.best else None)
            pruned = candidate.bound_s >= self._cutoff_s()
            if pruned or (self.deadline.has_passed and (self.best or self.searched)):
                self.out_of_time |= not pruned
                self.proven_s = min(self.proven_s, candidate.bound_s)
                break
            problem = self.task.problem(candidate.pair, candidate.order)
            bound_s = max(candidate.bound_s, self._solve(problem, contiguous=contiguous))
            if contiguous or is_exact_without_steps(problem):
                self.proven_s = min(self.proven_s, bound_s)
            else:
                still_open.append(replace(candidate, bound_s=bound_s))
        return still_open

    def _cutoff_s(self) -> float:
        return self.best_s * (1 - self.task.request.gap)

    def _solve(self, problem: AssignmentProblem, *, contiguous: bool) -> float:
        """Solve one program for plans below the cutoff; return a bound of all its plans."""
        request, cutoff_s = self.task.request, self._cutoff_s()
        left_s = self.deadline.left_s
        options = IlpOptions(
            solver=request.program_solver,
            gap=request.gap,
            time_limit_s=None if math.isinf(left_s) else max(0.1, left_s),
            cutoff_s=cutoff_s,
            contiguous=contiguous,
            prove=self.best is not None,
        )
        result = solve_ilp(problem, options)
        self.searched += 1
        self.out_of_time |= result.status in ("unknown", "feasible")
        if result.evaluation is not None and result.evaluation.objective_s < self.best_s:
            self.best = problem, result
            self.best_s = result.evaluation.objective_s
        # Below the cutoff nothing is cheaper than the program's bound; above it lies the cutoff.
        return min(result.bound_s, cutoff_s)


def _silent(done: int, total: int, best_s: float | None) -> None:
    """Keep the progress of a start to itself: it counts other things."""
    del done, total, best_s
