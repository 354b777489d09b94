"""Lower bounds of the objective for every micro-batch pair and first group, in one numpy sweep.

The integer program is relaxed until it decomposes by layer: contiguity is dropped, the slowest
stage of a group is replaced by the group's average, and memory, slowest stage and quality budget
get Lagrange multipliers. Any non-negative multipliers give a valid bound; a fixed number of Adam
steps (Kingma & Ba, 2015) improves them. Array legend: ``M`` candidates (pair and first group),
``T`` groups, ``K`` kinds, ``B`` widths, ``U`` classes of equal layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmpq.assigner.problem import FloatArray, IntArray, PairCosts, SearchSpace
from llmpq.spec.plan import Formula

STEPS = 250
LEARNING_RATE = 0.25
MAX_CELLS = 2_000_000
"""Array cells of one sweep; more candidates are computed in several."""


def lower_bounds(space: SearchSpace) -> FloatArray:
    """Return ``[P, T]`` bounds, one for every pair and first group.

    Infinite where that group cannot hold the master.
    """
    groups, kinds, widths = space.pairs[0].prefill_s.shape
    cells = groups * (groups * kinds + space.num_layers) * widths
    chunk = max(1, MAX_CELLS // cells)
    parts = [
        _LagrangianDual(space, space.pairs[start : start + chunk]).maximize()
        for start in range(0, len(space.pairs), chunk)
    ]
    return np.concatenate(parts)


class _LagrangianDual:
    def __init__(self, space: SearchSpace, pairs: Sequence[PairCosts]) -> None:
        groups = space.num_groups
        self.shape = len(pairs), groups
        self.first = np.tile(np.arange(groups), len(pairs))  # [M]
        self.rows = np.arange(self.first.size)
        own = self.rows, self.first

        def stacked(name: str) -> FloatArray:
            table = np.stack([getattr(pair, name) for pair in pairs]).astype(np.float64)
            return np.repeat(table, groups, axis=0)

        self.prefill, self.decode = stacked("prefill_s"), stacked("decode_s")  # [M, T, K, B]
        self.count = np.array(space.group_counts, dtype=np.float64)
        device, master = stacked("capacity_bytes"), stacked("first_capacity_bytes")  # [M, T]
        memory = self.count * np.maximum(device, 0.0)
        memory[own] += master[own] - np.maximum(device[own], 0.0)
        self.impossible = master[own] < 0
        # Bytes relative to a typical group's memory, so that all multipliers have one scale.
        scale = max(1.0, float(np.median(memory)))
        self.memory = np.maximum(memory, 0.0) / scale
        self.layer = stacked("layer_bytes") / scale
        self.master_prefill = stacked("master_prefill_s")[own]  # [M]
        self.master_decode = stacked("master_decode_s")[own]
        # [M, 1] seconds of latency per second of: the slowest prefill stage; the slowest decode
        # stage; a decode pass where the pass is the longer side of a round; a decode pass always.
        self.prefill_weight, self.max_weight, self.pass_weight, self.once_weight = (
            np.repeat(weight, groups)[:, None] for weight in _weights(pairs, space.formula)
        )
        penalties = space.theta_s * space.omega  # [L, B] seconds
        if space.limits is not None:
            penalties = np.where(space.limits.layer_widths, penalties, np.inf)
        table = np.column_stack([space.kinds, penalties, space.omega])
        classes, numbers = np.unique(table, axis=0, return_counts=True)
        widths = space.omega.shape[1]
        self.kinds = classes[:, 0].astype(int)  # [U]
        self.penalties = classes[:, 1 : 1 + widths]  # [U, B]
        self.omega = classes[:, 1 + widths :]
        self.numbers = numbers.astype(np.float64)
        self.budget = space.quality_budget

    def maximize(self) -> FloatArray:
        size, groups = self.first.size, self.shape[1]
        share = np.zeros((size, groups))  # logits: which group is slowest in prefill
        decode = np.zeros((size, groups + 1))  # the same in decode; last: the pass is longer
        start = self._value(share, decode, np.zeros((size, groups)), np.zeros(size))[0]
        unit = np.maximum(start, 1e-12)  # [M] seconds
        memory = np.full((size, groups), -3.0)  # log multiplier, in units
        budget = np.full((size, 1), -3.0 if self.budget is not None else -np.inf)
        logits = [share, decode, memory, budget]
        moments = [np.zeros_like(item) for item in logits]
        squares = [np.zeros_like(item) for item in logits]
        best = start
        for step in range(1, STEPS + 1):
            multipliers = np.exp(logits[2]) * unit[:, None], np.exp(logits[3][:, 0]) * unit
            value, gradients = self._value(logits[0], logits[1], *multipliers)
            best = np.maximum(best, value)
            rate = LEARNING_RATE * min(1.0, 2.0 * (1 - step / (STEPS + 1)))
            for index, gradient in enumerate(gradients):
                slope = gradient / unit[:, None]
                moments[index] += 0.1 * (slope - moments[index])
                squares[index] += 0.05 * (slope**2 - squares[index])
                mean = moments[index] / (1 - 0.9**step)
                deviation = np.sqrt(squares[index] / (1 - 0.95**step))
                logits[index] += rate * mean / (deviation + 1e-12)
        best[self.impossible] = np.inf
        return best.reshape(self.shape)

    def _value(
        self, share: FloatArray, decode: FloatArray, memory: FloatArray, budget: FloatArray
    ) -> tuple[FloatArray, list[FloatArray]]:
        """Return the bound at these multipliers and its gradients in the four logits."""
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
        total = cheapest[:, self.kinds] + self.penalties + budget[:, None, None] * self.omega
        width = total.argmin(axis=2)  # [M, U]
        chosen = np.take_along_axis(total, width[:, :, None], axis=2)[:, :, 0]
        own = self.rows, self.first
        value = (
            chosen @ self.numbers
            + self.master_prefill * prefill_factor[own]
            + self.master_decode * decode_factor[own]
            - (memory * self.memory).sum(axis=1)
        )
        spent = np.zeros((len(value), 1))
        if self.budget is not None:
            value = value - budget * self.budget
            lost = self.omega[np.arange(len(self.omega)), width] @ self.numbers  # [M]
            spent = (budget * (lost - self.budget))[:, None]
        prefill, decode_s, load = self._loads(group, width)
        gain = self.prefill_weight * prefill / self.count
        rounds = np.concatenate(
            [
                self.max_weight * decode_s / self.count,
                self.pass_weight * decode_s.sum(axis=1, keepdims=True),
            ],
            axis=1,
        )
        return value, [
            slow * (gain - (slow * gain).sum(axis=1, keepdims=True)),
            slow_decode * (rounds - (slow_decode * rounds).sum(axis=1, keepdims=True)),
            memory * (load - self.memory),
            spent,
        ]

    def _loads(self, group: IntArray, width: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return ``[M, T]`` prefill seconds, decode seconds and bytes of every group's layers."""
        size, _, kinds, widths = self.prefill.shape
        held = np.zeros((size, kinds, widths))  # [M, K, B] layers of a kind at a width
        for index, (kind, number) in enumerate(zip(self.kinds, self.numbers, strict=True)):
            held[self.rows, kind, width[:, index]] += number
        groups = np.arange(self.shape[1])[None, :, None, None]
        placed = held[:, None] * (group[:, None] == groups)  # [M, T, K, B]
        prefill, decode, load = (
            np.einsum("mtkb,mtkb->mt", placed, table)
            for table in (self.prefill, self.decode, self.layer)
        )
        prefill[self.rows, self.first] += self.master_prefill
        decode[self.rows, self.first] += self.master_decode
        return prefill, decode, load


def _weights(pairs: Sequence[PairCosts], formula: Formula) -> tuple[FloatArray, ...]:
    """Return four weights ``[P]`` of the latency formula; see ``_LagrangianDual``."""
    rounds = np.array([pair.new_tokens - 1.0 for pair in pairs])
    batches = np.array([float(pair.decode_batches) for pair in pairs])
    prefill = np.array([pair.prefill_batches - 1.0 for pair in pairs])
    if formula == "paper":
        return prefill, rounds * (batches - 1), np.zeros(len(pairs)), np.ones(len(pairs))
    return prefill, rounds * batches, rounds, np.zeros(len(pairs))


def _softmax(logits: FloatArray) -> FloatArray:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: FloatArray = raised / raised.sum(axis=1, keepdims=True)
    return shares
