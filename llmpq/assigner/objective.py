"""The problem of one device order and micro-batch pair, and the cost of its assignments.

``evaluate`` prices the plans of every method and of ``llmpq-check`` (LLM-PQ, Sec. 4.3). There are
two latency formulas, of which the first is ours (docs/how/equations.md):

- ``steady``: ``(mu_pre - 1) Tmax_pre + sum_j (T_pre[j] + c_pre[j]) + (n - 1) T_round`` with
  ``T_round = max(mu_dec max_j(T_dec[j], c_dec[j]), sum_j (T_dec[j] + c_dec[j]))``;
- ``paper``: ``(mu_pre - 1) Tmax_pre + sum_j T_pre[j] + (n - 1) (mu_dec - 1) Tmax_dec +
  sum_j T_dec[j]``.

A stage whose weights do not fit in its memory reads the least bytes of whole layers from disk
(``least_streamed``), while it computes: ``T[j]`` is then the larger of the seconds of its layers
and of the reading, of which all its layers share the disk.

``j`` runs over the used stages, ``c`` is the time to send one micro-batch on (the last stage sends
back to the master), ``Tmax`` covers stages and links. With one stage nothing is sent.

``assignment_of_counts`` chooses which layers of a stage get which bits, given how many of each
there are. Layers of one kind cost the same time and memory, so only the degradation is left to
minimise: a transportation problem, solved exactly.

Devices of one group (equal devices of one node) are interchangeable, and decoder layers of one
kind cost the same, so every figure is stored once per group and kind. Array legend: ``T`` groups,
``K`` layer kinds, ``B`` bitwidths, ``L`` layers, ``N`` positions of a device order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import permutations
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from llmpq.assigner.constraints.resolve import BoolArray, Limits
from llmpq.errors import SolverError
from llmpq.spec.plan import Formula, MicroBatching
from llmpq.spec.runtime_constants import STREAM_BUFFERS

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
        host_bytes: ``[T, K, B]`` bytes that one layer takes of the memory of a device's host.
        stream_bytes: ``[T, K, B]`` the weights, where they may rest on disk; else 0.
        stream_prefill_s, stream_decode_s: ``[T]`` seconds in which a byte of them is read for a
            micro-batch.
        kv_bytes: ``[K]`` the KV part of it.
        total_bytes, runtime_bytes: ``[T]`` a device's memory, and the part its process takes.
        host_capacity_bytes: ``[T]`` bytes of the memory of a device's host that layers may take.
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
    host_bytes: IntArray
    stream_bytes: IntArray
    stream_prefill_s: FloatArray
    stream_decode_s: FloatArray
    kv_bytes: IntArray
    total_bytes: IntArray
    host_capacity_bytes: IntArray
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
    def held_bytes(self) -> IntArray:
        """``[T, K, B]`` bytes of a layer that are in memory at least, wherever its weights rest."""
        return self.layer_bytes - self.stream_bytes

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
            host_bytes=summed(self.host_bytes, 1),
            stream_bytes=0 * summed(self.stream_bytes, 1),  # runs stay in memory
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


class _Figures(NamedTuple):
    """Costs of one position: ``[K][B]`` of a layer, those of the master where it is the first."""

    prefill_s: list[list[float]]
    decode_s: list[list[float]]
    layer_bytes: list[list[int]]
    host_bytes: list[list[int]]
    stream_bytes: list[list[int]]
    kv_bytes: list[int]
    master_prefill_s: float
    master_decode_s: float
    capacity_bytes: int
    host_capacity_bytes: int


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

    def host_capacity_bytes(self, position: int) -> int:
        """Return the bytes that layers at ``position`` may take of their host's memory."""
        return int(self.costs.host_capacity_bytes[self.order[position]])

    @property
    def safe_bytes(self) -> IntArray:
        """``[T, K, B]`` bytes of a layer, for methods that do not count the memory of hosts.

        More than any device has where a host has no room for as much of all layers.
        """
        costs = self.costs
        of_all = costs.host_bytes[:, self.kinds].sum(axis=1)  # [T, B]
        has_room = of_all <= costs.host_capacity_bytes[:, None]
        return np.where(has_room[:, None], costs.layer_bytes, costs.total_bytes.max() + 1)

    def allowed(self, position: int) -> BoolArray:
        """Return ``[L, B]`` which widths a layer may have at ``position``."""
        if self.limits is None:
            return np.ones(self.omega.shape, dtype=np.bool_)
        group = self.order[position]
        both: BoolArray = self.limits.layer_widths & self.limits.group_widths[group]
        return both

    @cached_property
    def figures(self) -> tuple[_Figures, ...]:
        """The costs at every position, as numbers that Python adds faster than those of arrays."""
        return tuple(map(self._figures, range(self.num_positions)))

    @cached_property
    def kind_list(self) -> list[int]:
        """The kind of every layer."""
        found: list[int] = self.kinds.tolist()
        return found

    @cached_property
    def omega_rows(self) -> list[list[float]]:
        """The degradation of every layer at each width."""
        found: list[list[float]] = self.omega.tolist()
        return found

    def _figures(self, position: int) -> _Figures:
        costs, group, is_first = self.costs, self.order[position], position == 0
        return _Figures(
            prefill_s=costs.prefill_s[group].tolist(),
            decode_s=costs.decode_s[group].tolist(),
            layer_bytes=costs.layer_bytes[group].tolist(),
            host_bytes=costs.host_bytes[group].tolist(),
            stream_bytes=costs.stream_bytes[group].tolist(),
            kv_bytes=costs.kv_bytes.tolist(),
            master_prefill_s=float(costs.master_prefill_s[group]) if is_first else 0.0,
            master_decode_s=float(costs.master_decode_s[group]) if is_first else 0.0,
            capacity_bytes=self.capacity_bytes(position),
            host_capacity_bytes=self.host_capacity_bytes(position),
        )


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


QUALITY_SLACK = 1e-9
"""Relative slack of the quality budget, for sums of floating-point shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEvaluation:
    """Seconds of one micro-batch and bytes of the layers of one used position, and of its host.

    The stage's seconds include the master's own work; the sends are those of its outgoing link.
    ``streamed`` has how many layers of a kind and width rest on disk, by kind and width.
    """

    position: int
    prefill_s: float
    decode_s: float
    send_prefill_s: float
    send_decode_s: float
    weight_bytes: int
    kv_bytes: int
    host_bytes: int = 0
    streamed: tuple[tuple[tuple[int, int], int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Cost of an assignment: latency, normalised degradation, and latency plus its price.

    ``excess_bytes`` are over capacity, summed over positions; 0 when it fits.
    """

    stages: tuple[StageEvaluation, ...]
    latency_s: float
    quality: float
    objective_s: float
    excess_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Seconds of one layer and micro-batch, and bytes that it takes less than a whole one."""

    prefill_s: float
    decode_s: float
    saved_bytes: int


def evaluate(
    problem: AssignmentProblem,
    assignment: Assignment,
    on_disk: Collection[int] | None = None,
    apart: Mapping[int, LayerCost] | None = None,
) -> Evaluation:
    """Evaluate a contiguous assignment (positions never decrease), whether it fits or not.

    Args:
        problem: the problem.
        assignment: of its layers.
        on_disk: layers whose weights rest on disk; by default those of ``least_streamed``.
        apart: layers whose experts are not as the rest of them, at their cost.
    """
    used, figures = assignment.used_positions(), problem.figures
    stages = tuple(
        _stage(problem, assignment, used, rank, (on_disk, apart or {})) for rank in range(len(used))
    )
    latency_s = latency(problem.costs, stages, problem.formula)
    rows = zip(problem.omega_rows, assignment.widths, strict=True)
    quality = sum(row[width] for row, width in rows)
    excess = sum(
        max(0, stage.weight_bytes + stage.kv_bytes - figures[stage.position].capacity_bytes)
        + max(0, stage.host_bytes - figures[stage.position].host_capacity_bytes)
        for stage in stages
    )
    return Evaluation(
        stages=stages,
        latency_s=latency_s,
        quality=quality,
        objective_s=latency_s + problem.theta_s * quality,
        excess_bytes=excess,
    )


def relative_gap(objective_s: float, bound_s: float) -> float:
    """Return the optimality gap ``(objective - bound) / objective``."""
    return (objective_s - bound_s) / objective_s if objective_s > 0 else 0.0


def is_feasible(problem: AssignmentProblem, found: Evaluation) -> bool:
    """Whether an assignment fits in memory and within the quality budget."""
    return found.excess_bytes == 0 and within_budget(problem, found.quality)


def within_budget(problem: AssignmentProblem, quality: float) -> bool:
    """Whether a degradation is within the budget, if there is one."""
    budget = problem.quality_budget
    return budget is None or quality <= budget * (1 + QUALITY_SLACK) + 1e-15


def latency(costs: PairCosts, stages: Sequence[StageEvaluation], formula: Formula) -> float:
    """Return the seconds of the whole batch for stages in pipeline order (module docstring)."""
    prefill_max = max(max(stage.prefill_s, stage.send_prefill_s) for stage in stages)
    decode_max = max(max(stage.decode_s, stage.send_decode_s) for stage in stages)
    prefill_s = (costs.prefill_batches - 1) * prefill_max + sum(s.prefill_s for s in stages)
    rounds = costs.new_tokens - 1
    if formula == "paper":
        bubbles = rounds * (costs.decode_batches - 1) * decode_max
        return prefill_s + bubbles + sum(stage.decode_s for stage in stages)
    prefill_s += sum(stage.send_prefill_s for stage in stages)
    pass_s = sum(stage.decode_s + stage.send_decode_s for stage in stages)
    return prefill_s + rounds * max(costs.decode_batches * decode_max, pass_s)


def _stage(
    problem: AssignmentProblem,
    assignment: Assignment,
    used: Sequence[int],
    rank: int,
    places: tuple[Collection[int] | None, Mapping[int, LayerCost]],
) -> StageEvaluation:
    position, (on_disk, apart) = used[rank], places
    at, kinds, widths = problem.figures[position], problem.kind_list, assignment.widths
    where = assignment.positions
    layers = range(bisect_left(where, position), bisect_right(where, position))
    cells = [(kinds[layer], widths[layer]) for layer in layers]
    plain = cells
    others: list[LayerCost] = []
    if apart:
        plain = [cell for layer, cell in zip(layers, cells, strict=True) if layer not in apart]
        others = [apart[layer] for layer in layers if layer in apart]
    prefill_s = sum(at.prefill_s[kind][width] for kind, width in plain)
    prefill_s += sum(other.prefill_s for other in others)
    prefill_s += at.master_prefill_s
    decode_s = sum(at.decode_s[kind][width] for kind, width in plain)
    decode_s += sum(other.decode_s for other in others)
    decode_s += at.master_decode_s
    kv_bytes = sum(at.kv_bytes[kind] for kind, _ in cells)
    send_prefill_s, send_decode_s = _sends(problem, used, rank)
    total = sum(at.layer_bytes[kind][width] for kind, width in cells)
    total -= sum(other.saved_bytes for other in others)
    if on_disk is None:
        streamed = _streamed(at.stream_bytes, cells, total - at.capacity_bytes)
    else:
        named = zip(layers, cells, strict=True)
        streamed = Counter(cell for layer, cell in named if layer in on_disk)
    if streamed:
        costs, group = problem.costs, problem.order[position]
        sizes = [at.stream_bytes[kind][width] for kind, width in streamed]
        read = sum(size * count for size, count in zip(sizes, streamed.values(), strict=True))
        prefill_s = max(prefill_s, read * float(costs.stream_prefill_s[group]))
        decode_s = max(decode_s, read * float(costs.stream_decode_s[group]))
        total += STREAM_BUFFERS * max(sizes) - read
    return StageEvaluation(
        position=position,
        prefill_s=prefill_s,
        decode_s=decode_s,
        send_prefill_s=send_prefill_s,
        send_decode_s=send_decode_s,
        weight_bytes=total - kv_bytes,
        kv_bytes=kv_bytes,
        host_bytes=sum(at.host_bytes[kind][width] for kind, width in plain),
        streamed=tuple(streamed.items()),
    )


def _streamed(
    stream_bytes: Sequence[Sequence[int]], cells: Sequence[tuple[int, int]], excess: int
) -> dict[tuple[int, int], int]:
    """Return how many layers of each kind and width of a stage rest on disk; none if all fit."""
    if excess <= 0:
        return {}
    counts = Counter(cell for cell in cells if stream_bytes[cell[0]][cell[1]])
    if not counts:
        return {}
    names = sorted(counts, key=lambda cell: (-stream_bytes[cell[0]][cell[1]], cell))
    sizes = [stream_bytes[kind][width] for kind, width in names]
    chosen = least_streamed(sizes, [counts[cell] for cell in names], excess)
    pairs = zip(names, chosen or (), strict=bool(chosen))
    return {cell: count for cell, count in pairs if count}


def least_streamed(
    sizes: Sequence[int], counts: Sequence[int], excess: int
) -> tuple[int, ...] | None:
    """Return how many layers of each size to stream, so that a stage fits in memory.

    Reading takes longer the more bytes there are, and nothing else does: the fewest bytes are the
    best choice for any plan, whatever its other stages. They exceed ``excess`` by the buffers.

    Args:
        sizes: bytes of the weights of a layer, falling.
        counts: layers of each size.
        excess: bytes of all layers beyond the memory.

    Returns:
        ``None`` if the stage does not fit even so.
    """
    best: tuple[int, tuple[int, ...]] | None = None
    each = [size * count for size, count in zip(sizes, counts, strict=True)]
    rest = [sum(each[index:]) for index in range(len(each))]
    for first, largest in enumerate(sizes):
        need = excess + STREAM_BUFFERS * largest
        stack = [(first, 0, (0,) * first)]
        while stack:
            index, read, taken = stack.pop()
            if best is not None and max(read, need) >= best[0]:
                continue
            if read >= need:
                best = read, taken + (0,) * (len(sizes) - index)
            elif index < len(sizes) and read + rest[index] >= need:
                most = min(counts[index], -(-(need - read) // sizes[index]))
                stack += [
                    (index + 1, read + n * sizes[index], (*taken, n)) for n in range(most + 1)
                ]
    return None if best is None else best[1]


def _sends(problem: AssignmentProblem, used: Sequence[int], rank: int) -> tuple[float, float]:
    """Return the prefill and decode seconds of the link that leaves a stage."""
    costs, order = problem.costs, problem.order
    if len(used) == 1:
        return 0.0, 0.0
    if rank == len(used) - 1:
        link = order[used[rank]], order[0]
        return float(costs.return_prefill_s[link]), float(costs.return_decode_s[link])
    link = order[used[rank]], order[used[rank + 1]]
    return float(costs.send_prefill_s[link]), float(costs.send_decode_s[link])


TOLERANCE = 1e-12
"""Relative improvement below which an exchange is a rounding error."""

FORBIDDEN = 1e3
"""Degradation of a width that a limit forbids, in sums of all degradations."""


def assignment_of_counts(problem: AssignmentProblem, counts: Sequence[FloatArray]) -> Assignment:
    """Return the assignment of least degradation with the given counts of every position.

    ``counts`` holds ``N`` arrays ``[K, B]``: how many layers of a kind a position holds at each
    width, whole up to a solver's tolerance.

    Raises:
        SolverError: the counts do not describe contiguous stages of this model.
    """
    layer = 0
    positions: list[int] = []
    widths = [0] * problem.num_layers
    for position, table in enumerate(counts):
        whole = table.round().astype(int)
        end = layer + int(whole.sum())
        held = problem.kinds[layer:end].tolist()
        for kind, row in enumerate(whole.tolist()):
            members = [layer + index for index, found in enumerate(held) if found == kind]
            if len(members) != sum(row):
                raise SolverError(
                    f"position {position} holds layers [{layer}, {end}) with {len(members)} of "
                    f"kind {kind}, but the solver counted {sum(row)}"
                )
            omega = problem.omega[members]
            if problem.limits is not None:
                allowed = problem.allowed(position)[members]
                omega = np.where(allowed, omega, FORBIDDEN * (1 + problem.omega.sum()))
            chosen = assign_bits_within_stage(omega, row)
            for member, width in zip(members, chosen, strict=True):
                widths[member] = width
        positions += [position] * (end - layer)
        layer = end
    if layer != problem.num_layers:
        raise SolverError(f"the solver placed {layer} of {problem.num_layers} layers")
    return Assignment(tuple(positions), tuple(widths))


def assign_bits_within_stage(omega: FloatArray, counts: Sequence[int]) -> list[int]:
    """Return the width index of every layer, of least total ``omega [M, B]``, with ``counts [B]``.

    Exchanges layers along cycles of bitwidths while that helps: a cycle moves the cheapest layer
    along each of its arcs. A flow without an improving cycle is optimal, and with at most four
    bitwidths there are at most twenty cycles.
    """
    widths = [width for width, count in enumerate(counts) for _ in range(count)]
    used = [width for width, count in enumerate(counts) if count]
    rows = omega.tolist()
    floor = TOLERANCE * max((abs(value) for row in rows for value in row), default=0.0)
    cycles = [
        cycle
        for length in range(2, len(counts) + 1)
        for cycle in permutations(used, length)
        if cycle[0] == min(cycle)
    ]
    improved = True
    while improved:
        improved = False
        for cycle in cycles:
            moves = _cheapest_moves(rows, widths, cycle)
            gain = sum(rows[layer][widths[layer]] - rows[layer][target] for layer, target in moves)
            if gain > floor:
                for layer, width in moves:
                    widths[layer] = width
                improved = True
    return widths


def _cheapest_moves(
    rows: Sequence[Sequence[float]], widths: Sequence[int], cycle: Sequence[int]
) -> list[tuple[int, int]]:
    """Return for each arc of a cycle the layer that moves along it cheapest, and its target."""
    moves = []
    for source, target in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        holders = [layer for layer, width in enumerate(widths) if width == source]
        layer = min(holders, key=lambda item: rows[item][target] - rows[item][source])
        moves.append((layer, target))
    return moves
