"""Blockwise attention of BLOOM and blockwise activations, compared with those of transformers."""

import math

import pytest
import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.bloom.configuration_bloom import BloomConfig
from transformers.models.bloom.modeling_bloom import BloomBlock, BloomGelu

from llmpq.models.alibi import (
    AlibiAttention,
    alibi_bias,
    attend_with_bias,
    use_alibi_attention,
)
from llmpq.models.attention import MicroBatch, additive_mask, visible_keys
from llmpq.models.stage import BlockwiseActivation, use_blockwise_activation
from llmpq.spec.runtime_constants import ACTIVATION_BLOCK_VALUES, BIAS_BLOCK_TOKENS

torch.set_num_threads(1)

LONG = 2 * BIAS_BLOCK_TOKENS + 7
WHOLE = (3, LONG, [0, 0, 0], [LONG, LONG - 1, 5])
LATE = (3, 70, [LONG, 3, 0], [70, 1, 66])
ONE = (2, 1, [40, 9], [1, 1])


def _case(step, dtype):
    rows, width, starts, counts = step
    batch = MicroBatch.build(list(range(rows)), starts, counts)
    torch.manual_seed(rows * width)
    query = torch.randn(rows, 3, width, 16).to(dtype)
    key, value = torch.randn(2, rows, 3, batch.longest, 16).to(dtype)
    bias = alibi_bias(3, batch.longest, torch.zeros(1, dtype=dtype))
    return query, key, value, bias, visible_keys(batch, None, torch.device("cpu"))


def _exact(query, key, value, bias, visible):
    scores = query.double() @ key.double().mT * 0.25 + bias[:, None].double()
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return (weights @ value.double()).transpose(1, 2)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("step", [WHOLE, LATE, ONE], ids=["whole", "late", "decode"])
def test_blockwise_attention_equals_full_scores(step, dtype, close):
    *case, visible = _case(step, dtype)
    right = _exact(*case, visible)
    made = attend_with_bias(*case, visible, 0.25)
    assert made.dtype == dtype
    assert made.is_contiguous()
    torch.testing.assert_close(made.double(), right, atol=close, rtol=0)


@pytest.mark.parametrize("past", [0, 30])
def test_attention_without_a_mask_is_causal(past):
    step = (2, LONG, [past] * 2, [LONG] * 2)
    *case, visible = _case(step, torch.float32)
    made = attend_with_bias(*case, None, 0.25)
    torch.testing.assert_close(made.double(), _exact(*case, visible), atol=2e-5, rtol=0)


def _block(**fields):
    torch.manual_seed(0)
    config = BloomConfig(hidden_size=48, n_layer=1, n_head=3, **fields)
    return BloomBlock(config, 0).eval()


@torch.inference_mode()
@pytest.mark.parametrize("fields", [{}, {"apply_residual_connection_post_layernorm": True}])
def test_layer_equals_that_of_transformers(fields):
    batch = MicroBatch.build([0, 1], [0, 0], [LONG, 9])
    hidden = torch.randn(2, LONG, 48)
    visible = visible_keys(batch, None, torch.device("cpu"))
    bias = alibi_bias(3, LONG, hidden)
    layer = _block(**fields)
    right, _ = layer(
        hidden,
        alibi=bias.repeat(2, 1)[:, None],
        attention_mask=additive_mask(visible, torch.float32),
    )

    names = [name for name, _ in layer.named_parameters()]
    use_alibi_attention(layer)
    use_alibi_attention(layer)
    made, weights = layer(hidden, alibi=bias, attention_mask=None)

    assert weights is None
    assert isinstance(layer.self_attention, AlibiAttention)
    assert sorted(name for name, _ in layer.named_parameters()) == sorted(names)
    torch.testing.assert_close(made[0], right[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(made[1, :9], right[1, :9], atol=1e-5, rtol=0)


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
