"""The best WAA schedule of a plan with stages of either phase, under a latency bound (ExeGPT).

Sec. 4.1 and 4.2: ``B_m`` sequences of a decoder micro-batch and how many of them are in circulation
make the decoding batch ``B_D``; ``B_E`` keeps it full, ``B_D = B_E E[D]`` an iteration. Both raise
throughput and latency, so the search is that of RRA.

**Where we depart.** The paper's ``B_E`` is a whole number an iteration. Answers are long against
the batches of a small machine, where it would be below one: here encoding runs at its own pace,
``B_E`` at a time, and what it needs is that its pace keeps the decoding batch full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from llmpq.assigner.schedules.expected import SteadyBatch, expected_longest
from llmpq.assigner.schedules.monotone import Point, Value, search
from llmpq.assigner.schedules.rra import (
    LATENCY_TOLERANCE,
    THROUGHPUT_TOLERANCE,
    ChosenSchedule,
    ScheduleTask,
)
from llmpq.assigner.schedules.steady import Performance
from llmpq.errors import InfeasibleError
from llmpq.sim import Hop, Shape, StepCosts
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase
from llmpq.spec.schedule import Schedule, ScheduleEstimate

Fits = Callable[[MicroBatching], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """What one micro-batch takes on its way.

    Attributes:
        total_s: from being sent off to its tokens.
        master_s: of these, the master's work.
        busiest_s: the work of the busiest other stage.
    """

    total_s: float
    master_s: float
    busiest_s: float


def _way(costs: StepCosts, shape: Shape) -> _Way:
    path = costs.layout.path(shape.phase)
    busy: Counter[int] = Counter()
    busy[0] += costs.embed_s(shape) + costs.project_s(shape)  # type: ignore[assignment]
    delay_s = costs.handover_s(shape) if shape.phase is Phase.PREFILL else 0.0
    for place, rank in enumerate(path):
        hop = costs.hop(rank, shape) if len(path) > 1 else Hop(0.0, 0.0)
        busy[rank] += costs.stage_s(rank, shape) + hop.end_s  # type: ignore[assignment]
        busy[path[(place + 1) % len(path)]] += hop.end_s  # type: ignore[assignment]
        delay_s += hop.delay_s
    return _Way(
        total_s=sum(busy.values()) + delay_s,
        master_s=busy[0],
        busiest_s=max((seconds for rank, seconds in busy.items() if rank), default=0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WaaPoint:
    """A point of the space and what it does.

    Attributes:
        sizes: micro-batches; ``prefill`` is ``B_E``.
        performance: throughput and latency.
        slots: sequences that hold a slot on average, those being encoded counted.
    """

    sizes: MicroBatching
    performance: Performance
    slots: int


class WaaSpace:
    """The grid of WAA's control variables: ``B_m`` rises with i, micro-batches on the way with j.

    Args:
        task: its costs have a layout with stages of either phase.
        fits: whether memory holds what such micro-batches need besides weights and slots.
    """

    def __init__(self, task: ScheduleTask, fits: Fits = lambda _: True) -> None:
        self._task = task
        self._fits = fits
        self._steady = SteadyBatch(
            prompt_tokens=task.prompt_tokens, new_tokens=task.new_tokens, decode_iterations=1
        )
        self._encoding: dict[int, _Way] = {}
        self._decoding: dict[int, _Way] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """Points in either direction."""
        ways = self._task.costs.layout.ways
        return self._task.num_slots, ways.most_in_flight(Phase.DECODE)

    def look(self, point: Point) -> WaaPoint:
        """Return what the schedule of a point does, whether it fits or not."""
        size, parts = point[0] + 1, point[1] + 1
        decode_batch, phases = size * parts, self._steady.phases
        decoding = self._decode(size)
        # Requests that end, and so begin, in an iteration; after one token nobody decodes.
        per_round = decode_batch / phases if phases else float(decode_batch)
        encode_batch, encode_rate = self._encode_batch(per_round, decode_batch, decoding, parts)
        encoding = self._encode(encode_batch)
        round_s = self._round_s(decoding, parts, encoding.master_s * per_round / encode_batch)
        rate = min(encode_rate, per_round / round_s) if phases else encode_rate
        latency_s = encoding.total_s
        if self._task.bound_tokens > 1:
            # A new sequence waits for a turn of the busiest stage, then makes a token a round.
            turn_s = max(decoding.busiest_s, decoding.master_s)
            latency_s += turn_s + (self._task.bound_tokens - 1) * round_s
        slots = decode_batch + max(encode_batch, math.ceil(rate * encoding.total_s))
        return WaaPoint(
            # Room for everyone who may decode at once: one sequence too many would be a
            # micro-batch of its own, which costs nearly as much as a full one.
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
        """Return throughput and latency; what does not fit in memory takes for ever."""
        found = self.look(point)
        fits = found.slots <= self._task.num_slots and self._fits(found.sizes)
        performance = found.performance
        return Value(performance.requests_per_s, performance.latency_s if fits else math.inf)

    def _encode_batch(
        self, per_round: float, decode_batch: int, decoding: _Way, parts: int
    ) -> tuple[int, float]:
        """Return the smallest ``B_E`` whose encoding keeps pace, else the fastest; and its pace."""
        wanted = per_round / self._round_s(decoding, parts, 0.0)
        best, fastest = 1, 0.0
        size = max(1, round(per_round))
        while size <= max(1, decode_batch):
            way = self._encode(size)
            rate = size / max(way.busiest_s, way.master_s)
            if rate > fastest:
                best, fastest = size, rate
            if rate >= wanted:
                break
            size *= 2
        return best, fastest

    @staticmethod
    def _round_s(decoding: _Way, parts: int, encoding_s: float) -> float:
        """Return the seconds in which every micro-batch makes a token; the master also encodes."""
        return max(
            decoding.total_s, parts * decoding.busiest_s, parts * decoding.master_s + encoding_s
        )

    def _encode(self, rows: int) -> _Way:
        if rows not in self._encoding:
            prompts = self._task.prompt_tokens
            shape = Shape(
                phase=Phase.PREFILL,
                rows=rows,
                longest=round(expected_longest(prompts, rows)),
                total=round(rows * prompts.mean),
            )
            self._encoding[rows] = _way(self._task.costs, shape)
        return self._encoding[rows]

    def _decode(self, rows: int) -> _Way:
        if rows not in self._decoding:
            context = self._steady.mean_context_tokens
            shape = Shape(
                phase=Phase.DECODE, rows=rows, longest=round(context), total=round(rows * context)
            )
            self._decoding[rows] = _way(self._task.costs, shape)
        return self._decoding[rows]


def best_waa(task: ScheduleTask, fits: Fits = lambda _: True) -> ChosenSchedule:
    """Return the schedule of highest throughput within the bound.

    Raises:
        InfeasibleError: none meets it, or memory holds none; the message says which.
    """
    space = WaaSpace(task, fits)
    found = search(
        space.evaluate,
        space.shape,
        task.latency_bound_s,
        throughput_tolerance=THROUGHPUT_TOLERANCE,
        latency_tolerance=LATENCY_TOLERANCE,
    )
    if found.point is None:
        fastest = space.look((0, 0))
        if math.isinf(space.evaluate((0, 0)).latency_s):
            raise InfeasibleError(
                f"no WAA schedule: {task.num_slots} sequences at once, or the memory for single "
                f"ones, do not hold even one that is encoded and one that is decoded"
            )
        raise InfeasibleError(
            f"no WAA schedule answers {task.bound_tokens} tokens within "
            f"{task.latency_bound_s:g} s: one sequence at a time takes "
            f"{fastest.performance.latency_s:.3g} s; allow at least that"
        )
    best = space.look(found.point)
    bound_s = None if math.isinf(task.latency_bound_s) else task.latency_bound_s
    return ChosenSchedule(
        schedule=Schedule(
            policy="waa",
            encode_batch=best.sizes.prefill,
            decode_batch=best.slots,
            threshold=task.threshold,
            mean_prompt_tokens=task.prompt_tokens.mean,
            mean_new_tokens=task.new_tokens.mean,
            estimate=ScheduleEstimate(
                requests_per_s=best.performance.requests_per_s,
                latency_s=best.performance.latency_s,
                new_tokens=task.bound_tokens,
                latency_bound_s=bound_s,
            ),
        ),
        micro_batching=best.sizes,
        performance=best.performance,
        found=found,
    )
