"""The forecast of a GPU's temporary memory against what attention allocates, on the meta device."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers import decode_attention
from helpers.live_tensors import LiveTensors

from llmpq.costmodel.memory import ForwardShape, _attention, decode_parts_bytes
from llmpq.dist.kv.cache import KVCache
from llmpq.models import KVShape, PackedBatch
from llmpq.models.attention import DecodeAttention, ScoreOptions, StepAttention
from llmpq.spec import catalog
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-2-70b-hf")


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize(("batch", "context"), [(1, 8192), (16, 1024), (256, 1024)])
@pytest.mark.parametrize("name", [*MODELS, "openai/gpt-oss-20b", "google/gemma-2-9b"])
def test_a_decode_step_takes_what_is_forecast(monkeypatch, name, batch, context, kv_bits):
    """Blocks are read in place: no part of it grows with the context."""
    launches = decode_attention.use_without_kernels(monkeypatch)
    model = catalog.model(name)
    layer = model.layer_types[0]
    shape = KVShape(heads=layer.num_kv_heads, head_dim=layer.head_dim)
    cache = KVCache(
        [shape], 0, num_blocks=batch * context // 16,
        dtype=torch.bfloat16, device="meta", kv_bits=kv_bits,
    )  # fmt: skip
    tables = torch.zeros(batch, context // 16, dtype=torch.int32, device="meta")
    view = cache.view_of_tensors(tables, tables[:, 0])
    new = torch.empty(1, shape.heads, batch, shape.head_dim, dtype=torch.bfloat16, device="meta")
    query = torch.empty(
        1, layer.num_heads, batch, layer.head_dim, dtype=torch.bfloat16, device="meta"
    )
    view.update(new, new, 0)
    with torch.inference_mode(), LiveTensors() as live:
        DecodeAttention(view).attend(query, new, new, ScoreOptions(scaling=1.0))
    assert launches.names == ["paged_decode_kernel", "join_splits_kernel"]
    step = ForwardShape(
        model=model, dtype="bfloat16", kv_bits=kv_bits, batch=batch, tokens=1, context=context
    )
    forecast = _attention(step, layer, in_place=True) + decode_parts_bytes(step, layer)
    own = 3 * query.nbytes + 2 * new.nbytes  # of the projections, rotated: they are counted, too
    assert live.peak + own == pytest.approx(forecast, rel=1e-3)


SCORED = {"openai/gpt-oss-20b": {"sinks": True}, "google/gemma-2-9b": {"softcap": 50.0}}


@pytest.mark.parametrize("context", [4096, 16_384])
@pytest.mark.parametrize("name", [*MODELS, *SCORED])
def test_a_chunk_takes_what_is_forecast(name, context):
    """Its own keys and values, those of the context gathered, and scores of a block of queries."""
    model = catalog.model(name)
    layer = next(one for one in model.layer_types if one.sliding_window is None)
    heads, dim, chunk = layer.num_heads, layer.head_dim, PROMPT_CHUNK_TOKENS
    shape = KVShape(heads=layer.num_kv_heads, head_dim=dim)
    cache = KVCache([shape], 0, num_blocks=context // 16, dtype=torch.bfloat16, device="meta")
    batch = PackedBatch(
        block_tables=[range(context // 16)], starts=[context - chunk], counts=[chunk]
    )
    view = cache.view(batch)
    new = torch.empty(1, shape.heads, chunk, dim, dtype=torch.bfloat16, device="meta")
    query = torch.empty(1, heads, chunk, dim, dtype=torch.bfloat16, device="meta")
    options = dict(SCORED.get(name, {}))
    if options.pop("sinks", False):
        options["sinks"] = torch.empty(heads, dtype=torch.bfloat16, device="meta")
    view.update(new, new, 0)
    with torch.inference_mode(), LiveTensors() as live:
        StepAttention(batch, view).attend(query, new, new, ScoreOptions(scaling=1.0, **options))
    step = ForwardShape.of_prompts(model, "bfloat16", 16, 1, context)
    assert step.is_chunk
    forecast = _attention(step, layer, in_place=False)
    own = query.nbytes + 2 * new.nbytes  # of the projections, rotated: they are counted, too
    assert live.peak <= forecast
    assert forecast <= 1.2 * live.peak + 2 * own + query.nbytes


def test_what_only_a_reference_cycle_holds_is_not_counted():
    def leave_a_cycle():
        own = torch.empty(1000, dtype=torch.float32, device="meta")
        frame = sys._getframe()
        assert frame.f_locals["own"] is own
        assert frame.f_locals["frame"] is frame

    with LiveTensors() as live:
        for _ in range(3):
            leave_a_cycle()
    assert live.peak == 4000
