"""The best RRA schedule of a plan under a latency bound (ExeGPT, Sec. 5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llmpq.assigner.schedules.monotone import GridOptimum, Point, Value, branch_and_bound
from llmpq.assigner.schedules.steady_state import (
    FlowShop,
    Performance,
    SteadyBatch,
    encode_s,
    rra_performance,
)
from llmpq.errors import InfeasibleError
from llmpq.sim import MicroBatchCosts
from llmpq.spec.plan import MicroBatching, Plan, Schedule, ScheduleEstimate
from llmpq.spec.workload import LengthDistribution

THROUGHPUT_TOLERANCE = 0.1
LATENCY_TOLERANCE = 0.02
"""Relative. On random pipelines 5 % and less sometimes stop at a local optimum (tests); with these
the search evaluates 2-4 % of a space."""

_PREFILL_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Prefill micro-batches a stage to try: more of them fill the pipeline sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTask:
    """A plan's costs, its slots and the latency bound that a schedule is searched for.

    Attributes:
        num_slots: sequences that memory holds, and the largest decoding batch.
        latency_bound_s: largest latency of an answer of ``bound_tokens``; infinity for no bound.
        threshold: share by which a decoding batch may shrink before more is encoded.
    """

    costs: MicroBatchCosts
    num_slots: int
    prompt_tokens: LengthDistribution
    new_tokens: LengthDistribution
    latency_bound_s: float
    bound_tokens: int
    threshold: float = 0.25

    def search(self, evaluate: Callable[[Point], Value], shape: tuple[int, int]) -> GridOptimum:
        """Return the point of highest throughput within the bound."""
        return branch_and_bound(
            evaluate,
            shape,
            self.latency_bound_s,
            throughput_tolerance=THROUGHPUT_TOLERANCE,
            latency_tolerance=LATENCY_TOLERANCE,
        )

    def chosen(
        self, found: GridOptimum, performance: Performance, sizes: MicroBatching, **variables: Any
    ) -> ChosenSchedule:
        """Return the optimum as a schedule of these ``variables``, with its performance."""
        bound_s = None if math.isinf(self.latency_bound_s) else self.latency_bound_s
        schedule = Schedule(
            **variables,
            threshold=self.threshold,
            mean_prompt_tokens=self.prompt_tokens.mean,
            mean_new_tokens=self.new_tokens.mean,
            estimate=ScheduleEstimate(
                requests_per_s=performance.requests_per_s,
                latency_s=performance.latency_s,
                new_tokens=self.bound_tokens,
                latency_bound_s=bound_s,
            ),
        )
        return ChosenSchedule(
            schedule=schedule, micro_batching=sizes, performance=performance, found=found
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSchedule:
    """A schedule, its micro-batches, its expected performance, and how it was found."""

    schedule: Schedule
    micro_batching: MicroBatching
    performance: Performance
    found: GridOptimum


class RraSpace:
    """The grid of RRA's variables: ``B_E`` rises with i, the frequency of encoding with j."""

    def __init__(self, task: ScheduleTask) -> None:
        self._task = task
        self._prefill_sizes: dict[int, int] = {}
        self._steady = [
            _steady_batch(task, steps) for steps in _iterations(task.new_tokens.longest)
        ]

    @property
    def shape(self) -> tuple[int, int]:
        """Points in either direction."""
        return self._task.num_slots, len(self._steady)

    def variables(self, point: Point) -> tuple[int, int]:
        """Return ``(B_E, N_D)`` of a point."""
        return point[0] + 1, self._steady[point[1]].decode_iterations

    def sizes(self, point: Point) -> MicroBatching:
        """Return micro-batches that keep every stage busy."""
        encode_batch = point[0] + 1
        decode_batch = self._steady[point[1]].decode_batch(encode_batch)
        return MicroBatching(
            prefill=self._prefill_size(encode_batch),
            decode=max(1, math.ceil(decode_batch / self._task.costs.layout.num_ranks)),
        )

    def _prefill_size(self, encode_batch: int) -> int:
        """Return the micro-batch size of the shortest encoding."""
        if encode_batch not in self._prefill_sizes:
            task = self._task
            parts = [task.costs.layout.num_ranks * count for count in _PREFILL_PARTS]
            self._prefill_sizes[encode_batch] = min(
                sorted({math.ceil(encode_batch / part) for part in parts}, reverse=True),
                key=lambda size: encode_s(
                    FlowShop(task.costs), task.prompt_tokens, encode_batch, size
                ),
            )
        return self._prefill_sizes[encode_batch]

    def performance(self, point: Point) -> Performance:
        """Return the performance of a point, feasible or not."""
        return rra_performance(
            self._task.costs,
            self._steady[point[1]],
            point[0] + 1,
            self.sizes(point),
            self._task.bound_tokens,
        )

    def evaluate(self, point: Point) -> Value:
        """Return throughput and latency; infinite latency where memory does not hold the batch."""
        found = self.performance(point)
        fits = max(found.decode_batch, found.encode_batch) <= self._task.num_slots
        return Value(found.requests_per_s, found.latency_s if fits else math.inf)


def best_rra(task: ScheduleTask) -> ChosenSchedule:
    """Return the schedule of highest throughput within the bound.

    Raises:
        InfeasibleError: none meets it; the message gives the latency of the fastest one.
    """
    space = RraSpace(task)
    found = task.search(space.evaluate, space.shape)
    if found.point is None:
        fastest = space.performance((0, 0))
        raise InfeasibleError(
            f"no RRA schedule answers {task.bound_tokens} tokens within "
            f"{task.latency_bound_s:g} s: encoding one request at a time takes "
            f"{fastest.latency_s:.3g} s; allow at least that"
        )
    performance = space.performance(found.point)
    encode_batch, iterations = space.variables(found.point)
    return task.chosen(
        found,
        performance,
        space.sizes(found.point),
        policy="rra",
        encode_batch=encode_batch,
        decode_batch=max(encode_batch, round(performance.decode_batch)),
        decode_iterations=iterations,
    )


def with_estimate(plan: Plan, task: ScheduleTask) -> Plan:
    """Return an RRA plan whose schedule has the closed form's expected performance."""
    schedule = plan.schedule
    assert schedule is not None
    assert schedule.encode_batch is not None
    assert schedule.decode_iterations is not None
    assert schedule.estimate is not None
    steady = _steady_batch(task, schedule.decode_iterations)
    found = rra_performance(
        task.costs, steady, schedule.encode_batch, plan.micro_batching, task.bound_tokens
    )
    estimate = replace(
        schedule.estimate, requests_per_s=found.requests_per_s, latency_s=found.latency_s
    )
    return replace(plan, schedule=replace(schedule, estimate=estimate))


def _steady_batch(task: ScheduleTask, iterations: int) -> SteadyBatch:
    return SteadyBatch(
        prompt_tokens=task.prompt_tokens, new_tokens=task.new_tokens, decode_iterations=iterations
    )


def _iterations(longest: int) -> list[int]:
    """Return candidates for ``N_D``, falling: every small one, then some 4 % apart."""
    steps = [1]
    while steps[-1] < max(1, longest - 1):
        steps.append(max(steps[-1] + 1, round(steps[-1] * 1.04)))
    return sorted({min(step, max(1, longest - 1)) for step in steps}, reverse=True)
