"""The problem of one device order and one micro-batch pair, as small arrays.

Devices of one group (equal devices of one node) are interchangeable, and decoder layers of one
kind cost the same, so every figure is stored once per group and kind. Array legend: ``T`` groups,
``K`` layer kinds, ``B`` bitwidths, ``L`` layers, ``N`` positions of a device order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from llmpq.assigner.constraints.resolve import BoolArray, Limits
from llmpq.spec.plan import Formula, MicroBatching

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Number = TypeVar("Number", np.float64, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairCosts:
    """The costs of one pair of micro-batch sizes, in seconds and exact bytes.

    Attributes:
        micro_batching: the pair ``(eta, xi)``.
        prefill_batches, decode_batches: micro-batches, ``ceil(B/eta)`` and ``ceil(B/xi)``.
        new_tokens: tokens generated per sequence ``n``.
        prefill_s, decode_s: ``[T, K, B]`` seconds of one layer and one micro-batch.
        layer_bytes: ``[T, K, B]`` weights of one layer and its KV cache for the whole batch.
        kv_bytes: ``[K]`` the KV part of it.
        total_bytes, runtime_bytes: ``[T]`` a device's memory, and the part its process takes.
        temporary_bytes: ``[T]`` largest operator and message buffers.
        master_bytes: ``[T]`` embeddings, final norm, head and logits, if it is the master.
        master_prefill_s, master_decode_s: ``[T]`` the master's own work on one micro-batch.
        send_prefill_s, send_decode_s: ``[T, T]`` hidden states of a micro-batch, row to column.
        return_prefill_s, return_decode_s: ``[T, T]`` those of the last position, to the master.
    """

    micro_batching: MicroBatching
    prefill_batches: int
    decode_batches: int
    new_tokens: int
    prefill_s: FloatArray
    decode_s: FloatArray
    layer_bytes: IntArray
    kv_bytes: IntArray
    total_bytes: IntArray
    runtime_bytes: IntArray
    temporary_bytes: IntArray
    master_bytes: IntArray
    master_prefill_s: FloatArray
    master_decode_s: FloatArray
    send_prefill_s: FloatArray
    send_decode_s: FloatArray
    return_prefill_s: FloatArray
    return_decode_s: FloatArray

    @property
    def capacity_bytes(self) -> IntArray:
        """``[T]`` bytes left for decoder layers; negative when the process itself does not fit."""
        return self.total_bytes - self.runtime_bytes - self.temporary_bytes

    @property
    def first_capacity_bytes(self) -> IntArray:
        """``[T]`` bytes left for decoder layers on the master."""
        return self.capacity_bytes - self.master_bytes

    def merged(self, compositions: Sequence[Sequence[int]]) -> PairCosts:
        """Return the costs of runs of layers decided together, given each new kind's old kinds."""
        picks = [list(kinds) for kinds in compositions]

        def summed(values: npt.NDArray[Number], axis: int) -> npt.NDArray[Number]:
            parts = [np.take(values, kinds, axis=axis).sum(axis=axis) for kinds in picks]
            return np.stack(parts, axis=axis).astype(values.dtype)

        return replace(
            self,
            prefill_s=summed(self.prefill_s, 1),
            decode_s=summed(self.decode_s, 1),
            layer_bytes=summed(self.layer_bytes, 1),
            kv_bytes=summed(self.kv_bytes, 0),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Terms:
    """The layers, their bitwidths, and what a choice of bitwidths costs.

    Attributes:
        kinds: ``[L]`` kind of each layer.
        bits: the ``B`` bitwidths, widest first.
        omega: ``[L, B]`` normalised degradation; "every layer at 4 bits" sums to 1.
        theta_s: seconds that one unit of degradation costs.
        quality_budget: largest allowed degradation, ``None`` for no limit.
        formula: the latency formula.
        limits: manual limits, ``None`` for none.
    """

    kinds: IntArray
    bits: tuple[int, ...]
    omega: FloatArray
    theta_s: float
    quality_budget: float | None
    formula: Formula
    limits: Limits | None = None

    @property
    def num_layers(self) -> int:
        """Layers ``L`` (or runs of layers decided together)."""
        return len(self.kinds)


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignmentProblem(_Terms):
    """Assign a device and a bitwidth to each layer, for one order of devices and one pair.

    ``order`` is the group of every position, each group at most as often as it has devices.
    Position 0 is the master and always runs; any other may stay empty and is then no part of the
    pipeline.
    """

    costs: PairCosts
    order: tuple[int, ...]

    @property
    def num_positions(self) -> int:
        """Positions ``N`` of the order."""
        return len(self.order)

    def capacity_bytes(self, position: int) -> int:
        """Return the bytes that decoder layers may take at ``position``."""
        costs, group = self.costs, self.order[position]
        held = costs.first_capacity_bytes if position == 0 else costs.capacity_bytes
        return int(held[group])

    def allowed(self, position: int) -> BoolArray:
        """Return ``[L, B]`` which widths a layer may have at ``position``."""
        if self.limits is None:
            return np.ones(self.omega.shape, dtype=np.bool_)
        group = self.order[position]
        both: BoolArray = self.limits.layer_widths & self.limits.group_widths[group]
        return both


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchSpace(_Terms):
    """All micro-batch pairs of one request, and the ``[T]`` numbers of devices of its groups."""

    pairs: tuple[PairCosts, ...]
    group_counts: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        """Groups ``T``."""
        return len(self.group_counts)

    @cached_property
    def allowed(self) -> BoolArray:
        """``[T, L, B]`` which widths a layer may have on a group.

        A range fixed to a group's one device forbids its layers on all other groups, and all other
        layers on that device, so that only plans with the whole range there are left.
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
        """Return the problem of one pair and one order of groups."""
        terms = {field.name: getattr(self, field.name) for field in fields(_Terms)}
        return AssignmentProblem(costs=pair, order=order, **terms)


@dataclass(frozen=True, slots=True)
class Assignment:
    """For every layer its position in the order, never decreasing, and its index into ``bits``."""

    positions: tuple[int, ...]
    widths: tuple[int, ...]

    def used_positions(self) -> tuple[int, ...]:
        """Return the positions that run: the master's, and all that hold a layer."""
        return tuple(sorted({0, *self.positions}))
