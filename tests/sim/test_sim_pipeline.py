"""The simulated pipeline against closed forms and laws."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from helpers.builders import uniform
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching import (
    Admission,
    FirstComeFormer,
    HybridPolicy,
    IterationPolicy,
    StaticPolicy,
    WaaPolicy,
)
from llmpq.sim import BatchShape, Hop, PipelineLayout, linear_layout, simulate
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase
from llmpq.spec.workload import TraceRequest, draw_trace


@dataclass
class FlatCosts:
    """A stage takes the same time for every micro-batch of a phase."""

    prefill_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    link_s: float = 0.0
    embed: float = 0.0
    project: float = 0.0

    @property
    def layout(self) -> PipelineLayout:
        return linear_layout(len(self.prefill_s))

    def stage_s(self, stage: int, shape: BatchShape) -> float:
        seconds = self.prefill_s if shape.phase is Phase.PREFILL else self.decode_s
        return seconds[stage] + (self.embed if stage == 0 else 0.0)

    def project_s(self, _: BatchShape) -> float:
        return self.project

    def hop(self, _: int, __: BatchShape) -> Hop:
        return Hop(0.0, self.link_s)


def _batch(count: int, new_tokens: int) -> list[TraceRequest]:
    return [TraceRequest(arrival_s=0, prompt_tokens=4, new_tokens=new_tokens)] * count


def _hybrid(size: int, slots: int, stages: int) -> HybridPolicy:
    sizes = MicroBatching(prefill=size, decode=size)
    return HybridPolicy(micro_batching=sizes, num_slots=slots, num_stages=stages)


@given(
    prefill=st.lists(st.floats(0.1, 5), min_size=1, max_size=4),
    decode_s=st.floats(0.1, 5),
    batches=st.integers(1, 6),
    new_tokens=st.integers(1, 6),
    link_s=st.floats(0, 1),
)
def test_one_micro_batch_takes_the_sum_of_its_path(prefill, decode_s, batches, new_tokens, link_s):
    costs = FlatCosts(tuple(prefill), (decode_s,) * len(prefill), link_s)
    report = simulate(costs, _hybrid(4, 4, len(prefill)), _batch(4, new_tokens), num_slots=4)
    links = 0 if len(prefill) == 1 else link_s * len(prefill)
    rounds = (new_tokens - 1) * (decode_s * len(prefill) + links)
    assert report.makespan_s == pytest.approx(sum(prefill) + links + rounds)


def test_steady_state_is_limited_by_the_slowest_stage():
    # LLM-PQ, Sec. 4.3 as we state it: a round costs micro-batches times the slowest stage.
    costs = FlatCosts((1.0, 3.0), (1.0, 3.0))
    report = simulate(costs, _hybrid(2, 8, 2), _batch(8, 21), num_slots=8)
    rounds = 20 * 4 * 3.0
    prefill = 1.0 + 4 * 3.0
    assert report.makespan_s == pytest.approx(prefill + rounds, rel=0.02)
    assert report.busy_fractions[1] > 0.98


@given(seed=st.integers(0, 500), stages=st.integers(1, 3))
def test_time_is_monotone_and_every_token_is_generated(seed, stages):
    trace = draw_trace(20, uniform(1, 20), uniform(1, 12), requests_per_s=2.0, seed=seed)
    costs = FlatCosts((0.3,) * stages, (0.1,) * stages, 0.01, 0.02, 0.03)
    policy = IterationPolicy(micro_batching=MicroBatching(prefill=3, decode=4))
    report = simulate(costs, policy, trace, num_slots=6, with_activities=True)
    for record, item in zip(report.requests, trace, strict=True):
        assert item.arrival_s < record.first_token_s <= record.end_s
        assert record.new_tokens == item.new_tokens
    for stage in range(stages):
        own = [block for block in report.activities if block.stage == stage]
        assert all(before.end_s <= after.start_s + 1e-9 for before, after in pairwise(own))
        assert sum(block.end_s - block.start_s for block in own) == pytest.approx(
            report.busy_s[stage]
        )


def test_held_batch_costs_as_much_as_its_longest_member():
    costs = FlatCosts((1.0,), (1.0,))
    trace = [
        TraceRequest(arrival_s=0, prompt_tokens=1, new_tokens=tokens) for tokens in (1, 5, 2, 6)
    ]
    policy = StaticPolicy(
        former=FirstComeFormer(batch=2), micro_batching=MicroBatching(prefill=2, decode=2)
    )
    report = simulate(costs, policy, trace, num_slots=2)
    assert report.makespan_s == pytest.approx(11)  # multi-bin batching, Figure 1(b)


def test_clock_advances_to_the_next_arrival():
    costs = FlatCosts((1.0,), (1.0,))
    trace = [
        TraceRequest(arrival_s=2, prompt_tokens=1, new_tokens=1),
        TraceRequest(arrival_s=100, prompt_tokens=1, new_tokens=1),
    ]
    report = simulate(costs, _hybrid(1, 1, 1), trace, num_slots=1)
    assert [record.latency_s for record in report.requests] == [1, 1]
    assert report.makespan_s == 99
    assert report.busy_s == (2,)


@dataclass
class SharedCosts(FlatCosts):
    """Ranks of one host with fewer cores than threads."""

    cores: int = 1

    @property
    def layout(self) -> PipelineLayout:
        stages = len(self.prefill_s)
        return replace(linear_layout(stages), hosts=("one",) * stages, cores={"one": self.cores})


def test_busy_workers_share_cores():
    free = simulate(FlatCosts((1.0, 1.0), (1.0, 1.0)), _hybrid(2, 8, 2), _batch(8, 9), num_slots=8)
    shared = SharedCosts((1.0, 1.0), (1.0, 1.0))
    report = simulate(shared, _hybrid(2, 8, 2), _batch(8, 9), num_slots=8)
    assert report.makespan_s == pytest.approx(2 * 4 * 9)  # all work on one core, no idle moment
    assert free.makespan_s == pytest.approx(4 * 9 + 1)


@dataclass
class SplitCosts(FlatCosts):
    """WAA: rank 1 prefills, rank 2 decodes, the master embeds and projects."""

    handover: float = 0.0

    @property
    def layout(self) -> PipelineLayout:
        return replace(linear_layout(3), prefill_path=(0, 1), decode_path=(0, 2))

    def hop(self, stage: int, _: BatchShape) -> Hop:
        return Hop(0.0, self.handover if stage == 1 else 0.0)


@pytest.mark.parametrize("handover", [0.0, 0.5])
def test_split_stages_prefill_and_decode_concurrently(handover):
    costs = SplitCosts((0.0, 4.0, 0.0), (0.0, 0.0, 1.0), handover=handover)
    policy = WaaPolicy(
        admission=Admission(encode_batch=1, decode_batch=8, threshold=0.0),
        micro_batching=MicroBatching(prefill=1, decode=8),
    )
    report = simulate(costs, policy, _batch(40, 5), num_slots=8)
    # Encoding is the bottleneck: one request every four seconds, decoding hides behind it.
    assert report.makespan_s == pytest.approx(40 * 4 + handover + 4, abs=2)
    assert report.busy_fractions[1] > 0.95
    assert report.requests[0].first_token_s == pytest.approx(4 + handover)


@pytest.mark.parametrize("begin_s", [0.0, 2.0**40])
def test_tasks_end_that_are_shorter_than_the_clock_resolves(begin_s):
    """The forecast of a long context on a slow device did not end: its clock is in hours."""
    costs = FlatCosts((1e-6, 3e-7), (1e-7, 7e-8))
    assert begin_s == 0.0 or begin_s + 1e-6 == begin_s
    trace = [TraceRequest(arrival_s=begin_s, prompt_tokens=4, new_tokens=50)] * 3
    report = simulate(costs, _hybrid(2, 4, 2), trace, num_slots=4)
    assert len(report.requests) == 3
    if not begin_s:
        assert 49 * 1.7e-7 <= report.makespan_s <= 2 * 50 * 2.7e-7
