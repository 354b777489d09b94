"""QuantLinear and QuantExperts compute what the modules they replace do with those weights."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from llmpq.errors import SpecError
from llmpq.kernels import BACKENDS, choose_backend
from llmpq.quant import QuantExperts, QuantLinear, quantize
from llmpq.quant.modules.layer import gate_of
from llmpq.spec.precision import default_precision, linear_bytes

torch.set_num_threads(1)


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype) * 0.1


def quant_linear(weight, bits, bias=None):
    precision = default_precision(bits)
    backend = choose_backend("cpu", precision, weight.dtype, *weight.shape)
    return QuantLinear(quantize(weight, precision, weight.dtype), bias, backend)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 1, 4)])
def test_forward_keeps_the_leading_dimensions(bits, leading):
    weight, bias = gaussian(64, 128), gaussian(64, seed=1)
    module = quant_linear(weight, bits, bias)
    x = gaussian(*leading, 128, seed=2)
    restored = quantize(weight, default_precision(bits), torch.float32).dequantize(torch.float32)
    torch.testing.assert_close(module(x), F.linear(x, restored, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_has_the_dtype_of_the_run(bits, dtype):
    module = quant_linear(gaussian(64, 128, dtype=dtype), bits, gaussian(64, dtype=dtype))
    assert module(gaussian(3, 128, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_weight_bytes_are_those_that_plans_count(bits):
    module = quant_linear(gaussian(64, 256), bits)
    assert module.weight_bytes == linear_bytes(64, 256, default_precision(bits), 4)


def test_no_parameter_requires_a_gradient():
    module = quant_linear(gaussian(64, 128), 4, nn.Parameter(gaussian(64)))
    assert list(module.parameters()) == []
    assert not module.bias.requires_grad


def test_repr_names_precision_and_backend():
    module = quant_linear(gaussian(64, 128), 3)
    text = repr(module)
    assert "in_features=128, out_features=64, bias=False" in text
    assert f"precision=w3-rtn-g128-asym, backend={module.backend_name}" in text


def test_a_bias_of_another_length_is_refused():
    with pytest.raises(SpecError, match=r"found a bias \[63\], expected \[64\]"):
        quant_linear(gaussian(64, 128), 4, gaussian(63))


def experts(num_experts=4):
    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_local_experts=num_experts, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    module = MixtralExperts(config)
    with torch.no_grad():
        module.gate_up_proj.copy_(gaussian(num_experts, 128, 32))
        module.down_proj.copy_(gaussian(num_experts, 32, 64, seed=1))
    return module.requires_grad_(False)


def quantized(module, bits):
    return QuantExperts(
        [quant_linear(weight, bits) for weight in module.gate_up_proj],
        [quant_linear(weight, bits) for weight in module.down_proj],
        gate_of(module),
    )


def restore(module, bits):
    """Round the weights of ``module`` in place to what ``quantized`` stores."""
    for stacked in (module.gate_up_proj, module.down_proj):
        for weight in stacked:
            weight.copy_(
                quantize(weight, default_precision(bits), torch.float32).dequantize(torch.float32)
            )


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_experts_equal_those_of_transformers(bits):
    module = experts()
    replaced = quantized(module, bits)
    restore(module, bits)
    hidden = gaussian(7, 32, seed=3)
    index = torch.tensor([[0, 1], [3, 0], [0, 3], [1, 3], [3, 1], [0, 1], [1, 0]])  # none to 2
    weights = torch.rand(7, 2, generator=torch.Generator().manual_seed(4))
    expected = module(hidden, index, weights)
    torch.testing.assert_close(replaced(hidden, index, weights), expected, atol=1e-6, rtol=1e-5)


def test_experts_skip_choices_marked_as_none():
    module = quantized(experts(), 8)
    hidden = gaussian(3, 32, seed=5)
    none = torch.full((3, 2), module.num_experts)
    assert torch.equal(module(hidden, none, torch.ones(3, 2)), torch.zeros(3, 32))


def test_experts_take_the_bytes_of_their_matrices():
    precision = default_precision(4)
    expected = 4 * (linear_bytes(128, 32, precision, 4) + linear_bytes(32, 64, precision, 4))
    assert quantized(experts(), 4).weight_bytes == expected


@pytest.mark.parametrize(("name", "bits"), [("cpu_int4", 4), ("cpu_int8", 8), ("cpu_packed", 3)])
def test_only_the_prepared_weight_is_kept(name, bits):
    backend, precision = BACKENDS[name], default_precision(bits)
    if not backend.supports("cpu", precision, torch.bfloat16, 64, 128):
        pytest.skip("this CPU has no u8 x s8 matmul")
    packed = quantize(gaussian(64, 128), precision, torch.bfloat16)
    codes = weakref.ref(packed.codes)
    module = QuantLinear(packed, None, backend)
    del packed
    assert codes() is None
    assert module.weight_bytes == backend.stored_bytes(precision, torch.bfloat16, 64, 128)
