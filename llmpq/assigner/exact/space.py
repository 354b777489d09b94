"""The search space of the exact search: every micro-batch pair of one request, in C arrays.

Array legend: ``T`` groups of equal devices, ``K`` layer kinds, ``B`` bitwidths, ``L`` layers.
A device *class* is a group, or (``T`` further on) the same group as the first device: the master.
"""

from __future__ import annotations

import math

import numpy as np

from llmpq.assigner.enumeration import layers_that_fit
from llmpq.assigner.exact import native
from llmpq.assigner.exact.native import NotCoveredError
from llmpq.assigner.objective import QUALITY_SLACK
from llmpq.assigner.problem import FloatArray, PairCosts, SearchSpace
from llmpq.spec.plan import Formula

MAX_BITS = 64
KEY_BITS = 63


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

    ``floor`` is that of ``native.noncontiguous_bound``; ``fits`` whether the smallest layers fit in
    all devices together: necessary, and with one kind of layers sufficient.
    """

    def __init__(self, space: SearchSpace, costs: PairCosts) -> None:
        self.costs = costs
        self.problem = native.Problem()
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
        self.fits = bool(layers_that_fit(costs, counts).max() >= space.num_layers)
        smallest = np.maximum(1, costs.layer_bytes[:, np.unique(space.kinds)].min(axis=(1, 2)))
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
