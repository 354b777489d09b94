"""Attention on slots against torch's own, row by row."""

import math

import pytest
import torch

from llmpq.kernels.cpu.slot_attention import SlotCall, SlotHeads, can_attend

pytestmark = pytest.mark.skipif(
    not can_attend(torch.float32, torch.float32, 32), reason="no C compiler"
)
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _expected(query, keys, values, length, window, scaling):
    """One row in float64: query [H, d], keys [h, T, d]."""
    group = query.shape[0] // keys.shape[0]
    first = max(0, length - window) if window else 0
    keys = keys[:, first:length].double().repeat_interleave(group, 0)
    values = values[:, first:length].double().repeat_interleave(group, 0)
    scores = torch.einsum("hd,htd->ht", query.double(), keys) * scaling
    return torch.einsum("ht,htd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(12, 4, 64), (4, 4, 16), (10, 2, 80), (7, 1, 128)]
)
@pytest.mark.parametrize("window", [None, 20])
def test_each_row_attends_to_its_own_tokens(dtype, heads, kv_heads, dim, window):
    torch.manual_seed(heads)
    slots, lengths = torch.tensor([3, 0, 5, 1]), torch.tensor([1, 17, 200, 64])
    keys, values = (torch.randn(6, kv_heads, 201, dim).to(dtype) for _ in range(2))
    before = keys.clone()
    query = (torch.randn(4, 1, heads, dim) * 2).to(dtype).transpose(1, 2)
    new = tuple(torch.randn(4, 1, kv_heads, dim).to(dtype).transpose(1, 2) for _ in range(2))

    made = SlotCall(slots, lengths).attend(
        query, new, SlotHeads(keys=keys, values=values), scaling=0.3, window=window
    )

    assert made.shape == (4, 1, heads, dim)
    assert made.dtype == dtype
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        assert torch.equal(keys[slot, :, length - 1], new[0][row, :, 0])
        assert torch.equal(values[slot, :, length - 1], new[1][row, :, 0])
        before[slot, :, length - 1] = new[0][row, :, 0]
        right = _expected(query[row, :, 0], keys[slot], values[slot], length, window, 0.3)
        assert (made[row, 0].double() - right).abs().max() <= CLOSE[dtype] * max(
            1.0, right.abs().max().item()
        )
    assert torch.equal(keys, before)  # nothing but the new tokens was written


def test_what_follows_in_a_slot_is_never_read():
    keys, values = (torch.full((1, 1, 40, 16), math.nan) for _ in range(2))
    keys[:, :, :9], values[:, :, :9] = 1.0, 2.0
    new = tuple(torch.ones(1, 1, 1, 16) for _ in range(2))

    made = SlotCall(torch.tensor([0]), torch.tensor([9])).attend(
        torch.ones(1, 1, 1, 16), new, SlotHeads(keys=keys, values=values), scaling=1.0, window=None
    )

    assert torch.allclose(made, torch.full((1, 1, 1, 16), (8 * 2.0 + 1.0) / 9))


def test_a_number_that_is_none_stays_one():
    keys, values = (torch.zeros(2, 1, 40, 16) for _ in range(2))
    keys[0, 0, 20, 3] = math.nan
    new = tuple(torch.ones(2, 1, 1, 16) for _ in range(2))

    made = SlotCall(torch.tensor([0, 1]), torch.tensor([40, 40])).attend(
        torch.ones(2, 1, 1, 16), new, SlotHeads(keys=keys, values=values), scaling=1.0, window=None
    )

    assert made[0].isnan().all()
    assert made[1].isfinite().all()


def test_far_scores_neither_overflow_nor_vanish():
    keys, values = torch.zeros(1, 1, 130, 16), torch.zeros(1, 1, 130, 16)
    keys[0, 0, :, 0] = torch.linspace(-500, 400, 130)
    values[0, 0, 128] = 7.0
    new = (keys[:, :, 128:129].clone(), values[:, :, 128:129].clone())
    query = torch.zeros(1, 1, 1, 16)
    query[..., 0] = 1.0

    made = SlotCall(torch.tensor([0]), torch.tensor([129])).attend(
        query, new, SlotHeads(keys=keys, values=values), scaling=1.0, window=None
    )

    right = _expected(query[0, 0], keys[0], values[0], 129, None, 1.0)
    assert torch.allclose(made[0, 0].double(), right, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_a_bias_of_the_keys_is_added_to_the_scores_of_its_head(window):
    torch.manual_seed(3)
    slots, lengths = torch.tensor([1, 0]), torch.tensor([77, 130])
    keys, values = (torch.randn(2, 2, 140, 16) for _ in range(2))
    query = torch.randn(2, 6, 1, 16)
    new = tuple(torch.randn(2, 2, 1, 16) for _ in range(2))
    bias = torch.randn(6, 200)[:, :131] * 3
    call, heads = SlotCall(slots, lengths), SlotHeads(keys=keys, values=values)

    made = call.attend(query, new, heads, scaling=0.3, window=window, bias=bias)
    plain = call.attend(query, new, heads, scaling=0.3, window=window)

    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        # A further part of queries and keys whose product is the bias.
        for head in range(6):
            one = torch.cat((query[row, head] * 0.3, torch.ones(1, 1)), 1)  # [1, d + 1]
            key = torch.cat((keys[slot, head // 3, :length], bias[head, :length, None]), 1)
            value = values[slot, head // 3, :length]
            right = _expected(one, key[None], value[None], length, window, 1.0)[0]
            assert (made[row, 0, head].double() - right).abs().max() <= 2e-6 * 4
    assert not torch.allclose(made, plain, atol=0.1)
    unbiased = SlotCall(slots, lengths).attend(query, new, heads, scaling=0.3, window=window)
    assert torch.equal(plain, unbiased)
