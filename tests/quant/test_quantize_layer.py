"""quantize_layer_ replaces exactly the operators that a plan's memory model counts as quantized."""

import pytest
import torch
from helpers.tiny_configs import SIZES, tiny_config
from torch import nn
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Moe

from llmpq.errors import SpecError
from llmpq.kernels.cpu.dense import can_prepack
from llmpq.models import Checkpoint, build_layer
from llmpq.quant import DenseLinear, QuantExperts, QuantLinear, quantize_layer_, stored_bytes
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.precision import default_precision

torch.set_num_threads(1)

# Wide enough for two groups of 128 in some operators and a single shorter one in others.
SHAPE = {"layers": 2, "hidden": 64, "intermediate": 256, "heads": 4, "kv_heads": 2}
FAMILIES = ["opt", "bloom", "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi", "gpt_neox"]
MIXTURES = ["mixtral", "qwen3_moe"]


def read_layer(model_dir, index=0):
    checkpoint = Checkpoint(model_dir)
    layer = build_layer(checkpoint.config, index)
    layer.load_state_dict(checkpoint.layer_state_dict(index), assign=True)
    return layer


@pytest.mark.parametrize("family", FAMILIES + MIXTURES)
@pytest.mark.parametrize("bits", [3, 4, 8, 16])
def test_a_layer_takes_the_bytes_that_the_memory_model_predicts(tiny_model, family, bits):
    model_dir = tiny_model(family, shape=SHAPE)
    layer = read_layer(model_dir)
    quantize_layer_(layer, bits, torch.float32)
    predicted = load_model_dir(model_dir).layers[0].weight_bytes(default_precision(bits), 4)
    assert stored_bytes(layer) == predicted


@pytest.mark.parametrize("family", FAMILIES + MIXTURES)
def test_no_large_matrix_is_left_unquantized(tiny_model, family):
    layer = read_layer(tiny_model(family, shape=SHAPE))
    quantize_layer_(layer, 4, torch.float32)
    matrices = {name: p for name, p in layer.named_parameters() if p.dim() > 1}
    routers = {"mlp.gate.weight"} if family in MIXTURES else set()
    assert set(matrices) == routers
    assert any(isinstance(module, QuantLinear) for module in layer.modules())


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_quantized_and_the_router_is_not(tiny_model, family):
    layer = read_layer(tiny_model(family, shape=SHAPE))
    router = layer.mlp.gate.weight.clone()
    quantize_layer_(layer, 3, torch.float32)
    assert isinstance(layer.mlp.experts, QuantExperts)
    assert torch.equal(layer.mlp.gate.weight, router)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_at_16_bits_run_one_by_one_on_views_of_their_weights(tiny_model, family):
    layer = read_layer(tiny_model(family, shape=SHAPE))
    experts = layer.mlp.experts
    hidden = torch.randn(20, 64)
    chosen, weights = torch.randint(0, 4, (20, 2)), torch.rand(20, 2)
    with torch.inference_mode():
        expected = experts(hidden, chosen, weights)
        quantize_layer_(layer, 16, torch.float32)
        assert isinstance(layer.mlp.experts, QuantExperts)
        torch.testing.assert_close(layer.mlp.experts(hidden, chosen, weights), expected)
    shared = layer.mlp.experts.down[1].weight.untyped_storage().data_ptr()
    assert shared == experts.down_proj.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["gate", "router", "shared_expert_gate"])
def test_routers_that_are_linear_modules_are_not_quantized(name):
    layer = nn.ModuleDict({name: nn.Linear(8, 4), "gate_proj": nn.Linear(8, 8)})
    quantize_layer_(layer, 4, torch.float32)
    assert type(layer[name]) is nn.Linear
    assert isinstance(layer["gate_proj"], QuantLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sixteen_bits_only_cast_the_weights(tiny_model, dtype, monkeypatch):
    monkeypatch.setattr("llmpq.quant.modules.layer.can_prepack", lambda _: False)
    layer = read_layer(tiny_model("llama", shape=SHAPE))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    quantize_layer_(layer, 16, dtype)
    after = layer.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name].to(dtype)) for name in before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_are_ordered_for_the_cpu(tiny_model, monkeypatch, dtype):
    model_dir = tiny_model("opt", shape=SHAPE)
    layer, plain = read_layer(model_dir), read_layer(model_dir)
    quantize_layer_(layer, 16, dtype)
    monkeypatch.setattr("llmpq.quant.modules.layer.can_prepack", lambda _: False)
    quantize_layer_(plain, 16, dtype)
    assert isinstance(layer.fc1, DenseLinear) == can_prepack(plain.fc1.weight)
    assert stored_bytes(layer) == stored_bytes(plain)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.testing.assert_close(layer.fc1(x), plain.fc1(x), atol=0.01, rtol=0.02)


def test_biases_and_norms_are_kept_in_the_dtype_of_the_run(tiny_model):
    layer = read_layer(tiny_model("opt", shape=SHAPE))
    bias, norm = layer.fc1.bias.clone(), layer.final_layer_norm.weight.clone()
    quantize_layer_(layer, 4, torch.bfloat16)
    assert torch.equal(layer.fc1.bias, bias.to(torch.bfloat16))
    assert torch.equal(layer.final_layer_norm.weight, norm.to(torch.bfloat16))


def test_a_named_backend_is_used_where_it_can_run(tiny_model):
    layer = read_layer(tiny_model("llama", shape={**SHAPE, "hidden": 128}))
    quantize_layer_(layer, 4, torch.bfloat16, backend="cpu_int4")
    assert layer.mlp.down_proj.backend_name == "cpu_int4"


def test_a_layer_without_linear_operators_is_refused():
    with pytest.raises(SpecError, match="found no linear operator"):
        quantize_layer_(nn.Sequential(nn.LayerNorm(8)), 4, torch.float32)


class OddExperts(nn.Module):
    """Experts in an unknown layout: with a bias, or transposed."""

    def __init__(self, *, bias=False, transposed=False):
        super().__init__()
        self.is_transposed = transposed
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 16, 8))
        self.down_proj = nn.Parameter(torch.zeros(2, 8, 8))
        self.act_fn = nn.SiLU()
        if bias:
            self.down_proj_bias = nn.Parameter(torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (OddExperts(bias=True), "down_proj_bias"),
        (OddExperts(transposed=True), "is_transposed"),
        (nn.ConvTranspose1d(8, 8, 3), r"ConvTranspose1d.*expected experts"),
    ],
)
def test_experts_in_an_unknown_layout_are_refused(module, message):
    layer = nn.ModuleDict({"proj": nn.Linear(8, 8), "experts": module})
    with pytest.raises(SpecError, match=message):
        quantize_layer_(layer, 4, torch.float32)


def test_router_whose_weight_is_read_stays_as_it_is_at_16_bits():
    config = tiny_config("hunyuan_v1_moe", {**SIZES, "hidden_size": 64, "num_experts": 64})
    layer = HunYuanMoEV1Moe(config, layer_idx=0)
    quantize_layer_(layer, 16, torch.bfloat16)
    assert type(layer.gate.wg) is nn.Linear
    assert layer(torch.zeros(1, 2, 64, dtype=torch.bfloat16)).shape == (1, 2, 64)
