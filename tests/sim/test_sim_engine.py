"""Simulation of an engine: costs of packed steps at their ends, times in closed form, capacity."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from sim.test_sim_plan_costs import _plan

from llmpq.batching.engine_step import DraftLimits, DraftWork, EngineLimits, ScheduledChunk
from llmpq.batching.queue_order import queue_order
from llmpq.errors import CapacityError
from llmpq.sim.costs import (
    Hop,
    PlanCosts,
    PlanEngineCosts,
    StageLaw,
    linear_layout,
    step_size,
)
from llmpq.sim.engine import SimulatedEngine, relative_draft_s, simulate_engine
from llmpq.sim.report import capacity
from llmpq.spec.precision import Phase
from llmpq.spec.workload import TraceRequest
from reproduce.worker_costs import WorkerCosts

LIMITS = EngineLimits(token_budget=4, max_sequences=8, num_blocks=64, block_size=4, watermark=0.0)
FCFS = queue_order("fcfs")


def _request(arrival_s, prompt, new, hash_ids=()):
    return TraceRequest(
        arrival_s=arrival_s, prompt_tokens=prompt, new_tokens=new, hash_ids=hash_ids
    )


def _shape(*chunks):
    return step_size([ScheduledChunk(0, first, count, (), True) for first, count in chunks])


class Pipeline:
    """Two stages of 1 s and 2 s, half a second of head, and sends of 0.25 s at each end."""

    layout = linear_layout(2)

    def stage_s(self, stage, shape):  # noqa: ARG002
        return 1.0 + stage

    def project_s(self, shape):  # noqa: ARG002
        return 0.5

    def hop(self, stage, shape):  # noqa: ARG002
        return Hop(0.25, 3.0)


def test_single_request_takes_its_chunks_and_steps():
    report = simulate_engine(WorkerCosts(lambda _: 1.0), LIMITS, FCFS, [_request(2.0, 10, 5)])
    (record,) = report.requests
    assert (record.start_s, record.first_token_s, record.end_s) == (2.0, 5.0, 9.0)
    assert (report.steps, report.makespan_s, report.busy_s) == (7, 7.0, (7.0,))
    assert report.engine_json()["tokens_per_step"] == 14 / 7


def test_draft_tokens_are_rows_of_a_decode_step():
    drafted = step_size([ScheduledChunk(0, 10, 4, (), True, 3), ScheduledChunk(1, 5, 1, (), True)])
    assert drafted == _shape((10, 1), (11, 1), (12, 1), (13, 1), (5, 1))


@pytest.mark.parametrize("accepted", [0, 1, 2, 9])
def test_right_drafts_save_steps_and_wrong_ones_lose_few(accepted):
    costs = WorkerCosts(lambda shape: 3.0 + shape.tokens)  # a row is a third of what is fixed
    limits = replace(LIMITS, token_budget=16, num_speculative_tokens=3)
    ends = []
    for accepts in (None, lambda _, place: place % 10 < accepted):
        engine = SimulatedEngine(costs, limits, FCFS, accepts)
        engine.add(0, _request(0.0, 4, 100))
        engine.advance(float("inf"))
        (record,) = engine.report().requests
        assert record.new_tokens == 100
        ends.append(record.end_s - record.first_token_s)
    assert ends[0] == 99 * 4.0
    # The bound of DraftCredit: 0.25 steps and 1 % of the steps.
    assert ends[1] <= 4.0 * (99 * 1.01 + 0.25)
    if accepted == 9:
        assert ends[1] < ends[0] / 1.8
    assert engine.scheduler.free_blocks == LIMITS.num_blocks


@pytest.mark.parametrize("share", [0.02, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("accepted", [0, 2, 5, 9])
@pytest.mark.parametrize("sequences", [1, 4])
def test_drafts_lose_few_steps_whatever_a_row_takes(share, accepted, sequences):
    """The engine starts from 0.25 and measures what a row really takes."""
    costs = WorkerCosts(lambda shape: 1 + share * (shape.tokens - 1))
    limits = replace(LIMITS, token_budget=32, num_speculative_tokens=5, num_blocks=800)
    ends = []
    for accepts in (None, lambda request, place: (7 * request + place) % 10 < accepted):
        engine = SimulatedEngine(costs, limits, FCFS, accepts)
        for number in range(sequences):
            engine.add(number, _request(0.0, 2, 400))
        engine.advance(float("inf"))
        ends.append(engine.report().makespan_s)
    # Where sequences end at different times, the others are left with steps of fewer rows.
    assert ends[1] <= (1.031 if sequences == 1 else 1.04) * ends[0]
    if share < 0.1 and accepted == 9:
        assert ends[1] < 0.5 * ends[0]


@pytest.mark.parametrize("cost", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("accepted", [0, 5, 9])
@pytest.mark.parametrize("sequences", [1, 4])
def test_a_draft_model_loses_few_steps_whatever_it_takes(cost, accepted, sequences):
    """The engine starts from 0.2 and measures what a pass really takes."""
    costs = WorkerCosts(lambda shape: 1 + 0.1 * (shape.tokens - 1))
    limits = replace(
        LIMITS, token_budget=32, num_speculative_tokens=5, num_blocks=800, row_cost=0.1,
        draft=DraftLimits(num_blocks=800, cost=cost),
    )  # fmt: skip
    draft_s = relative_draft_s(costs, limits, 1)
    limits = replace(limits, draft=DraftLimits(num_blocks=800, cost=0.2))
    ends = []
    for accepts in (None, lambda request, place: (7 * request + place) % 10 < accepted):
        own = replace(limits, draft=None) if accepts is None else limits
        engine = SimulatedEngine(costs, own, FCFS, accepts, draft_s)
        for number in range(sequences):
            engine.add(number, _request(0.0, 2, 400))
        engine.advance(float("inf"))
        ends.append(engine.report().makespan_s)
    assert ends[1] <= 1.03 * ends[0]
    if cost < 0.1 and accepted == 9:
        assert ends[1] < 0.6 * ends[0]


@pytest.mark.parametrize(
    ("stage", "busy_s"), [(0, (6.0, 4.0)), (1, (3.0, 7.0)), (None, (3.0, 4.0))]
)
def test_a_draft_model_takes_its_place_and_its_link(stage, busy_s):
    """A draft of 2 tokens, which takes 3 s, before the second of two steps."""
    limits = replace(
        LIMITS, num_speculative_tokens=2, draft=DraftLimits(num_blocks=9, cost=0.1, stage=stage)
    )
    ends = []
    for draft_s in (0.0, 3.0):
        engine = SimulatedEngine(
            Pipeline(), limits, FCFS, lambda *_: True, lambda _, seconds=draft_s: seconds
        )
        engine.add(0, _request(0.0, 2, 4))
        engine.advance(float("inf"))
        report = engine.report()
        assert (report.steps, report.draft_tokens) == (2, 2)
        ends.append(report.makespan_s)
    assert ends[1] - ends[0] == pytest.approx(3.0)
    assert report.busy_s == pytest.approx(busy_s)


def test_the_hand_over_of_token_ids_is_once_a_step():
    costs = WorkerCosts(lambda _: 2.0)
    works = [DraftWork(0, 9, 10, 3, ()), DraftWork(1, 5, 6, 1, ())]
    seconds = []
    for handover in (0.0, 0.15):
        draft = DraftLimits(num_blocks=9, cost=0.25, handover=handover)
        draft_s = relative_draft_s(costs, replace(LIMITS, draft=draft), 1)
        assert draft_s is not None
        seconds.append(draft_s(works))
    assert seconds[1] - seconds[0] == pytest.approx(0.3)


def test_a_pass_of_the_draft_model_takes_its_share_of_a_step():
    costs = WorkerCosts(lambda shape: 2.0 * (1 + 0.1 * (shape.tokens - 1)))
    limits = replace(LIMITS, row_cost=0.1, draft=DraftLimits(num_blocks=9, cost=0.25))
    draft_s = relative_draft_s(costs, limits, 1)
    assert draft_s is not None
    works = [DraftWork(0, 8, 10, 3, ()), DraftWork(1, 5, 6, 1, ())]
    # Three rows, then one, then one.
    assert draft_s(works) == pytest.approx(0.5 * (1.2 + 1 + 1))
    assert relative_draft_s(costs, LIMITS, 1) is None


def test_request_that_arrives_during_a_step_is_in_the_next():
    trace = [_request(0.0, 4, 4), _request(0.5, 1, 1)]
    late = simulate_engine(WorkerCosts(lambda _: 1.0), LIMITS, FCFS, trace).requests[1]
    assert (late.start_s, late.end_s) == (1.0, 2.0)


def test_token_passes_the_stages_and_returns_to_the_master():
    (record,) = simulate_engine(Pipeline(), LIMITS, FCFS, [_request(0.0, 3, 2)]).requests
    step_s = (1.0 + 0.25) + 3.0 + (0.25 + 2.0 + 0.25) + 3.0 + 0.25 + 0.5
    assert record.first_token_s == pytest.approx(step_s)
    assert record.end_s == pytest.approx(2 * step_s)


def test_steps_in_flight_overlap_in_a_pipeline():
    trace = [_request(0.0, 2, 40) for _ in range(4)]
    ends = []
    for steps in (1, 2):
        limits = EngineLimits(
            token_budget=64, max_sequences=8, num_blocks=99, block_size=4, steps_in_flight=steps
        )
        report = simulate_engine(Pipeline(), limits, FCFS, trace)
        assert all(record.new_tokens == 40 for record in report.requests)
        ends.append(report.makespan_s)
    assert ends[0] == pytest.approx(40 * 10.5)
    # Two steps are in the pipeline, so a token of all sequences takes little more than one.
    assert ends[1] < 1.25 * ends[0]
    assert report.steps > 70


def test_engine_can_be_fed_while_its_clock_runs():
    trace = [_request(0.3 * number, 3 + number % 7, 1 + number % 5) for number in range(50)]
    whole = simulate_engine(WorkerCosts(lambda _: 0.1), LIMITS, FCFS, trace)
    engine = SimulatedEngine(WorkerCosts(lambda _: 0.1), LIMITS, FCFS)
    for number, item in enumerate(trace):
        engine.advance(item.arrival_s / 2.0)
        engine.advance(item.arrival_s)
        engine.add(number, item)
    engine.advance(1e9)
    assert engine.now_s == 1e9
    assert engine.report() == whole


def test_prompts_with_equal_hashes_share_blocks():
    limits = EngineLimits(token_budget=2048, max_sequences=8, num_blocks=400, block_size=16)
    trace = [
        _request(0.0, 1500, 2, (1, 2, 3)),
        _request(9.0, 1300, 2, (1, 2, 4)),
        _request(18.0, 1300, 2, (5, 2, 4)),
    ]
    report = simulate_engine(WorkerCosts(lambda _: 1.0), limits, FCFS, trace)
    assert (report.prefix_cache_queries, report.prefix_cache_hits) == (4100, 1024)
    assert report.step_tokens == 4100 - 1024 + 3


def test_longest_answer_is_reserved_but_not_made():
    trace = [_request(0.0, 4, 2) for _ in range(4)]
    limits = EngineLimits(token_budget=64, max_sequences=8, num_blocks=8, block_size=4)
    order = queue_order("no_preempt")
    report = simulate_engine(WorkerCosts(lambda _: 1.0), limits, order, trace, max_tokens=13)
    assert [record.end_s for record in report.requests] == [2.0, 2.0, 4.0, 4.0]
    with pytest.raises(CapacityError):
        simulate_engine(WorkerCosts(lambda _: 1.0), limits, order, trace, max_tokens=99)


def _law():
    """Return a law of known parts: n for linear operators, n^2 / 100 and r c / 10 for attention."""
    return StageLaw(
        lambda rows, tokens: rows * tokens + rows * tokens**2 / 100 + 5,
        lambda rows, tokens: 8 + rows / 2 + rows * tokens / 10,
    )


def test_step_of_one_phase_costs_the_micro_batch():
    law = _law()
    assert law(_shape((0, 40))) == pytest.approx(40 + 16 + 5)
    assert law(_shape((0, 40), (0, 40))) == pytest.approx(80 + 32 + 5)
    assert law(_shape((99, 1), (199, 1))) == pytest.approx(8 + 1 + 30)


def test_chunks_of_a_prompt_add_up_to_its_attention():
    law = _law()
    whole = law(_shape((0, 100)))
    parts = law(_shape((0, 30))) + law(_shape((30, 40))) + law(_shape((70, 30)))
    assert parts == pytest.approx(whole + 2 * 5)


def test_chunk_reads_the_keys_before_it_at_least_once():
    law = _law()
    short = law(_shape((10000, 2))) - law(_shape((0, 2)))
    assert short >= 10000 / 10 - 1


def test_mixed_step_costs_no_less_than_either_phase_and_grows():
    law, chance = _law(), random.Random(3)
    for _ in range(200):
        decode = [(chance.randint(1, 500), 1) for _ in range(chance.randint(1, 40))]
        prompts = [(chance.choice([0, 64]), chance.randint(2, 300))]
        mixed = law(_shape(*decode, *prompts))
        assert mixed >= law(_shape(*decode)) - 1e-9
        assert mixed >= law(_shape(*prompts)) - 1e-9
        first, count = prompts[0]
        assert law(_shape(*decode, (first, count + 1))) >= mixed - 1e-9


@pytest.mark.parametrize("device", ["cpu", "A100-80G"])
def test_plan_costs_at_the_ends_are_those_of_its_micro_batches(device):
    costs = PlanCosts(*_plan(device))
    engine = PlanEngineCosts(costs)
    for tokens in (2, 17, 64, 300):
        found = engine.stage_s(0, _shape((0, tokens)))
        assert found == pytest.approx(costs.micro_batch_s(0, Phase.PREFILL, 1, tokens))
        assert engine.project_s(_shape((0, tokens))) == costs.master_s(Phase.PREFILL, 1, tokens)
    for rows, context in ((1, 1), (4, 64), (7, 100), (16, 640)):
        found = engine.stage_s(0, _shape(*[(context - 1, 1)] * rows))
        assert found == pytest.approx(costs.micro_batch_s(0, Phase.DECODE, rows, context))
    mixed = engine.stage_s(0, _shape((0, 64), *[(99, 1)] * 4))
    assert mixed > engine.stage_s(0, _shape((0, 64)))


def test_roofline_separates_attention_of_two_prompts():
    costs = PlanCosts(*_plan("A100-80G"))
    found = PlanEngineCosts(costs).stage_s(0, _shape((0, 512), (0, 512)))
    assert found == pytest.approx(costs.micro_batch_s(0, Phase.PREFILL, 2, 512))


def test_capacity_is_the_rate_that_keeps_the_bound():
    seen = []

    def ttft(rate):
        seen.append(rate)
        return 1.0 / (7.0 - rate) if rate < 7.0 else 1e9

    assert capacity(ttft, 1.0) == pytest.approx(6.0, rel=0.02)
    assert capacity(ttft, 1.0, start=50.0) == pytest.approx(6.0, rel=0.02)
    assert capacity(ttft, 0.1) is None
    assert all(one > 0 for one in seen)


def test_ttft_grows_with_the_rate():
    chance = random.Random(1)
    lengths = [(chance.randint(1, 60), chance.randint(1, 20)) for _ in range(300)]
    found = []
    for rate in (0.2, 1.0, 5.0):
        trace = [_request(number / rate, *item) for number, item in enumerate(lengths)]
        report = simulate_engine(WorkerCosts(lambda s: 0.01 * s.tokens), LIMITS, FCFS, trace)
        found.append(report.engine_json()["time_to_first_token_s"]["p95"])
    assert all(low < high for low, high in pairwise(found))
