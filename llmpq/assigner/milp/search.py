"""Every device order and micro-batch pair as an integer program, best bound first (Algorithm 1).

Candidates are solved in the order of their lower bounds, each only for plans better than the best
so far, until the next bound cannot win. The first incumbent is the plan of bitwidth transfer,
because programs are slow where layers differ, and much faster with a cutoff.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmpq.assigner.enumeration import layers_that_fit
from llmpq.assigner.explain.infeasible import explain_budget, memory_error
from llmpq.assigner.heuristics.baselines import find_proportional
from llmpq.assigner.heuristics.transfer import find_transfer
from llmpq.assigner.milp.ilp import IlpOptions, layers_equal, solve_ilp
from llmpq.assigner.objective import (
    Assignment,
    AssignmentProblem,
    Evaluation,
    PairCosts,
    relative_gap,
)
from llmpq.assigner.request import (
    GAP_ROUNDING,
    NO_PLAN,
    OutOfTimeError,
    PlanningTask,
    Progress,
    Solution,
    silent,
)
from llmpq.errors import InfeasibleError

TRANSFER_SHARE = 0.25
"""Part of a time limit that bitwidth transfer may take before the programs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PairAndOrder:
    bound_s: float
    pair: PairCosts
    order: tuple[int, ...]


def find_plan(task: PlanningTask, progress: Progress) -> Solution:
    """Minimise the objective over orders, pairs, placements and bitwidths; some pair fits."""
    request, (order_set, orders) = task.request, task.orders()
    search = _ProgramSearch(task, progress, _candidates(task, orders))
    search.run()
    if search.best is None:
        if search.out_of_time:
            raise OutOfTimeError(
                f"no plan within the time limit of {request.time_limit_s} s "
                f"({search.searched} of {len(search.candidates)} candidates solved); memory does "
                "not rule one out, so raise the time limit"
            )
        if not request.gives_reasons:
            raise InfeasibleError(NO_PLAN)
        if request.quality_budget is None:
            raise memory_error(request)
        raise InfeasibleError(explain_budget(task))
    problem, assignment, evaluation = search.best
    bound_s = min(evaluation.objective_s, search.proven_s)
    gap = relative_gap(evaluation.objective_s, bound_s)
    return Solution(
        problem=problem,
        assignment=assignment,
        evaluation=evaluation,
        solver=request.program_solver,
        status="optimal" if gap <= request.gap + GAP_ROUNDING else "feasible",
        bound_s=bound_s,
        orders=len(orders),
        order_set=order_set,
        pairs_searched=search.searched,
        pairs_pruned=len(orders) * task.num_pairs - search.searched,
    )


def _candidates(task: PlanningTask, orders: tuple[tuple[int, ...], ...]) -> list[_PairAndOrder]:
    found = []
    for pair, row in zip(task.pairs, task.bounds(task.theta_s).tolist(), strict=True):
        fits = layers_that_fit(pair, task.group_counts) >= len(task.kinds)
        found += [
            _PairAndOrder(bound_s=row[order[0]], pair=pair, order=order)
            for order in orders
            if fits[order[0]]
        ]
    return sorted(found, key=lambda item: item.bound_s)


class _ProgramSearch:
    def __init__(
        self, task: PlanningTask, progress: Progress, candidates: list[_PairAndOrder]
    ) -> None:
        self.task = task
        self.progress = progress
        self.candidates = candidates
        self.best: tuple[AssignmentProblem, Assignment, Evaluation] | None = None
        self.best_s = math.inf
        self.proven_s = math.inf
        self.searched = 0
        self.out_of_time = False
        self.deadline = task.request.deadline

    def run(self) -> None:
        """Solve until the next bound cannot win, or time is up."""
        self._start()
        total = len(self.candidates)
        for done, candidate in enumerate(self.candidates):
            self.progress(done, total, self.best_s if self.best else None)
            pruned = candidate.bound_s >= self._cutoff_s()
            if pruned or (self.deadline.has_passed and (self.best or self.searched)):
                self.out_of_time |= not pruned
                self.proven_s = min(self.proven_s, candidate.bound_s)
                break
            bound_s = self._solve(self.task.problem(candidate.pair, candidate.order))
            self.proven_s = min(self.proven_s, max(candidate.bound_s, bound_s))
        self.progress(total, total, self.best_s)
        if self.out_of_time:
            self._offer_solution(find_proportional(self.task))

    def _start(self) -> None:
        """Take the plan of bitwidth transfer, which ignores manual limits, as the incumbent."""
        task = self.task
        if task.has_limits or not self.candidates:
            return
        if layers_equal(task.problem(task.pairs[0], self.candidates[0].order)):
            return  # programs find plans fast there
        share = self.deadline.within(TRANSFER_SHARE * self.deadline.left_s)
        limited = replace(task, request=replace(task.request, deadline=share))
        try:
            self._offer_solution(find_transfer(limited, silent))
        except InfeasibleError:
            return

    def _offer_solution(self, found: Solution | None) -> None:
        if found is not None:
            self._offer(found.problem, found.assignment, found.evaluation)

    def _offer(
        self, problem: AssignmentProblem, assignment: Assignment, evaluation: Evaluation
    ) -> None:
        if evaluation.objective_s < self.best_s:
            self.best = problem, assignment, evaluation
            self.best_s = evaluation.objective_s

    def _cutoff_s(self) -> float:
        return self.best_s * (1 - self.task.request.gap)

    def _solve(self, problem: AssignmentProblem) -> float:
        """Solve one program for plans below the cutoff; return a bound of all its plans."""
        request, cutoff_s, left_s = self.task.request, self._cutoff_s(), self.deadline.left_s
        options = IlpOptions(
            solver=request.program_solver,
            gap=request.gap,
            time_limit_s=None if math.isinf(left_s) else max(0.1, left_s),
            cutoff_s=cutoff_s,
        )
        result = solve_ilp(problem, options)
        self.searched += 1
        self.out_of_time |= result.status in ("unknown", "feasible")
        if result.assignment is not None and result.evaluation is not None:
            self._offer(problem, result.assignment, result.evaluation)
        # Below the cutoff nothing costs less than the program's bound.
        return min(result.bound_s, cutoff_s)
