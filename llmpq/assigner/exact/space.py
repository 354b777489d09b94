"""What the exact search searches: every micro-batch pair of one request, as the core sees it.

Array legend: ``T`` groups of equal devices, ``K`` layer kinds, ``B`` bitwidths, ``L`` layers.
A device *class* is a group, or (``T`` further on) the same group as the first device: the master.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmpq.assigner.constraints.limits import BoolArray, Limits
from llmpq.assigner.exact import native
from llmpq.assigner.exact.coverage import NotCoveredError
from llmpq.assigner.objective import QUALITY_SLACK
from llmpq.assigner.problem import AssignmentProblem, FloatArray, IntArray, PairCosts
from llmpq.spec.plan import Formula

MAX_BITS = 64
KEY_BITS = 63


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchSpace:
    """One request.

    Attributes:
        pairs: costs of every micro-batch pair to consider.
        group_counts: ``[T]`` devices of every group.
        kinds: ``[L]`` kind of each layer.
        bits: the ``B`` bitwidths, widest first.
        omega: ``[L, B]`` degradation, not negative.
        theta_s: seconds that one unit of degradation costs.
        quality_budget: largest allowed degradation, ``None`` for no limit.
        formula: the latency formula.
        limits: what a person decided, ``None`` for nothing.
    """

    pairs: tuple[PairCosts, ...]
    group_counts: tuple[int, ...]
    kinds: IntArray
    bits: tuple[int, ...]
    omega: FloatArray
    theta_s: float
    quality_budget: float | None
    formula: Formula
    limits: Limits | None = None

    @property
    def num_layers(self) -> int:
        """Layers ``L``."""
        return len(self.kinds)

    @property
    def num_groups(self) -> int:
        """Groups ``T``."""
        return len(self.group_counts)

    @cached_property
    def radices(self) -> tuple[int, ...]:
        """``[K, B]`` flat: what one layer of a kind at a width adds to a stage's key of counts.

        The last width adds nothing: its count follows from the stage's length.

        Raises:
            NotCoveredError: the keys do not fit in 63 bits.
        """
        place, found = 1, []
        kinds = self.kinds.tolist()
        for kind in range(self.pairs[0].prefill_s.shape[1]):
            for width in range(len(self.bits)):
                last = width + 1 == len(self.bits)
                found.append(0 if last else place)
                place *= 1 if last else kinds.count(kind) + 1
        if place.bit_length() > KEY_BITS or len(self.bits) > MAX_BITS:
            raise NotCoveredError(
                f"{self.pairs[0].prefill_s.shape[1]} kinds of layers at {len(self.bits)} "
                f"bitwidths: found {place} ways to count a stage, expected at most 2^{KEY_BITS}"
            )
        return tuple(found)

    def counts_of(self, key: int, first: int, end: int) -> FloatArray:
        """Return ``[K, B]`` layers per kind and width of a stage, from its key."""
        kinds, widths = self.pairs[0].prefill_s.shape[1], len(self.bits)
        found = np.zeros((kinds, widths))
        places = [(place, index) for index, place in enumerate(self.radices) if place]
        for place, index in reversed(places):
            found.flat[index], key = divmod(key, place)
        for kind in range(kinds):
            held = int((self.kinds[first:end] == kind).sum())
            found[kind, -1] = held - found[kind, :-1].sum()
        return found

    @cached_property
    def allowed(self) -> BoolArray:
        """``[T, L, B]`` which widths a layer may have on a group.

        A range that is given to a group's one device forbids its layers to all other groups, and
        all other layers to it: then no plan but with the whole range there is left.
        """
        limits = self.limits
        if limits is None:
            return np.ones((self.num_groups, *self.omega.shape), dtype=np.bool_)
        found: BoolArray = limits.layer_widths[None] & limits.group_widths[:, None]
        for group, first, end in limits.ranges:
            inside = (np.arange(self.num_layers) >= first) & (np.arange(self.num_layers) < end)
            found[:, inside] &= (np.arange(self.num_groups) == group)[:, None, None]
            found[group, ~inside] = False
        return found

    def problem(self, pair: PairCosts, order: tuple[int, ...]) -> AssignmentProblem:
        """Return the problem of one pair and one order, for pricing."""
        return AssignmentProblem(
            costs=pair,
            kinds=self.kinds,
            bits=self.bits,
            omega=self.omega,
            theta_s=self.theta_s,
            quality_budget=self.quality_budget,
            formula=self.formula,
            order=order,
            limits=self.limits,
        )

    def budget(self) -> float:
        """Return the largest degradation that ``objective.within_budget`` accepts."""
        if self.quality_budget is None:
            return math.inf
        return self.quality_budget * (1 + QUALITY_SLACK) + 1e-15


class NativePair:
    """One pair as the core's structure, with what its cheapest bound needs.

    Attributes:
        costs: the pair.
        problem: the structure; it points into arrays held here.
        floor: see ``native.pool_bound``.
        fits: whether the smallest layers fit in all devices together (necessary; with one kind of
            layers also sufficient).
    """

    def __init__(self, space: SearchSpace, costs: PairCosts) -> None:
        self.costs = costs
        self.problem = native.Problem()
        master = np.zeros(space.num_groups)
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
            master_prefill=np.concatenate([master, costs.master_prefill_s]),
            master_decode=np.concatenate([master, costs.master_decode_s]),
            send_prefill=np.stack([costs.send_prefill_s, costs.return_prefill_s]),
            send_decode=np.stack([costs.send_decode_s, costs.return_decode_s]),
            omega=space.omega,
            **({} if space.limits is None else {"allowed": space.allowed}),
            theta=space.theta_s,
            budget=space.budget(),
            **_weights(costs, space.formula),
        )
        self._count_slots(space)

    def _count_slots(self, space: SearchSpace) -> None:
        costs, counts = self.costs, np.array(space.group_counts)
        smallest = np.maximum(1, costs.layer_bytes[:, np.unique(space.kinds)].min(axis=(1, 2)))
        slots = np.maximum(0, costs.capacity_bytes) // smallest
        first = np.where(costs.first_capacity_bytes < 0, -1, costs.first_capacity_bytes // smallest)
        total = (counts * slots).sum() - slots + first
        self.fits = bool((total[first >= 0] >= space.num_layers).any())
        most = np.sort(np.repeat(slots, counts))[::-1].cumsum()
        fewest = 1 + int((most < space.num_layers).sum())
        alone = np.diag(counts == 1)  # a group of one device never sends to itself
        sends = [
            float(np.where(alone, np.inf, send).min()) if counts.sum() > 1 else 0.0
            for send in (costs.send_prefill_s, costs.send_decode_s)
        ]
        self.floor = (slots > 0).astype(np.int32), np.array(sends), fewest


def _weights(costs: PairCosts, formula: Formula) -> dict[str, object]:
    """Return the weights of maxima and sums (``objective``'s two formulas)."""
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
