"""Local search of schedules: better neighbours within the bound, with their own estimate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers.builders import model_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import costs_of
from llmpq.assigner.schedules.plan import (
    ALWAYS_REFILL,
    BATCH_MOVES,
    CYCLE_MOVES,
    MAX_EVALUATIONS,
    ScheduleRequest,
    local_search,
    simulated,
    with_schedule,
)
from llmpq.assigner.schedules.steady_state import SteadyBatch, rra_performance
from llmpq.batching import percentile
from llmpq.sim.costs import PlanCosts
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import MicroBatching, Schedule
from llmpq.spec.workload import Workload, truncated_normal

PROMPTS, ANSWERS = truncated_normal(20, 8, 32), truncated_normal(20, 8, 40)
LAW = ScheduleRequest(prompt_tokens=PROMPTS, new_tokens=ANSWERS)


@pytest.fixture(scope="module")
def problem():
    groups = (DeviceGroup(type="L4", count=1), DeviceGroup(type="T4-16G", count=1))
    request = PlanRequest(
        model=model_spec(layers=6, kinds=2, hidden=512),
        cluster=Cluster(name="c", nodes=(Node(name="n", devices=groups),)),
        workload=Workload(batch=32, prompt_tokens=32, new_tokens=40),
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
        mean_new_tokens=20.0,
    )
    return replace(
        plan, schedule=schedule, micro_batching=MicroBatching(prefill=prefill, decode=16)
    )


def variables(plan):
    schedule, sizes = plan.schedule, plan.micro_batching
    return (
        schedule.encode_batch,
        schedule.decode_iterations,
        sizes.prefill,
        schedule.decode_batch,
        schedule.threshold,
    )


@settings(max_examples=50, deadline=None)
@given(
    encode=st.integers(1, 32),
    iterations=st.integers(1, 39),
    best=st.tuples(*[st.integers(1, high) for high in (32, 39, 32, 32)], st.sampled_from((0, 20))),
)
def test_only_better_neighbours_are_returned_and_variables_stay_in_their_ranges(
    problem, encode, iterations, best
):
    start = with_rra(problem[0], encode, iterations, prefill=min(4, encode))
    tried = {}

    def score(plan):
        *found, threshold = variables(plan)
        key = variables(plan)
        assert key not in tried, "played twice"
        assert plan.micro_batching.decode == -(-plan.schedule.decode_batch // len(plan.stages))
        tried[key] = 1 / (1 + math.dist((*found, 80 * threshold), best))
        return tried[key]

    path = local_search(start, PROMPTS, ANSWERS, score, moves=CYCLE_MOVES + BATCH_MOVES)
    reached = [tried[variables(plan)] for plan in path]
    assert path[0] is start
    assert reached == sorted(set(reached))
    assert len(tried) <= MAX_EVALUATIONS
    for be, nd, mb, bd, threshold in tried:
        assert 1 <= be <= bd <= 32
        assert 1 <= nd <= 39
        assert 1 <= mb <= 32
        assert threshold in (ALWAYS_REFILL, 0.25)


def test_only_a_bound_moves_the_decoding_batch(problem):
    start, batches = with_rra(problem[0]), []
    local_search(
        start, PROMPTS, ANSWERS, lambda plan: batches.append(plan.schedule.decode_batch) or 1
    )
    assert set(batches) == {32}
    local_search(
        start, PROMPTS, ANSWERS, lambda plan: batches.append(plan.schedule.decode_batch) or 1,
        moves=BATCH_MOVES,
    )  # fmt: skip
    assert min(batches) == round(0.9 * 32)


def test_a_neighbour_keeps_the_decoding_batch_by_what_it_encodes(problem):
    path = local_search(
        with_rra(problem[0]), PROMPTS, ANSWERS, lambda plan: 1 / (1 + abs(9 - of(plan)))
    )
    assert len(path) > 1
    for plan in path[1:]:
        steady = SteadyBatch(prompt_tokens=PROMPTS, new_tokens=ANSWERS, decode_iterations=of(plan))
        assert plan.schedule.encode_batch == round(steady.encode_batch(32))


def of(plan):
    return plan.schedule.decode_iterations


def test_a_plan_that_nothing_beats_is_returned_itself(problem):
    start = with_rra(problem[0])
    assert local_search(start, PROMPTS, ANSWERS, lambda _: 1.0) == [start]


def test_the_schedule_is_a_local_optimum_with_its_own_estimate(problem):
    plan, costs = problem
    made = with_schedule(plan, costs, replace(LAW, sla="length"))
    *_, again = local_search(
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
    played = with_schedule(plan, costs, LAW)
    assert variables(played) == variables(made)
    report = simulated(played, costs, LAW)
    assert played.schedule.estimate.requests_per_s == report.throughput_requests_per_s


def test_the_local_search_keeps_a_bound_of_all_queries(problem):
    plan, costs = problem
    free = simulated(with_schedule(plan, costs, LAW), costs, LAW)
    slow_s = percentile([record.service_s for record in free.requests], 99)
    wanted = replace(LAW, sla="queries", latency_bound_s=0.95 * slow_s)
    report = simulated(with_schedule(plan, costs, wanted), costs, wanted)
    assert percentile([record.service_s for record in report.requests], 99) <= 0.95 * slow_s


def test_by_default_a_bound_is_kept_for_all_queries_and_for_long_answers(problem):
    plan, costs = problem
    bound_s = 0.9 * with_schedule(plan, costs, LAW).schedule.estimate.latency_s
    made = with_schedule(plan, costs, replace(LAW, latency_bound_s=bound_s))
    report = simulated(made, costs, LAW)
    longest = ANSWERS.quantile(0.99)
    long = [one.service_s for one in report.requests if 0.97 * longest <= one.new_tokens <= longest]
    assert percentile([one.service_s for one in report.requests], 99) <= bound_s
    assert percentile(long, 99) <= bound_s
    assert made.schedule.estimate.latency_s <= bound_s
