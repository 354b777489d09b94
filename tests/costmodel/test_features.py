import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.costmodel.roofline import experts_hit, layer_work, quantizable_parameters, touched_bytes
from llmpq.spec import catalog
from llmpq.spec.model import LinearSpec
from llmpq.spec.precision import Phase, default_precision
from llmpq.spec.runtime_constants import SCORE_BLOCK_TOKENS

OPT = catalog.model("facebook/opt-30b").layer_types[0]
MIXTRAL = catalog.model("mistralai/Mixtral-8x7B-v0.1").layer_types[0]


def test_a_window_bounds_what_attention_reads():
    layer = replace(OPT, sliding_window=100)
    whole, seen = (layer_work(one, Phase.DECODE, 8, 512) for one in (OPT, layer))
    assert seen.kv_values == 100 * whole.kv_values / 512
    assert seen.attention_flops == 100 * whole.attention_flops / 512
    assert layer_work(layer, Phase.DECODE, 8, 90) == layer_work(OPT, Phase.DECODE, 8, 90)
    prompts = layer_work(layer, Phase.PREFILL, 8, 512)
    block = 100 + SCORE_BLOCK_TOKENS
    whole_flops = layer_work(OPT, Phase.PREFILL, 8, 512).attention_flops
    assert prompts.attention_flops == pytest.approx(block / 512 * whole_flops)


def test_work_of_an_opt_layer_is_the_textbook_count():
    h, f = 7168, 4 * 7168
    prefill = layer_work(OPT, Phase.PREFILL, 8, 512)
    assert prefill.rows == 8 * 512
    assert prefill.linear_flops == 2 * (4 * h * h + 2 * h * f)
    assert prefill.attention_flops == 4 * 8 * 512**2 * h
    decode = layer_work(OPT, Phase.DECODE, 8, 512)
    assert decode.rows == 8
    assert decode.attention_flops == 4 * 8 * 512 * h
    assert decode.kv_values == prefill.kv_values == 2 * 8 * 512 * h


def test_grouped_queries_read_fewer_keys_but_compute_as_much():
    layer = catalog.model("meta-llama/Llama-3.1-70B").layer_types[0]
    work = layer_work(layer, Phase.DECODE, 1, 1000)
    assert work.kv_values == 2 * 1000 * 8 * 128
    assert work.attention_flops == 4 * 1000 * 64 * 128


def test_one_token_visits_its_experts_and_many_visit_all():
    gate_up = next(op for op in MIXTRAL.linears if op.count > 1)
    assert experts_hit(gate_up, 1) == pytest.approx(2)
    assert experts_hit(gate_up, 2) == pytest.approx(8 * (1 - (3 / 4) ** 2))
    assert experts_hit(gate_up, 10_000) == pytest.approx(8)


@given(
    count=st.integers(1, 256), share=st.floats(0.01, 1), rows=st.integers(1, 5000),
    more=st.integers(1, 100),
)  # fmt: skip
def test_experts_hit_stay_in_bounds_and_grow_with_rows(count, share, rows, more):
    active = max(1, math.floor(share * count))
    op = LinearSpec(name="e", out_features=1, in_features=1, count=count, active=active)
    hits = experts_hit(op, rows)
    assert min(active, count) * (1 - 1e-12) <= hits <= count
    assert experts_hit(op, rows + more) >= hits


def test_touched_bytes_of_a_dense_layer_are_all_its_bytes():
    for bits in (16, 8, 4, 3):
        precision = default_precision(bits)
        assert sum(touched_bytes(OPT, precision, 2, 1)) == OPT.weight_bytes(precision, 2)


def test_touched_bytes_of_a_mixture_reach_all_its_bytes():
    precision = default_precision(4)
    few, many = (sum(touched_bytes(MIXTRAL, precision, 2, rows)) for rows in (1, 10_000))
    assert many == pytest.approx(MIXTRAL.weight_bytes(precision, 2))
    assert few < many / 3


def test_experts_are_read_as_often_as_their_tokens_need():
    # 64 tokens visit two experts of eight each: 128 visits, though there are eight matrices.
    precision = default_precision(4)
    (one, _), (many, _) = (touched_bytes(MIXTRAL, precision, 2, n, n) for n in (1, 64))
    (once, _), (twice, _) = (touched_bytes(MIXTRAL, precision, 2, 64, n) for n in (1, 2))
    assert many == pytest.approx(64 * one)
    assert once < twice < 1.05 * once


def test_routers_are_not_quantizable_parameters():
    routers = sum(op.weight_parameters for op in MIXTRAL.linears if not op.quantizable)
    assert routers == 8 * 4096
    everything = sum(op.weight_parameters for op in MIXTRAL.linears)
    assert quantizable_parameters(MIXTRAL, 10**6) == pytest.approx(everything - routers)


def test_a_recurrence_costs_the_same_at_every_context_and_grows_with_the_tokens_of_a_prompt():
    layer = replace(OPT, state_values=1000)
    step = layer_work(layer, Phase.DECODE, 8, 90)
    assert step.state_values == 2 * 8 * 1000  # read and written
    assert step.state_flops == 7 * 8 * 1000
    later = layer_work(layer, Phase.DECODE, 8, 4096)
    assert (later.state_flops, later.state_values) == (step.state_flops, step.state_values)
    prompts = layer_work(layer, Phase.PREFILL, 8, 90)
    assert prompts.state_flops == 90 * step.state_flops
    assert prompts.state_values == step.state_values
    assert layer_work(OPT, Phase.PREFILL, 8, 90).state_flops == 0
