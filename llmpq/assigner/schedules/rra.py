"""The best RRA schedule of a plan under a latency bound (ExeGPT, Sec. 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmpq.assigner.schedules.expected import SteadyBatch
from llmpq.assigner.schedules.monotone import Found, Point, Value, search
from llmpq.assigner.schedules.steady import Performance, encode_s, rra_performance
from llmpq.errors import InfeasibleError
from llmpq.sim import StepCosts
from llmpq.spec.lengths import LengthDistribution
from llmpq.spec.plan import MicroBatching, Plan
from llmpq.spec.schedule import Schedule, ScheduleEstimate

THROUGHPUT_TOLERANCE = 0.1
LATENCY_TOLERANCE = 0.02
"""Relative. Tried on random pipelines against looking at every point: with 5 % and less the search
sometimes stops at an optimum of a small region (tests); with these it looks at 2-4 % of a space."""

_PREFILL_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Prefill micro-batches a stage that are tried: more of them fill the pipeline sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTask:
    """What a schedule is wanted for.

    Attributes:
        costs: seconds of the plan's parts.
        num_slots: sequences that memory holds.
        prompt_tokens, new_tokens: laws of lengths.
        latency_bound_s: largest latency of an answer of ``bound_tokens``; infinity is no bound.
        bound_tokens: the answer that the bound is for.
        threshold: how far a decoding batch may be below its size before more is encoded.
    """

    costs: StepCosts
    num_slots: int
    prompt_tokens: LengthDistribution
    new_tokens: LengthDistribution
    latency_bound_s: float
    bound_tokens: int
    threshold: float = 0.25

    @property
    def most_decoding(self) -> int:
        """Largest decoding batch: every slot, since the policy never lets it grow beyond."""
        return self.num_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSchedule:
    """A schedule, the micro-batches it runs with, and how it was found."""

    schedule: Schedule
    micro_batching: MicroBatching
    performance: Performance
    found: Found


class RraSpace:
    """The grid of RRA's control variables: ``B_E`` rises with i, the frequency of encoding with j.

    Both raise throughput and latency: fewer iterations between encodings keep a larger batch.
    """

    def __init__(self, task: ScheduleTask) -> None:
        self._task = task
        self._prefill_sizes: dict[int, int] = {}
        self._iterations = _iteration_steps(task.new_tokens.longest)
        self._steady = [
            SteadyBatch(
                prompt_tokens=task.prompt_tokens,
                new_tokens=task.new_tokens,
                decode_iterations=iterations,
            )
            for iterations in self._iterations
        ]

    @property
    def shape(self) -> tuple[int, int]:
        """Points in either direction."""
        return self._task.most_decoding, len(self._iterations)

    def variables(self, point: Point) -> tuple[int, int]:
        """Return ``(B_E, N_D)`` of a point."""
        return point[0] + 1, self._iterations[point[1]]

    def sizes(self, point: Point) -> MicroBatching:
        """Return micro-batches that keep every stage at work."""
        encode_batch = point[0] + 1
        decode_batch = self._steady[point[1]].decode_batch(encode_batch)
        return MicroBatching(
            prefill=self._prefill_size(encode_batch),
            decode=max(1, math.ceil(decode_batch / self._task.costs.layout.num_ranks)),
        )

    def _prefill_size(self, encode_batch: int) -> int:
        """Return the size of which encoding takes least time."""
        if encode_batch not in self._prefill_sizes:
            parts = [self._task.costs.layout.num_ranks * count for count in _PREFILL_PARTS]
            sizes = sorted({math.ceil(encode_batch / part) for part in parts}, reverse=True)
            self._prefill_sizes[encode_batch] = min(
                sizes,
                key=lambda size: encode_s(
                    self._task.costs, self._task.prompt_tokens, encode_batch, size
                ),
            )
        return self._prefill_sizes[encode_batch]

    def performance(self, point: Point) -> Performance:
        """Return what the schedule of a point does, whether it fits or not."""
        task = self._task
        return rra_performance(
            task.costs,
            self._steady[point[1]],
            point[0] + 1,
            self.sizes(point),
            task.bound_tokens,
        )

    def evaluate(self, point: Point) -> Value:
        """Return throughput and latency; what does not fit in memory takes for ever."""
        found = self.performance(point)
        fits = max(found.decode_batch, found.encode_batch) <= self._task.most_decoding
        return Value(found.requests_per_s, found.latency_s if fits else math.inf)


def best_rra(task: ScheduleTask) -> ChosenSchedule:
    """Return the schedule of highest throughput within the bound.

    Raises:
        InfeasibleError: none meets it; the message says what the fastest one takes.
    """
    space = RraSpace(task)
    found = search(
        space.evaluate,
        space.shape,
        task.latency_bound_s,
        throughput_tolerance=THROUGHPUT_TOLERANCE,
        latency_tolerance=LATENCY_TOLERANCE,
    )
    if found.point is None:
        fastest = space.performance((0, 0))
        raise InfeasibleError(
            f"no RRA schedule answers {task.bound_tokens} tokens within "
            f"{task.latency_bound_s:g} s: encoding one request at a time takes "
            f"{fastest.latency_s:.3g} s; allow at least that"
        )
    return _chosen(space, task, found)


def _chosen(space: RraSpace, task: ScheduleTask, found: Found) -> ChosenSchedule:
    assert found.point is not None
    performance = space.performance(found.point)
    encode_batch, iterations = space.variables(found.point)
    bound_s = None if math.isinf(task.latency_bound_s) else task.latency_bound_s
    schedule = Schedule(
        policy="rra",
        encode_batch=encode_batch,
        decode_batch=max(encode_batch, round(performance.decode_batch)),
        decode_iterations=iterations,
        threshold=task.threshold,
        mean_prompt_tokens=task.prompt_tokens.mean,
        mean_new_tokens=task.new_tokens.mean,
        estimate=ScheduleEstimate(
            requests_per_s=performance.requests_per_s,
            latency_s=performance.latency_s,
            new_tokens=task.bound_tokens,
            latency_bound_s=bound_s,
        ),
    )
    return ChosenSchedule(
        schedule=schedule,
        micro_batching=space.sizes(found.point),
        performance=performance,
        found=found,
    )


def estimated(plan: Plan, task: ScheduleTask) -> Schedule:
    """Return the schedule of an RRA plan with what the closed form says of it."""
    schedule = plan.schedule
    assert schedule is not None
    assert schedule.encode_batch is not None
    assert schedule.decode_iterations is not None
    assert schedule.estimate is not None
    steady = SteadyBatch(
        prompt_tokens=task.prompt_tokens,
        new_tokens=task.new_tokens,
        decode_iterations=schedule.decode_iterations,
    )
    found = rra_performance(
        task.costs, steady, schedule.encode_batch, plan.micro_batching, task.bound_tokens
    )
    return replace(
        schedule,
        estimate=replace(
            schedule.estimate, requests_per_s=found.requests_per_s, latency_s=found.latency_s
        ),
    )


def _iteration_steps(longest: int) -> list[int]:
    """Return candidates for ``N_D``, falling: every small one, then some 4 % apart."""
    steps = [1]
    while steps[-1] < max(1, longest - 1):
        steps.append(max(steps[-1] + 1, round(steps[-1] * 1.04)))
    return sorted({min(step, max(1, longest - 1)) for step in steps}, reverse=True)
