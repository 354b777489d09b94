"""Schedules of RRA compared with exhaustive search, their forecasts with the simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from helpers.brute_force import exhaustive
from helpers.builders import uniform
from hypothesis import given
from hypothesis import strategies as st

from llmpq.assigner.schedules.rra import RraSpace, ScheduleTask, best_rra
from llmpq.assigner.schedules.steady_state import SteadyBatch, rra_performance
from llmpq.batching import PipelineShape, make_policy
from llmpq.errors import InfeasibleError
from llmpq.sim import BatchShape, Hop, PipelineLayout, linear_layout, simulate
from llmpq.spec.plan import MicroBatching, Schedule
from llmpq.spec.precision import Phase
from llmpq.spec.workload import LengthDistribution, draw_trace, truncated_normal


@dataclass(frozen=True)
class Costs:
    """A GPU-like pipeline: a decode step has a floor, prefill follows its tokens.

    Prompts are packed, or padded to the longest one.
    """

    stages: int = 2
    pads: bool = True
    floor_s: float = 4e-3
    row_s: float = 4e-5
    token_s: float = 3e-5

    @property
    def layout(self) -> PipelineLayout:
        return linear_layout(self.stages)

    def stage_s(self, rank: int, shape: BatchShape) -> float:
        return self.layers_s(shape) + (1e-4 if rank == 0 else 0.0)

    def layers_s(self, shape: BatchShape) -> float:
        if shape.phase is Phase.PREFILL:
            packed = shape.total * (0.8 + 0.2 * shape.spread)
            tokens = shape.rows * shape.longest if self.pads else packed
            return max(self.floor_s, self.token_s * tokens)
        return max(self.floor_s, self.row_s * shape.rows * (1 + shape.mean / 500))

    def project_s(self, shape: BatchShape) -> float:
        return 3e-4 + 2e-6 * shape.rows

    def hop(self, _: int, shape: BatchShape) -> Hop:
        return Hop(1e-5, 5e-5 + 1e-7 * shape.rows)


def _task(
    bound_s: float = math.inf,
    slots: int = 256,
    costs: Costs | None = None,
    law: LengthDistribution | None = None,
) -> ScheduleTask:
    costs = costs or Costs()
    law = law or truncated_normal(32, 13, 80)
    return ScheduleTask(
        costs=costs,
        num_slots=slots,
        prompt_tokens=truncated_normal(128, 60, 256),
        new_tokens=law,
        latency_bound_s=bound_s,
        bound_tokens=law.quantile(0.99),
    )


@given(
    slots=st.integers(4, 24),
    longest=st.integers(2, 20),
    bound_s=st.floats(0.05, 2.0),
    stages=st.integers(1, 3),
    floor_s=st.floats(1e-3, 1e-2),
)
def test_search_is_within_a_percent_of_exhaustive(slots, longest, bound_s, stages, floor_s):
    costs = Costs(stages=stages, floor_s=floor_s)
    task = _task(bound_s, slots, costs, uniform(1, longest))
    space = RraSpace(task)
    best = exhaustive(space.evaluate, space.shape, bound_s)
    if best.value is None:
        with pytest.raises(InfeasibleError, match="no RRA schedule"):
            best_rra(task)
        return
    found = best_rra(task)
    assert found.performance.latency_s <= bound_s
    assert found.performance.requests_per_s >= 0.99 * best.value.throughput


@pytest.mark.parametrize("share", [math.inf, 0.7, 0.4])
def test_a_space_of_the_paper_needs_few_evaluations(share):
    free = best_rra(_task(slots=512))
    found = best_rra(_task(free.performance.latency_s * share, slots=512))
    assert found.found.evaluated < 0.05 * found.found.space
    assert found.performance.requests_per_s <= free.performance.requests_per_s * 1.001


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("iterations", [4, 16])
def test_forecasts_agree_with_the_simulator(iterations, pads):
    costs, sizes = Costs(pads=pads), MicroBatching(prefill=8, decode=64)
    task = _task()
    steady = SteadyBatch(
        prompt_tokens=task.prompt_tokens,
        new_tokens=task.new_tokens,
        decode_iterations=iterations,
    )
    encode_batch = round(steady.encode_batch(120))
    expected = rra_performance(costs, steady, encode_batch, sizes, task.bound_tokens)
    schedule = Schedule(
        policy="rra",
        encode_batch=encode_batch,
        decode_batch=round(expected.decode_batch),
        decode_iterations=iterations,
        threshold=0.25,
    )
    policy = make_policy(schedule, PipelineShape(micro_batching=sizes, num_slots=256, num_stages=2))
    trace = draw_trace(6000, task.prompt_tokens, task.new_tokens, seed=1)
    report = simulate(costs, policy, trace, num_slots=256)
    ends = sorted(record.end_s for record in report.requests)
    middle = ends[1000:5000]  # neither the ramp nor the last stragglers
    measured = len(middle) / (middle[-1] - middle[0])
    assert measured == pytest.approx(expected.requests_per_s, rel=0.08)


def test_a_tighter_bound_never_raises_throughput():
    free = best_rra(_task())
    assert free.performance.decode_batch <= 256  # no bound is no leave to overflow
    rates = []
    for share in (1.0, 0.8, 0.6, 0.5):
        try:
            found = best_rra(_task(free.performance.latency_s * share))
        except InfeasibleError:
            break
        rates.append(found.performance.requests_per_s)
        assert found.schedule.decode_batch <= 256
    assert len(rates) > 1
    assert rates == sorted(rates, reverse=True)
