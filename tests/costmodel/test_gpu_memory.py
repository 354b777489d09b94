"""The forecast of a GPU's temporary memory against what attention allocates, on the meta device."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers.live_tensors import LiveTensors

from llmpq.costmodel.memory import ForwardShape, _attention
from llmpq.dist.kv.cache import KVCache
from llmpq.models import KVShape, PackedBatch
from llmpq.models.attention import DecodeAttention, ScoreOptions, StepAttention
from llmpq.spec import catalog
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-2-70b-hf")


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_takes_what_is_forecast(name, kv_bits):
    """Grouped heads are repeated in decode too: five times the keys and values at four heads each.

    The forecast may be up to a fifth too high: it counts no order of its parts.
    """
    model = catalog.model(name)
    layer, batch, context = model.layer_types[0], 16, 1024
    shape = KVShape(heads=layer.num_kv_heads, head_dim=layer.head_dim)
    cache = KVCache(
        [shape], 0, num_blocks=batch * context // 16,
        dtype=torch.bfloat16, device="meta", kv_bits=kv_bits,
    )  # fmt: skip
    places = torch.zeros(batch, context // 16 + 1, dtype=torch.int64, device="meta")
    view = cache.view_of_tensors(places[:, :-1], places[:, -1])
    new = torch.empty(1, shape.heads, batch, shape.head_dim, dtype=torch.bfloat16, device="meta")
    query = torch.empty(
        1, layer.num_heads, batch, layer.head_dim, dtype=torch.bfloat16, device="meta"
    )
    view.update(new, new, 0)
    step = DecodeAttention(places[:, -1], view)
    with torch.inference_mode(), LiveTensors() as live:
        step.attend(query, new, new, ScoreOptions(scaling=1.0))
    forecast = _attention(
        ForwardShape(
            model=model, dtype="bfloat16", kv_bits=kv_bits, batch=batch, tokens=1, context=context
        ),
        layer,
        in_place=False,
    )
    assert live.peak <= forecast <= 1.2 * live.peak


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
