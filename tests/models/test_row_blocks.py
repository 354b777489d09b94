"""Feed-forwards and experts in blocks of rows: the same numbers, with tensors of a block."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_configs import TESTED, stored_fields, tiny_config
from torch import nn
from transformers import BloomConfig, LlamaConfig, OPTConfig
from transformers.models.bloom.modeling_bloom import BloomMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from llmpq.costmodel.memory import runs_in_blocks
from llmpq.models import build_layer
from llmpq.models.stage import use_row_blocks
from llmpq.spec.huggingface.families import model_from_config, model_types
from llmpq.spec.runtime_constants import ROW_BLOCK

torch.set_num_threads(1)

TOKENS = 2 * ROW_BLOCK + 44


class Layer(nn.Module):
    """A layer with nothing but a feed-forward, which notes the rows that it is called with."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        self.rows = []
        next(mlp.children()).register_forward_hook(
            lambda _, inputs, __: self.rows.append(inputs[0].shape[-2])
        )


def llama():
    return LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=96)), 1


def bloom():
    return BloomMLP(BloomConfig(hidden_size=32, n_head=4, hidden_dropout=0.0)), 2


@pytest.mark.parametrize("make", [llama, bloom])
@torch.inference_mode()
def test_blocks_of_rows_give_the_numbers_of_all_rows(make):
    torch.manual_seed(0)
    mlp, count = make()
    layer, inputs = Layer(mlp), [torch.randn(1, TOKENS, 32) for _ in range(count)]
    whole = mlp(*inputs)
    use_row_blocks(layer)
    use_row_blocks(layer)  # as two stages of the same layers
    torch.testing.assert_close(mlp(*inputs), whole)
    assert layer.rows == [TOKENS, ROW_BLOCK, ROW_BLOCK, 44]
    mlp(*(one[:, :ROW_BLOCK] for one in inputs))
    assert layer.rows[4:] == [ROW_BLOCK]


def test_a_layer_itself_is_not_called_with_blocks():
    layer = OPTDecoderLayer(OPTConfig(hidden_size=32, ffn_dim=64, num_attention_heads=4))
    forward = type(layer).forward
    use_row_blocks(layer)
    assert type(layer).forward is forward


@pytest.mark.parametrize("model_type", sorted(TESTED & set(model_types())))
def test_every_feed_forward_that_is_counted_in_blocks_runs_in_blocks(model_type):
    config = tiny_config(model_type)
    config._attn_implementation = "eager"
    model = model_from_config(stored_fields(config), "tiny", "config.json")
    for index in range(model.num_layers):
        layer = build_layer(config, index)
        before = {name: type(part) for name, part in layer.named_modules()}
        use_row_blocks(layer)
        changed = {n for n, part in layer.named_modules() if type(part) is not before[n]}
        counted = {
            op.name.rpartition(".")[0]
            for op in model.layer_types[model.layer_kinds[index]].linears
            if op.quantizable and op.count == 1 and runs_in_blocks(op)
        }
        assert counted <= changed
        assert not any("attn" in name or "attention" in name for name in changed)
