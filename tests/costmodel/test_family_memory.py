"""Memory of every family: finite forecasts, and the cache that the runtime allocates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers.live_tensors import LiveTensors
from helpers.tiny_configs import SIZES, TESTED, stored_fields, tiny_config

from llmpq.batching.blocks import slot_blocks
from llmpq.costmodel import build_costs
from llmpq.costmodel.memory import (
    ForwardShape,
    layer_kv_bytes,
    live_bytes,
    temporary_bytes,
    token_kv_bytes,
)
from llmpq.dist.kv.cache import KVCache
from llmpq.models import DecoderStage, PackedBatch, build_layer, kv_shapes, load_config
from llmpq.quant.modules import mixers
from llmpq.quant.modules.layer import fuse_norms_, quantize_layer_
from llmpq.quant.modules.mixers import compile_mixers_
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.huggingface.families import model_from_config, model_types
from llmpq.spec.plan import MicroBatching
from llmpq.spec.runtime_constants import ROW_BLOCK
from llmpq.spec.workload import Workload

torch.set_num_threads(1)

WORKLOAD = Workload(batch=4, prompt_tokens=20, new_tokens=12)


def _spec(model_type):
    return model_from_config(stored_fields(tiny_config(model_type)), "tiny", "config.json")


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize("model_type", model_types())
def test_temporaries_of_a_family_grow_with_the_micro_batch(model_type, device_kind):
    model = _spec(model_type)
    found = [
        temporary_bytes(
            model,
            WORKLOAD,
            MicroBatching(prefill=size, decode=size),
            dtype="float32",
            device_kind=device_kind,
            is_master=True,
        )
        for size in (1, 4)
    ]
    assert WORKLOAD.prompt_tokens * model.hidden_size * 4 < found[0] < found[1]


SIZES_OF_A_PROMPT = {
    **SIZES, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 176,
    "query_pre_attn_scalar": 16, "moe_intermediate_size": 48, "max_position_embeddings": 2048,
}  # fmt: skip
ROWS, TOKENS = 4, ROW_BLOCK
SENDING_MORE = {"gemma3n_text", "gemma4_text"}
"""Families whose layers run on messages of all stages before."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", sorted(TESTED - SENDING_MORE))
def test_tensors_of_every_family_are_within_the_bound(tmp_path, model_type, dtype):
    _check_tensors(tmp_path, model_type, dtype, ROWS, TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 20), (1, 64), (2, 300)])
@pytest.mark.parametrize(
    "model_type", ["bailing_hybrid", "falcon_h1", "kimi_linear", "minimax", "olmo_hybrid"]
)
def test_recurrences_without_kernels_are_within_the_bound(
    tmp_path, model_type, rows, tokens, dtype
):
    """A few tokens take as much as a piece; a long prompt no more."""
    _check_tensors(tmp_path, model_type, dtype, rows, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("falcon_h1", {"mamba_d_state": 256}),
        ("bailing_hybrid", {"head_dim": 128}),
        ("kimi_linear", {"linear_head_dim": 128}),
        ("minimax", {"head_dim": 128}),
        ("olmo_hybrid", {"linear_key_head_dim": 128, "linear_value_head_dim": 128}),
    ],
)
def test_decode_of_large_states_without_kernels_is_within_the_bound(
    tmp_path, model_type, sizes, dtype
):
    _check_tensors(tmp_path, model_type, dtype, 24, 1, start=20, **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "tokens", "start"), [(1, 64, 0), (2, 300, 0), (24, 1, 20)])
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("falcon_mamba", {}),
        ("granitemoehybrid", {"mamba_d_state": 128, "num_local_experts": 0}),
        ("jamba", {}),
        ("lfm2", {}),
        ("mamba2", {"state_size": 128}),
        ("qwen3_5_text", {"linear_key_head_dim": 128, "linear_value_head_dim": 128}),
    ],
)
def test_recurrences_without_a_compiler_are_within_the_bound(
    tmp_path, monkeypatch, model_type, sizes, rows, tokens, start, dtype
):
    monkeypatch.setattr(mixers, "_form_of", lambda *_: None)
    _check_tensors(tmp_path, model_type, dtype, rows, tokens, start, **sizes)


def _check_tensors(tmp_path, model_type, dtype, rows, count, start=0, **sizes):
    fields = stored_fields(tiny_config(model_type, SIZES_OF_A_PROMPT, **sizes))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model, config = model_from_config(fields, "tiny", "config.json"), load_config(tmp_path)
    layer = build_layer(config, 0).to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    quantize_layer_(layer, 16, dtype)
    fuse_norms_(layer)
    stage = DecoderStage(config, [layer], 0)
    compile_mixers_(stage, dtype)
    context = start + count
    blocks = rows * -(-context // 16)
    states = stage.new_states(rows)
    cache = KVCache(kv_shapes(config, 0, 1), 0, num_blocks=blocks, dtype=dtype, states=states)
    tables = [slot_blocks(row, context, context) for row in range(rows)]
    batch = PackedBatch(
        block_tables=tables, starts=[start] * rows, counts=[count] * rows, slots=range(rows)
    )
    hidden = torch.randn(1, batch.tokens, model.hidden_size).to(dtype)
    cache.view(batch)
    with LiveTensors() as live:
        stage(hidden, batch, cache)
    step = ForwardShape(
        model=model, dtype=str(dtype).removeprefix("torch."), kv_bits=8 * dtype.itemsize,
        batch=rows, tokens=count, context=context,
    )  # fmt: skip
    assert live.peak + hidden.nbytes <= 1.01 * live_bytes(step)


@pytest.mark.parametrize("model_type", sorted(TESTED & set(model_types())))
def test_cache_of_a_family_is_allocated_as_planned(model_type):
    config = tiny_config(model_type)
    model = model_from_config(stored_fields(config), "tiny", "config.json")
    shapes = kv_shapes(config, 0, model.num_layers)
    cache = KVCache(shapes, 0, num_blocks=3, block_size=16, dtype=torch.float32)
    planned = [token_kv_bytes(model, kind, 3 * 16, 32) for kind in model.layer_kinds]
    assert cache.nbytes == sum(planned)


def test_a_recurrent_state_counts_once_a_sequence():
    model = _spec("qwen3_next")
    state, kind = next(
        (layer.state_values, kind)
        for kind, layer in enumerate(model.layer_types)
        if layer.state_values
    )
    assert [layer_kv_bytes(model, kind, 3, tokens, 16) for tokens in (1, 900)] == [12 * state] * 2


def test_a_forecast_says_that_it_leaves_recurrences_out(caplog):
    request = {"dtype": "float32", "kv_bits": 32, "latency": "roofline"}
    cluster = cluster_of_types({"A100-40G": 2})
    build_costs(_spec("llama"), cluster, **request)
    assert not caplog.records
    for _ in range(2):
        build_costs(replace(_spec("lfm2"), name="one of states"), cluster, **request)
    (record,) = caplog.records
    assert "one of states: layers with a recurrent state are forecast by" in record.getMessage()
