"""Polishing: steps only to better neighbours, within the bound, and says what it found."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers.builders import model_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.schedules.expected import SteadyBatch
from llmpq.assigner.schedules.plan import ScheduleRequest, simulated, with_schedule
from llmpq.assigner.schedules.polish import polished
from llmpq.assigner.schedules.steady import rra_performance
from llmpq.assigner.task import costs_of
from llmpq.batching import percentile
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.lengths import truncated_normal
from llmpq.spec.plan import MicroBatching
from llmpq.spec.schedule import Schedule
from llmpq.spec.workload import Workload

PROMPTS, ANSWERS = truncated_normal(20, 8, 32), truncated_normal(40, 16, 80)
LAW = ScheduleRequest(prompt_tokens=PROMPTS, new_tokens=ANSWERS)


@pytest.fixture(scope="module")
def problem():
    groups = (DeviceGroup(type="L4", count=1), DeviceGroup(type="T4-16G", count=1))
    request = PlanRequest(
        model=model_spec(layers=6, kinds=2, hidden=512),
        cluster=Cluster(name="c", nodes=(Node(name="n", devices=groups),)),
        workload=Workload(batch=32, prompt_tokens=32, new_tokens=80),
        dtype="float16",
        kv_bits=16,
    )
    plan = make_plan(request, "uniform", command="test")
    return plan, costs_of(request, plan.cluster)


def with_rra(plan, encode_batch=8, iterations=16, prefill=4):
    schedule = Schedule(
        policy="rra",
        encode_batch=encode_batch,
        decode_batch=32,
        decode_iterations=iterations,
        threshold=0.25,
        mean_prompt_tokens=20.0,
        mean_new_tokens=40.0,
    )
    return replace(
        plan, schedule=schedule, micro_batching=MicroBatching(prefill=prefill, decode=16)
    )


def variables(plan):
    schedule = plan.schedule
    return schedule.encode_batch, schedule.decode_iterations, plan.micro_batching.prefill


@settings(max_examples=50, deadline=None)
@given(
    encode=st.integers(1, 32),
    iterations=st.integers(1, 79),
    best=st.tuples(st.integers(1, 32), st.integers(1, 79), st.integers(1, 32)),
)
def test_nothing_worse_is_returned_and_variables_stay_in_their_ranges(
    problem, encode, iterations, best
):
    start = with_rra(problem[0], encode, iterations, prefill=min(4, encode))
    tried = {}

    def score(plan):
        found = variables(plan)
        assert found not in tried, "played twice"
        tried[found] = 1 / (1 + math.dist(found, best))
        return tried[found]

    made = polished(start, PROMPTS, ANSWERS, score)
    assert tried[variables(made)] >= tried[variables(start)]
    assert len(tried) <= 19  # three rounds of six, and the first
    assert all(1 <= mb <= be <= 32 and 1 <= nd <= 79 for be, nd, mb in tried)


def test_a_plan_that_nothing_beats_is_returned_itself(problem):
    start = with_rra(problem[0])
    assert polished(start, PROMPTS, ANSWERS, lambda _: 1.0) is start


def test_the_search_is_polished_by_playing_and_priced_as_what_it_is(problem):
    plan, costs = problem
    made = with_schedule(plan, costs, LAW)
    again = polished(
        made,
        PROMPTS,
        ANSWERS,
        lambda one: simulated(one, costs, LAW, 500).throughput_requests_per_s,
    )
    assert variables(again) == variables(made)
    steady = SteadyBatch(
        prompt_tokens=PROMPTS,
        new_tokens=ANSWERS,
        decode_iterations=made.schedule.decode_iterations,
    )
    found = rra_performance(
        PlanCosts(made, costs),
        steady,
        made.schedule.encode_batch,
        made.micro_batching,
        made.schedule.estimate.new_tokens,
    )
    assert made.schedule.estimate.requests_per_s == pytest.approx(found.requests_per_s)
    assert made.schedule.estimate.latency_s == pytest.approx(found.latency_s)


def test_a_bound_for_all_queries_is_kept_by_what_is_polished(problem):
    plan, costs = problem
    free = simulated(with_schedule(plan, costs, LAW), costs, LAW)
    slow_s = percentile([record.service_s for record in free.requests], 99)
    wanted = replace(LAW, sla="queries", latency_bound_s=0.95 * slow_s)
    report = simulated(with_schedule(plan, costs, wanted), costs, wanted)
    assert percentile([record.service_s for record in report.requests], 99) <= 0.95 * slow_s
