"""WAA: separate stages per phase, and their best schedule (ExeGPT, Sec. 4). Experimental.

A split decides which devices encode, which decode, and which layers each holds (Sec. 4.1). WAA-C
gives every device of a phase an equal share of its time, WAA-M of its memory. The paper takes the
number of encoders from ``C_E : C_D``; here every number is tried, at either end of the plan's
device order.

The size ``B_m`` of a decode micro-batch and the number of them in flight make the decoding batch
``B_D``; ``B_E`` keeps it full, ``B_D = B_E E[D]`` an iteration (Sec. 4.1 and 4.2).

**Deviation.** The paper's ``B_E`` is a whole number of requests an iteration, which would be below
one with small batches: here encoding runs at its own pace, ``B_E`` at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, get_args

from llmpq.assigner.forecast import empty_estimate, stage_memory
from llmpq.assigner.schedules.monotone import Point, Value
from llmpq.assigner.schedules.rra import ChosenSchedule, ScheduleTask
from llmpq.assigner.schedules.steady_state import (
    Performance,
    SteadyBatch,
    decode_shape,
    prefill_shape,
)
from llmpq.costmodel import ClusterCosts
from llmpq.errors import InfeasibleError
from llmpq.sim import BatchShape, Hop, MicroBatchCosts
from llmpq.spec.plan import MicroBatching, Plan, StageAssignment, default_schedule
from llmpq.spec.precision import Phase

Fits = Callable[[MicroBatching], bool]

Balance = Literal["time", "memory"]
BALANCES: tuple[Balance, ...] = get_args(Balance)
"""What a phase's devices share equally: time (WAA-C) or memory (WAA-M)."""

RangeCost = Callable[[int, int], float]
"""Cost of layers ``[first, end)`` on one device; infinity where they do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PathTime:
    """Seconds of a micro-batch until its tokens are known; of the master; of the busiest other."""

    total_s: float
    master_s: float
    busiest_s: float


def _path_time(costs: MicroBatchCosts, shape: BatchShape) -> _PathTime:
    path = costs.layout.path(shape.phase)
    busy = dict.fromkeys((0, *path), 0.0)
    busy[0] += costs.project_s(shape)
    delay_s = 0.0
    for place, rank in enumerate(path):
        hop = costs.hop(rank, shape) if len(path) > 1 else Hop(0.0, 0.0)
        busy[rank] += costs.stage_s(rank, shape) + hop.end_s
        busy[path[(place + 1) % len(path)]] += hop.end_s
        delay_s += hop.delay_s
    return _PathTime(
        total_s=sum(busy.values()) + delay_s,
        master_s=busy[0],
        busiest_s=max((seconds for rank, seconds in busy.items() if rank), default=0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WaaPoint:
    """A point of the space and its performance.

    ``slots`` is the mean number of sequences that hold a slot, including those being encoded.
    """

    sizes: MicroBatching
    performance: Performance
    slots: int


class WaaSpace:
    """The grid of WAA's control variables: ``B_m`` rises with i, micro-batches in flight with j.

    ``fits`` tells whether memory holds the temporary buffers of such micro-batches.
    """

    def __init__(self, task: ScheduleTask, fits: Fits = lambda _: True) -> None:
        self._task = task
        self._fits = fits
        self._steady = SteadyBatch(
            prompt_tokens=task.prompt_tokens, new_tokens=task.new_tokens, decode_iterations=1
        )
        self._times: dict[tuple[Phase, int], _PathTime] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """Points in either direction."""
        depth = self._task.costs.layout.depth
        return self._task.num_slots, depth.max_in_flight(Phase.DECODE)

    def point(self, point: Point) -> WaaPoint:
        """Return the performance of a point, feasible or not."""
        size, parts = point[0] + 1, point[1] + 1
        decode_batch, phases = size * parts, self._steady.phases
        decoding = self._time(Phase.DECODE, size)
        # Requests that end, and so begin, in an iteration; answers of one token do not decode.
        per_round = decode_batch / phases if phases else float(decode_batch)
        encode_batch, encode_rate = self._encode_batch(per_round, decode_batch, decoding, parts)
        encoding = self._time(Phase.PREFILL, encode_batch)
        round_s = _round_s(decoding, parts, encoding.master_s * per_round / encode_batch)
        rate = min(encode_rate, per_round / round_s) if phases else encode_rate
        latency_s = encoding.total_s
        if self._task.bound_tokens > 1:
            # A new sequence waits for a turn of the busiest stage, then makes a token a round.
            turn_s = max(decoding.busiest_s, decoding.master_s)
            latency_s += turn_s + (self._task.bound_tokens - 1) * round_s
        slots = decode_batch + max(encode_batch, math.ceil(rate * encoding.total_s))
        return WaaPoint(
            # Room for all that may decode at once: one sequence too many would be a
            # micro-batch of its own, which takes nearly as long as a full one.
            sizes=MicroBatching(prefill=encode_batch, decode=math.ceil(slots / parts)),
            performance=Performance(
                requests_per_s=rate,
                latency_s=latency_s,
                decode_batch=float(decode_batch),
                encode_batch=float(encode_batch),
                cycle_s=round_s,
            ),
            slots=slots,
        )

    def evaluate(self, point: Point) -> Value:
        """Return throughput and latency; infinite latency where memory does not hold the batch."""
        found = self.point(point)
        fits = found.slots <= self._task.num_slots and self._fits(found.sizes)
        performance = found.performance
        return Value(performance.requests_per_s, performance.latency_s if fits else math.inf)

    def _encode_batch(
        self, per_round: float, decode_batch: int, decoding: _PathTime, parts: int
    ) -> tuple[int, float]:
        """Return the smallest ``B_E`` that keeps pace, else the fastest; and its requests/s."""
        wanted = per_round / _round_s(decoding, parts, 0.0)
        best, fastest = 1, 0.0
        size = max(1, round(per_round))
        while size <= max(1, decode_batch):
            time = self._time(Phase.PREFILL, size)
            rate = size / max(time.busiest_s, time.master_s)
            if rate > fastest:
                best, fastest = size, rate
            if rate >= wanted:
                break
            size *= 2
        return best, fastest

    def _time(self, phase: Phase, rows: int) -> _PathTime:
        if (phase, rows) not in self._times:
            shape = (
                prefill_shape(self._task.prompt_tokens, rows)
                if phase is Phase.PREFILL
                else decode_shape(self._steady.mean_context_tokens, rows)
            )
            self._times[phase, rows] = _path_time(self._task.costs, shape)
        return self._times[phase, rows]


def _round_s(decoding: _PathTime, parts: int, encoding_s: float) -> float:
    """Return the seconds in which every micro-batch makes a token; the master also encodes."""
    return max(decoding.total_s, parts * decoding.busiest_s, parts * decoding.master_s + encoding_s)


def best_waa(task: ScheduleTask, fits: Fits = lambda _: True) -> ChosenSchedule:
    """Return the schedule of highest throughput within the bound.

    Raises:
        InfeasibleError: none meets it, or memory holds none; the message says which.
    """
    space = WaaSpace(task, fits)
    found = task.search(space.evaluate, space.shape)
    if found.point is None:
        if math.isinf(space.evaluate((0, 0)).latency_s):
            raise InfeasibleError(
                f"no WAA schedule: {task.num_slots} slots, or the memory for single sequences, do "
                "not hold one that is encoded and one that is decoded"
            )
        raise InfeasibleError(
            f"no WAA schedule answers {task.bound_tokens} tokens within "
            f"{task.latency_bound_s:g} s: one sequence at a time takes "
            f"{space.point((0, 0)).performance.latency_s:.3g} s; allow at least that"
        )
    best = space.point(found.point)
    return task.chosen(
        found,
        best.performance,
        best.sizes,
        policy="waa",
        encode_batch=best.sizes.prefill,
        decode_batch=best.slots,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PhaseCosts:
    """Costs of layer ranges in one phase, by memory (WAA-M) or by a micro-batch's time (WAA-C)."""

    plan: Plan
    costs: ClusterCosts
    phase: Phase
    rows: int
    tokens: int
    by_memory: bool

    def cuts(self, devices: Sequence[int], first_rank: int) -> tuple[int, ...] | None:
        """Return the balanced ranges of the layers on devices of these ranks."""
        costs = [self._of_device(item, rank) for rank, item in enumerate(devices, start=first_rank)]
        return balanced_cuts(costs, self.plan.model.num_layers)

    def _of_device(self, device: int, rank: int) -> RangeCost:
        plan, costs = self.plan, self.costs
        place = plan.cluster.devices[device]
        smallest = replace(plan, micro_batching=MicroBatching(prefill=1, decode=1))
        stage = StageAssignment(
            rank=rank, device=device, first_layer=0, end_layer=0, bits=(), phase=self.phase
        )
        room = costs.capacity_bytes(place) - stage_memory(smallest, costs, stage).total
        slots, tokens = smallest.slots_of(stage)
        layers = list(zip(costs.model.layer_kinds, plan.bits, strict=True))
        layer_bytes = (
            costs.layer_weight_bytes(place, kind, bits)
            + costs.layer_kv_bytes(kind, slots, tokens, place, keeps_all=True)
            for kind, bits in layers
        )
        layer_s = (
            costs.layer_steps_s(place, self.phase, bits, self.rows, self.tokens, kind)
            for kind, bits in layers
        )
        sizes = list(accumulate(layer_bytes, initial=0))
        seconds = list(accumulate(layer_s, initial=0.0))
        master_s = costs.master_s(place, self.phase, self.rows, self.tokens) if rank == 0 else 0.0

        def cost(first: int, end: int) -> float:
            size = sizes[end] - sizes[first]
            if size > room:
                return math.inf
            return size / room if self.by_memory else seconds[end] - seconds[first] + master_s

        return cost


def split_plans(
    plan: Plan,
    costs: ClusterCosts,
    *,
    prompt: int,
    context: int,
    balances: Sequence[Balance] = BALANCES,
) -> Iterator[Plan]:
    """Yield plans with the layers and bits of ``plan`` and separate stages per phase, as they fit.

    They use the devices that ``plan`` left out as well, and have no estimate and no searched
    schedule yet. Times are balanced for a mean ``prompt`` and a mean ``context`` in decode.
    """
    if len({costs.format_of(device) for device in plan.cluster.devices}) > 1:
        return  # keys and values travel in one format
    order = [*(stage.device for stage in plan.stages), *plan.dropped_devices]
    for count in range(1, len(order)):
        for decoders, encoders in _ends(plan, order, count):
            for balance in balances:
                decode = _PhaseCosts(
                    plan=plan,
                    costs=costs,
                    phase=Phase.DECODE,
                    rows=max(1, plan.workload.batch // (len(decoders) + 1)),
                    tokens=context,
                    by_memory=balance == "memory",
                )
                encode = replace(decode, phase=Phase.PREFILL, rows=1, tokens=prompt)
                cuts = decode.cuts(decoders, 0), encode.cuts(encoders, len(decoders))
                if cuts[0] is not None and cuts[1] is not None:
                    yield _assembled(plan, (decoders, encoders), (cuts[0], cuts[1]))


def _ends(
    plan: Plan, order: Sequence[int], encoders: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield devices that decode and that encode: either end, once where both ends are equal."""
    found = sorted(
        {
            (tuple(order[:-encoders]), tuple(order[-encoders:])),
            (tuple(order[encoders:]), tuple(order[:encoders])),
        }
    )
    seen = set()
    for ends in found:
        # Devices of one group are equal, and so are the links between them.
        groups = tuple(tuple(plan.cluster.devices[device].group for device in end) for end in ends)
        if groups not in seen:
            seen.add(groups)
            yield ends


def balanced_cuts(costs: Sequence[RangeCost], num_layers: int) -> tuple[int, ...] | None:
    """Cut layers into one range a device so that the largest cost is least (dynamic programming).

    A longer range costs no less. Returns where the ranges begin, and the end of the last; ``None``
    when no cut fits.
    """
    if len(costs) > num_layers:
        return None
    best = [0.0, *[math.inf] * num_layers]
    starts: list[list[int]] = []
    for number, cost in enumerate(costs, start=1):
        now, chosen = [math.inf] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(number, num_layers + 1):
            for first in range(end - 1, number - 2, -1):
                own = cost(first, end)
                if own >= now[end]:
                    break  # longer ranges cost no less
                value = max(own, best[first])
                if value < now[end]:
                    now[end], chosen[end] = value, first
        best = now
        starts.append(chosen)
    if math.isinf(best[num_layers]):
        return None
    cuts = [num_layers]
    for chosen in reversed(starts):
        cuts.append(chosen[cuts[-1]])
    return tuple(reversed(cuts))


def _assembled(
    plan: Plan,
    devices: tuple[Sequence[int], Sequence[int]],
    cuts: tuple[tuple[int, ...], tuple[int, ...]],
) -> Plan:
    """Return the plan of a split; ranks that decode come first."""
    ranges = [
        (phase, device, first, end)
        for phase, of_phase, cut in zip((Phase.DECODE, Phase.PREFILL), devices, cuts, strict=True)
        for device, (first, end) in zip(of_phase, pairwise(cut), strict=True)
    ]
    form = plan.stages[0].dtype  # all devices have one
    stages = tuple(
        StageAssignment(
            rank=rank,
            device=device,
            first_layer=first,
            end_layer=end,
            bits=plan.bits[first:end],
            phase=phase,
            dtype=form,
        )
        for rank, (phase, device, first, end) in enumerate(ranges)
    )
    return replace(
        plan,
        stages=stages,
        dropped_devices=(),
        schedule=default_schedule("waa", plan.workload.batch),
        estimate=empty_estimate(len(stages), quality=plan.estimate.quality),
        search=replace(plan.search, status="feasible", bound_s=None, gap=None),
    )
