"""The best WAA schedule of a plan with separate stages per phase (ExeGPT, Sec. 4). Experimental.

The size ``B_m`` of a decode micro-batch and the number of them in flight make the decoding batch
``B_D``; ``B_E`` keeps it full, ``B_D = B_E E[D]`` an iteration (Sec. 4.1 and 4.2).

**Deviation.** The paper's ``B_E`` is a whole number of requests an iteration, which would be below
one with small batches: here encoding runs at its own pace, ``B_E`` at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from llmpq.assigner.schedules.monotone import Point, Value
from llmpq.assigner.schedules.rra import ChosenSchedule, ScheduleTask
from llmpq.assigner.schedules.steady_state import (
    Performance,
    SteadyBatch,
    decode_shape,
    prefill_shape,
)
from llmpq.errors import InfeasibleError
from llmpq.sim import BatchShape, Hop, StepCosts
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase

Fits = Callable[[MicroBatching], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PathTime:
    """Seconds of a micro-batch until its tokens are known; of the master; of the busiest other."""

    total_s: float
    master_s: float
    busiest_s: float


def _path_time(costs: StepCosts, shape: BatchShape) -> _PathTime:
    path = costs.layout.path(shape.phase)
    busy = dict.fromkeys((0, *path), 0.0)
    busy[0] += costs.embed_s(shape) + costs.project_s(shape)
    delay_s = costs.handover_s(shape) if shape.phase is Phase.PREFILL else 0.0
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
