"""Plans without given lengths: the longest context at bits that lose next to nothing."""

from itertools import pairwise

import pytest

from llmpq.assigner.longest_context import SHORT_CONTEXT, plan_longest_context
from llmpq.assigner.request import PlanRequest
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.precision import BITS
from llmpq.spec.workload import Workload
from llmpq.units import GIB

MODEL = catalog.model("meta-llama/Llama-3.1-8B")


def request(gib, *, batch=1, bits=BITS):
    group = DeviceGroup(type="cpu", count=1, threads=8, memory_bytes=int(gib * GIB))
    return PlanRequest(
        model=MODEL,
        cluster=Cluster(name="host", nodes=(Node(name="here", devices=(group,)),)),
        workload=Workload(batch=batch, prompt_tokens=1, new_tokens=1),
        dtype="bfloat16",
        kv_bits=16,
        bits=bits,
    )


def context(plan):
    return plan.workload.max_context_tokens


def test_much_memory_gives_the_models_own_context_at_8_bits_or_more():
    plan = plan_longest_context(request(64))
    assert context(plan) == MODEL.max_positions
    assert min(plan.bits) >= 8


def test_less_memory_shortens_the_context_before_it_takes_bits():
    plan = plan_longest_context(request(16))
    assert SHORT_CONTEXT <= context(plan) < MODEL.max_positions
    assert min(plan.bits) >= 8


def test_little_memory_takes_bits_before_a_context_below_the_short_one():
    plan = plan_longest_context(request(7))
    assert context(plan) == SHORT_CONTEXT
    assert min(plan.bits) < 8


def test_more_memory_is_never_worse():
    """Loss up to 8 bits counts as none; then the longer context is the better plan."""
    found = []
    for gib in (5.2, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64):
        try:
            plan = plan_longest_context(request(gib))
        except InfeasibleError:
            found.append((-99.0, 0))
            continue
        loss = plan.estimate.quality if min(plan.bits) < 8 else 0.0
        stages = plan.estimate.stages
        assert all(stage.memory.total <= stage.capacity_bytes for stage in stages)
        found.append((-loss, context(plan)))
    assert all(worse <= better for worse, better in pairwise(found))
    assert found[-1] > found[0]


def test_a_length_that_is_asked_for_is_kept():
    assert context(plan_longest_context(request(16), 3000)) == 3000
    with pytest.raises(InfeasibleError):
        plan_longest_context(request(7), 100_000)
    with pytest.raises(SpecError, match="at least 2"):
        plan_longest_context(request(7), 1)
    with pytest.raises(SpecError, match="131072"):
        plan_longest_context(request(64), 200_000)


def test_bits_and_sequences_that_are_asked_for_are_kept():
    plan = plan_longest_context(request(64, bits=(4,)))
    assert set(plan.bits) == {4}
    assert plan.workload.batch == 1
    assert plan_longest_context(request(64, batch=3)).workload.batch == 3


def test_a_model_that_does_not_fit_is_an_error():
    with pytest.raises(InfeasibleError):
        plan_longest_context(request(2))
