"""What the exact search answers: the plan, its value, and why nothing is cheaper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmpq.assigner.objective import Evaluation
from llmpq.assigner.problem import Assignment, AssignmentProblem
from llmpq.spec.plan import MicroBatching

Reason = Literal["memory", "pool", "lattice", "search", "open"]
"""Why a pair needs no further search: no plan of it fits; its bound with contiguity dropped, or
over all orders, is no lower than the answer; every plan below was enumerated; or it is not closed
(a limit of time or memory was met) and only its bound is proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairProof:
    """The certificate of one micro-batch pair.

    Attributes:
        micro_batching: the pair.
        bound_s: no plan of the pair is cheaper; infinite when none fits.
        reason: how that is known.
        multipliers: Lagrangian multipliers that attain a ``pool`` or ``lattice`` bound, in the
            core's layout; empty for the other reasons.
    """

    micro_batching: MicroBatching
    bound_s: float
    reason: Reason
    multipliers: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStats:
    """How much work it was.

    Attributes:
        pairs: micro-batch pairs considered.
        polished, searched: pairs whose lattice bound, and whose plans, were computed.
        nodes: nodes of the order lattice.
        columns, labels: largest number of stage columns and partial plans held at once.
        pool_s, lattice_s, search_s, total_s: seconds by part.
    """

    pairs: int
    polished: int
    searched: int
    nodes: int
    columns: int
    labels: int
    pool_s: float
    lattice_s: float
    search_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactResult:
    """A plan and its certificate.

    Attributes:
        problem: pair and order of the plan; the order names the used devices only.
        assignment: position and width of every layer.
        evaluation: what ``objective`` says it takes.
        bound_s: no plan of the whole space is cheaper.
        proofs: one entry a pair, in the order of the space.
        stats: how much work it was.
    """

    problem: AssignmentProblem
    assignment: Assignment
    evaluation: Evaluation
    bound_s: float
    proofs: tuple[PairProof, ...]
    stats: SearchStats

    @property
    def value_s(self) -> float:
        """The plan's objective."""
        return self.evaluation.objective_s

    @property
    def gap(self) -> float:
        """``(value - bound) / value``: how far the plan may be from the best."""
        return (self.value_s - self.bound_s) / self.value_s if self.value_s > 0 else 0.0

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """``[first, end)`` of every position of the order; only the first may be empty."""
        found, start = [], 0
        for position in range(self.problem.num_positions):
            end = start + self.assignment.positions.count(position)
            found.append((start, end))
            start = end
        return tuple(found)
