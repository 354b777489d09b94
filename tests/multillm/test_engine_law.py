"""Engines of measured iterations and of plans: equal to their sources, close to the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.builders import cluster_of

from llmpq.assigner.fleet.partition import DevicePools
from llmpq.assigner.planner import make_plan
from llmpq.assigner.request import PlanRequest
from llmpq.batching.block_scheduler import EngineLimits
from llmpq.batching.queue_order import queue_order
from llmpq.costmodel import build_costs
from llmpq.errors import InfeasibleError
from llmpq.multillm.candidates import find_candidates, resolve_models
from llmpq.multillm.engine.law import (
    FlopCount,
    IterationModel,
    IterationTable,
    measured_law,
    plan_law,
    play,
)
from llmpq.multillm.graph import Application, AppModel, AppNode
from llmpq.multillm.workload import Item, ModelLengths, build_workload
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits
from llmpq.sim.costs import PlanCosts, PlanEngineCosts
from llmpq.sim.engine import simulate_engine
from llmpq.spec import catalog
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE
from llmpq.spec.workload import TraceRequest, Workload


def iterations():
    chance = np.random.default_rng(0)
    rows = [
        (prefill, batch, batch * longest, longest)
        for prefill in (True, False)
        for batch in range(1, 300)
        for longest in (8, 200, 1500)
    ]
    columns = np.array(rows, np.float64).T
    is_prefill, batch, tokens, longest = columns
    is_uneven = (is_prefill == 0) & (longest == 200)
    tokens = np.where(is_uneven, batch + 199, tokens)
    seconds = 0.02 + 1e-4 * batch + np.where(is_prefill, 1e-4, 1e-7) * tokens
    seconds += np.where(is_prefill, 0.0, 2e-7) * batch * longest
    return IterationModel(
        IterationTable(
            is_prefill=is_prefill > 0, batch=batch, tokens=tokens, longest=longest,
            seconds=seconds * chance.uniform(0.99, 1.01, len(seconds)),
            parts=np.stack([seconds, seconds, seconds]),
        )
    )  # fmt: skip


def test_a_measured_engine_has_the_seconds_of_its_iterations():
    fitted = iterations()
    law = measured_law(
        fitted, FlopCount(1.0, 1.0), prompt_tokens=64, kv_tokens=10_000, max_model_len=4096
    )
    for batch in (1, 7, 256):
        decode = law.decode[batch] @ [1.0, batch * 90.0, batch * 90.0]
        assert decode == pytest.approx(fitted.seconds(Phase.DECODE, batch, 90), rel=0.02)
        uneven = law.decode[batch] @ [1.0, batch * 90.0, batch * 1000.0]
        assert uneven == pytest.approx(fitted.seconds(Phase.DECODE, batch, 90, 1000), rel=0.05)
        prefill = law.prefill[batch] @ [1.0, batch * 64.0]
        assert prefill == pytest.approx(fitted.seconds(Phase.PREFILL, batch, 64), rel=0.02)
    assert law.max_tokens == 10_000
    assert law.token_budget == 4096


def test_operations_are_twice_those_of_the_paper_without_padding():
    # SamuLLM, Eq. 1 and 2, count a product and a sum as one: L (c B s + 2 B h s^2) for prompts,
    # L (c B + 2 h S) for a decode iteration.
    layers, hidden, inner = 24, 2048, 4 * 2048
    weights = 4 * hidden**2 + 2 * hidden * inner
    count = FlopCount.of(catalog.model("facebook/opt-1.3b"))
    prefill = layers * (weights * 100 + 2 * hidden * 100**2)
    assert count.prefill(np.array([100.0])) == pytest.approx([2 * prefill])
    decode = layers * (weights * 3 + 2 * hidden * (50 + 60 + 70))
    assert 3 * count.token + count.key * (50 + 60 + 70) == pytest.approx(2 * decode)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_plans_engine_is_close_to_the_engine_simulated_step_by_step(devices):
    model = catalog.model("facebook/opt-1.3b")
    cluster = cluster_of(("T4-16G", devices, 16_000))
    plan = make_plan(
        PlanRequest(
            model=model, cluster=cluster, dtype=model.dtype, kv_bits=16, bits=(16,),
            workload=Workload(batch=8, prompt_tokens=120, new_tokens=72),
        )
    )  # fmt: skip
    costs = build_costs(model, cluster, dtype=model.dtype, kv_bits=16)
    law = plan_law(plan, costs)
    chance = np.random.default_rng(1)
    prompt, answer = chance.integers(20, 120, 40), chance.integers(8, 72, 40)
    run = play(
        law, ready_s=np.zeros(40), prompt=prompt, answer=answer, following=np.full(40, -1),
        work=np.zeros(40),
    )  # fmt: skip
    limits = EngineLimits(
        token_budget=law.token_budget, max_sequences=law.max_sequences,
        num_blocks=law.num_blocks, block_size=KV_BLOCK_SIZE, prefix_caching=False,
        steps_in_flight=engine_limits(plan, EngineOptions()).steps_in_flight,
    )  # fmt: skip
    trace = [
        TraceRequest(arrival_s=0.0, prompt_tokens=int(one), new_tokens=int(other))
        for one, other in zip(prompt, answer, strict=True)
    ]
    report = simulate_engine(
        PlanEngineCosts(PlanCosts(plan, costs)), limits, queue_order("fcfs"), trace
    )
    end_s = max(one.end_s for one in report.requests)
    assert run.finish_s.max() == pytest.approx(end_s, rel=0.05 if devices == 1 else 0.2)


def application(model):
    return Application(
        name="one",
        models=(AppModel(name="m", model=model),),
        nodes=(AppNode(name="n", model="m", requests="r", max_new_tokens=50),),
    )


def workload(app):
    items = [Item(id=number, where="r", prompt_tokens=(100,)) for number in range(20)]
    return build_workload(app, {"n": items}, {"m": ModelLengths(context=2048)})


def test_candidates_are_pipelines_of_every_part_or_teams_of_devices():
    app = application("facebook/opt-13b")
    pools = DevicePools.of(cluster_of(("V100-32G", 2, 32_000), ("T4-16G", 1, 16_000)))
    (own,) = find_candidates(resolve_models(app), pools, workload(app))
    assert {(1, 0), (2, 0)} <= {one.counts for one in own}
    assert all(len(one.plan.stages) == sum(one.counts) for one in own)
    assert (0, 1) not in {one.counts for one in own}  # 26 GB of weights
    (teams,) = find_candidates(resolve_models(app), pools, workload(app), pipelines=False)
    assert {one.name for one in teams} == {"dp1 tp1", "dp2 tp1", "dp1 tp2"}


def test_a_model_that_fits_nowhere_is_one_error():
    app = application("facebook/opt-66b")
    pools = DevicePools.of(cluster_of(("T4-16G", 2, 16_000)))
    with pytest.raises(InfeasibleError, match=r"model 'm': no part of cluster .* 150 tokens"):
        find_candidates(resolve_models(app), pools, workload(app))
