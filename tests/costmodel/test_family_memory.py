"""Memory of every family: finite forecasts, and the cache that the runtime allocates."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_configs import stored_fields, tiny_config

from llmpq.costmodel.memory import temporary_bytes
from llmpq.costmodel.stored import layer_kv_bytes, token_kv_bytes
from llmpq.dist.kv.cache import KVCache
from llmpq.models import kv_shapes
from llmpq.models.families import TESTED
from llmpq.spec.huggingface.families import model_from_config, model_types
from llmpq.spec.plan import MicroBatching
from llmpq.spec.workload import Workload

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
