"""A cache that attends by itself answers as one that torch reads."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from llmpq.dist.kv.cache import KVCache
from llmpq.kernels.cpu.slot_attention import can_attend
from llmpq.models import KVShape, MicroBatch

pytestmark = pytest.mark.skipif(
    not can_attend(torch.float32, torch.float32, 32), reason="no C compiler"
)


def _cache(kv_bits):
    return KVCache(
        [KVShape(heads=2, head_dim=32)] * 2,
        3,
        num_slots=5,
        max_tokens=40,
        dtype=torch.float32,
        kv_bits=kv_bits,
    )


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_attends_to_what_the_cache_would_give(kv_bits):
    torch.manual_seed(0)
    plain, attending = _cache(kv_bits), _cache(kv_bits)
    slots, starts = [4, 0, 2], [11, 1, 30]
    prompt = MicroBatch.build(slots, [0, 0, 0], starts)
    key, value = torch.randn(2, 3, 2, 30, 32)
    step = MicroBatch.build(slots, starts, [1, 1, 1])
    new_key, new_value = (
        torch.randn(2, 3, 2, 1, 32) * torch.tensor([1e-3, 1, 50])[:, None, None, None]
    )
    query = torch.randn(3, 6, 1, 32)
    for cache in (plain, attending):
        cache.view(prompt).update(key, value, 4)

    keys, values = plain.view(step).update(new_key, new_value, 4)
    visible = torch.arange(31) <= torch.tensor(starts)[:, None, None, None]
    right = scaled_dot_product_attention(
        query,
        keys.repeat_interleave(3, 1),
        values.repeat_interleave(3, 1),
        attn_mask=visible,
        scale=0.5,
    )
    view = attending.attention_view(step)
    view.update(new_key, new_value, 4)
    made = view.attend(query, 0.5, None)

    assert torch.allclose(made.transpose(1, 2), right, rtol=1e-5, atol=2e-5)
    later = MicroBatch.build(slots, [start + 1 for start in starts], [1, 1, 1])
    for one, other in zip(
        plain.view(later).update(new_key, new_value, 4),
        attending.view(later).update(new_key, new_value, 4),
        strict=True,
    ):
        assert torch.equal(one, other)  # it keeps the same codes, to the bit
