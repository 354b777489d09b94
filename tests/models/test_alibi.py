"""Blockwise attention of BLOOM and blockwise activations, compared with those of transformers."""

import math

import pytest
import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.bloom.configuration_bloom import BloomConfig
from transformers.models.bloom.modeling_bloom import BloomBlock, BloomGelu
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from llmpq.models import PackedBatch
from llmpq.models.attention import (
    Alibi,
    AlibiAttention,
    LayerAttention,
    ScoreOptions,
    StepAttention,
    attend_last,
    keys_before,
    unrounded_slopes,
    use_own_attention,
)
from llmpq.models.stage import BlockwiseActivation, use_blockwise_activation
from llmpq.spec.families import family_of
from llmpq.spec.runtime_constants import ACTIVATION_BLOCK_VALUES, SCORE_BLOCK_TOKENS

torch.set_num_threads(1)

LONG = 2 * SCORE_BLOCK_TOKENS + 7


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("past", [0, 30, LONG - 1], ids=["whole", "late", "decode"])
def test_blockwise_attention_equals_full_scores(past, dtype, close):
    torch.manual_seed(past)
    query = torch.randn(3, 3, LONG - past, 16).to(dtype)
    key, value = torch.randn(2, 3, 3, LONG, 16).to(dtype)
    alibi = Alibi(heads=3, longest=LONG, like=torch.zeros(1, dtype=dtype))
    visible = keys_before(torch.arange(past, LONG), torch.arange(LONG), None)
    scores = query.double() @ key.double().mT * 0.25 + alibi.bias[:, None].double()
    right = scores.masked_fill(~visible, -math.inf).softmax(-1) @ value.double()
    made = attend_last(query, key, value, ScoreOptions(scaling=0.25, alibi=alibi))
    assert made.dtype == dtype
    assert made.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(made.double(), right, atol=close, rtol=0)


def _block(**fields):
    torch.manual_seed(0)
    config = BloomConfig(hidden_size=48, n_layer=1, n_head=3, **fields)
    return BloomBlock(config, 0).eval()


@torch.inference_mode()
@pytest.mark.parametrize("fields", [{}, {"apply_residual_connection_post_layernorm": True}])
def test_layer_equals_that_of_transformers(fields):
    hidden = torch.randn(1, LONG + 9, 48)
    alibi = Alibi(heads=3, longest=LONG, like=hidden)
    layer = _block(**fields)
    right = []
    for part in torch.split(hidden, [LONG, 9], dim=1):
        count = part.shape[1]
        visible = keys_before(torch.arange(count), torch.arange(count), None)
        mask = torch.zeros(count, count).masked_fill(~visible, torch.finfo(torch.float32).min)
        own, _ = layer(part, alibi=alibi.bias[:, None, :count], attention_mask=mask[None, None])
        right.append(own)

    names = [name for name, _ in layer.named_parameters()]
    use_own_attention(layer, family_of("bloom"))
    use_own_attention(layer, family_of("bloom"))
    step = StepAttention(PackedBatch.whole([LONG, 9]), None)
    mask = LayerAttention(step=step, window=None)
    made, weights = layer(hidden, alibi=alibi, attention_mask=mask)

    assert weights is None
    assert isinstance(layer.self_attention, AlibiAttention)
    assert sorted(name for name, _ in layer.named_parameters()) == sorted(names)
    torch.testing.assert_close(made, torch.cat(right, 1), atol=1e-5, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("activation", [BloomGelu, NewGELUActivation])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_blockwise_activation_is_bit_identical(activation, rows):
    features = ACTIVATION_BLOCK_VALUES // 4  # four rows a block
    values = torch.randn(1, rows, features).to(torch.bfloat16)
    right = activation()(values)
    made = BlockwiseActivation(activation())(values)
    assert torch.equal(made, right)
    assert (made.data_ptr() == values.data_ptr()) == (rows > 4)  # written over


def test_row_larger_than_a_block_is_one_block():
    values = torch.randn(2, ACTIVATION_BLOCK_VALUES + 1)
    right = torch.tanh(values)
    assert torch.equal(BlockwiseActivation(nn.Tanh())(values), right)


def test_activation_is_wrapped_once():
    layer = _block()
    use_blockwise_activation(layer, "mlp.gelu_impl")
    use_blockwise_activation(layer, "mlp.gelu_impl")
    assert isinstance(layer.mlp.gelu_impl.activation, BloomGelu)


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_slopes_of_mpt_are_those_of_transformers(heads):
    expected = build_mpt_alibi_tensor(heads, 2, alibi_bias_max=8)  # [heads, 1, 2]
    torch.testing.assert_close(unrounded_slopes(heads, 8), -expected[:, 0, 0], atol=0, rtol=0)
