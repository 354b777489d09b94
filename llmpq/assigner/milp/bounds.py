"""Lower bounds of the objective for every first group and micro-batch pair, in one numpy sweep.

The integer program is relaxed until it decomposes by layer: contiguity is dropped, the slowest
stage of a group is replaced by the group's average, and the rows of memory, slowest stage and
quality budget are priced into the objective. Any non-negative prices give a valid bound, for every
order of the devices that starts with the group; the prices are improved by a fixed number of
gradient steps, so the result is deterministic.

Array legend: ``M`` candidates (pair and first group), ``T`` groups, ``K`` kinds, ``B`` widths,
``U`` classes of layers that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmpq.assigner.problem import FloatArray, IntArray, PairCosts
from llmpq.spec.plan import Formula

STEPS = 250
LEARNING_RATE = 0.25
MAX_CELLS = 2_000_000
"""Array cells of one sweep; more candidates are swept in several."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundInputs:
    """What the bounds of all candidates share.

    Attributes:
        counts: ``[T]`` devices of each group.
        kinds: ``[L]`` kind of each layer.
        prices: ``[L, B]`` degradation of each choice, in seconds (theta times omega).
        omega: ``[L, B]`` degradation, for the budget.
        quality_budget: largest allowed degradation, or ``None``.
        formula: the latency formula.
    """

    counts: IntArray
    kinds: IntArray
    prices: FloatArray
    omega: FloatArray
    quality_budget: float | None
    formula: Formula


def lower_bounds(inputs: BoundInputs, pairs: Sequence[PairCosts]) -> FloatArray:
    """Return ``[P, T]`` bounds, one for every pair and first group.

    Infinite where that group cannot hold the master.
    """
    groups, kinds, widths = pairs[0].prefill_s.shape
    cells = groups * (groups * kinds + len(inputs.kinds)) * widths
    chunk = max(1, MAX_CELLS // cells)
    parts = [
        _Sweep(inputs, pairs[start : start + chunk]).run() for start in range(0, len(pairs), chunk)
    ]
    return np.concatenate(parts)


class _Sweep:
    """Lagrangian ascent over all candidates at once."""

    def __init__(self, inputs: BoundInputs, pairs: Sequence[PairCosts]) -> None:
        groups = len(inputs.counts)
        self.shape = len(pairs), groups
        self.first = np.tile(np.arange(groups), len(pairs))  # [M]
        self.rows = np.arange(self.first.size)

        def stacked(name: str) -> FloatArray:
            table = np.stack([getattr(pair, name) for pair in pairs]).astype(np.float64)
            return np.repeat(table, groups, axis=0)

        self.prefill, self.decode = stacked("prefill_s"), stacked("decode_s")  # [M, T, K, B]
        self.count = inputs.counts.astype(np.float64)
        device, master = stacked("capacity_bytes"), stacked("first_capacity_bytes")  # [M, T]
        memory = self.count * np.maximum(device, 0.0)
        own = self.rows, self.first
        memory[own] += master[own] - np.maximum(device[own], 0.0)
        self.impossible = master[own] < 0
        # Bytes as shares of a typical group's memory, so that every price has a like scale.
        scale = max(1.0, float(np.median(memory)))
        self.memory = np.maximum(memory, 0.0) / scale
        self.layer = stacked("layer_bytes") / scale
        self.master_prefill = stacked("master_prefill_s")[own]  # [M]
        self.master_decode = stacked("master_decode_s")[own]
        self._set_weights(inputs, pairs, groups)
        self._set_classes(inputs)

    def _set_weights(self, inputs: BoundInputs, pairs: Sequence[PairCosts], groups: int) -> None:
        rounds = np.array([pair.new_tokens - 1.0 for pair in pairs])
        batches = np.array([float(pair.decode_batches) for pair in pairs])
        prefill = np.array([pair.prefill_batches - 1.0 for pair in pairs])
        if inputs.formula == "paper":
            weights = rounds * (batches - 1), np.zeros(len(pairs)), np.ones(len(pairs))
        else:
            weights = rounds * batches, rounds, np.zeros(len(pairs))
        self.prefill_weight = np.repeat(prefill, groups)[:, None]  # [M, 1]
        # Seconds of latency per second of: the slowest stage; one pass when passes bind; one pass.
        self.max_weight, self.pass_weight, self.once_weight = (
            np.repeat(weight, groups)[:, None] for weight in weights
        )

    def _set_classes(self, inputs: BoundInputs) -> None:
        table = np.column_stack([inputs.kinds, inputs.prices, inputs.omega])
        classes, numbers = np.unique(table, axis=0, return_counts=True)
        widths = inputs.omega.shape[1]
        self.kinds = classes[:, 0].astype(int)  # [U]
        self.prices = classes[:, 1 : 1 + widths]  # [U, B]
        self.omega = classes[:, 1 + widths :]
        self.numbers = numbers.astype(np.float64)
        self.budget = inputs.quality_budget

    def run(self) -> FloatArray:
        """Return ``[P, T]`` the best bound met on the way."""
        size, groups = self.first.size, self.shape[1]
        share = np.zeros((size, groups))  # logits of who is slowest in prefill
        decode = np.zeros((size, groups + 1))  # the same in decode; last: the pass binds
        start = self._value(share, decode, np.zeros((size, groups)), np.zeros(size))[0]
        unit = np.maximum(start, 1e-12)  # [M] seconds
        memory = np.full((size, groups), -3.0)  # log price of memory, in units
        budget = np.full(size, -3.0 if self.budget is not None else -np.inf)
        logits = [share, decode, memory, budget[:, None]]
        moments = [np.zeros_like(item) for item in logits]
        squares = [np.zeros_like(item) for item in logits]
        best = start
        for step in range(1, STEPS + 1):
            prices = np.exp(logits[2]) * unit[:, None], np.exp(logits[3][:, 0]) * unit
            value, slopes = self._value(logits[0], logits[1], *prices)
            best = np.maximum(best, value)
            rate = LEARNING_RATE * min(1.0, 2.0 * (1 - step / (STEPS + 1)))
            for index, slope in enumerate(slopes):
                _adam(
                    logits[index], moments[index], squares[index], slope / unit[:, None], rate, step
                )
        best[self.impossible] = np.inf
        return best.reshape(self.shape)

    def _value(
        self, share: FloatArray, decode: FloatArray, memory: FloatArray, budget: FloatArray
    ) -> tuple[FloatArray, list[FloatArray]]:
        """Return the bound at these prices and its slopes in the four logits."""
        slow = _softmax(share)  # [M, T]
        slow_decode = _softmax(decode)  # [M, T + 1]
        prefill_factor = 1 + self.prefill_weight * slow / self.count
        passing = self.once_weight + self.pass_weight * slow_decode[:, -1:]
        decode_factor = passing + self.max_weight * slow_decode[:, :-1] / self.count
        cost = (
            self.prefill * prefill_factor[:, :, None, None]
            + self.decode * decode_factor[:, :, None, None]
            + self.layer * memory[:, :, None, None]
        )  # [M, T, K, B]
        group = cost.argmin(axis=1)  # [M, K, B]
        cheapest = np.take_along_axis(cost, group[:, None], axis=1)[:, 0]
        total = cheapest[:, self.kinds] + self.prices + budget_or_zero(budget) * self.omega
        width = total.argmin(axis=2)  # [M, U]
        chosen = np.take_along_axis(total, width[:, :, None], axis=2)[:, :, 0]
        own = self.rows, self.first
        value = (
            chosen @ self.numbers
            + self.master_prefill * prefill_factor[own]
            + self.master_decode * decode_factor[own]
            - (memory * self.memory).sum(axis=1)
        )
        if self.budget is not None:
            value = value - budget * self.budget
        return value, self._slopes(slow, slow_decode, memory, budget, (group, width))

    def _slopes(
        self,
        slow: FloatArray,
        slow_decode: FloatArray,
        memory: FloatArray,
        budget: FloatArray,
        choice: tuple[IntArray, IntArray],
    ) -> list[FloatArray]:
        group, width = choice
        size, _, kinds, widths = self.prefill.shape
        held = np.zeros((size, kinds, widths))  # [M, K, B] layers of a kind at a width
        for index, (kind, number) in enumerate(zip(self.kinds, self.numbers, strict=True)):
            held[self.rows, kind, width[:, index]] += number
        groups = np.arange(self.shape[1])[None, :, None, None]
        placed = held[:, None] * (group[:, None] == groups)  # [M, T, K, B]
        prefill = np.einsum("mtkb,mtkb->mt", placed, self.prefill)
        decode = np.einsum("mtkb,mtkb->mt", placed, self.decode)
        load = np.einsum("mtkb,mtkb->mt", placed, self.layer)
        prefill[self.rows, self.first] += self.master_prefill
        decode[self.rows, self.first] += self.master_decode
        gain = self.prefill_weight * prefill / self.count
        rounds = np.concatenate(
            [
                self.max_weight * decode / self.count,
                self.pass_weight * decode.sum(axis=1, keepdims=True),
            ],
            axis=1,
        )
        spent = np.zeros((size, 1))
        if self.budget is not None:
            columns = np.arange(self.omega.shape[0])
            lost = self.omega[columns, width] @ self.numbers  # [M]
            spent = (budget * (lost - self.budget))[:, None]
        return [
            slow * (gain - (slow * gain).sum(axis=1, keepdims=True)),
            slow_decode * (rounds - (slow_decode * rounds).sum(axis=1, keepdims=True)),
            memory * (load - self.memory),
            spent,
        ]


def budget_or_zero(budget: FloatArray) -> FloatArray:
    """Return the budget's price shaped for ``[M, U, B]``."""
    return budget[:, None, None]


def _softmax(logits: FloatArray) -> FloatArray:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: FloatArray = raised / raised.sum(axis=1, keepdims=True)
    return shares


def _adam(
    logit: FloatArray,
    moment: FloatArray,
    square: FloatArray,
    slope: FloatArray,
    rate: float,
    step: int,
) -> None:
    """One step uphill, in place (Kingma & Ba, 2015)."""
    moment += 0.1 * (slope - moment)
    square += 0.05 * (slope**2 - square)
    mean = moment / (1 - 0.9**step)
    spread = np.sqrt(square / (1 - 0.95**step))
    logit += rate * mean / (spread + 1e-12)
