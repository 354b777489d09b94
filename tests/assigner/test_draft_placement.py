"""Where a draft model runs and whether it pays: every device and length, and a simulation."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.draft_placement import (
    DraftRequest,
    draft_places,
    expected_tokens,
    place_draft,
)
from llmpq.assigner.request import costs_of
from llmpq.assigner.verify import verify_plan
from llmpq.batching.engine_step import EngineLimits, planned_limits
from llmpq.batching.queue_order import queue_order
from llmpq.costmodel import build_costs
from llmpq.errors import SpecError
from llmpq.sim import BatchShape
from llmpq.sim.costs import PlanCosts, PlanEngineCosts
from llmpq.sim.engine import SimulatedEngine, random_acceptance, relative_draft_s
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, LinkSpec, Node
from llmpq.spec.fields import Fields, from_json, to_json
from llmpq.spec.plan import MicroBatching, Plan
from llmpq.spec.precision import Phase
from llmpq.spec.workload import TraceRequest, Workload

CLUSTER = Cluster(
    name="three",
    nodes=(
        Node(
            name="a",
            devices=(
                DeviceGroup(type="T4-16G", count=1),
                DeviceGroup(type="V100-32G", count=1),
                DeviceGroup(type="T4-16G", count=1, memory_bytes=10**9),
            ),
        ),
        Node(name="b", devices=(DeviceGroup(type="V100-32G", count=1),)),
    ),
)
REQUEST = PlanRequest(
    model=catalog.model("facebook/opt-6.7b"),
    cluster=CLUSTER,
    workload=Workload(batch=1, prompt_tokens=128, new_tokens=100),
    dtype="float16",
    kv_bits=16,
    bits=(8,),
    theta_s=0.0,
    latency="roofline",
)
COSTS = costs_of(REQUEST, CLUSTER)


def draft(rate=0.7, most=8, name="facebook/opt-125m", bits=None, cluster=CLUSTER) -> DraftRequest:
    costs = build_costs(
        catalog.model(name), cluster, dtype="float16", kv_bits=16, latency="roofline"
    )
    return DraftRequest(costs=costs, source=name, bits=bits, acceptance_rate=rate, most=most)


@cache
def plan_of(work: Workload) -> Plan:
    return make_plan(replace(REQUEST, workload=work), "llmpq")


def plan_on(*devices: int, batch=1, micro_batch=1, prompt=128, new=100) -> Plan:
    """Stages of equal numbers of layers on these devices, the others without any."""
    work = Workload(batch=batch, prompt_tokens=prompt, new_tokens=new)
    chosen = plan_of(work)
    layers = chosen.model.num_layers
    cuts = [layers * place // len(devices) for place in range(len(devices) + 1)]
    stage = chosen.stages[0]
    stages = tuple(
        replace(
            stage,
            rank=rank,
            device=device,
            first_layer=first,
            end_layer=end,
            bits=(8,) * (end - first),
            dtype=None,
        )
        for rank, (device, first, end) in enumerate(zip(devices, cuts[:-1], cuts[1:], strict=True))
    )
    return replace(
        chosen,
        stages=stages,
        micro_batching=MicroBatching(prefill=1, decode=micro_batch),
        dropped_devices=tuple(sorted(set(range(4)) - set(devices))),
        estimate=replace(
            chosen.estimate, stages=chosen.estimate.stages[:1] * len(devices), forecast=None
        ),
    )


@cache
def stage_costs(plan: Plan) -> PlanCosts:
    return PlanCosts(plan, COSTS)


def brute_force(plan: Plan, request: DraftRequest, index: int, count: int) -> float:
    """Seconds of decoding, summed by hand from the cost models."""
    work, costs = plan.workload, request.costs
    device, context = plan.cluster.devices[index], work.mean_context_tokens
    rows = plan.micro_batching.decode

    def small_s(phase, sequences, tokens, own):
        bits = 16 if request.bits is None else request.bits
        return sum(
            count * costs.layer_s(device, phase, bits, sequences, tokens, kind)
            for kind, count in Counter(costs.model.layer_kinds).items()
        ) + costs.master_s(device, phase, sequences, own)

    stages = stage_costs(plan)
    verified = rows * (1 + count)
    shape = BatchShape(
        phase=Phase.DECODE,
        rows=verified,
        longest=round(context),
        total=round(verified * context),
    )
    times = [
        stages.layers_s(rank, Phase.DECODE, verified, context) for rank in range(len(plan.stages))
    ]
    hops = [stages.hop(rank, shape) for rank in range(len(plan.stages))]
    times[0] += stages.project_s(shape)
    times = [time + 2 * hop.end_s for time, hop in zip(times, hops, strict=True)]
    master = plan.cluster.devices[plan.stages[0].device]

    def send_s(source, target, tokens):
        if source == target:
            return 0.0
        link = plan.cluster.link(source, target, COSTS.specs[source.group])
        return link.latency_s + 4 * tokens / link.bytes_per_s

    passes_s = count * small_s(Phase.DECODE, rows, context, 1.0) if count else 0.0
    sent_s = send_s(master, device, rows * (1 + count)) + send_s(device, master, rows * count)
    sent_s *= count > 0
    way_s = sum(times) + sum(hop.delay_s for hop in hops) + passes_s + sent_s
    times[0] += passes_s + sent_s
    for rank, stage in enumerate(plan.stages):
        times[rank] += passes_s if rank and stage.device == index else 0.0
    round_s = max(way_s, math.ceil(work.batch / rows) * max(times))
    prompt = float(work.prompt_tokens)
    prompts_s = 0.0
    if count:
        prompts_s = small_s(Phase.PREFILL, 1, prompt, prompt)
        prompts_s = work.batch * (prompts_s + send_s(master, device, work.prompt_tokens))
    rate = request.acceptance_rate
    made = count + 1 if rate == 1 else (1 - rate ** (count + 1)) / (1 - rate)
    return (work.new_tokens - 1) / made * round_s + prompts_s


@pytest.mark.parametrize("devices", [(0,), (1,), (0, 3), (3, 0), (0, 1, 3)])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("batch", "micro_batch"), [(1, 1), (8, 4), (12, 3)])
def test_the_choice_is_the_best_of_all_devices_and_lengths(devices, rate, batch, micro_batch):
    plan, request = plan_on(*devices, batch=batch, micro_batch=micro_batch), draft(rate)
    found = place_draft(plan, COSTS, request)
    reached = {0, 1, 3}  # device 2 has a gigabyte
    most = min(8, 32 // micro_batch - 1)
    times = {
        (index, count): brute_force(plan, request, index, count)
        for index in reached
        for count in range(1, most + 1)
    }
    alone_s = brute_force(plan, request, devices[0], 0)
    best = min(times, key=times.__getitem__)
    if times[best] >= alone_s:
        assert found is None
        return
    assert found is not None
    assert times[found.device, found.num_speculative_tokens] == pytest.approx(times[best])
    assert found.speedup == pytest.approx(alone_s / times[best])
    assert found.acceptance_rate == rate


def test_a_draft_model_pays_for_one_sequence_and_runs_where_no_stage_is():
    plan = plan_on(0, 3)
    found = place_draft(plan, COSTS, draft(0.8))
    assert found is not None
    assert found.device == 1  # the V100 beside the master's T4
    assert found.speedup > 1.5
    assert 0 < found.cost < 0.2


@pytest.mark.parametrize("changes", [{"rate": 0.0}, {"name": "facebook/opt-6.7b", "rate": 0.6}])
def test_a_draft_model_that_is_wrong_or_slow_does_not_pay(changes):
    assert place_draft(plan_on(1), COSTS, draft(**changes)) is None


def test_it_may_run_beside_another_stage():
    """On the V100 of stage 1, with a process and an entry in the memory of its own."""
    plan, request = plan_on(0, 1), draft(0.8)
    found = place_draft(plan, COSTS, request)
    assert found is not None
    assert found.device == 1
    assert 0 < found.handover < found.cost
    assert (plan.draft_rank, replace(plan, draft=found).draft_rank) == (None, 2)
    assert replace(plan, draft=found).rank_devices == (0, 1, 1)
    beside = place_draft(plan_on(1), COSTS, request)
    assert beside is not None
    assert (beside.device, beside.handover) == (1, None)
    runtime = COSTS.runtime_bytes(CLUSTER.devices[1])
    assert found.memory_bytes == beside.memory_bytes + runtime
    full = replace(
        plan.estimate.stages[1],
        memory=replace(plan.estimate.stages[1].memory, kv=COSTS.capacity_bytes(CLUSTER.devices[1])),
    )
    crowded = replace(plan, estimate=replace(plan.estimate, stages=(plan.estimate.stages[0], full)))
    other = place_draft(crowded, COSTS, request)
    assert other is not None
    assert other.device == 3
    places = {place.device: place for place in draft_places(crowded, COSTS, request)}
    assert [*places] == [0, 1, 2, 3]
    assert "free, expected" in places[1].obstacle
    assert "free, expected" in places[2].obstacle
    assert places[3].speedup == other.speedup > places[0].speedup > 1


def test_a_slow_link_keeps_it_with_the_master():
    links = (LinkSpec(between=("a", "b"), bytes_per_s=1e9, latency_s=0.1),)
    slow = replace(CLUSTER, links=links)
    plan = replace(plan_on(0), cluster=slow)
    costs = costs_of(replace(REQUEST, cluster=slow), slow)
    speedups = {
        place.device: place.speedup for place in draft_places(plan, costs, draft(0.8, cluster=slow))
    }
    assert speedups[3] < 1 < speedups[0] < speedups[1]


def test_it_does_not_pay_where_its_prompt_takes_longer_than_it_saves():
    plan = plan_on(0, new=2, prompt=1500)
    assert place_draft(plan, COSTS, draft(name="facebook/opt-1.3b")) is None


def test_memory_decides_where_it_runs():
    """The small T4 has room for the draft model at few bits, and for no other."""
    plan, request = plan_on(1), draft(0.8)
    found = place_draft(plan, COSTS, request)
    assert found is not None
    room = COSTS.capacity_bytes(plan.cluster.devices[found.device])
    used = plan.estimate.stages[0].memory.total if found.device == 1 else 0
    assert found.memory_bytes + used <= room
    full = replace(
        plan.estimate.stages[0],
        memory=replace(plan.estimate.stages[0].memory, kv=room),
    )
    crowded = replace(plan, estimate=replace(plan.estimate, stages=(full,)))
    other = place_draft(crowded, COSTS, request)
    assert other is None or other.device != 1


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_plan_whose_draft_model_does_not_fit_is_found(is_idle):
    plan = plan_on(0, 3)
    chosen = place_draft(plan, COSTS, draft(0.8))
    assert chosen is not None
    device = 1 if is_idle else 0
    fitting = replace(plan, draft=replace(chosen, device=device))
    excess = verify_plan(fitting, "plan", profile_dir=None).excess_bytes
    room = COSTS.capacity_bytes(plan.cluster.devices[device])
    too_large = replace(fitting, draft=replace(chosen, device=device, memory_bytes=room + 10**6))
    found = verify_plan(too_large, "plan", profile_dir=None).excess_bytes
    assert found >= excess + 10**6


def test_another_vocabulary_is_refused():
    with pytest.raises(SpecError, match=r"'vocab_size': found \d+, expected the 50272"):
        place_draft(plan_on(0), COSTS, draft(name="bigscience/bloom-560m"))


@given(rate=st.floats(0, 1), count=st.integers(0, 20))
def test_expected_tokens_is_the_closed_formula(rate, count):
    chance, mean = 1.0, 0.0
    for accepted in range(count + 1):  # the mean of how many are accepted, and one more
        right = chance * (1 - rate) if accepted < count else chance
        mean += (accepted + 1) * right
        chance *= rate
    assert expected_tokens(rate, count) == pytest.approx(mean)


def test_the_plan_file_keeps_it():
    plan = plan_on(0)
    plan = replace(
        plan,
        draft=place_draft(plan, COSTS, draft(0.8, bits=4)),
        provenance=replace(plan.provenance, command="test"),
    )
    assert plan.draft is not None
    assert from_json(Plan, Fields(to_json(plan), "plan")) == plan
    with pytest.raises(SpecError, match=r"'draft.device': found 9, expected an index below 4"):
        replace(plan, draft=replace(plan.draft, device=9))


@pytest.mark.parametrize("devices", [(0, 3), (0, 1), (1, 3)])
def test_the_speedup_is_that_of_a_simulated_engine(devices):
    """One sequence; the engine learns the share of right tokens, and adapts the lengths to it."""
    plan = plan_on(*devices, new=400)
    found = place_draft(plan, COSTS, draft(0.8))
    assert found is not None
    assert found.device == 1
    costs = PlanEngineCosts(PlanCosts(plan, COSTS))
    context = round(plan.workload.mean_context_tokens)
    alone = EngineLimits(token_budget=256, max_sequences=1, num_blocks=40, block_size=16)
    drafted = replace(
        alone,
        num_speculative_tokens=found.num_speculative_tokens,
        draft=planned_limits(replace(plan, draft=found), 40),
    )
    seconds = []
    for limits in (alone, drafted):
        accepts = None if limits.draft is None else random_acceptance(0.8)
        draft_s = relative_draft_s(costs, limits, context)
        engine = SimulatedEngine(costs, limits, queue_order("fcfs"), accepts, draft_s)
        engine.add(0, TraceRequest(arrival_s=0.0, prompt_tokens=128, new_tokens=400))
        engine.advance(math.inf)
        (record,) = engine.report().requests
        seconds.append(record.end_s - record.first_token_s)
    assert seconds[0] / seconds[1] == pytest.approx(found.speedup, rel=0.15)
