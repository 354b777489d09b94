"""A stage and the master create all tensors on their own device.

The meta device stands in for an accelerator: torch raises an error when it is mixed with the CPU.
"""

import pytest
import torch
from helpers.tiny_models import make_tiny_model_script

from llmpq.dist.kv.cache import KVCache
from llmpq.models import DecoderStage, Master, PackedBatch, build_layer, kv_shapes, load_config

ELSEWHERE = torch.device("meta")
# Experts choose their tokens by value, and the meta device has none.
MIXTURES = ("gpt_oss", "jetmoe", "mixtral", "qwen3_moe")
FAMILIES = sorted(set(make_tiny_model_script().FAMILIES) - set(MIXTURES))
LAYERS = 2
STEPS = {
    "prefill of equal rows": ([0, 1], [0, 0], [5, 5]),
    "prefill of mixed rows": ([2, 0], [0, 0], [5, 3]),
    "prefill after a prefix": ([0, 1], [4, 2], [3, 3]),
    "decode of mixed rows": ([3, 1], [6, 2], [1, 1]),
}


@pytest.fixture(params=FAMILIES)
def config(request, tiny_model):
    return load_config(tiny_model(request.param))


def test_master_works_on_its_device(config):
    master = Master(config).to(ELSEWHERE)
    token_ids = torch.zeros(2, 3, dtype=torch.int64, device=ELSEWHERE)
    hidden = master.embed(token_ids, torch.arange(3).expand(2, 3))
    assert hidden.device == ELSEWHERE
    assert master.logits(hidden[:, 0]).shape == (2, config.vocab_size)


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_stage_works_on_its_device(config, kv_bits):
    layers = [build_layer(config, index) for index in range(LAYERS)]
    stage = DecoderStage(config, layers, 0).to(ELSEWHERE)
    cache = KVCache(
        kv_shapes(config, 0, LAYERS),
        0,
        num_blocks=4,
        dtype=torch.float32,
        device=ELSEWHERE,
        kv_bits=kv_bits,
    )
    for slots, starts, counts in STEPS.values():
        tables = [(slot,) for slot in slots]
        batch = PackedBatch(block_tables=tables, starts=starts, counts=counts)
        hidden = torch.empty(1, batch.tokens, config.hidden_size, device=ELSEWHERE)
        made = stage(hidden, batch, cache)
        assert made.device == ELSEWHERE
        assert made.shape == hidden.shape
