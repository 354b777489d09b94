"""Plans without given lengths: the longest context at bits that lose next to nothing."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from helpers.certificate import certify_memory
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.assigner.forecast import evaluate_plan
from llmpq.assigner.longest_context import NEXT_TO, SHORT_CONTEXT, plan_longest_context
from llmpq.assigner.planner import make_plan
from llmpq.assigner.request import PlanRequest
from llmpq.costmodel import build_costs
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.huggingface.families import model_from_config
from llmpq.spec.plan import MicroBatching, StageAssignment
from llmpq.spec.precision import BITS, DTYPE_BYTES
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


@pytest.mark.parametrize("gib", [8.5, 9])
def test_several_sequences_lose_no_more_than_any_plan(gib):
    """The oracle is the search of all micro-batches at once, with a high price of degradation."""
    plan = plan_longest_context(request(gib, batch=4))
    assert min(plan.bits) < 8
    work = plan.workload
    direct = make_plan(replace(request(gib, batch=4), workload=work, theta_s=1e9))
    assert plan.estimate.quality == pytest.approx(direct.estimate.quality, rel=1e-8)
    assert plan.estimate.latency_s == pytest.approx(direct.estimate.latency_s, rel=1e-6)
    assert plan.micro_batching == direct.micro_batching


def on_disk(plan):
    return sum(len(stage.on_disk) for stage in plan.stages)


def with_disk(wanted, disk_bytes_per_s=2e9):
    (node,) = wanted.cluster.nodes
    groups = tuple(replace(one, disk_bytes_per_s=disk_bytes_per_s) for one in node.devices)
    cluster = replace(wanted.cluster, nodes=(replace(node, devices=groups),))
    return replace(wanted, cluster=cluster)


def test_a_model_that_does_not_fit_is_read_from_disk_unless_that_is_forbidden():
    with pytest.raises(InfeasibleError):
        plan_longest_context(request(3))
    with pytest.raises(InfeasibleError):
        plan_longest_context(replace(with_disk(request(3)), no_streaming=True))
    plan = plan_longest_context(with_disk(request(3)))
    assert on_disk(plan)
    assert plan.estimate.quality <= 1 + 1e-6
    assert context(plan) >= 512
    costs = build_costs(MODEL, plan.cluster, dtype="bfloat16", kv_bits=16)
    estimate, excess = evaluate_plan(plan, costs, np.zeros((MODEL.num_layers, len(BITS))))
    assert excess == 0
    assert estimate.latency_s == pytest.approx(plan.estimate.latency_s)
    slower = plan_longest_context(with_disk(request(3), 1e9))
    assert slower.answer_tokens_per_s < plan.answer_tokens_per_s


@pytest.mark.parametrize("gib", [7, 16])
def test_a_disk_changes_no_plan_that_fits(gib):
    plan, other = (plan_longest_context(one) for one in (request(gib), with_disk(request(gib))))
    assert not on_disk(other)
    assert (plan.bits, context(plan)) == (other.bits, context(other))


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


def fast_and_slow(sequences):
    """A GPU whose memory ends between a short and the longest context, beside a slow CPU."""
    groups = DeviceGroup(type="RTX4060Ti-16G", count=1), DeviceGroup(type="cpu", count=1)
    node = Node(name="here", devices=groups)
    return replace(request(1, batch=sequences), cluster=Cluster(name="host", nodes=(node,)))


def test_a_longer_context_does_not_move_layers_to_a_slow_device():
    plan = plan_longest_context(fast_and_slow(1))
    assert [plan.device_of(stage).type for stage in plan.stages] == ["RTX4060Ti-16G"]
    assert SHORT_CONTEXT < context(plan) < MODEL.max_positions
    # Where it is asked for, it does: all is slower, every answer alike.
    longest = plan_longest_context(fast_and_slow(1), MODEL.max_positions // 2)
    assert len(longest.stages) == 2
    assert longest.answer_tokens_per_s < NEXT_TO * plan.answer_tokens_per_s


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 50_000), (4, 15_000)])
def test_no_split_with_the_same_context_answers_usual_requests_faster(sequences, tokens):
    """The oracle is every split of the layers, in either order, at the plan's bits.

    Prompts count, too: a split that is slower as a whole may have the faster steps.
    """
    plan = plan_longest_context(fast_and_slow(sequences), tokens)
    costs = build_costs(MODEL, plan.cluster, dtype=plan.dtype, kv_bits=plan.kv_bits)
    count, found = MODEL.num_layers, []
    for order, cut, decode in product(((0, 1), (1, 0)), range(1, count), (1, 2, sequences)):
        stages = tuple(
            StageAssignment(
                rank=rank, device=device, first_layer=first, end_layer=end,
                bits=(8,) * (end - first),
            )
            for rank, device, first, end in ((0, order[0], 0, cut), (1, order[1], cut, count))
        )  # fmt: skip
        sizes = MicroBatching(prefill=1, decode=min(decode, sequences))
        other = replace(plan, stages=stages, micro_batching=sizes)
        estimate, _ = evaluate_plan(other, costs, np.zeros((count, len(BITS))))
        if all(one.memory.total <= one.capacity_bytes for one in estimate.stages):
            rate = replace(other, estimate=estimate).answer_tokens_per_s
            found.append((estimate.latency_s, rate))
    own_s = plan.estimate.latency_s
    assert own_s <= min(found)[0] * (1 + 1e-9)
    rates = [rate for seconds, rate in found if seconds <= own_s / 0.97]
    assert plan.answer_tokens_per_s >= 0.97 * max(rates)


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


HEADS = st.sampled_from(((4, 4), (8, 2), (16, 4)))


@settings(max_examples=12)
@given(
    heads=HEADS,
    head_dim=st.sampled_from((32, 64, 128)),
    wide=st.integers(1, 4),
    layers=st.integers(1, 8),
    vocab=st.integers(100, 150_000),
    positions=st.sampled_from((512, 4096, 40_960)),
    batch=st.integers(1, 8),
    dtype=st.sampled_from(("bfloat16", "float32")),
    mib=st.integers(150, 6000),
)
def test_no_plan_needs_more_memory_than_there_is(
    heads, head_dim, wide, layers, vocab, positions, batch, dtype, mib
):
    hidden = heads[0] * head_dim
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": 256 * wide,
        "num_hidden_layers": layers, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "vocab_size": vocab, "torch_dtype": dtype,
        "max_position_embeddings": positions,
    }  # fmt: skip
    asked = replace(
        request(mib / 1024, batch=batch),
        model=model_from_config(config, "random", "config.json"),
        dtype=dtype,
        kv_bits=8 * DTYPE_BYTES[dtype],
    )
    try:
        plan = plan_longest_context(asked)
    except InfeasibleError:
        # A GiB holds the process and the caches of the shortest context, 8 x 8 x 512 tokens.
        assert mib < 1024 + 8 * asked.model.parameters / 2**20
        return
    certify_memory(
        plan,
        build_costs(asked.model, asked.cluster, dtype=asked.dtype, kv_bits=asked.kv_bits),
    )
