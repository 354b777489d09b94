"""The integer program of one device order and one micro-batch pair (LLM-PQ, Eqs. 4-16).

The paper's pairwise contiguity constraints are replaced by step variables: ``v[i, j]`` says that
layer ``i`` runs at position ``j`` or before it. Then ``z[i, j, b]`` may stay continuous: once ``v``
and the counts ``n[j, k, b] = sum_i z[i, j, b]`` are whole, what is left inside a stage is a
transportation problem, whose optimum is whole. When all layers are equal, ``v`` and ``z`` are not
needed. A solver whose value differs from that of ``objective`` is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmpq.assigner.constraints.resolve import obeys
from llmpq.assigner.milp.solvers import (
    MixedProgram,
    SolverResult,
    SolverStatus,
    Terms,
    solve,
)
from llmpq.assigner.objective import (
    Assignment,
    AssignmentProblem,
    Evaluation,
    assignment_of_counts,
    evaluate,
    is_feasible,
)
from llmpq.errors import SolverError
from llmpq.options.plan import SolverName
from llmpq.spec.runtime_constants import STREAM_BUFFERS

SCALE = 100.0
"""The objective is scaled to about this, so that solver tolerances always mean the same."""

VALUE_TOLERANCE = 1e-6
"""Largest relative difference between a solver's value and ``objective``'s."""

MARGIN = 2e-6
"""Relative tightening of memory and budget after a solver used its own tolerance."""

_Link = tuple[int, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpOptions:
    """How to solve; only plans of at most ``cutoff_s`` are allowed."""

    solver: SolverName = "highs"
    gap: float = 0.0
    time_limit_s: float | None = None
    cutoff_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpResult:
    """The result of one integer program: an assignment if there is one, and a bound.

    The status is also ``infeasible`` when no plan is below the cutoff; ``bound_s`` is a lower bound
    among plans below it.
    """

    status: SolverStatus
    assignment: Assignment | None
    evaluation: Evaluation | None
    bound_s: float


def solve_ilp(problem: AssignmentProblem, options: IlpOptions) -> IlpResult:
    """Solve a problem to the requested gap.

    Raises:
        SolverError: the solver's value and our evaluation of its solution differ.
    """
    first = _solve(problem, options, margin=0.0)
    if first.evaluation is None or is_feasible(problem, first.evaluation):
        return first
    # The solver violated a constraint by less than its tolerance; bytes are exact, so solve again
    # with slightly tighter constraints. The first bound stays valid.
    second = _solve(problem, options, margin=MARGIN)
    if second.evaluation is not None and not is_feasible(problem, second.evaluation):
        raise SolverError(f"solver '{options.solver}' exceeds memory or the quality budget")
    return replace(second, bound_s=first.bound_s)


def _solve(problem: AssignmentProblem, options: IlpOptions, margin: float) -> IlpResult:
    program = Program(problem, margin=margin, cutoff_s=options.cutoff_s)
    found = solve(program.lp, options.solver, gap=options.gap, time_limit_s=options.time_limit_s)
    unit_s = program.unit_s
    bound_s, value_s = found.bound * unit_s, found.objective * unit_s
    if not found.values:
        return IlpResult(status=found.status, assignment=None, evaluation=None, bound_s=bound_s)
    assignment = assignment_of_counts(problem, program.counts_of(found))
    if not obeys(problem.limits, problem.order, assignment.positions, assignment.widths):
        raise SolverError(f"solver '{options.solver}' violates a manual decision")
    evaluation = evaluate(problem, assignment)
    objective_s = evaluation.objective_s
    slack = VALUE_TOLERANCE * abs(objective_s)
    if not bound_s - slack <= objective_s <= value_s + slack:
        raise SolverError(
            f"solver '{options.solver}' claims a value of {value_s!r} s (bound {bound_s!r} s), but "
            f"its answer costs {objective_s!r} s"
        )
    return IlpResult(
        status=found.status,
        assignment=assignment,
        evaluation=evaluation,
        bound_s=min(bound_s, objective_s),
    )


class Program:
    """The mixed-integer program of one problem, in units of ``unit_s`` seconds.

    ``margin`` is a relative tightening of memory and budget.
    """

    def __init__(self, problem: AssignmentProblem, *, margin: float, cutoff_s: float) -> None:
        self.problem = problem
        self.margin = margin
        self.unit_s = _time_unit(problem)
        self.lp = MixedProgram()
        self.objective: Terms = []
        self.constant = 0.0
        self.decode_pass: Terms = []  # one micro-batch through stages and links, per round
        self.decode_pass_constant = 0.0
        costs = problem.costs
        rounds = costs.new_tokens - 1
        paper = problem.formula == "paper"
        batches = costs.decode_batches - 1 if paper else costs.decode_batches
        self.prefill_weight = (costs.prefill_batches - 1) / self.unit_s
        self.decode_weight = rounds * batches / self.unit_s
        self.pass_weight = (1.0 if paper else rounds) / self.unit_s
        self.prefill_max = self.lp.variable(0)
        self.decode_max = self.lp.variable(0)
        self.objective += [(self.prefill_max, 1.0), (self.decode_max, 1.0)]
        self._add_counts()
        self._add_limits()
        self._add_layers()
        self._add_stages()
        self._add_links()
        self._add_decode_pass()
        self.lp.minimise(self.objective, self.constant)
        if math.isfinite(cutoff_s):
            self.lp.constrain(self.objective, "<=", cutoff_s / self.unit_s - self.constant)

    def counts_of(self, found: SolverResult) -> list[np.ndarray]:
        """Return the ``[K, B]`` counts of every position in a solution."""
        shape = self.problem.costs.kv_bytes.size, len(self.problem.bits)
        tables = [np.zeros(shape) for _ in self.problem.order]
        for (position, kind, width), variable in self.counts.items():
            tables[position][kind, width] = found.values[variable]
        return tables

    def _add_counts(self) -> None:
        """``n[j, k, b]``: whole, and no more than memory holds."""
        problem = self.problem
        self.counts: dict[tuple[int, int, int], int] = {}
        kinds = np.unique(problem.kinds).tolist()
        for position, group in enumerate(problem.order):
            capacity = max(0, problem.capacity_bytes(position))
            allowed = problem.allowed(position)
            for kind in kinds:
                numbers = allowed[problem.kinds == kind].sum(axis=0).tolist()
                for width, number in enumerate(numbers):
                    size = max(1, int(problem.costs.held_bytes[group, kind, width]))
                    most = min(number, capacity // size)
                    self.counts[position, kind, width] = self.lp.variable(0, most, is_whole=True)

    def _add_limits(self) -> None:
        """Manual limits of whole stages: exactly these layers, or at least one."""
        problem = self.problem
        if problem.limits is None:
            return
        for group, first, end in problem.limits.ranges:
            position = problem.order.index(group)
            for kind in np.unique(problem.kinds).tolist():
                before = [v for (j, k, _), v in self.counts.items() if k == kind and j < position]
                here = [v for (j, k, _), v in self.counts.items() if k == kind and j == position]
                for terms, span in ((before, slice(first)), (here, slice(first, end))):
                    held = float((problem.kinds[span] == kind).sum())
                    if terms:
                        self.lp.constrain(((item, 1.0) for item in terms), "==", held)
                    elif held:
                        self._add_contradiction()  # no position before the first
        for group in problem.limits.used:
            position = problem.order.index(group)
            held_here = [(v, 1.0) for (j, _, _), v in self.counts.items() if j == position]
            self.lp.constrain(held_here, ">=", 1.0)

    def _add_contradiction(self) -> None:
        self.lp.constrain([(self.prefill_max, 0.0)], ">=", 1.0)

    def _add_layers(self) -> None:
        """Place every layer once; add its degradation to the objective and the budget."""
        problem = self.problem
        if layers_equal(problem):
            quality = [
                (variable, float(problem.omega[0, width]))
                for (_, _, width), variable in self.counts.items()
            ]
            self.lp.constrain(
                ((item, 1.0) for item in self.counts.values()), "==", problem.num_layers
            )
        else:
            quality = self._add_steps()
        self.objective += [
            (variable, value * problem.theta_s / self.unit_s) for variable, value in quality
        ]
        if problem.quality_budget is not None:
            limit = problem.quality_budget * (1 - self.margin)
            scale = 1.0 / limit if limit > 0 else 1.0
            self.lp.constrain(
                ((item, value * scale) for item, value in quality), "<=", limit * scale
            )

    def _add_steps(self) -> Terms:
        """Add ``v`` and ``z`` and tie them to the counts; return the degradation's terms."""
        problem, last = self.problem, self.problem.num_positions - 1
        sums: dict[tuple[int, int, int], Terms] = {
            key: [(count, -1.0)] for key, count in self.counts.items()
        }
        quality: Terms = []
        previous: list[int] = []
        tops = [problem.allowed(position).astype(int) for position in range(last + 1)]
        for layer, kind in enumerate(problem.kinds.tolist()):
            steps = [self.lp.variable(0, 1, is_whole=True) for _ in range(last)]
            for position in range(last + 1):
                cells = [self.lp.variable(0, int(top)) for top in tops[position][layer]]
                for width, cell in enumerate(cells):
                    sums[position, kind, width].append((cell, 1.0))
                    quality.append((cell, float(problem.omega[layer, width])))
                row: Terms = [(cell, 1.0) for cell in cells]
                row += [(steps[position], -1.0)] if position < last else []
                row += [(steps[position - 1], 1.0)] if position > 0 else []
                self.lp.constrain(row, "==", 0.0 if position < last else 1.0)
            for before, after in zip(previous, steps, strict=bool(previous)):
                self.lp.constrain([(before, 1.0), (after, -1.0)], ">=", 0.0)
            previous = steps
        for terms in sums.values():
            self.lp.constrain(terms, "==", 0.0)
        return quality

    def _add_stages(self) -> None:
        """Stage times below the maxima, stage memory below capacity."""
        problem, costs = self.problem, self.problem.costs
        for position, group in enumerate(problem.order):
            cells = [(key[1:], var) for key, var in self.counts.items() if key[0] == position]
            prefill = [(item, float(costs.prefill_s[group, k, b])) for (k, b), item in cells]
            decode = [(item, float(costs.decode_s[group, k, b])) for (k, b), item in cells]
            own = position == 0
            prefill_s = float(costs.master_prefill_s[group]) if own else 0.0
            decode_s = float(costs.master_decode_s[group]) if own else 0.0
            freed: Terms = []
            if costs.stream_bytes[group].any():
                reads, freed = self._add_reads(group, cells)
                prefill = self._slower(
                    prefill, prefill_s, reads, float(costs.stream_prefill_s[group])
                )
                decode = self._slower(decode, decode_s, reads, float(costs.stream_decode_s[group]))
                prefill_s = decode_s = 0.0
            self._bound_maxima(prefill, prefill_s, decode, decode_s)
            self.objective += [(item, value / self.unit_s) for item, value in prefill]
            self.constant += prefill_s / self.unit_s
            self.decode_pass += decode
            self.decode_pass_constant += decode_s
            capacity = problem.capacity_bytes(position)
            if own and capacity < 0:
                self._add_contradiction()  # the master itself does not fit
            # Bytes are whole: half a byte of room absorbs a solver's tolerance at an exact fit.
            scale = 1.0 / (max(0, capacity) * (1 - self.margin) + 0.5)
            sizes = [(item, scale * int(costs.layer_bytes[group, k, b])) for (k, b), item in cells]
            sizes += [(item, scale * size) for item, size in freed]
            self.lp.constrain(sizes, "<=", 1.0)
            if costs.host_bytes[group].any():
                self._add_host(position, cells)

    def _add_host(self, position: int, cells: Sequence[tuple[tuple[int, int], int]]) -> None:
        """What layers take of their host's memory below its capacity."""
        group, capacity = self.problem.order[position], self.problem.host_capacity_bytes(position)
        scale = 1.0 / (capacity * (1 - self.margin) + 0.5)
        sizes = self.problem.costs.host_bytes[group]
        self.lp.constrain(((item, scale * int(sizes[cell])) for cell, item in cells), "<=", 1.0)

    def _add_reads(
        self, group: int, cells: Sequence[tuple[tuple[int, int], int]]
    ) -> tuple[Terms, Terms]:
        """Add ``s[j, k, b]``, layers on disk, and the buffers for the largest of them.

        Returns:
            The terms of the bytes that are read, and of those that memory then holds more.
        """
        reads: Terms = []
        buffer = self.lp.variable(0)  # of one layer, in units of the largest
        largest = int(self.problem.costs.stream_bytes[group].max())
        for (kind, width), held in cells:
            size = int(self.problem.costs.stream_bytes[group, kind, width])
            most = self.lp.upper[held]
            if not size or not most:
                continue
            number = self.lp.variable(0, most, is_whole=True)
            is_any = self.lp.variable(0, 1, is_whole=True)
            self.lp.constrain([(number, 1.0), (held, -1.0)], "<=", 0.0)
            self.lp.constrain([(number, 1.0), (is_any, -float(most))], "<=", 0.0)
            self.lp.constrain([(buffer, 1.0), (is_any, -size / largest)], ">=", 0.0)
            reads.append((number, float(size)))
        freed = [(item, -size) for item, size in reads]
        return reads, [*freed, (buffer, float(STREAM_BUFFERS * largest))]

    def _slower(self, terms: Terms, constant: float, reads: Terms, byte_s: float) -> Terms:
        """Return the larger of the seconds of computing and of reading, as a variable."""
        unit_s = self.unit_s
        top = self.lp.variable(0)
        computed = [(item, value / unit_s) for item, value in terms]
        self._bound(top, computed, constant / unit_s)
        self._bound(top, [(item, size * byte_s / unit_s) for item, size in reads], 0.0)
        return [(top, unit_s)]

    def _add_links(self) -> None:
        """Links between consecutive used positions, and back to the master."""
        problem = self.problem
        used: list[int] = []
        for position in range(1, problem.num_positions):
            layers = [item for key, item in self.counts.items() if key[0] == position]
            flag = self.lp.variable(0, 1, is_whole=True)
            used.append(flag)
            most = min(problem.num_layers, sum(self.lp.upper[item] for item in layers))
            ones: Terms = [(item, 1.0) for item in layers]
            self.lp.constrain([*ones, (flag, -float(most))], "<=", 0.0)
            self.lp.constrain([*ones, (flag, -1.0)], ">=", 0.0)
        for flag, prefill_s, decode_s in self._links(used):
            self._bound_maxima([(flag, prefill_s)], 0.0, [(flag, decode_s)], 0.0)
            if problem.formula == "steady":
                self.objective.append((flag, prefill_s / self.unit_s))
                self.decode_pass.append((flag, decode_s))

    def _links(self, used: list[int]) -> Iterable[_Link]:
        """A pair is linked when both ends are used and nothing between them is."""
        costs, order = self.problem.costs, self.problem.order
        for target in range(1, len(order)):
            for source in range(target):
                link = order[source], order[target]
                flag = self.lp.variable(0, 1)
                ends: Terms = [(used[target - 1], -1.0)]
                ends += [(used[source - 1], -1.0)] if source else []
                between: Terms = [(used[j - 1], 1.0) for j in range(source + 1, target)]
                self.lp.constrain([(flag, 1.0), *ends, *between], ">=", -1.0 if source else 0.0)
                yield flag, float(costs.send_prefill_s[link]), float(costs.send_decode_s[link])
        for last in range(1, len(order)):
            link = order[last], order[0]
            flag = self.lp.variable(0, 1)
            later: Terms = [(item, 1.0) for item in used[last:]]
            self.lp.constrain([(flag, 1.0), (used[last - 1], -1.0), *later], ">=", 0.0)
            yield flag, float(costs.return_prefill_s[link]), float(costs.return_decode_s[link])

    def _add_decode_pass(self) -> None:
        """The paper adds one pass; in the steady state a round takes at least one pass."""
        scaled = [(item, value * self.pass_weight) for item, value in self.decode_pass]
        constant = self.decode_pass_constant * self.pass_weight
        if self.problem.formula == "paper":
            self.objective += scaled
            self.constant += constant
        else:
            self._bound(self.decode_max, scaled, constant)

    def _bound_maxima(
        self, prefill: Terms, prefill_s: float, decode: Terms, decode_s: float
    ) -> None:
        for top, weight, terms, constant in (
            (self.prefill_max, self.prefill_weight, prefill, prefill_s),
            (self.decode_max, self.decode_weight, decode, decode_s),
        ):
            self._bound(top, [(item, value * weight) for item, value in terms], constant * weight)

    def _bound(self, top: int, terms: Terms, constant: float) -> None:
        self.lp.constrain([(top, 1.0), *((item, -value) for item, value in terms)], ">=", constant)


def layers_equal(problem: AssignmentProblem) -> bool:
    """Whether all layers have one kind, equal degradation and the same allowed widths."""
    if problem.limits is not None and not problem.limits.layers_equal:
        return False
    one_kind = bool((problem.kinds == problem.kinds[0]).all())
    return one_kind and bool((problem.omega == problem.omega[0]).all())


def _time_unit(problem: AssignmentProblem) -> float:
    """Return the seconds of one objective unit: about the objective over ``SCALE``."""
    costs = problem.costs
    rounds = costs.new_tokens - 1
    layer_s = costs.prefill_s.min(axis=(0, 2)) + rounds * costs.decode_s.min(axis=(0, 2))
    rough_s = float(layer_s[problem.kinds].sum()) or problem.theta_s or 1.0
    return rough_s / SCALE
